"""The Pareto front: what nothing else beats on both counts at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def front(x: ArrayLike, y: ArrayLike) -> NDArray[np.bool_]:
    """Which points are non-dominated when both coordinates are to be small. x, y: [n]; returns bool [n].

    A point is dominated if another is no worse in both and better in one. Equal points stay together; a point with
    NaN or inf is never on the front and dominates nobody. O(n log n): after sorting by x, a point survives iff it
    has the lowest y of its own x and that is below everything at a smaller x.
    """
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    mask = np.zeros(len(xs), bool)
    usable = np.flatnonzero(np.isfinite(xs) & np.isfinite(ys))
    if not len(usable):
        return mask
    order = usable[np.lexsort((ys[usable], xs[usable]))]
    columns, start = np.unique(xs[order], return_index=True)
    lowest = ys[order][start]  # per distinct x
    before = np.minimum.accumulate(np.concatenate([[np.inf], lowest[:-1]]))
    column = np.searchsorted(columns, xs[order])
    mask[order] = (ys[order] == lowest[column]) & (lowest[column] < before[column])
    return mask
