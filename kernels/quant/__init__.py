"""Quantizers: their definition (`spec`), their GPU kernels (`triton`), and what a population needs to call them: tables
of descriptors, the call record, the backend of a device, and slots (`operand`). Native code for CPUs is kernels/cpp."""
