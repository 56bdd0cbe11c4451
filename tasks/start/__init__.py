"""Weights that training starts from: files, and those that another task trains first."""

ENDING = ".safetensors"
"""Of a file of weights."""
