"""The fused GPU kernels as one PyTorch operator, for torch.compile and CUDA graphs too, and when it cannot be taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dse.kernels.descriptor import FLOATS, INTS
from fp4dse.kernels.philox import STREAMS, random16
from fp4dse.kernels.reference import decode_operand

BLOCKS = (16, 32, 64, 128, 256, 512, 1024)
"""Block sizes that the kernel takes."""

WIDE = 2.0**100
"""Scale formats that reach beyond are rounded by the kernel's long way."""


class Features(NamedTuple):
    """What some lane of a descriptor table needs; the rest is left out of the kernel when it is compiled.

    unusual: the encode convention, hybrid, rounded-up and BF16 or FP32 scales, half-away and logarithmic ties
    """

    tensor_scale: bool
    stochastic: bool
    adaptive: bool
    unusual: bool


def features(floats: Tensor, ints: Tensor) -> Features:
    """The features of descriptor tables; reads them back from the device."""
    f = dict(zip(FLOATS, floats.cpu().unbind(1), strict=True))
    i = dict(zip(INTS, ints.cpu().unbind(1), strict=True))
    unusual = [i[name].any() for name in ("encode", "hybrid", "scale_up", "log_ties", "half_away")]
    return Features(
        tensor_scale=bool(f["tensor_target"].any()),
        stochastic=bool(i["stochastic"].any()),
        adaptive=bool(i["adapt"].any()),
        unusual=any(unusual) or bool((f["scale_max"] > WIDE).any()),
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
    if unknown := unknown_columns():
        return f"{prefix}: it does not know {', '.join(unknown)}"
    return None


def unknown_columns() -> list[str]:
    """Columns of the descriptor tables that the kernel does not heed."""
    from fp4dse.kernels.triton_quantize import KNOWN

    return [name for name in (*FLOATS, *INTS) if name not in KNOWN]


def why_not_operand(x: Tensor, block: int, dtype: torch.dtype) -> str | None:
    """The reason why the kernels do not take this operand, or None if they do."""
    kinds = torch.float32, torch.bfloat16
    if x.dtype not in kinds or dtype not in kinds:
        return f"dtype: found {x.dtype} to {dtype}; accepted: float32 and bfloat16"
    if block not in BLOCKS:
        return f"block: found {block}; accepted: {', '.join(map(str, BLOCKS))}"
    if not (x.numel() > 0 and len(x) < 2**16 and x[0].numel() < 2**30):
        return f"x: found {tuple(x.shape)}; accepted: 1 to 65,535 lanes of 1 to 2^30 - 1 elements"
    return None


@torch.library.custom_op("fp4dse::operand", mutates_args=())
def operand(
    x: Tensor,
    columns: bool,
    block: int,
    floats: Tensor,
    ints: Tensor,
    features: Sequence[bool],
    seeds: Tensor,
    step: Tensor,
    site: int,
    tensor_amax: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`reference.decode_operand` with `philox.random16`: the operand [L, R, C] as `dtype`, decode factors float32 [L].

    x: float32 or bfloat16, [L, R, C], or [L, C, R] where `columns`; blocks lie along C, which they divide.
    features: `Features` of the tables. seeds: int64 [L], step: int64 scalar on the device, site: keys of the draws.
    tensor_amax: float32 [L] maxima to scale by, or None for those of x. dtype: float32 or bfloat16 (one rounding).
    Raises ValueError for what the kernels do not take.
    """
    from fp4dse.kernels.triton_quantize import launch, tensor_maxima

    if reason := why_not_operand(x, block, dtype):
        raise ValueError(reason)
    if x.shape[1 if columns else 2] % block:
        raise ValueError(f"x: found {tuple(x.shape)}; accepted: a contraction axis that blocks of {block} divide")
    x = x.contiguous()
    out, dec = _outputs(x, columns, dtype)
    with torch.cuda.device_of(x):
        if features[0] and tensor_amax is None:
            tensor_amax = tensor_maxima(x)
        launch(x, columns, block, floats, ints, features, tensor_amax, seeds, step, site, out, dec)
    return out, dec


@operand.register_fake
def _(x, columns, block, floats, ints, features, seeds, step, site, tensor_amax, dtype):
    return _outputs(x, columns, dtype)


def unfused_operand(
    x: Tensor,
    columns: bool,
    block: int,
    floats: Tensor,
    ints: Tensor,
    features: Sequence[bool],
    seeds: Tensor,
    step: Tensor,
    site: int,
    *,
    decode=decode_operand,
    draws=random16,
) -> tuple[Tensor, Tensor]:
    """What `operand` computes, in float32, by the reference or its twins: its specification."""
    x = (x.mT if columns else x).to(torch.float32).contiguous()
    blocks = x.view(len(x), -1, block)
    _, stochastic, adaptive, _ = features
    random = None
    if stochastic:
        at = torch.tensor(site, device=x.device)
        random = draws(seeds, STREAMS["rounding"], step, at, blocks[0].numel()).view_as(blocks)
    values, dec = decode(blocks, floats, ints, random, adaptive)
    return values.view_as(x), dec


def _outputs(x: Tensor, columns: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = x.mT.shape if columns else x.shape
    return x.new_empty(shape, dtype=dtype), x.new_empty(len(x), dtype=torch.float32)
