"""Codecs: the ways in which a block of numbers becomes elements and a scale, one function each.

A codec takes a `Blocks` and gives an `Encoded`. `block` is the general one; the others are for formats that find their
elements or scales in a way of their own (`Quantizer.codec` says which).
"""

from __future__ import annotations

from collections.abc import Callable

from fp4dse.kernels.codecs.block import Blocks, Encoded, block
from fp4dse.kernels.codecs.eden import eden
from fp4dse.kernels.codecs.exact import exact
from fp4dse.kernels.codecs.macro import macro
from fp4dse.kernels.codecs.quest import quest
from fp4dse.kernels.codecs.radix4 import radix4
from fp4dse.kernels.codecs.sawb import sawb

CODECS: dict[str, Callable[[Blocks], Encoded]] = {
    "block": block,
    "macro": macro,
    "eden": eden,
    "quest": quest,
    "sawb": sawb,
    "radix4": radix4,
    "exact": exact,
}

__all__ = ["CODECS", "Blocks", "Encoded"]
