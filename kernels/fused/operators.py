"""The fused GPU kernels as PyTorch operators, for torch.compile and CUDA graphs too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.kernels.arithmetic.rotation import rotate
from fp4dse.kernels.fused.limits import span, why_not_operand
from fp4dse.kernels.reference import tensor_maxima


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
    numbers and what follows: of the estimator, see `estimators.numbers` and `Through.form`.
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
