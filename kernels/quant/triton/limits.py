"""The operands that the fused kernels take, and the reasons why they do not take the others."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.dse.estimator import STE, Through
from fp4dse.dse.quantizer import MACRO_BLOCK
from fp4dse.dse.rounding import Ema
from fp4dse.dse.scale import BF16
from fp4dse.kernels.quant.triton.features import Features

BLOCKS = (16, 32, 64, 128, 256, 512, 1024)
"""Block sizes that the kernels take."""

EDGES = (16, 32)
"""Edges of the 2-D tiles that they take where these lie."""

ROTATIONS = (16, 32, 64, 128, 256)
"""Sizes of rotations that the kernels take."""

MOST = 2**34
"""Elements from which on a lane is too large: runs of 16 of them, and lines of memory, are numbered in 32 bits."""

CODECS = ("block", "eden", "hif4", "quest", "split", "macro", "if4", "mixfp4", "razer", "dialects", "exact", "softmax")
"""Codecs that the kernels have (`codecs.CODECS`)."""

SCALE_CODECS = ("block", "softmax", "sawb", "radix4")
"""Those of `codecs.SCALES` for which the kernel of elements by given scales has the grid."""

RELAXATIONS = ("ste", "clipped", "dge", "power-law", "sigmoid", "spline", "trust")
"""Surrogate derivatives, of elements and of the rounding of scales, that the kernel of estimators has."""

SCALE_GRADIENTS = ("none", "diagonal", "exact", "softmax-diagonal", "softmax")
"""Gradients through a block's scale that it has."""


MAGNITUDES = 8
"""Magnitudes of the elements whose codes of 4 bits they write (codes.py): sums saturate at code 7."""


def span(block: int, rotation: int, codec: str) -> int:
    """Neighbours along the contraction axis that are quantized together."""
    return max(block, rotation, MACRO_BLOCK if codec == "macro" else 0)


def why_not_operand(x: Tensor, block: int, dtype: torch.dtype, rotation: int = 0, codec: str = "block") -> str | None:
    """The reason why the kernels do not take this operand, or None if they do."""
    kinds = torch.float32, torch.bfloat16
    if x.dtype not in kinds or dtype not in kinds:
        return f"dtype: found {x.dtype} to {dtype}; accepted: float32 and bfloat16"
    if block not in BLOCKS:
        return f"block: found {block}; accepted: {', '.join(map(str, BLOCKS))}"
    if rotation not in (0, *ROTATIONS):
        return f"rotation: found {rotation}; accepted: 0 (none), {', '.join(map(str, ROTATIONS))}"
    if codec not in CODECS:
        return f"codec: found {codec}; accepted: {', '.join(CODECS)}"
    if not (x.numel() > 0 and len(x) < 2**16 and x[0].numel() < MOST):
        return f"x: found {tuple(x.shape)}; accepted: 1 to 65,535 lanes of 1 to 2^34 - 1 elements"
    return None


def why_not_squares(x: Tensor, edge: int, features: Features, codec: str, transposed: bool) -> str | None:
    """The reason why x [L, R, C] cannot be quantized in place in tiles of `edge`, or None."""
    if codec != "block":
        return f"codec: found {codec}; accepted: block"
    if features.stochastic or (features.adaptive and transposed):
        return "rounding: random bits and sums depend on the order of a tile's elements"
    if edge not in EDGES:
        return f"tile: found {edge}; accepted: {', '.join(map(str, EDGES))}"
    if x.shape[1] % edge or x.shape[2] % edge:
        return f"x: found {tuple(x.shape)}; accepted: whole tiles of {edge}"
    if x.dtype not in (torch.float32, torch.bfloat16) or x.stride()[1:] != (x.shape[2], 1):
        return "x: rows do not follow one another"
    return None


def why_not_form(form: tuple[str, bool, str, str]) -> str | None:
    """The reason why the kernel of estimators does not take one of this `Through.form`, or None if it does."""
    element, _, scale, rounding = form
    for field, found, known in (
        ("element", element, RELAXATIONS),
        ("scale", scale, SCALE_GRADIENTS),
        ("scale_rounding", rounding, RELAXATIONS),
    ):
        if found not in known:
            return f"estimator {field}: found {found}; accepted: {', '.join(known)}"
    return None


def why_not_through(quantizer: Quantizer, spec: Through) -> str | None:
    """The reason why `through` does not take an operand of this quantizer, or None if it does."""
    q = quantizer.canonical()
    if reason := why_not_form(spec.form()):
        return reason
    if q.block not in BLOCKS:
        return f"block: found {q.block}; accepted: {', '.join(map(str, BLOCKS))}"
    if q.codec not in CODECS:
        return f"codec: found {q.codec}; accepted: {', '.join(CODECS)}"
    if q.factors_over != "tensor":
        return f"tensor_scale.over: found {q.factors_over}; accepted: tensor"
    if q.stochastic_scales:
        return "scale.rounding: found stochastic; accepted: nearest, up"
    if isinstance(q.rounding, Ema):
        return "rounding: found ema; accepted: nearest, stochastic"
    if isinstance(q.scale, BF16) and spec.scale_rounding != STE():
        return "scale: found bf16 with a gradient through its rounding; accepted: e8m0 and scales of 8 bits"
    return None
