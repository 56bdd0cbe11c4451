"""The Pareto front, the points that no other beats in both coordinates, and the area that it dominates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEAST_SAVING = 0.01
"""Of BF16's step time: what costs more than the rest saves no time."""
ULPS = 8
"""Last places by which two sums of the same costs may differ."""


def front(x: ArrayLike, y: ArrayLike) -> NDArray[np.bool_]:
    """True for points that no other dominates, where both coordinates are to be small. x, y: [n]; returns bool [n].

    A point is dominated if another is no worse in both and better in one. Equal points stay together, and so do those
    whose x differs in its last digits alone; a point with NaN or inf is never on the front and dominates nobody.
    """
    [mask] = fronts(equal_costs(x), np.asarray(y, float)[None])
    return np.asarray(mask)


def front_of_any(xs: Sequence[ArrayLike], y: ArrayLike) -> NDArray[np.bool_]:
    """True for points that are on the front for one of several costs at least. xs: [n] each; y: [n]; returns bool [n].

    A recipe whose cost depends on what is assumed is dominated only if it is dominated under every assumption.
    """
    [mask] = fronts_of_any([equal_costs(x) for x in xs], np.asarray(y, float)[None])
    return np.asarray(mask)


def fronts_of_any(xs: Sequence[ArrayLike], ys: ArrayLike) -> NDArray[np.bool_]:
    """`front_of_any` of many draws of y at once, whose costs are made equal already. ys: [draws, n]; returns bool
    [draws, n]."""
    return np.asarray(np.any([fronts(x, ys) for x in xs], axis=0))


def saving(overhead: ArrayLike, rolls_out: bool = False) -> NDArray[np.bool_]:
    """True for recipes that may be recommended: those that save time against BF16, or whose overhead is not known; all
    where none saves any, or where lanes roll out, whose time the overhead does not have. overhead: [n], BF16 = 1;
    returns bool [n]."""
    saves = ~(np.asarray(overhead, float) > 1 - LEAST_SAVING) | rolls_out
    return saves if saves.any() else np.ones_like(saves)


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


def fronts(x: ArrayLike, ys: ArrayLike) -> NDArray[np.bool_]:
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
    return mask


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
