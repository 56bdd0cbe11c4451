"""Studies of known truth, drawn from worlds that are not the model which the statistics fit.

    log loss[recipe, seed] = log 0.5 + gap[recipe] + seed + noise[recipe, seed]

A world says where gaps and noise are from: main effects of half the factors, and beside them sparse interactions of two
and three, residuals with heavy tails, recipes whose noise differs, noise that all recipes with a technique share in a
seed, techniques that change nothing to the bit, recipes that diverge, combinations that cannot be built, costs that are
tied to factors and equal up to the last bit. In the weak world every factor has an effect, most of them below the noise
of a lane. In the null world all recipes are equally good. A design holds all combinations, or a part of them; the truth
of an effect is over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.bench.generated import KNOBS, as_runs, crossing
from fp4dse.results.stats.estimates.spread import spread_over_seeds
from fp4dse.results.stats.levels import log_or_nan
from fp4dse.results.stats.paired import by_seed, rows_at_best_lr
from fp4dse.results.stats.recipes.equal_time import credit, slope_of
from fp4dse.results.stats.recipes.margins import BY_LAW, MARGIN, Margin
from fp4dse.results.stats.recipes.pareto import worth_naming

Array = NDArray[np.float64]

NOISE = 0.01
"""Standard deviation of a lane, where the worlds agree."""


@dataclass(frozen=True)
class Size:
    """recipes of a crossing and seeds each; where the crossing has no more, the design is complete."""

    recipes: int
    seeds: int
    knobs: tuple[str, ...]
    larger: tuple[str, ...]
    """The crossing of designs that are a part of theirs."""

    def __str__(self) -> str:
        return f"{self.recipes:,} × {self.seeds}"


_NAMES = tuple(KNOBS)
_SMALL = ("*.scale", "*.g.rounding", "forward.rounding", "dgrad.rotation", "fprop.w.adapt")
SIZES = {
    "48": Size(48, 3, _SMALL, (*_SMALL, "wgrad.rotation")),
    "160": Size(160, 5, _SMALL, (*_SMALL, "wgrad.rotation", "backward.source", "fprop.x.outliers")),
    "17664": Size(17_664, 3, _NAMES, _NAMES),
}
WORLDS = ("additive", "rough", "tied", "holes", "shared", "weak", "null")


@dataclass
class Study:
    """A study: its runs, and what is true of them."""

    world: str
    size: Size
    knobs: tuple[str, ...]
    codes: NDArray[np.intp]
    """[recipes, knobs]"""
    ids: NDArray[np.intp]
    """[recipes], rising: what config_ids are made from, the same for the same levels in all studies of a size."""
    gap: Array
    """[recipes]: what each gap is over all seeds."""
    cost: Array
    """[recipes]: the rows have these up to the last bit."""
    everything: Array
    """The gaps of all combinations, an axis a knob; NaN where one cannot be built."""
    lanes: Lanes

    def runs(self, task: str, more: int = 0) -> pd.DataFrame:
        """Rows as a store has them, with so many seeds more than the size says; the first stay as they are."""
        columns = [self.lanes.column(s) for s in range(self.size.seeds + more)]
        losses = 0.5 * np.exp(np.append(self.gap, 0.0)[:, None] + np.stack(columns, axis=1))
        last_bit = np.random.default_rng(len(self.cost)).integers(0, 2, len(self.cost)).astype(bool)
        cost = np.where(last_bit, np.nextafter(self.cost, 1.0), self.cost)
        runs = as_runs(self.knobs, self.codes, losses, np.append(cost, 1.0), task, np.append(self.ids, 10**9))
        return runs.assign(margin=MARGIN, margin_of=BY_LAW)

    def rows(self, config_ids: pd.Series) -> NDArray[np.intp]:
        """Where recipes stand in `codes`, `gap` and `cost`."""
        return np.searchsorted(self.ids, [int(text, 16) for text in config_ids])

    @property
    def may_be_named(self) -> NDArray[np.bool_]:
        """[recipes]: those that may be recommended, as they save time."""
        return worth_naming(self.cost, np.full(len(self.cost), self.size.seeds))

    @property
    def at_time(self) -> Array:
        """[recipes]: what each gap is at equal time."""
        return np.asarray(self.gap + credit(pd.Series(self.cost), slope_of(Margin(MARGIN, BY_LAW))))

    def places(self, rows: NDArray[np.intp], on_front: NDArray[np.bool_]) -> Array:
        """[recipes asked for]: the truth that a chance of the front is held against: 1 on it, 0 off it, and 1/k for one
        of k that cost the same, are equally good and train to bits of their own. No number of seeds tells which of
        them is the lowest, and their chances add up to one place."""
        same = self.lanes.same[rows]
        facts = np.stack([self.cost[rows], self.gap[rows]], axis=1).round(9)
        _, tie = np.unique(facts, axis=0, return_inverse=True)
        _, first = np.unique(np.stack([tie, same], axis=1), axis=0, return_index=True)
        return on_front / np.bincount(tie[first])[tie]


@dataclass
class Lanes:
    """The part that chance adds to the log loss of each recipe, BF16 the last, seed by seed."""

    rng: np.random.Generator
    spread: Array
    """[classes + 1]: standard deviation of each that trains to bits of its own."""
    same: NDArray[np.intp]
    """[recipes]: recipes of one class train to the same bits."""
    techniques: NDArray[np.intp]
    """[recipes, any]: codes whose levels share noise within a seed."""
    shared: float
    diverges: Array
    """[classes]: chance that a seed diverges."""
    known: list[Array] = field(default_factory=list)

    def column(self, seed: int) -> Array:
        """[recipes + 1]; the same whenever it is asked for."""
        while len(self.known) <= seed:
            self.known.append(self._next())
        return self.known[seed]

    def _next(self) -> Array:
        own = self.rng.normal(0, self.spread)
        blown = self.rng.random(len(self.diverges)) < self.diverges
        lane = np.append(np.where(blown, np.nan, own[:-1])[self.same], own[-1])
        for codes in self.techniques.T:
            lane[:-1] += self.rng.normal(0, self.shared, codes.max() + 1)[codes]
        return lane + self.rng.normal(0, 2 * NOISE)


def drawn(size: Size, world: str, rng: np.random.Generator) -> Study:
    """A study of one world. Every second one has a complete design, where the size allows it."""
    complete = world == "additive" or bool(rng.random() < 0.5)
    codes = crossing(size.larger)
    if complete:
        codes = codes[(codes[:, len(size.knobs) :] == 0).all(axis=1)]
    sizes = tuple(len(KNOBS[name][1]) for name in size.larger)
    ids = np.ravel_multi_index(tuple(codes.T), sizes)
    truth = np.full(len(codes), 0.15)
    same = np.arange(len(codes))
    if world == "weak":
        truth += sum(NOISE / 2 * rng.normal(size=n)[c] for n, c in zip(sizes, codes.T, strict=True))
    elif world != "null":
        truth += _mains(codes, sizes, rng)
    if world in ("rough", "tied", "holes", "shared"):
        truth += _interactions(codes, sizes, rng) + NOISE * rng.standard_t(3, len(codes))
    if world == "tied":  # where the first knob is at its first level the third one changes no bit
        off = codes.copy()
        off[codes[:, 0] == 0, 2] = 0
        same = np.searchsorted(ids, np.ravel_multi_index(tuple(off.T), sizes))
        truth = truth[same]
    buildable = ~((codes[:, 0] == 1) & (codes[:, 1] == 1)) if world == "holes" else np.ones(len(codes), bool)
    everything = np.full(int(np.prod(sizes)), np.nan)
    everything[ids[buildable]] = truth[buildable]
    tried = np.flatnonzero(buildable)
    if len(tried) > size.recipes:
        tried = np.sort(rng.choice(tried, size.recipes, replace=False))
    cost = 0.5 + 0.02 * sum(rng.integers(-2, 4, n)[c] for n, c in zip(sizes, codes.T, strict=True))
    spread = NOISE * np.exp(0.4 * rng.normal(size=len(codes) + 1) * (world in ("rough", "tied", "null")))
    diverges = np.where(rng.random(len(codes)) < 0.05 * (world in ("rough", "tied")), 0.3, 0.0)
    in_common = 2 * (world == "shared" or (world == "null" and rng.random() < 0.5))
    lanes = Lanes(rng, spread, same[tried], codes[tried, :in_common], NOISE / 2, diverges)
    gaps = everything.reshape(sizes)
    return Study(world, size, size.larger, codes[tried], ids[tried], truth[tried], np.abs(cost)[tried], gaps, lanes)


def _mains(codes: NDArray[np.intp], sizes: tuple[int, ...], rng: np.random.Generator) -> Array:
    total = np.zeros(len(codes))
    for levels, column in zip(sizes, codes.T, strict=True):
        if rng.random() < 0.5:
            total += np.append(0.0, 3 * NOISE * rng.normal(size=levels - 1))[column]
    return total


def _interactions(codes: NDArray[np.intp], sizes: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Two of two factors and one of three, each of one combination of their levels."""
    total = np.zeros(len(codes))
    for order in (2, 2, 3):
        chosen = rng.choice(len(sizes), order, replace=False)
        levels = [rng.integers(sizes[i]) for i in chosen]
        total += 3 * NOISE * rng.normal() * (codes[:, chosen] == levels).all(axis=1)
    return total


@dataclass(frozen=True)
class Recorded:
    """A setting of a real store whose recipes and BF16 have two seeds or more: what is taken for the truth of studies
    that are drawn from it. Effects have no truth here."""

    gap: Array
    """[recipes]: the mean over seeds less BF16's."""
    cost: Array
    """[recipes]"""
    spread: Array
    """[recipes + 1], BF16 the last: standard deviation of a lane, shrunk towards that of the others (spread.py)."""

    def resampled(self, seeds: int, rng: np.random.Generator) -> Study:
        """A study of so many seeds, whose lanes are normal.

        The deviations that were recorded are no sample of lanes: the two or three of a recipe have sizes of their own,
        so that three lanes are often equal but for the sign, and over their own spread they follow an arcsine law. No
        interval covers .95 of such. So these studies have the spreads, costs and gaps of real recipes, and not the
        shape of their noise; and their spreads are nearer together than those of the seeds are.
        """
        count = len(self.gap)
        codes, ids = np.arange(count)[:, None] % 3, np.arange(count)
        size = Size(count, seeds, ("*.scale",), ())
        lanes = Lanes(rng, self.spread, ids, codes[:, :0], 0.0, np.zeros(count))
        return Study("real", size, size.knobs, codes, ids, self.gap, self.cost, np.full(3, np.nan), lanes)


def recorded(runs: pd.DataFrame) -> Iterator[Recorded]:
    """Each setting of real runs that has two seeds or more, which do not all tie. Recipes that diverged somewhere are
    left out."""
    rows = rows_at_best_lr(runs)
    for _, part in rows.groupby("setting", sort=False):
        recipes, log = by_seed(part, _logs(part))
        facts = part.groupby("config_id", sort=False)[["overhead", "is_baseline"]].first().reindex(recipes)
        base = facts["is_baseline"].to_numpy(bool)
        whole = np.isfinite(log).all(axis=1)
        usable = whole & ~base & facts["overhead"].notna().to_numpy()
        if log.shape[1] < 2 or usable.sum() < 2 or not (base & whole).any():
            continue
        order = np.append(np.flatnonzero(usable), np.flatnonzero(base & whole)[0])
        log = log[order] - log[order].mean(axis=0)
        mean = log.mean(axis=1)
        spread = spread_over_seeds(log).error * np.sqrt(log.shape[1])
        if not (spread > 0).all():
            continue
        yield Recorded(mean[:-1] - mean[-1], facts["overhead"].to_numpy(float)[order[:-1]], spread)


def _logs(rows: pd.DataFrame) -> pd.Series:
    return pd.Series(log_or_nan(rows["loss"]), rows.index)
