"""Operands whose scales the reference makes and whose elements a kernel does: what the operand kernel does not take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.kernels.codecs import SCALES
from fp4dse.kernels.reference import with_numbers


def by_scales(
    x: Tensor,
    floats: Tensor,
    ints: Tensor,
    features: Sequence[bool],
    seeds: Tensor,
    step: Tensor,
    site: int,
    dtype: torch.dtype,
    *,
    codec: str = "block",
    guide: Tensor | None = None,
    factors: int = 1,
    **more,
) -> tuple[Tensor, Tensor]:
    """`reference.decode_operand` with `philox.random16`: values [L, n, B] as `dtype`, decode factors [L], [L, factors].

    x: float32 [L, n, B], blocks of any length, of a codec in `codecs.SCALES`, no lane adaptive. features, seeds, step,
    site: as in `operators.operand`. guide, factors, more: as in `reference.quantize_blocks`.
    """
    low, high = torch.aminmax(x, dim=2)  # no temporary of x's size
    blocks, dec = with_numbers(x, torch.maximum(high, -low), floats, ints, factors=factors, guide=guide, **more)
    scale, mult = (t.contiguous() for t in SCALES[codec](blocks))
    mult = mult * blocks.prescale
    common = floats, ints, features, seeds, step, site
    return elements(x, scale, mult, *common, guide, codec == "radix4", dtype), dec[:, 0] if factors == 1 else dec


@torch.library.custom_op("fp4dse::elements", mutates_args=())
def elements(
    x: Tensor,
    scale: Tensor,
    mult: Tensor,
    floats: Tensor,
    ints: Tensor,
    features: Sequence[bool],
    seeds: Tensor,
    step: Tensor,
    site: int,
    guide: Tensor | None,
    fours: bool,
    dtype: torch.dtype,
) -> Tensor:
    """q · scale as `dtype` of x [L, n, B], q being x · mult on the element grid; NaN where mult is.

    scale, mult: float32 [L, n]. guide: float32, of x's shape, or None, see `grid.round_elements`. fours: the grid is
    one of powers of four.
    """
    from fp4dse.kernels.fused.elements import launch_elements

    out = torch.empty_like(x, dtype=dtype)
    with torch.cuda.device_of(x):
        launch_elements(x, scale, mult, floats, ints, features, seeds, step, site, guide, fours, out)
    return out


@elements.register_fake
def _(x, scale, mult, floats, ints, features, seeds, step, site, guide, fours, dtype):
    return torch.empty_like(x, dtype=dtype)
