"""The hierarchical model of a study: what the gaps of recipes are, once all of them have been seen.

    mean gap = centre + Σ effects of its levels + own part u + luck e          e ~ N(0, v/n)
    effects of a factor ~ Σ_k share_k · N(0, width_k²)         u ~ Σ_k share_k · N(0, width_k²)

The luckiest of many noisy means is too good. Here every mean is drawn towards the linear model by as much as its luck
outweighs what recipes differ by beside the model. Both that part and the factors' effects are mixtures of normal
distributions of fixed widths, 0 among them, whose shares are fitted (adaptive shrinkage, Stephens 2017): a few large
ones stay where they are while the rest moves in, and techniques that do nothing are told to do nothing. Variances v
over seeds are those of spread.py. What all recipes with a technique share in a seed is estimated over all factors
together, from how much their effects differ between seeds beyond the luck of lanes; it is uncertainty of the effects.

A draw from the posterior takes v from its scaled inverse χ² distribution, the width and the effects of each factor, and
u given these. Too few recipes for a model (fewer than twice its coefficients) are drawn towards their mean alone, and
fewer than five towards nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4dse.results.stats.least_squares import sum_to_zero
from fp4dse.results.stats.spread import Spread

Array = NDArray[np.float64]
LEAST_RECIPES = 5
STEPS = 100
"""Of expectation-maximization."""
TOWARDS_ZERO = 2
DIGITS = 12
"""Of a drawn gap: recipes that a draw says are equal are equal, whatever order sums were taken in."""


class Mixture(NamedTuple):
    """A mixture that n things are drawn from: members of normal distributions around zero."""

    widths: Array
    """[widths], rising from 0."""
    member: Array
    """[n, widths]: the chances of each."""

    def drawn(self, count: int, rng: np.random.Generator) -> Array:
        """Widths [count, n]."""
        luck = rng.random((count, len(self.member)))
        which = np.zeros(luck.shape, np.intp)
        for edge in np.cumsum(self.member, axis=1)[:, :-1].T:
            which += luck > edge
        return self.widths[which]


class Posterior(NamedTuple):
    """All that draws are made from; arrays of [recipes], [recipes, coefficients]."""

    spread: Spread
    own: Mixture | None
    """Of the recipes' own parts; None where nothing is drawn towards anything."""
    own_error: Array
    """Standard error of each mean without what levels share."""
    design: Array
    """The first column is 1."""
    coefficients: Array
    precision: Array
    """[coefficients, coefficients], of the data alone."""
    effects: Mixture
    """Of the factors' effects."""
    blocks: list[slice]
    """The columns of each factor."""

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Gaps [count, recipes] from the posterior."""
        recipes = len(self.spread.mean)
        variance = np.square(self.own_error) * inflation(self.spread.freedom, count, rng)
        noise = rng.standard_normal((count, recipes))
        if self.own is None:
            return self.spread.mean + np.sqrt(variance) * noise
        centre = self._coefficients(count, rng) @ self.design.T
        prior = np.square(self.own.drawn(count, rng))
        kept = prior / (prior + variance + 1e-300)
        return np.asarray(
            np.round(centre + kept * (self.spread.mean - centre) + np.sqrt(kept * variance) * noise, DIGITS)
        )

    def _coefficients(self, count: int, rng: np.random.Generator) -> Array:
        """[count, coefficients], exactly 0 for factors that a draw says do nothing."""
        widths = self.effects.drawn(count, rng)
        p = len(self.coefficients)
        precision = np.broadcast_to(self.precision, (count, p, p)).copy()
        least = 1e-6 * self.effects.widths[1:].min(initial=1.0)
        nothing = np.zeros((count, p), bool)
        for width, columns in zip(widths.T, self.blocks, strict=True):
            size = columns.stop - columns.start
            prior = np.eye(size) + np.ones((size, size))  # the inverse of I - J/L
            precision[:, columns, columns] += prior / np.square(np.maximum(width, least))[:, None, None]
            nothing[:, columns] = (width == 0)[:, None]
        root = np.linalg.cholesky(precision)
        target = np.broadcast_to((self.precision @ self.coefficients)[:, None], (count, p, 1))
        noise = rng.standard_normal((count, p, 1))
        mean = np.linalg.solve(precision, target)
        return np.where(nothing, 0.0, (mean + np.linalg.solve(root.transpose(0, 2, 1), noise))[..., 0])


def posterior(spread: Spread, gaps: Array, factors: Sequence[NDArray[np.intp]]) -> Posterior:
    """The posterior of distinct recipes. gaps: [recipes, seeds], as `spread` is of; factors: codes [recipes] each, from
    0 on without a gap."""
    recipes = len(spread.mean)
    parts = [sum_to_zero(int(codes.max()) + 1)[codes] for codes in factors if codes.max() > 0]
    if recipes < 2 * (1 + sum(part.shape[1] for part in parts)):
        parts = []
    design = np.hstack([np.ones((recipes, 1)), *parts])
    ends = np.cumsum([1, *(part.shape[1] for part in parts)])
    blocks = [slice(int(a), int(b)) for a, b in pairwise(ends)]
    level_error, own_error = _level_noise(spread, gaps, parts)
    if recipes < LEAST_RECIPES or not np.isfinite(own_error).all() or not (own_error > 0).all():
        return unmoved(spread)
    coefficients, normal, own = _fitted(design, spread.mean, np.square(own_error))
    shared = np.zeros(normal.shape)
    for columns in blocks:
        size = columns.stop - columns.start
        shared[columns, columns] = level_error**2 * (np.eye(size) - 1 / (size + 1))
    covariance, precision = _uncertainty(normal, shared)
    effects = _effects(coefficients, covariance, blocks)
    return Posterior(spread, own, own_error, design, coefficients, precision, effects, blocks)


def unmoved(spread: Spread) -> Posterior:
    """The posterior that draws recipes towards nothing: each has what its own seeds say."""
    nothing = Mixture(np.zeros(1), np.ones((0, 1)))
    return Posterior(spread, None, spread.error, np.zeros((0, 0)), np.zeros(0), np.zeros((0, 0)), nothing, [])


def inflation(freedom: Array, count: int, rng: np.random.Generator) -> Array:
    """[count, recipes]: by how much a variance may be larger than what its seeds say."""
    out = np.ones((count, len(freedom)))
    finite = np.isfinite(freedom) & (freedom > 0)
    d = freedom[finite]
    out[:, finite] = d / (2 * rng.standard_gamma(d / 2, (count, len(d))))
    return out


def _widths(least: float, most: float) -> Array:
    """0, and widths from least to most, each √2 or so of the one before."""
    most = max(most, 2 * least)
    count = int(np.ceil(2 * np.log2(most / least))) + 1
    return np.append(0.0, np.geomspace(least, most, count))


def _shares(log_density: Array, shares: Array) -> tuple[Array, Array]:
    """A step of expectation-maximization: memberships [n, widths] and new shares.

    As many things more as TOWARDS_ZERO are counted as having no width: where the data cannot tell, nothing is.
    """
    member = shares * np.exp(log_density - log_density.max(axis=1, keepdims=True))
    member /= member.sum(axis=1, keepdims=True)
    total = member.sum(axis=0) + TOWARDS_ZERO * (np.arange(len(shares)) == 0)
    return member, total / total.sum()


def _fitted(design: Array, mean: Array, variance: Array) -> tuple[Array, Array, Mixture]:
    """Coefficients, the matrix of their normal equations, and what recipes have of their own."""
    coefficients = np.asarray(np.linalg.lstsq(design, mean, rcond=None)[0], float)
    widths = _widths(math.sqrt(float(np.median(variance))) / 4, 2 * float(np.abs(mean - design @ coefficients).max()))
    total = np.square(widths) + variance[:, None]  # [recipes, widths]
    shares = np.full(len(widths), 1 / len(widths))
    for _ in range(STEPS):
        residual = mean - design @ coefficients
        before = shares
        member, shares = _shares(-0.5 * (np.log(total) + np.square(residual)[:, None] / total), shares)
        weighted = design.T * (member / total).sum(axis=1)
        coefficients = np.asarray(np.linalg.lstsq(weighted @ design, weighted @ mean, rcond=None)[0], float)
        if np.abs(shares - before).max() < 1e-4:
            break
    return coefficients, weighted @ design, Mixture(widths, member)


def _uncertainty(normal: Array, shared: Array) -> tuple[Array, Array]:
    """Covariance (normal⁻¹ + shared) of the coefficients and its inverse, positive semidefinite whatever was rounded.

    Factors that are a mixture of others leave directions of which the data say nothing: an inverse of the inverse would
    have negative variances there.
    """
    values, vectors = np.linalg.eigh(normal)
    slack = 1e-9 * float(np.trace(normal)) / len(normal)
    values = np.maximum(values, 0.0) + slack
    root = vectors * np.sqrt(values)
    covariance = np.asarray((vectors / values) @ vectors.T + shared)
    precision = root @ np.linalg.solve(np.eye(len(normal)) + root.T @ shared @ root, root.T)
    return covariance, np.asarray((precision + precision.T) / 2)


def _effects(coefficients: Array, covariance: Array, blocks: Sequence[slice]) -> Mixture:
    """The mixture that the effects of the factors are drawn from, found from all of them."""
    if not blocks:
        return Mixture(np.zeros(1), np.ones((0, 1)))
    errors = [math.sqrt(float(np.diag(covariance)[columns].mean())) for columns in blocks]
    widths = _widths(min(errors) / 2, 2 * float(np.abs(coefficients[1:]).max()))
    log_density = np.empty((len(blocks), len(widths)))
    for i, columns in enumerate(blocks):
        found, size = coefficients[columns], columns.stop - columns.start
        for k, width in enumerate(widths):
            total = covariance[columns, columns] + width**2 * (np.eye(size) - 1 / (size + 1))
            log_density[i, k] = -0.5 * (np.linalg.slogdet(total)[1] + found @ np.linalg.solve(total, found))
    shares = np.full(len(widths), 0.5 / (len(widths) - 1))
    shares[0] = 0.5
    for _ in range(STEPS):
        member, shares = _shares(log_density, shares)
    return Mixture(widths, member)


def _level_noise(spread: Spread, gaps: Array, blocks: Sequence[Array]) -> tuple[float, Array]:
    """The standard error of a level from what its recipes share in a seed, and of each mean without it.

    One variance for all factors: the excess of the squares that factors' effects have from seed to seed over what the
    luck of lanes explains.
    """
    whole = np.isfinite(gaps).all(axis=1)
    seeds = gaps.shape[1]
    columns = sum(block.shape[1] for block in blocks)
    if not blocks or seeds < 2 or whole.sum() < 2 * columns + 2:
        return 0.0, spread.error
    deviation = gaps[whole] - gaps[whole].mean(axis=1, keepdims=True)
    deviation = deviation - deviation.mean(axis=0)
    design = np.hstack([block[whole] for block in blocks])
    design = design - design.mean(axis=0)
    found = np.linalg.lstsq(design, deviation, rcond=None)[0]
    explained = np.square(design @ found).sum()
    rank = int(np.linalg.matrix_rank(design))
    left = np.square(deviation).sum() - explained
    own = left / ((whole.sum() - 1 - rank) * (seeds - 1))
    excess = max(explained / (rank * (seeds - 1)) - own, 0.0) / whole.sum() * rank
    if excess <= 0:
        return 0.0, spread.error
    # `excess` is the variance that all factors add to a recipe in a seed; a level of L has this over (1 - 1/L)
    in_levels = sum(1 - 1 / (block.shape[1] + 1) for block in blocks)
    share = min(excess / (excess + own), 0.9)
    return math.sqrt(excess / in_levels / seeds), spread.error * math.sqrt(1 - share)
