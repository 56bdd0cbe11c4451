"""`fp4dse bench kernels`: quantizers beside a copy of the same tensor, and beside other implementations."""
