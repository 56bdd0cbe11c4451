"""fp4dse: which FP4 training techniques buy the most quality for the least overhead."""
