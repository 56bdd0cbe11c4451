"""The hierarchical model of a study: what the gaps of recipes are, once all of them have been seen.

    mean gap = centre + Σ effects of its levels + own part u + luck e          e ~ N(0, v/n)
    effects of a factor ~ Σ_k share_k · N(0, width_k²)         u ~ Σ_k share_k · N(0, width_k²)

The luckiest of many noisy means is too good. Here every mean is drawn towards the linear model by as much as its luck
outweighs what recipes differ by beside the model. Both that part and the factors' effects are mixtures of normal
distributions of fixed widths, 0 among them (adaptive shrinkage, Stephens 2017): a few large ones stay where they are
while the rest moves in, and techniques that do nothing are told to do nothing. Variances v are those of variances.py.

Nothing is estimated first and then taken to be known: shares, widths, effects, own parts and variances are drawn in
turn, each given all others (Gibbs sampling, Geman and Geman 1984), so that a draw of the gaps knows how unsure all of
them are together. Shares have a Dirichlet prior; that of own parts leans towards no width, and there may be no own part
at all: no number of recipes tells many tiny ones from none, and the tiny ones alone would reorder all recipes that the
model has close together. Effects and own parts are summed out where their width is drawn, and own parts where effects
are, so that chains do not get stuck at 0.

What all recipes with a technique share in a seed is estimated over all factors together, from how much their effects
differ between seeds beyond the luck of lanes: it is a part of the effects that are seen and no part of the gaps.

Too few recipes for a model (fewer than twice its coefficients) are drawn towards their mean alone, and fewer than five
towards nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit

from fp4dse.results.stats.estimates.least_squares import sum_to_zero
from fp4dse.results.stats.estimates.spread import Spread

Array = NDArray[np.float64]
LEAST_RECIPES = 5
DRAWS = 32
"""Of the states of all chains after a sweep."""
CHAINS, FEWER_CHAINS, MANY = 32, 8, 2000
"""Chains side by side; and fewer, with several draws of each state, from that many recipes on, which take long and know
their shares well."""
BURN_IN = 20
"""Sweeps of a chain before its first draw."""
OWN_PRIOR, EFFECT_PRIOR = (2.0, 1.0), (0.5, 0.5)
"""Recipes, or factors, that the prior of the shares is worth: without width, and with any. A space has five factors or
so, which say little of their shares: a prior worth more of them would decide that the weak ones do nothing."""
NO_OWN_PART = 0.5
"""The chance, before anything is seen, that no recipe has an own part: that the linear model is all there is."""
DIGITS = 12
"""Of a drawn gap: recipes that a draw says are equal are equal, whatever order sums were taken in."""


class Factor(NamedTuple):
    """A factor of the model, whose effects of its L levels sum to zero."""

    codes: NDArray[np.intp]
    """[recipes], 0 … L - 1"""
    levels: Array
    """[recipes, L]: 1 where a recipe has a level."""
    contrasts: Array
    """[L, L - 1]: orthonormal, each sums to zero; of the centre [1, 1]."""


class Posterior(NamedTuple):
    """All that draws are made from."""

    spread: Spread
    factors: list[Factor] | None
    """The first is the centre, which has one level; None where nothing is drawn towards anything."""
    lanes: Array
    """[recipes]: the variance of a mean over that of a seed, without what levels share."""
    level_error: float
    """Standard deviation of what the recipes of a level share in their means."""
    own_widths: Array
    effect_widths: Array
    """Rising from 0."""

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Gaps [count, recipes] from the posterior."""
        return np.concatenate([*self.draws(count, rng)])

    def draws(self, count: int, rng: np.random.Generator) -> Iterator[Array]:
        """The same in parts [DRAWS, recipes], the last of which may be shorter."""
        sweeps = _unmoved(self.spread, rng) if self.factors is None else _sweeps(self, self.factors, rng)
        for start, draw in zip(range(0, count, DRAWS), sweeps, strict=False):
            yield draw[: count - start]


def posterior(spread: Spread, gaps: Array, factors: Sequence[NDArray[np.intp]]) -> Posterior:
    """The posterior of distinct recipes. gaps: [recipes, seeds], as `spread` is of; factors: codes [recipes] each, from
    0 on without a gap."""
    recipes = len(spread.mean)
    known = [_factor(codes) for codes in factors if codes.max() > 0]
    if recipes < 2 * (1 + sum(factor.contrasts.shape[1] for factor in known)):
        known = []
    level_error, own_error = _level_noise(spread, gaps, known)
    if recipes < LEAST_RECIPES or not np.isfinite(own_error).all() or not (own_error > 0).all():
        return unmoved(spread)
    centre = Factor(np.zeros(recipes, np.intp), np.ones((recipes, 1)), np.ones((1, 1)))
    lanes = np.square(own_error / spread.error) / np.isfinite(gaps).sum(axis=1)
    noise, most = float(np.median(own_error)), 2 * float(np.abs(spread.mean - spread.mean.mean()).max())
    widths = _widths(noise / 4, most), _widths(noise / math.sqrt(recipes), most)
    return Posterior(spread, [centre, *known], lanes, level_error, *widths)


def unmoved(spread: Spread) -> Posterior:
    """The posterior that draws recipes towards nothing: each has what its own seeds say."""
    return Posterior(spread, None, np.zeros(0), 0.0, np.zeros(0), np.zeros(0))


def _unmoved(spread: Spread, rng: np.random.Generator) -> Iterator[Array]:
    freedom = spread.freedom
    finite = np.isfinite(freedom) & (freedom > 0)
    d = freedom[finite]
    while True:
        inflation = np.ones((DRAWS, len(freedom)))  # a variance may be larger than what its seeds say
        inflation[:, finite] = d / (2 * rng.standard_gamma(d / 2, (DRAWS, len(d))))
        yield spread.mean + spread.error * np.sqrt(inflation) * rng.standard_normal(inflation.shape)


def _sweeps(of: Posterior, factors: list[Factor], rng: np.random.Generator) -> Iterator[Array]:
    """Draws [DRAWS, recipes] without end, one part a sweep."""
    spread, own_widths, effect_widths = of.spread, of.own_widths, of.effect_widths
    chains = CHAINS if len(spread.mean) < MANY else FEWER_CHAINS
    variance = np.broadcast_to(np.square(spread.error), (chains, len(spread.mean)))
    width = np.zeros(variance.shape)
    effects = [np.zeros((chains, factor.contrasts.shape[0])) for factor in factors]
    own_shares = np.full((chains, len(own_widths)), 1 / len(own_widths))
    effect_shares = np.full((chains, len(effect_widths)), 1 / len(effect_widths))
    left = np.tile(spread.mean, (chains, 1))
    each = np.empty(left.shape)  # of recipes, the effect of a factor; arrays are written again, as new ones take longer
    sweep = 0
    while True:
        weight = 1 / (np.square(width) + variance)
        centre, chosen = np.zeros(left.shape), []
        for i, factor in enumerate(factors):
            left += np.take(effects[i], factor.codes, axis=1, out=each, mode="clip")
            prior = np.square(effect_widths) if i else None
            effects[i], true, which = _effects(factor, weight, left, effect_shares, prior, of.level_error, rng)
            left -= np.take(effects[i], factor.codes, axis=1, out=each, mode="clip")
            centre += np.take(true, factor.codes, axis=1, out=each, mode="clip")
            chosen.append(which)
        if len(factors) > 1:
            effect_shares = _shares(np.stack(chosen[1:], axis=1), len(effect_widths), EFFECT_PRIOR, rng)
        which, any_own = _own(left, variance, own_widths, own_shares, rng)
        own_shares = _shares(which, len(own_widths), OWN_PRIOR, rng, any_own)
        width = own_widths[which]
        kept = np.square(width) / (np.square(width) + variance)
        middle, unsure = kept * left, np.sqrt(kept * variance)
        if (sweep := sweep + 1) > BURN_IN:
            luck = rng.standard_normal((DRAWS // chains, *left.shape))
            yield np.round(centre + middle + unsure * luck, DIGITS).reshape(DRAWS, -1)
        own = middle + unsure * rng.standard_normal(left.shape)
        variance = spread.variances.draw(chains, rng, np.square(left - own) / of.lanes) * of.lanes


def _effects(
    factor: Factor,
    weight: Array,
    left: Array,
    shares: Array,
    prior: Array | None,
    level_error: float,
    rng: np.random.Generator,
) -> tuple[Array, Array, NDArray[np.intp]]:
    """Effects of a factor's levels as these seeds show them and as they are, [chains, L] each, and which width each
    chain took for them [chains].

    weight, left: [chains, recipes], precisions of the means and what other factors leave of them; prior: variances of
    effects, with `shares` [chains, widths]; None for the centre, of which nothing is known before.
    """
    precision = np.einsum("li,cl,lj->cij", factor.contrasts, weight @ factor.levels, factor.contrasts)
    seen = (weight * left) @ factor.levels @ factor.contrasts
    values, vectors = np.linalg.eigh(precision)
    values = np.maximum(values, 0.0)
    seen = np.einsum("cij,ci->cj", vectors, seen)
    luck = rng.standard_normal(seen.shape)
    which = np.zeros(len(seen), np.intp)
    if prior is None:
        effect = true = seen / values + luck / np.sqrt(values)
    else:
        total = prior + level_error**2
        scaled = values[:, None, :] * total[:, None]  # [chains, widths, L - 1]
        chance = np.square(seen)[:, None, :] * total[:, None] / (1 + scaled) - np.log1p(scaled)
        which = _picked(np.log(shares) + chance.sum(axis=2) / 2, rng)
        known = total[which][:, None] / (1 + values * total[which][:, None])
        effect = known * seen + np.sqrt(known) * luck
        share = (prior / np.maximum(total, 1e-300))[which][:, None]
        true = share * effect + level_error * np.sqrt(share) * rng.standard_normal(seen.shape) * (level_error > 0)
    back = [np.einsum("cij,cj->ci", vectors, part) @ factor.contrasts.T for part in (effect, true)]
    return back[0], back[1], which


def _own(
    left: Array, variance: Array, widths: Array, shares: Array, rng: np.random.Generator
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Widths of recipes' own parts by their places, [chains, recipes], from what the model leaves of the means; and in
    which chains [chains] recipes may have own parts."""
    square, cumulated = np.square(left), np.empty((len(widths), *left.shape))
    half, total, root = -0.5 * square, np.empty(left.shape), np.empty(left.shape)
    for k, width in enumerate(widths):
        np.add(width**2, variance, out=total)
        density = np.exp(np.divide(half, total, out=cumulated[k]), out=cumulated[k])
        density *= np.divide(shares[:, k, None], np.sqrt(total, out=root), out=root)
        if k:
            density += cumulated[k - 1]
    none = -0.5 * (square / variance + np.log(variance)).sum(axis=1)
    some = np.log(np.maximum(cumulated[-1], 1e-300)).sum(axis=1)
    any_own = rng.random(len(left)) < expit(some - none - logit(NO_OWN_PART))
    luck = rng.random(left.shape) * cumulated[-1]
    which = np.asarray((cumulated[:-1] <= luck).sum(axis=0))
    return np.where(any_own[:, None], which, 0), any_own


def _picked(log_chance: Array, rng: np.random.Generator) -> NDArray[np.intp]:
    """One of the columns of each row, by the logarithms of their chances."""
    cumulated = np.exp(log_chance - log_chance.max(axis=1, keepdims=True)).cumsum(axis=1)
    return np.asarray((cumulated[:, :-1] <= rng.random((len(cumulated), 1)) * cumulated[:, -1:]).sum(axis=1))


def _shares(
    which: NDArray[np.intp],
    widths: int,
    worth: tuple[float, float],
    rng: np.random.Generator,
    of: NDArray[np.bool_] | None = None,
) -> Array:
    """Shares [chains, widths] of which these widths [chains, n] were drawn. worth: of the prior, without width and
    with any; of: chains [chains] whose widths were drawn from shares, the others have theirs from the prior alone."""
    chains = len(which)
    places = (which + widths * np.arange(chains)[:, None]).ravel()
    counts = np.bincount(places, minlength=chains * widths).reshape(chains, widths)
    if of is not None:
        counts = counts * of[:, None]
    prior = np.append(worth[0], np.full(widths - 1, worth[1] / (widths - 1)))
    drawn = np.maximum(rng.standard_gamma(counts + prior), 1e-30)
    return np.asarray(drawn / drawn.sum(axis=1, keepdims=True))


def _factor(codes: NDArray[np.intp]) -> Factor:
    levels = int(codes.max()) + 1
    return Factor(codes, np.eye(levels)[codes], np.linalg.qr(sum_to_zero(levels))[0])


def _widths(least: float, most: float) -> Array:
    """0, and widths from least to most, each half of the next or so."""
    most = max(most, 2 * least)
    count = int(np.ceil(np.log2(most / least))) + 1
    return np.append(0.0, np.geomspace(least, most, count))


def _level_noise(spread: Spread, gaps: Array, factors: Sequence[Factor]) -> tuple[float, Array]:
    """The standard error of a level from what its recipes share in a seed, and of each mean without it.

    One variance for all factors: the excess of the squares that factors' effects have from seed to seed over what the
    luck of lanes explains.
    """
    whole = np.isfinite(gaps).all(axis=1)
    seeds = gaps.shape[1]
    columns = sum(factor.contrasts.shape[1] for factor in factors)
    if not factors or seeds < 2 or whole.sum() < 2 * columns + 2:
        return 0.0, spread.error
    deviation = gaps[whole] - gaps[whole].mean(axis=1, keepdims=True)
    deviation = deviation - deviation.mean(axis=0)
    design = np.hstack([factor.levels[whole] @ factor.contrasts for factor in factors])
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
    in_levels = sum(1 - 1 / len(factor.contrasts) for factor in factors)
    share = min(excess / (excess + own), 0.9)
    return math.sqrt(excess / in_levels / seeds), spread.error * math.sqrt(1 - share)
