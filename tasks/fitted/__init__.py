"""Weights to start from that are fitted to the quantizers that will round them, on calibration data."""
