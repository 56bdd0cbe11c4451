"""Quantizers seen by people: what they make of the tensors in a file, and the table of all of them."""
