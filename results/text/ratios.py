"""Gaps as a person reads them: ratios of losses, or points of accuracy.

Frames and queries hold the logarithm of a ratio; nobody should have to read that.

A ratio near one is a change in %: exp(gap) - 1, so that `+44.3 %` is a loss 1.443 times as large. From half and twice
on it is the ratio itself, `× 11.4`: percentages of a thousand, or of -97, are read wrongly. Mean and bounds of an
interval share the unit that suits the mean.

Where losses are the share of what is wrong, frames hold their difference, and it is read as points of accuracy: 0.032
is `-3.2 points`. Whoever writes of such a task does so within `written_in("points")`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

UNKNOWN = "–"
_TWICE = math.log(2)
_UNIT: ContextVar[str | None] = ContextVar("unit of gaps", default=None)


@contextmanager
def written_in(unit: object) -> Iterator[None]:
    """Gaps that are written within are in this gap_unit: `points`; log ratios for anything else."""
    token = _UNIT.set("points" if unit == "points" else None)
    try:
        yield
    finally:
        _UNIT.reset(token)


def in_points() -> bool:
    """True where gaps are written in points of accuracy."""
    return _UNIT.get() == "points"


def noun(many: bool = False) -> str:
    """The quantity that a gap is of: `loss`, or `accuracy`."""
    singular, plural = ("accuracy", "accuracies") if in_points() else ("loss", "losses")
    return plural if many else singular


def best() -> str:
    """`the lowest loss`, or `the highest accuracy`."""
    return "the highest accuracy" if in_points() else "the lowest loss"


def size(gap: float, digits: int = 2) -> str:
    """`9.5 %`, `× 2.31` or `0.7 points`, without a sign: with few digits, as it comes from few seeds."""
    if in_points():
        return f"{100 * gap:.{digits}g} points"
    return f"{100 * math.expm1(gap):.{digits}g} %" if gap < _TWICE else change(gap)


def correlation(value: float, low: float, high: float) -> str:
    """`0.49 (-0.05 to 0.85)`, of a correlation; without its ends where there are none, a dash for NaN."""
    if math.isnan(value):
        return UNKNOWN
    return f"{value:.2f}" if math.isnan(low) else f"{value:.2f} ({low:.2f} to {high:.2f})"


def fine_change(gap: float) -> str:
    """`+0.012 %` or `-0.012 points`, with a digit more than `change` has; a dash for NaN."""
    if math.isnan(gap):
        return UNKNOWN
    return f"{-100 * gap:+.3f} points" if in_points() else f"{100 * math.expm1(gap):+.3f} %"


def change(log_ratio: float) -> str:
    """`+0.62 %`, `× 11.4` or `-0.62 points`; a dash for NaN. log_ratio: log(loss / other loss), or the difference of
    losses in points."""
    if in_points():
        return UNKNOWN if math.isnan(log_ratio) else f"{_points(log_ratio)} points"
    return _in_unit(log_ratio, _as_ratio(log_ratio))


def change_range(mean: float, low: float, high: float) -> str:
    """`+0.10 to +0.30 %` or `× 8.1 to 16`, in the unit of `change(mean)`; empty if a bound is NaN.

    Percentages have one number of digits for both ends: two of an interval that is near zero or narrow, else one.
    """
    if math.isnan(low) or math.isnan(high):
        return ""
    if in_points():
        digits = 2 if max(abs(low), abs(high)) < 0.1 else 1
        return f"{_points(high, digits)} to {_points(low, digits)} points"
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


def ends(low: float, high: float) -> tuple[float, float]:
    """The bounds in the order in which `change_range` writes them: a higher accuracy is a lower loss."""
    return (high, low) if in_points() else (low, high)


def _points(difference: float, digits: int | None = None) -> str:
    """Points of accuracy, of a difference of losses that are shares."""
    if digits is None:
        digits = 2 if abs(difference) < 0.1 else 1
    return "-∞" if math.isinf(difference) else f"{-100 * difference + 0.0:+.{digits}f}"


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
