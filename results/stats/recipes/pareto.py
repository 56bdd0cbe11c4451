"""The Pareto front, the points that no other beats in both coordinates, and the area that it dominates.

BF16 is the point (cost of BF16, 0). It is on no front, but beats what costs as much and is no better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEAST_SAVING = 0.01
"""Of BF16's step time: what costs more than the rest saves no time."""
ULPS = 8
"""Last places by which two sums of the same costs may differ."""


def front(x: ArrayLike, y: ArrayLike, bf16: float | None = None) -> NDArray[np.bool_]:
    """True for points that no other dominates, where both coordinates are to be small. x, y: [n]; returns bool [n].

    A point is dominated if another is no worse in both and better in one. Equal points stay together, and so do those
    whose x differs in its last digits alone; a point with NaN or inf is never on the front and dominates nobody. bf16:
    the cost of BF16; None if x is no cost that BF16 has, too.
    """
    [mask] = fronts(equal_costs(x), np.asarray(y, float)[None], bf16)
    return np.asarray(mask)


def front_of_any(xs: Sequence[ArrayLike], y: ArrayLike, bf16: float | None = None) -> NDArray[np.bool_]:
    """True for points that are on the front for one of several costs at least. xs: [n] each; y: [n]; returns bool [n].

    A recipe whose cost depends on what is assumed is dominated only if it is dominated under every assumption.
    """
    [mask] = fronts_of_any([equal_costs(x) for x in xs], np.asarray(y, float)[None], bf16)
    return np.asarray(mask)


def fronts_of_any(xs: Sequence[ArrayLike], ys: ArrayLike, bf16: float | None = None) -> NDArray[np.bool_]:
    """`front_of_any` of many draws of y at once, whose costs are made equal already. ys: [draws, n]; returns bool
    [draws, n]."""
    return np.asarray(np.any([fronts(x, ys, bf16) for x in xs], axis=0))


class Rivals(NamedTuple):
    """Points that may tie for one place on a front: those of equal costs."""

    cost: NDArray[np.intp]
    """[n]: which costs each has."""
    first: NDArray[np.intp]
    """One of each group of copies of equal costs, in the order of `cost`."""
    start: NDArray[np.intp]
    """Where each `cost` begins in `first`."""


def rivals(xs: ArrayLike, same: NDArray[np.intp]) -> Rivals:
    """xs: costs [m, n]; same: [n], equal for points that are copies of one another, which are never lower or higher."""
    _, cost = np.unique(np.nan_to_num(np.asarray(xs, float), nan=-np.inf), axis=1, return_inverse=True)
    cost = cost.ravel()
    pairs, first = np.unique(np.stack([cost, same]), axis=1, return_index=True)
    return Rivals(cost, first, np.unique(pairs[0], return_index=True)[1])


def places(on_front: NDArray[np.bool_], among: Rivals) -> NDArray[np.float64]:
    """The part [draws, n] that each point has of a place on its front: 1/k for each of k that tie and are no copies.

    Points of equal costs are on a front together only if they are equal. Recipes that train to bits of their own are
    equal in the model alone, and which of them is the lowest no number of seeds tells. on_front: of `fronts_of_any`.
    """
    count = np.add.reduceat(on_front[:, among.first], among.start, axis=1, dtype=float)
    return np.asarray(on_front / np.maximum(count, 1)[:, among.cost])


def worth_naming(overhead: ArrayLike, seeds: ArrayLike, bf16: float | None = 1.0) -> NDArray[np.bool_]:
    """True for recipes that may be recommended. overhead: [n]; seeds: [n], finished; bf16: overhead of BF16, None where
    recipes are not held against it; returns bool [n].

    They have two seeds, where any has, or the luckiest single lane of an unfinished sweep would be the answer. And they
    save time against BF16, or their overhead is not known; where none saves any, all may be.
    """
    seeds = np.asarray(seeds)
    often = seeds >= min(2, np.max(seeds, initial=0))
    saves = often & ~(np.asarray(overhead, float) > (np.inf if bf16 is None else bf16 - LEAST_SAVING))
    return np.asarray(saves if saves.any() else often)


def equal_costs(x: ArrayLike) -> NDArray[np.float64]:
    """Costs [n], those that differ by sums taken in another order (ULPS) made equal to the lowest of them."""
    x = np.asarray(x, float)
    out, known = x.copy(), np.flatnonzero(np.isfinite(x))
    order = known[np.argsort(x[known], kind="stable")]
    with np.errstate(over="ignore"):
        last = np.nan_to_num(np.spacing(np.abs(x[order])), posinf=2.0**971)  # of the largest number it is infinite
        apart = np.diff(x[order], prepend=-np.inf) > ULPS * last
    out[order] = x[order][np.maximum.accumulate(np.where(apart, np.arange(len(order)), 0))]
    return out


def fronts(x: ArrayLike, ys: ArrayLike, bf16: float | None = None) -> NDArray[np.bool_]:
    """`front` of many draws of y at once. x: [n]; ys: [draws, n]; returns bool [draws, n].

    After sorting by x once, a point survives iff it has the lowest y of its own x and that is below everything at a
    smaller x.
    """
    ys = np.asarray(ys, float)
    order, start, column, _ = _columns(x)
    mask = np.zeros(ys.shape, bool)
    if not len(order):
        return mask
    sorted_ys = ys[:, order]
    lowest = _lowest(sorted_ys, start)  # [draws, distinct x]
    before = np.minimum.accumulate(lowest, axis=1)
    alive = np.isfinite(lowest)
    alive[:, 1:] &= lowest[:, 1:] < before[:, :-1]
    mask[:, order] = (sorted_ys == lowest[:, column]) & alive[:, column]
    return mask if bf16 is None else mask & ((np.asarray(x, float) < bf16) | (ys < 0))


def hypervolumes(x: ArrayLike, ys: ArrayLike, reference: tuple[float, float]) -> NDArray[np.float64]:
    """The area between each draw's front and the reference point (x, y). x: [n]; ys: [draws, n]; returns [draws].

    Points beyond the reference add nothing.
    """
    ys = np.asarray(ys, float)
    order, start, _, distinct = _columns(x)
    if not len(order):
        return np.zeros(len(ys))
    best = np.minimum.accumulate(_lowest(ys[:, order], start), axis=1)
    width = np.diff(np.minimum(np.append(distinct, reference[0]), reference[0]))
    return np.asarray(np.clip(reference[1] - best, 0, None) @ width)


def _columns(x: ArrayLike) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
    """The order of the finite x, where each distinct x starts in it, which one each belongs to, and the distinct x."""
    xs = np.asarray(x, float)
    usable = np.flatnonzero(np.isfinite(xs))
    order = usable[np.argsort(xs[usable], kind="stable")]
    distinct, start, column = np.unique(xs[order], return_index=True, return_inverse=True)
    return order, start, column, distinct


def _lowest(ys: NDArray[np.float64], start: NDArray[np.intp]) -> NDArray[np.float64]:
    return np.minimum.reduceat(np.where(np.isfinite(ys), ys, np.inf), start, axis=1)
