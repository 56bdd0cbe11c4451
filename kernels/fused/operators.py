"""The fused GPU kernels as PyTorch operators, for torch.compile and CUDA graphs too, and when it cannot be taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
from fp4dse.kernels.arithmetic.philox import STREAMS, random16
from fp4dse.kernels.arithmetic.rotation import rotate
from fp4dse.kernels.descriptor import FLOATS, INTS
from fp4dse.kernels.packed import quantize_and_pack
from fp4dse.kernels.reference import decode_operand, tensor_maxima

BLOCKS = (16, 32, 64, 128, 256, 512, 1024)
"""Block sizes that the kernels take."""

ROTATIONS = (16, 32, 64, 128, 256)
"""Sizes of rotations that the kernels take."""

MOST = 2**34
"""Elements from which on a lane is too large: runs of 16 of them, and lines of memory, are numbered in 32 bits."""

CODECS = ("block", "eden", "hif4", "quest", "split", "macro", "if4", "razer", "dialects", "exact", "softmax")
"""Codecs that the kernels have (`codecs.CODECS`)."""


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
    f = dict(zip(FLOATS, floats.cpu().unbind(1), strict=True))
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
    if unknown := unknown_columns():
        return f"{prefix}: it does not know {', '.join(unknown)}"
    return None


@cache
def takes(device: torch.device) -> bool:
    """Whether the fused kernels are taken on this device."""
    return why_not_fused(str(device)) is None


def unknown_columns() -> list[str]:
    """Columns of the descriptor tables that the kernel does not heed."""
    from fp4dse.kernels.fused.blocks import KNOWN

    return [name for name in (*FLOATS, *INTS) if name not in KNOWN]


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
    rotation: int = 0,
    signs: Tensor | None = None,
    codec: str = "block",
) -> tuple[Tensor, Tensor]:
    """`reference.decode_operand` with `philox.random16`: the operand [L, R, C] as `dtype`, decode factors float32 [L].

    x: float32 or bfloat16, [L, R, C], or [L, C, R] where `columns`; blocks lie along C, which they divide.
    features: `Features` of the tables. seeds: int64 [L], step: int64 scalar on the device, site: keys of the draws.
    tensor_amax: float32 [L] maxima to scale by, or None for those of x. dtype: float32 or bfloat16 (one rounding).
    rotation: x is rotated first along C, in groups of so many (0: not), with signs: float32 [L or 1, rotation] or None;
    as `rotation.rotate` does. codec: of all lanes, one of CODECS; but for `eden`, no lane rounds scales stochastically.
    Raises ValueError for what the kernels do not take.
    """
    _check(x, columns, block, dtype, rotation, codec)
    out, dec = _decoded(x, columns, dtype)
    common = x, columns, block, floats, ints, features, seeds, step, site
    _run(*common, tensor_amax=tensor_amax, rotation=rotation, signs=signs, outputs=(out, None, dec), codec=codec)
    return out, dec


@operand.register_fake
def _(
    x, columns, block, floats, ints, features, seeds, step, site, tensor_amax, dtype, rotation=0, signs=None, codec=""
):
    return _decoded(x, columns, dtype)


@torch.library.custom_op("fp4dse::packed", mutates_args=())
def packed(
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
    rotation: int = 0,
    signs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operand as stored: codes uint8 [L, R, C/2], scale codes uint8 [L, R, C/B], decode factors float32 [L].

    Arguments as in `operand`; `packed.py` has the layout. For tables of quantizers that `packed.why_not_packed` takes.
    """
    _check(x, columns, block, torch.float32, rotation)
    outputs = _packed(x, columns, block)
    common = x, columns, block, floats, ints, features, seeds, step, site
    _run(*common, tensor_amax=tensor_amax, rotation=rotation, signs=signs, outputs=outputs)
    return outputs


@packed.register_fake
def _(x, columns, block, floats, ints, features, seeds, step, site, tensor_amax, rotation=0, signs=None):
    return _packed(x, columns, block)


@torch.library.custom_op("fp4dse::both", mutates_args=())
def both(
    x: Tensor,
    blocks: Sequence[int],
    floats: Sequence[Tensor],
    ints: Sequence[Tensor],
    features: Sequence[bool],
    seeds: Tensor,
    step: Tensor,
    sites: Sequence[int],
    maxima: Sequence[Tensor | None],
    dtype: torch.dtype,
    rotations: Sequence[int],
    signs: Sequence[Tensor | None],
) -> list[Tensor]:
    """What `operand` returns for the rows of x and for its columns, one after the other, from one read of x [L, R, C].

    Two of everything that `operand` takes, first for rows, then for columns; features: all and all. dtype: also
    torch.uint8, for what `packed` returns. Where neither is rotated they share one tensor maximum.
    """
    from fp4dse.kernels.fused.launch import launch_both, tensor_maxima

    x, amax, signs = x.contiguous(), list(maxima), [_for_lanes(s, len(x)) for s in signs]
    for n in (0, 1):
        _check(x, n == 1, blocks[n], torch.float32 if dtype == torch.uint8 else dtype, rotations[n])
    outputs = _both(x, blocks, dtype)
    with torch.cuda.device_of(x):
        for n in (0, 1):
            if features[n * len(features) // 2] and amax[n] is None:
                shared = n == 1 and features[0] and maxima[0] is None and not any(rotations)
                amax[n] = amax[0] if shared else tensor_maxima(x, n == 1, rotations[n], signs[n])
        halves = features[: len(features) // 2], features[len(features) // 2 :]
        launch_both(x, blocks, floats, ints, halves, seeds, step, sites, amax, rotations, signs, outputs)
    return [t for of_one in outputs for t in of_one]


@both.register_fake
def _(x, blocks, floats, ints, features, seeds, step, sites, maxima, dtype, rotations, signs):
    return [t for of_one in _both(x, blocks, dtype) for t in of_one]


def rotated_maxima(x: Tensor, columns: bool, rotation: int = 0, signs: Tensor | None = None) -> Tensor:
    """max |x| of each lane after rotation, float32 [L], NaN where one is; arguments as in `operand`."""
    if not x.is_cuda:
        x = x.to(torch.float32)
        return tensor_maxima(rotate(x, rotation, 1 if columns else 2, signs) if rotation else x)[:, 0]
    from fp4dse.kernels.fused.launch import tensor_maxima as taken

    with torch.cuda.device_of(x):
        return taken(x, columns, rotation, _for_lanes(signs, len(x)))


def squares(x: Tensor, edge: int, *tables) -> tuple[Tensor, Tensor]:
    """x [L, R, C] quantized in tiles where it lies; arguments as in squares.squares."""
    from fp4dse.kernels.fused import squares

    with torch.cuda.device_of(x):
        return squares.squares(x, edge, *tables)


@torch.library.custom_op("fp4dse::through", mutates_args=())
def through(
    g: Tensor,
    x: Tensor,
    block: int,
    floats: Tensor,
    ints: Tensor,
    features: Sequence[bool],
    seeds: Tensor,
    step: Tensor,
    site: int,
    tensor_amax: Tensor | None,
    rotation: int,
    signs: Tensor | None,
    codec: str,
    numbers: Tensor,
    element: str,
    masked: bool,
    scale: str,
    scale_rounding: str,
) -> Tensor:
    """The gradient of x, float32 [L, R, C], from g, float32 [L, R, C], that of what `operand` made of it, blocks along
    C; both before the rotation. What `estimators.through` computes, for quantizers that `why_not_through` lets pass.

    Arguments as `operand` had them; tensor_amax: the maxima that it took, None where no lane has a tensor scale.
    numbers and what follows: of the estimator, see `estimators.numbers` and `estimators.form`.
    """
    from fp4dse.kernels.fused.estimators import launch

    _check(x, False, block, torch.float32, rotation, codec)
    if g.shape != x.shape or g.dtype != torch.float32:
        raise ValueError(f"g: found {g.dtype} {tuple(g.shape)}; accepted: float32 {tuple(x.shape)}")
    keys = seeds, step, site, tensor_amax, rotation, _for_lanes(signs, len(x))
    out = torch.empty_like(g, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(x):
        launch(g, x, block, floats, ints, features, *keys, codec, numbers, element, masked, scale, scale_rounding, out)
    return out


@through.register_fake
def _(g, *of_through):
    return torch.empty_like(g, memory_format=torch.contiguous_format)


def why_not_through(quantizer: Quantizer, spec: Through) -> str | None:
    """The reason why `through` does not take an operand of this quantizer, or None if it does."""
    q = quantizer.canonical()
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
    rotation: int = 0,
    signs: Tensor | None = None,
    codec: str = "block",
    *,
    decode=decode_operand,
    draws=random16,
) -> tuple[Tensor, Tensor]:
    """What `operand` computes, in float32, by the reference or its twins: its specification."""
    blocks, shape, random = _blocks(x, columns, block, features, seeds, step, site, rotation, signs, draws)
    more: dict = {} if codec == "block" else {"codec": codec}
    if codec == "eden":
        at = torch.tensor(site, device=x.device)
        more["scale_random"] = random16(seeds, STREAMS["scales"], step, at, blocks.shape[1])
    values, dec = decode(blocks, floats, ints, random, features[2], **more)
    return values.view(shape), dec


def unfused_packed(
    x: Tensor,
    columns: bool,
    block: int,
    floats: Tensor,
    ints: Tensor,
    features: Sequence[bool],
    seeds: Tensor,
    step: Tensor,
    site: int,
    quantizers: Sequence[Quantizer],
    rotation: int = 0,
    signs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `packed` computes, by the reference: its specification. quantizers: those of the tables, one a lane."""
    blocks, shape, random = _blocks(x, columns, block, features, seeds, step, site, rotation, signs, random16)
    codes, scales, dec = quantize_and_pack(blocks, floats, ints, random, features[2], quantizers)
    return codes.view(*shape[:2], -1), scales.view(*shape[:2], -1), dec


def _blocks(x, columns, block, features, seeds, step, site, rotation, signs, draws):
    """Blocks of the rotated operand, float32 [L, n, B], the operand's shape, and its random bits or None."""
    x = (x.mT if columns else x).to(torch.float32).contiguous()
    if rotation:
        x = rotate(x, rotation, 2, signs)
    blocks = x.view(len(x), -1, block)
    random = None
    if features[1]:
        at = torch.tensor(site, device=x.device)
        random = draws(seeds, STREAMS["rounding"], step, at, blocks[0].numel()).view_as(blocks)
    return blocks, x.shape, random


def _check(x: Tensor, columns: bool, block: int, dtype: torch.dtype, rotation: int, codec: str = "block") -> None:
    if reason := why_not_operand(x, block, dtype, rotation, codec):
        raise ValueError(reason)
    for name, size in ("blocks of", span(block, 0, codec)), ("a rotation of", rotation or 1):
        if x.shape[1 if columns else 2] % size:
            raise ValueError(f"x: found {tuple(x.shape)}; accepted: a contraction axis that {name} {size} divides")


def _run(
    x,
    columns,
    block,
    floats,
    ints,
    features,
    seeds,
    step,
    site,
    *,
    tensor_amax,
    rotation,
    signs,
    outputs,
    codec="block",
) -> None:
    """One launch, and one for the tensor maximum where it is needed and not given."""
    from fp4dse.kernels.fused.launch import launch, tensor_maxima

    signs = _for_lanes(signs, len(x))
    out, scales, dec = outputs
    with torch.cuda.device_of(x):
        if features[0] and tensor_amax is None:
            tensor_amax = tensor_maxima(x, columns, rotation, signs)
        keys = seeds, step, site
        launch(x, columns, block, floats, ints, features, *keys, tensor_amax, rotation, signs, out, scales, dec, codec)


def _for_lanes(signs: Tensor | None, lanes: int) -> Tensor | None:
    return None if signs is None else signs.expand(lanes, -1).contiguous()


def _decoded(x: Tensor, columns: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = x.mT.shape if columns else x.shape
    return x.new_empty(shape, dtype=dtype), x.new_empty(len(x), dtype=torch.float32)


def _packed(x: Tensor, columns: bool, block: int) -> tuple[Tensor, Tensor, Tensor]:
    lanes, rows, width = x.mT.shape if columns else x.shape
    codes, scales = (x.new_empty((lanes, rows, width // n), dtype=torch.uint8) for n in (2, block))
    return codes, scales, x.new_empty(lanes, dtype=torch.float32)


def _both(x: Tensor, blocks: Sequence[int], dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    if dtype == torch.uint8:
        return [_packed(x, columns, blocks[columns]) for columns in (False, True)]
    return [_decoded(x, columns, dtype) for columns in (False, True)]
