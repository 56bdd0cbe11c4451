"""The seeds that would decide: the fewest with which a verdict is reached with a chance of 80 %.

A few seeds know neither the difference nor its spread, so neither may be taken for what they show. The chance is over
what both may be after all, node by node, and the luck of the seeds to come. It is what is promised before these are
trained, and it holds on average over such cases; of recipes that differ by much less than a lane's spread, but more
than the margin, more than one in five stays open, since chance made the promise where it made the difference large.

With n0 pairs of mean m, of a true difference δ and a standard deviation σ of a pair, the mean of n pairs is

    (n0 · m + (n - n0) · δ) / n  ±  σ · √(n - n0) / n

and is held against the limits that n pairs will have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, ndtr, ndtri, stdtrit

from fp4dse.results.stats.estimates.intervals import CONFIDENCE

Array = NDArray[np.float64]
POWER = 0.8
MOST_SEEDS = 10_000
_SEEDS = np.unique(np.concatenate([np.arange(2, 40), np.geomspace(40, MOST_SEEDS, 80).astype(int)]))
_NODES = (np.arange(15) + 0.5) / 15
NORMAL: Array = ndtri(_NODES)
"""Nodes of a standard normal distribution, which weigh the same."""

Limits = Callable[[Array], tuple[Array, Array]]
"""Pairs n [rows, N, 1] -> how far from 0 a mean must be that is told from it, and how near to 0 one that is the same
([rows, N, nodes or 1] each; below 0: none is)."""


class Prospect(NamedTuple):
    """Lines without a verdict: pairs that there are, and differences and spreads that may be true."""

    pairs: Array
    """[rows]: those there are."""
    difference: Array
    """[rows]: their mean."""
    truth: Array
    """[rows, nodes]: what it may be over all seeds."""
    deviation: Array
    """[rows, nodes or 1]: the standard deviation of a pair that goes with it."""


def more_seeds(of: Prospect, limits: Limits) -> Array:
    """[rows]: seeds beyond those there are with which a verdict is reached in 80 % of cases; inf above 10,000."""
    n0 = of.pairs[:, None, None].astype(float)
    n = np.maximum(_SEEDS[None, :, None], n0 + 1)
    centre = (n0 * of.difference[:, None, None] + (n - n0) * of.truth[:, None]) / n
    luck = of.deviation[:, None] * np.sqrt(n - n0) / n
    beyond, within = limits(n)
    apart = ndtr((-beyond - centre) / luck) + ndtr((centre - beyond) / luck)
    same = np.clip(ndtr((within - centre) / luck) - ndtr((-within - centre) / luck), 0, 1) * (within > 0)
    reached = np.minimum(apart + same, 1.0).mean(axis=2) >= POWER
    need = np.where(reached.any(axis=1), n[:, :, 0][np.arange(len(n)), reached.argmax(axis=1)], np.inf)
    return np.asarray(need - n0[:, 0, 0])


def pair_alone(pairs: int, mean: float, std: float) -> Prospect:
    """The prospect of pairs of which nothing else is known: σ² = s² (n0 - 1)/χ²(n0 - 1), δ = m + σ/√n0 · N(0, 1).

    Of one row; pairs: 2 or more; std: above 0."""
    deviation = np.repeat(std * np.sqrt((pairs - 1) / chdtri(pairs - 1.0, _NODES)), len(_NODES))
    truth = mean + deviation / np.sqrt(pairs) * np.tile(NORMAL, len(_NODES))
    return Prospect(np.array([pairs]), np.array([mean]), truth[None], deviation[None])


def more_pairs(of: Prospect, std: Array, margin: float) -> Array:
    """`more_seeds` of pairs that are judged alone, by the t-tests of intervals.py and equivalence.py. std: [rows], of
    the pairs that there are, above 0.

    The standard deviation that n pairs will show is taken to be what it is on average, given σ.
    """
    first = of.pairs[:, None, None].astype(float)
    seen = (first - 1) * np.square(std)[:, None, None]

    def limits(n: Array) -> tuple[Array, Array]:
        error = np.sqrt((seen + (n - first) * np.square(of.deviation)[:, None]) / ((n - 1) * n))
        return stdtrit(n - 1, 0.5 + CONFIDENCE / 2) * error, margin - stdtrit(n - 1, CONFIDENCE) * error

    return more_seeds(of, limits)
