"""Benchmarks of the store, the statistics and the report, at the sizes that they are made for."""
