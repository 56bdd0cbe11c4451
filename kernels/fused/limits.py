"""Which devices and operands the fused kernels take, and why they do not take the others."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.dse.estimator import STE, Through
from fp4dse.dse.quantizer import MACRO_BLOCK
from fp4dse.dse.rounding import Ema
from fp4dse.dse.scale import BF16
from fp4dse.kernels.descriptor import FLOATS, INTS
from fp4dse.kernels.estimators import form

BLOCKS = (16, 32, 64, 128, 256, 512, 1024)
"""Block sizes that the kernels take."""

ROTATIONS = (16, 32, 64, 128, 256)
"""Sizes of rotations that the kernels take."""

MOST = 2**34
"""Elements from which on a lane is too large: runs of 16 of them, and lines of memory, are numbered in 32 bits."""

CODECS = ("block", "eden", "hif4", "quest", "split", "macro", "if4", "razer", "dialects", "exact", "softmax")
"""Codecs that the kernels have (`codecs.CODECS`)."""


RELAXATIONS = ("ste", "clipped", "dge", "power-law", "sigmoid", "spline", "trust")
"""Surrogate derivatives, of elements and of the rounding of scales, that the kernel of estimators has."""

SCALE_GRADIENTS = ("none", "diagonal", "exact", "softmax-diagonal", "softmax")
"""Gradients through a block's scale that it has."""


def span(block: int, rotation: int, codec: str) -> int:
    """Neighbours along the contraction axis that are quantized together."""
    return max(block, rotation, MACRO_BLOCK if codec == "macro" else 0)


WIDE = 2.0**100
"""Scale formats that reach beyond are rounded by the kernel's long way."""

TIES = ("log_ties", "half_away")
"""Columns of ties that are not to even."""


class Features(NamedTuple):
    """What some lane of a descriptor table needs; the rest is left out of the kernel when it is compiled.

    scales: the encode convention, hybrid, rounded-up and BF16 or FP32 scales; ties: half-away and logarithmic ones
    """

    tensor_scale: bool
    stochastic: bool
    adaptive: bool
    scales: bool
    ties: bool


def features(floats: Tensor, ints: Tensor) -> Features:
    """The features of descriptor tables; reads them back from the device."""
    f = dict(zip(FLOATS, floats[:, : len(FLOATS)].cpu().unbind(1), strict=True))
    i = dict(zip(INTS, ints.cpu().unbind(1), strict=True))
    scales, ties = (any(bool(i[n].any()) for n in of) for of in (("encode", "hybrid", "scale_up"), TIES))
    return Features(
        tensor_scale=bool(f["tensor_target"].any()),
        stochastic=bool(i["stochastic"].any()),
        adaptive=bool(i["adapt"].any()),
        scales=scales or bool((f["scale_max"] > WIDE).any()),
        ties=ties,
    )


def why_not_fused(device: str) -> str | None:
    """The reason why the fused kernels are not taken on this device, or None if they are."""
    prefix = "fused quantizer not taken"
    if torch.device(device).type != "cuda":
        return f"{prefix} on {device}: it needs a CUDA device"
    if os.environ.get("FP4DSE_EAGER"):
        return f"{prefix}: FP4DSE_EAGER is set"
    if find_spec("triton") is None:
        return f"{prefix}: triton is not installed (pip install 'fp4dse[gpu]')"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"{prefix}: it needs compute capability 8.0, {torch.cuda.get_device_name(device)} has {capability}"
    return None


@cache
def takes(device: torch.device) -> bool:
    """Whether the fused kernels are taken on this device."""
    return why_not_fused(str(device)) is None


def heeded(codec: str) -> set[str]:
    """Columns of the descriptor tables that the kernels of whole operands read; lanes that need others they refuse."""
    from fp4dse.kernels.fused.blocks import HEEDED

    return HEEDED | {"scale_stochastic"} if codec == "eden" else HEEDED  # all of its scales are rounded by chance


def heeded_by_scales() -> set[str]:
    """The same of `by_scales`, of columns about elements."""
    from fp4dse.kernels.fused.elements import HEEDED

    return HEEDED


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
    if edge not in (16, 32):
        return f"tile: found {edge}; accepted: 16, 32"
    if x.shape[1] % edge or x.shape[2] % edge:
        return f"x: found {tuple(x.shape)}; accepted: whole tiles of {edge}"
    if x.dtype not in (torch.float32, torch.bfloat16) or x.stride()[1:] != (x.shape[2], 1):
        return "x: rows do not follow one another"
    return None


def why_not_through(quantizer: Quantizer, spec: Through) -> str | None:
    """The reason why `through` does not take an operand of this quantizer, or None if it does."""
    q, (element, _, scale, rounding) = quantizer.canonical(), form(spec)
    for field, found, known in (
        ("element", element, RELAXATIONS),
        ("scale", scale, SCALE_GRADIENTS),
        ("scale_rounding", rounding, RELAXATIONS),
    ):
        if found not in known:
            return f"estimator {field}: found {found}; accepted: {', '.join(known)}"
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
