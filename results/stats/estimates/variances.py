"""Draws of the variances that lanes of recipes may have, from the few seeds of each.

    s² ~ σ² · χ²(d)/d          σ² ~ s0² · d0/χ²(d0)

is the model of Smyth 2004, as in limma, by which spread.py pools variances. There d0, which says by how much recipes
differ in their variance, is one number. Here it is drawn as well: forty recipes of three seeds often look as if they
had one variance where they do not, and whoever takes that at its word tells recipes apart that are equal. The root of
the variance of log σ² has a half-normal prior of width `WIDTH`; real studies have 0.8 and 2.2 (docs/log.md).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, gammaln, polygamma

Array = NDArray[np.float64]

WIDTH = 1.0


class Variances(NamedTuple):
    """The posterior of the variances of recipes, from the variances of their seeds."""

    own: Array
    """[recipes]: s²; of no account where a recipe has one seed, unless there is nothing else."""
    freedom: Array
    """[recipes]: d."""
    chances: Array
    """[PRIOR_FREEDOM]: of each d0; empty where nothing is known of any variance."""
    centres: Array
    """[PRIOR_FREEDOM]: log s0² for each."""
    usual: Array
    """[recipes]: what all variances are held against (spread.py); `own` and `centres` are ratios to it."""

    def draw(self, count: int, rng: np.random.Generator, square: Array | None = None) -> Array:
        """σ² [count, recipes]; `own` itself where nothing else is known. square: [count, recipes], the square of one
        deviation more, whose variance is σ², too."""
        if not len(self.chances):
            return np.broadcast_to(self.own * self.usual, (count, len(self.own)))
        prior, common = self._common(count, rng)
        sums, freedom = prior * common + self.freedom * self.own, prior + self.freedom
        if square is not None:
            sums, freedom = sums + square / self.usual, freedom + 1
        return np.asarray(self.usual * sums / (2 * rng.standard_gamma(freedom / 2)))

    def draw_of_difference(
        self, two: list[int], variance: float, freedom: int, count: int, rng: np.random.Generator
    ) -> Array:
        """σ² [count] of the difference of two recipes, whose pairs have this variance and degrees of freedom. What is
        usual for it is the sum of what is usual for the two."""
        prior, common = self._common(count, rng) if len(self.chances) else (np.zeros((count, 1)), np.ones((count, 1)))
        sums = prior * common * self.usual[two].sum() + freedom * variance
        return np.asarray(sums / (2 * rng.standard_gamma((prior + freedom) / 2)))[:, 0]

    def _common(self, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """d0 and s0² [count, 1] each."""
        which = rng.choice(len(self.chances), count, p=self.chances)[:, None]
        known = self.freedom[self.freedom > 0]
        unsure = np.sqrt((np.square(_ROOTS[which]) + 2 / known.mean()) / len(known))
        return PRIOR_FREEDOM[which], np.exp(self.centres[which] + unsure * rng.standard_normal((count, 1)))


def variances(own: Array, freedom: Array, usual: Array | None = None) -> Variances:
    """The posterior from s² and d, [recipes] each; s² may be NaN where d is 0. usual: see Variances; ones if None."""
    usual = np.ones(len(own)) if usual is None else usual
    own, freedom = np.nan_to_num(np.asarray(own, float) / usual), np.asarray(freedom, float)
    known = freedom > 0
    if known.sum() < 2 or not (own[known] > 0).any():
        only = own[known].sum() if known.sum() == 1 else 0.0
        return Variances(np.where(known, own, only), freedom, np.zeros(0), np.zeros(0), usual)
    log, half = log_variances(own[known]), freedom[known] / 2
    halves = PRIOR_FREEDOM[:, None] / 2
    centres = (log - expected_log(half)).mean() + expected_log(halves)
    above = log - centres
    density = half * above - (half + halves) * np.log1p(half / halves * np.exp(above))
    density += half * np.log(half / halves) + gammaln(half + halves) - gammaln(halves)
    weight = density.sum(axis=1) - np.square(_ROOTS / WIDTH) / 2
    weight = np.exp(weight - weight.max())
    return Variances(own, freedom, weight / weight.sum(), centres[:, 0], usual)


def log_variances(variance: Array) -> Array:
    """Logarithms of variances [n], zeros counted as the smallest above; one at least is."""
    return np.asarray(np.log(np.maximum(variance, variance[variance > 0].min())))


def expected_log(half: Array) -> Array:
    """The mean of log(χ²(d)/d), of half = d/2: what log s² has where log σ² is 0."""
    return np.asarray(digamma(half) - np.log(half))


def inverse_trigamma(value: float) -> float:
    """x with trigamma(x) = value, by Newton's method on 1/trigamma, which is nearly straight (Smyth 2004)."""
    x = 0.5 + 1 / value
    for _ in range(50):
        tri = polygamma(1, x)
        step = tri * (1 - tri / value) / polygamma(2, x)
        x += step
        if abs(step) < 1e-10 * x:
            break
    return float(x)


_ROOTS = np.linspace(0.05, 4, 40)
PRIOR_FREEDOM: Array = np.array([2 * inverse_trigamma(root**2) for root in _ROOTS])
"""Values of d0: those whose log σ² have the variances `_ROOTS`²."""
