"""Codecs: the ways in which a block of numbers becomes elements and a scale, one function each.

A codec takes a `Blocks` and gives an `Encoded`. `block` is the general one; the others are for formats that find their
elements or scales in a way of their own (`Quantizer.codec` says which).
"""

from __future__ import annotations

from collections.abc import Callable

from fp4dse.kernels.codecs.block import Blocks, Encoded, block
from fp4dse.kernels.codecs.softmax import softmax

CODECS: dict[str, Callable[[Blocks], Encoded]] = {
    "block": block,
    "softmax": softmax,
}

__all__ = ["CODECS", "Blocks", "Encoded"]
