"""The GPU kernels in Triton: one family for every quantizer that they take, each lane by its own row of numbers."""
