"""Ratios of losses as a person reads them. Frames and queries hold their logarithm; nobody should have to read that.

A ratio near one is a change in %: exp(gap) - 1, so that `+44.3 %` is a loss 1.443 times as large. From half and twice
on it is the ratio itself, `× 11.4`: percentages of a thousand, or of -97, are read wrongly. Mean and bounds of an
interval share the unit that suits the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

UNKNOWN = "–"
_TWICE = math.log(2)


def change(log_ratio: float) -> str:
    """`+0.62 %` or `× 11.4`; a dash for NaN. log_ratio: log(loss / other loss)."""
    return _in_unit(log_ratio, _as_ratio(log_ratio))


def change_range(mean: float, low: float, high: float) -> str:
    """`+0.10 to +0.30 %` or `× 8.1 to 16`, in the unit of `change(mean)`; empty if a bound is NaN.

    Percentages have one number of digits for both ends: two of an interval that is near zero or narrow, else one.
    """
    if math.isnan(low) or math.isnan(high):
        return ""
    if _as_ratio(mean):
        return f"{_in_unit(low, ratio=True)} to {_in_unit(high, ratio=True).removeprefix('× ')}"
    ends = [_percents(end) for end in (low, high)]
    size, width = max(map(abs, ends)), ends[1] - ends[0]
    digits = 2 if size < 10 or 0.01 <= width < 1 else 1
    return f"{_percent_text(ends[0], digits)} to {_percent_text(ends[1], digits)} %"


def change_with_range(mean: float, low: float, high: float) -> str:
    """`+0.20 % (+0.10 to +0.30 %)`; without the bracket if a bound is NaN."""
    bounds = change_range(mean, low, high)
    return f"{change(mean)} ({bounds})" if bounds else change(mean)


def _as_ratio(log_ratio: float) -> bool:
    return abs(log_ratio) >= _TWICE


def _in_unit(log_ratio: float, ratio: bool) -> str:
    if math.isnan(log_ratio):
        return UNKNOWN
    if ratio:
        return f"× {_digits(_times(log_ratio))}"
    percents = _percents(log_ratio)
    return f"{_percent_text(percents, 2 if abs(percents) < 10 else 1)} %"


def _times(log_ratio: float) -> float:
    return math.exp(log_ratio) if log_ratio < 700 else math.inf


def _percents(log_ratio: float) -> float:
    return 100 * (_times(log_ratio) - 1)


def _percent_text(percents: float, digits: int) -> str:
    return "∞" if math.isinf(percents) else f"{percents:+.{digits}f}"


def _digits(times: float) -> str:
    """Three significant digits, never as a power of ten up to a million."""
    if math.isinf(times):
        return "∞"
    return f"{times:,.0f}" if 1000 <= times < 1e6 else f"{times:#.3g}".rstrip(".")


def share_with_band(share: float, band: Sequence[float]) -> str:
    """`0.63 (0.55 to 0.73)`: an overhead with the best and the worst software; without the bracket if there is none, or
    if it would say the same thrice."""
    ends = [f"{end:.2f}" for end in band]
    return f"{share:.2f}" + (f" ({ends[0]} to {ends[-1]})" if len({f"{share:.2f}", *ends}) > 1 else "")


def counted(n: int, word: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
