"""Benchmark of training: populations against the same training one lane at a time."""
