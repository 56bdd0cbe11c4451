"""Arithmetic whose bits are the same on every device and in every company: grids, rotations, sums, random numbers."""
