"""Loss and time on one scale: a recipe's gap once the time that it saves is spent on more tokens.

A recipe that is fast and a little worse, and one that is slower and a little better, are told apart by what tokens are
worth. BF16's own training says that (tokens_worth.py): its margin is what MORE tokens lower its loss by, so that

    slope = margin / log(1 + MORE)                             -d log loss / d log tokens, above 0
    gap at equal time = gap + slope · log overhead             in BF16's time a recipe trains 1 / overhead of its tokens
    time to BF16's loss = overhead · exp(gap / slope)          BF16 = 1

The last is the time to quality of arXiv 2610.00053, (1 + τ) · overhead, where τ is the share of tokens more than
BF16's. The two say the same: a recipe whose gap at equal time is below 0 reaches BF16's loss in less than BF16's time.
Both take it that more tokens do for a recipe what they do for BF16, and that the slope holds as far as the gap reaches:
a gap as large as that of BF16 with less than FARTHEST of its tokens, which is as far as training curves are asked, is
out of reach, and no time is told; nor is one told that fewer than FARTHEST of the tokens would take.

Where nothing is known of what tokens are worth (a margin that is assumed, points of accuracy) there is no such time;
there, and where all gaps are out of reach, recipes are ranked by their gaps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.stats.levels import are_shares
from fp4dse.results.stats.paired import MARGINS, OVERHEAD
from fp4dse.results.stats.recipes.margins import BY_CURVE, BY_LAW, FROM, MORE, Margin
from fp4dse.results.stats.recipes.overheads import on_one_scale

FARTHEST = FROM
"""Share of BF16's tokens."""
TELLING = (BY_LAW, BY_CURVE)
"""Beginnings of a margin's `of` that tell what tokens are worth."""


class Time(NamedTuple):
    """The modelled time to BF16's loss, BF16 = 1, by the mean of a gap and the ends of its interval."""

    mean: float
    """NaN if nothing tells what tokens are worth, inf if the gap is further than FARTHEST."""
    low: float
    high: float
    rough: bool
    """The worth of tokens is from one training curve."""


def slope_of(margin: Margin) -> float:
    """The worth of tokens to BF16: the fall of its log loss for a rise of the log of tokens by one; NaN if nothing
    tells it."""
    return margin.value / math.log1p(MORE) if margin.of.startswith(TELLING) else math.nan


def slopes(rows: pd.DataFrame) -> NDArray[np.float64]:
    """`slope_of` the margin of each row, or line, [n]; NaN where losses are shares, or rows have no MARGINS."""
    if MARGINS[0] not in rows:
        return np.full(len(rows), np.nan)
    told = rows[MARGINS[1]].astype(str).str.startswith(TELLING) & ~are_shares(rows)
    return np.asarray(rows[MARGINS[0]].astype(float).where(told) / math.log1p(MORE))


def times_to_quality(gap: pd.Series, overhead: pd.Series, slope: NDArray[np.float64]) -> NDArray[np.float64]:
    """The modelled time to BF16's loss, [n], BF16 = 1; as in `Time`. gap: log ratios; slope: of `slopes`."""
    tokens = gap.to_numpy(float) / slope  # the log of their share of BF16's
    time = overhead.to_numpy(float) * np.exp(np.clip(tokens, math.log(FARTHEST), -math.log(FARTHEST)))
    return np.where(tokens > -math.log(FARTHEST), np.inf, time)


def time_to_quality(gap: float, gap_low: float, gap_high: float, overhead: float, margin: Margin) -> Time:
    """The time of one recipe, by its gap, a log ratio, with its interval."""
    gaps = pd.Series([gap, gap_low, gap_high])
    times = times_to_quality(gaps, pd.Series([overhead] * 3), np.full(3, slope_of(margin)))
    mean, low, high = times.tolist()
    return Time(mean, low, high, margin.of.startswith(BY_CURVE))


def credit(overhead: pd.Series, slope: NDArray[np.float64] | float) -> pd.Series:
    """The worth of the time that recipes save: log ratios below 0, above it where they take more than BF16. 0 where the
    overhead is not known, which counts as BF16's, or the slope is not."""
    known = overhead.astype(float)
    return (slope * np.log(known.where(known.gt(0)))).fillna(0.0)


def ranking(gap: pd.Series, overhead: pd.Series, slope: float) -> tuple[pd.Series, float]:
    """The number by which recipes are ranked, the lowest first, and the slope that it is by.

    It is the gap at equal time, inf where the gap is out of reach. Where all are, or the slope is not known, it is the
    gap as it is, and the slope NaN. gap: log ratios.
    """
    near = gap <= -math.log(FARTHEST) * slope
    if not near.any():
        return gap, math.nan
    return (gap + credit(overhead, slope)).where(near, np.inf), slope


def at_equal_time(rows: pd.DataFrame, slope: pd.Series) -> pd.DataFrame:
    """The rows with loss and gap as they would be after BF16's time. rows: of `rows_at_best_lr`; slope: of each of the
    values of `setting`, NaN where rows stay as they are."""
    if OVERHEAD not in rows or slope.isna().all():
        return rows
    overhead = on_one_scale(rows, OVERHEAD).groupby([rows["setting"], rows["config_id"]]).transform("mean")
    by = credit(overhead, rows["setting"].map(slope).to_numpy(float))
    return rows.assign(loss=rows["loss"] * np.exp(by), gap=rows["gap"] + by)
