"""Series that a training recorded, name -> values, each with its own steps, and lanes that recorded at other steps.

The steps of a series NAME stand under `step/NAME`, or, where there is no such entry, under `step`, as all of them do in
rows of older versions. Lanes are compared at the steps that all have: a series that is longer loses what is between,
and a shorter one gets nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

STEP = "step"
T = TypeVar("T")
Series = Mapping[str, NDArray[np.float64]]


def is_series(name: str) -> bool:
    """True if a name is of values, False if of the steps of some."""
    return name != STEP and not name.startswith(f"{STEP}/")


def steps_of(of: Mapping[str, T], name: str) -> T:
    """The steps of a series."""
    own = f"{STEP}/{name}"
    return of[own] if own in of else of[STEP]


def at_common_steps(
    lanes: Sequence[Series], are_whole: Iterable[bool], wanted: Callable[[str], bool] = is_series
) -> list[dict[str, NDArray[np.float64]]]:
    """The wanted series of lanes, each with its steps under `step/NAME`, at the steps of all lanes that have it and are
    whole: neither diverged nor pruned, which ended early. What no whole lane has stays as it is."""
    axes: dict[str, dict[bytes, NDArray[np.float64]]] = {}
    for of, is_whole in zip(lanes, are_whole, strict=True):
        for name in filter(wanted, of if is_whole else ()):
            steps = steps_of(of, name)
            axes.setdefault(name, {})[steps.tobytes()] = steps
    common = {name: reduce(np.intersect1d, found.values()) for name, found in axes.items()}
    out: list[dict[str, NDArray[np.float64]]] = []
    for of in lanes:
        cut: dict[str, NDArray[np.float64]] = {}
        for name in filter(wanted, of):
            steps = steps_of(of, name)
            there = np.isin(steps, common.get(name, steps))
            cut |= {name: of[name][there], f"{STEP}/{name}": steps[there]}
        out.append(cut)
    return out
