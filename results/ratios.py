"""Ratios of losses as a person reads them. Frames and queries hold their logarithm; nobody should have to read that.

A ratio near one is a change in %: exp(gap) - 1, so that `+44.3 %` is a loss 1.443 times as large. From half and twice
on it is the ratio itself, `× 11.4`: percentages of a thousand, or of -97, are read wrongly. Mean and bounds of an
interval share the unit that suits the mean.
"""

from __future__ import annotations

import math

UNKNOWN = "–"
_TWICE = math.log(2)


def change(log_ratio: float) -> str:
    """`+0.62 %` or `× 11.4`; a dash for NaN. log_ratio: log(loss / other loss)."""
    return _in_unit(log_ratio, _as_ratio(log_ratio), unit=True)


def change_range(mean: float, low: float, high: float) -> str:
    """`+0.10 to +0.30 %` or `× 8.1 to 16`, in the unit of `change(mean)`; empty if a bound is NaN."""
    if math.isnan(low) or math.isnan(high):
        return ""
    ratio = _as_ratio(mean)
    ends = (_in_unit(low, ratio, unit=ratio), _in_unit(high, ratio, unit=not ratio))
    return " to ".join(ends)


def change_with_range(mean: float, low: float, high: float) -> str:
    """`+0.20 % (+0.10 to +0.30 %)`; without the bracket if a bound is NaN."""
    bounds = change_range(mean, low, high)
    return f"{change(mean)} ({bounds})" if bounds else change(mean)


def _as_ratio(log_ratio: float) -> bool:
    return abs(log_ratio) >= _TWICE


def _in_unit(log_ratio: float, ratio: bool, unit: bool) -> str:
    if math.isnan(log_ratio):
        return UNKNOWN
    times = math.exp(log_ratio) if log_ratio < 700 else math.inf
    if ratio:
        return f"{'× ' if unit else ''}{_digits(times)}"
    percents = 100 * (times - 1)
    text = "∞" if math.isinf(percents) else f"{percents:+.{2 if abs(percents) < 10 else 1}f}"
    return f"{text}{' %' if unit else ''}"


def _digits(times: float) -> str:
    """Three significant digits, never as a power of ten up to a million."""
    if math.isinf(times):
        return "∞"
    return f"{times:,.0f}" if 1000 <= times < 1e6 else f"{times:#.3g}".rstrip(".")
