"""The operations of training, a folder each: the definition in torch, and `triton.py` with the same bits beside it."""
