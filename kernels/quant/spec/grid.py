"""Rounding to a grid of numbers, each lane by its own: the arithmetic that all quantizers are made of.

Every operation is a single IEEE operation on float32 or an integer one on its bits, so that results are the same on
every device. Lanes' numbers come as columns of the descriptor tables, [L, 1] or wider. Given float64 numbers, all is
done in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.quant.descriptor import LEVELS

FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN = torch.finfo(torch.float32).tiny
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_EXPONENT = {torch.float32: 0x7F800000, torch.float64: 0x7FF << 52}
_HALF_RANGE = {torch.float32: 0x7F000000, torch.float64: 0x7FE << 52}
# bits of 2^127 (2^1023): subtracting the bits of a power of two from them gives its reciprocal's


def scaled(y: Tensor, pmin: Tensor, ulps: Tensor) -> tuple[Tensor, Tensor]:
    """y >= 0 in units of its grid's step: (t, binade), y = t · binade / ulps, exactly.

    pmin: smallest binade 2^emin of the format; ulps: 2^mantissa, the steps in a binade.
    """
    binade = torch.maximum(power_below(y), pmin)
    return y * inverse_of_power(binade) * ulps, binade


def power_below(y: Tensor) -> Tensor:
    """The largest power of two that is at most y >= 0; 0 for zero and subnormal y, Inf for Inf and NaN."""
    return (y.view(_BITS[y.dtype]) & _EXPONENT[y.dtype]).view(y.dtype)


def inverse_of_power(x: Tensor) -> Tensor:
    """1/x for x a power of two from 2^-126 to 2^126 (float64: 2^-1022 to 2^1022)."""
    return (_HALF_RANGE[x.dtype] - x.view(_BITS[x.dtype])).view(x.dtype)


def round_up_from(t: Tensor, threshold: Tensor | float) -> Tensor:
    """floor(t), and one more where the fraction is at least `threshold`."""
    low = torch.floor(t)
    return low + (t - low >= threshold).to(t.dtype)


def round_scale(y: Tensor, f: dict[str, Tensor], i: dict[str, Tensor], random: Tensor | None) -> Tensor:
    """y >= 0, at most the scale format's maximum, to that format as the lane does: nearest even, up, or stochastically.

    y: [L, n]. random: int32 in 0 … 65535 of y's shape, or None where no lane rounds scales stochastically.
    """
    t, binade = scaled(y, f["scale_pmin"], f["scale_ulps"])
    up = i["scale_up"] > 0
    threshold: Tensor | float = FLT_MIN
    if random is not None:
        by_chance = i["scale_stochastic"] > 0
        threshold = torch.where(by_chance, midpoint_threshold(random, torch.zeros_like(i["scale_up"])), FLT_MIN)
        up = up | by_chance
    q = torch.where(up, round_up_from(t, threshold), torch.round(t))
    return q * (binade / f["scale_ulps"])


def midpoint_threshold(random: Tensor, shift: Tensor) -> Tensor:
    """The fraction from which on r, the upper b of 16 random bits, rounds up: fraction + (2r+1)/2^(b+1) >= 1.

    random: int32 in 0 … 65535. shift: int32, 16 - b.
    """
    step = (shift + (127 - 17) << 23).view(torch.float32)  # 2^-(b+1)
    return 1.0 - (2 * (random >> shift) + 1).to(torch.float32) * step


def round_elements(
    y: Tensor, f: dict[str, Tensor], i: dict[str, Tensor], random: Tensor | None, guide: Tensor | None = None
) -> Tensor:
    """Round magnitudes y [L, n, B], at most the format's maximum, to the element grid, each lane by its own mode.

    random: int32 [L, n, B] in 0 … 65535, or None where no lane rounds stochastically. guide: [L, n, B], what lanes with
    a moving average have in the place of y, sign and all relative to y's; NaN where it does not count yet.
    """
    column = {name: value[:, :, None] for name, value in (f | i).items()}  # [L, 1, 1]
    t, binade = scaled(y, column["elem_pmin"], column["elem_ulps"])
    nearest = torch.round(t)
    # a power of two's own binade has one grid point: the tie 1.5 goes to the even code, that of even exponent
    is_even = (binade.to(torch.float32).view(torch.int32) >> 23 & 1) == 0
    nearest = torch.where((column["log_ties"] > 0) & (t == 1.5) & is_even, 1.0, nearest)
    if guide is not None:
        at = guide * inverse_of_power(binade) * column["elem_ulps"] - torch.floor(t)
        follow = (column["ema"] > 0) & ~torch.isnan(guide) & ~torch.isnan(t)
        nearest = torch.where(follow, torch.where(at >= 0.5, torch.ceil(t), torch.floor(t)), nearest)
    threshold: Tensor | float = 0.5
    if random is not None:
        chance = midpoint_threshold(random, column["random_shift"])
        threshold = torch.where(column["half_away"] > 0, 0.5, chance)
    by_threshold = (column["half_away"] > 0) | (column["stochastic"] > 0)
    return torch.where(by_threshold, round_up_from(t, threshold), nearest) * (binade / column["elem_ulps"])


def round_to_levels(
    y: Tensor, levels: Tensor, i: dict[str, Tensor], random: Tensor | None, guide: Tensor | None
) -> Tensor:
    """Round y [L, n, B] to the values of each lane's table, by its own mode; saturating. NaN stays.

    levels: [L, LEVELS + BOUNDS], as in the descriptor. random, guide: as in `round_elements`. By chance, or towards a
    guide, y goes to one of its two neighbours: from the one nearer to 0 to the other, as in `round_elements`.
    """
    columns = levels[:, :, None, None].unbind(1)  # each [L, 1, 1]
    values, bounds = columns[:LEVELS], columns[LEVELS:]
    q = values[0].expand_as(y)
    for value, bound in zip(values[1:], bounds, strict=True):
        q = torch.where(y >= bound, value, q)
    if random is not None or guide is not None:
        below, above = values[0].expand_as(y), values[-1].expand_as(y)
        for value in values[1:]:
            below = torch.where(y >= value, value, below)
        for value in reversed(values[:-1]):
            above = torch.where(y <= value, value, above)
        inner, outer = torch.where(y < 0, above, below), torch.where(y < 0, below, above)
        low, step = inner.abs(), outer.abs() - inner.abs()  # 0 for what is beyond the ends
        if guide is not None:
            follow = (i["ema"][:, :, None] > 0) & ~torch.isnan(guide) & ~torch.isnan(y)
            q = torch.where(follow, torch.where(guide - low >= 0.5 * step, outer, inner), q)
        if random is not None:
            chance = midpoint_threshold(random, i["random_shift"][:, :, None])
            up = (y.abs() - low) / torch.where(step > 0, step, 1.0) >= chance
            by_chance = i["stochastic"][:, :, None] > 0
            q = torch.where(by_chance, torch.where(up & (step > 0), outer, inner), q)
    return torch.where(torch.isnan(y), y, q)


def round_bf16(x: Tensor) -> Tensor:
    """One rounding to BF16, nearest even, kept in float32. NaN stays NaN, overflow goes to Inf."""
    return x.to(torch.bfloat16).to(torch.float32)
