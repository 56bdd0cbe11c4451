"""Codecs: the ways in which a block of numbers becomes elements and a scale, one function each.

A codec takes a `Blocks` and gives an `Encoded`. `block` is the general one, for tables of values (`Blocks.levels`) as
for float formats; the others are for formats that find their
elements or scales in a way of their own (`Quantizer.codec` says which).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, block, general_scales
from fp4dse.kernels.quant.spec.codecs.dialects import dialects
from fp4dse.kernels.quant.spec.codecs.eden import eden
from fp4dse.kernels.quant.spec.codecs.exact import exact
from fp4dse.kernels.quant.spec.codecs.hif4 import hif4
from fp4dse.kernels.quant.spec.codecs.if4 import if4
from fp4dse.kernels.quant.spec.codecs.macro import macro
from fp4dse.kernels.quant.spec.codecs.mixfp4 import mixfp4
from fp4dse.kernels.quant.spec.codecs.quest import quest
from fp4dse.kernels.quant.spec.codecs.radix4 import radix4
from fp4dse.kernels.quant.spec.codecs.razer import razer
from fp4dse.kernels.quant.spec.codecs.sawb import sawb, sawb_scales
from fp4dse.kernels.quant.spec.codecs.softmax import softmax, softmax_scales
from fp4dse.kernels.quant.spec.codecs.split import split

CODECS: dict[str, Callable[[Blocks], Encoded]] = {
    "block": block,
    "table": block,
    "hif4": hif4,
    "split": split,
    "macro": macro,
    "eden": eden,
    "quest": quest,
    "sawb": sawb,
    "softmax": softmax,
    "if4": if4,
    "mixfp4": mixfp4,
    "razer": razer,
    "dialects": dialects,
    "radix4": radix4,
    "exact": exact,
}

SCALES: dict[str, Callable[[Blocks], tuple[Tensor, Tensor]]] = {
    "block": general_scales,
    "softmax": softmax_scales,
    "sawb": sawb_scales,
    "radix4": general_scales,
}
"""Of codecs that make their scales first, and then from each element and its block's multiplier what is stored: scales
and multipliers, [L, n] each."""

__all__ = ["CODECS", "SCALES", "Blocks", "Encoded"]
