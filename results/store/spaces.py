"""The spaces that were swept into a store, with question and axes: spaces.json beside the rows.

    {"mine": {"asks": "Does rounding pay?", "axes": {"*.g.rounding": ["nearest", "stochastic"]},
              "levels": {"6a1f0c…": [0], "93b2e1…": [1]}}}

The space that was swept last stands last. Rows do not say it: a row that two spaces ask for is trained once. `levels`
has for each config_id the place of its value on each axis, so that what was varied goes by the space's own words.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse import StoreError
from fp4dse.results.stats.factors import AXIS
from fp4dse.results.stats.paired import SETTING, numbered
from fp4dse.results.store.atomic import read_json, write_atomic

if TYPE_CHECKING:
    from fp4dse.dse import Space
    from fp4dse.results.store.store import Store

FILE = "spaces.json"
MOST_COMBINATIONS = 4096
"""Of a space whose axes are noted; each takes a millisecond or two."""

SweptSpaces = Mapping[str, Any]
"""Name of a space -> what FILE has of it; of stores made until 2026 only what it asks."""


def record_space(store: Store, space: Space) -> None:
    """Record that a space is swept into the store."""
    facts = _facts(space)
    with store.lock():
        known = read_spaces(store)
        now = {**{name: what for name, what in known.items() if name != space.name}, space.name: facts}
        if list(now.items()) != list(known.items()):
            _write(store, now)


def merge_spaces(store: Store, other: Store) -> None:
    """Take over what was swept into another store; what was swept into this one last stays last."""
    ours = read_spaces(store)
    new = {name: what for name, what in read_spaces(other).items() if name not in ours}
    if new:
        _write(store, new | ours)


def _write(store: Store, spaces: SweptSpaces) -> None:
    write_atomic(store.path / FILE, f"{json.dumps(spaces, ensure_ascii=False)}\n".encode())


def _facts(space: Space) -> dict[str, Any]:
    facts: dict[str, Any] = {"asks": space.summary}
    if space.join or not space.axes or space.size > MOST_COMBINATIONS:
        return facts
    levels: dict[str, list[int]] = {}
    for indices in itertools.product(*(range(len(axis.values)) for axis in space.axes.values())):
        levels.setdefault(space.build(indices).config_id, list(indices))
    return facts | {"axes": {text: list(axis.texts) for text, axis in space.axes.items()}, "levels": levels}


class _SpaceRecord(msgspec.Struct, frozen=True):
    """One space in FILE."""

    asks: str = ""
    axes: dict[str, list[str]] = {}
    levels: dict[str, list[int]] = {}

    @property
    def is_whole(self) -> bool:
        """True if every recipe has a value on every axis."""
        sizes = [len(texts) for texts in self.axes.values()]
        return all(
            len(indices) == len(sizes) and all(0 <= index < size for index, size in zip(indices, sizes, strict=True))
            for indices in self.levels.values()
        )


def read_spaces(store: Store) -> dict[str, Any]:
    """The content of FILE; StoreError if it is unreadable or something else."""
    path = store.path / FILE
    found = read_json(path) if path.exists() else {}
    for name, what in found.items():
        try:
            note = msgspec.convert(what, str | _SpaceRecord)
            wrong = "" if isinstance(note, str) or note.is_whole else "`levels` has places that `axes` lacks"
        except msgspec.ValidationError as error:
            wrong = str(error)
        if wrong:
            fix = "mend it, or delete the file: the next sweep notes its space again"
            raise StoreError(f"{path}: {name}: {wrong}; {fix}")
    return found


def spaces(store: Store) -> dict[str, str]:
    """Name -> question (may be empty) of the spaces that were swept into the store, the latest last; StoreError if
    unreadable."""
    found = read_spaces(store).items()
    return {str(name): str(what.get("asks", "") if isinstance(what, dict) else what) for name, what in found}


def with_axes(runs: pd.DataFrame, known: SweptSpaces) -> pd.DataFrame:
    """The runs with a column of values for each axis of the latest space that has all recipes of a setting that
    quantize, if there is one; factors.py reads them. Rows of other settings have none. runs: config_id, points and
    more; without columns of SETTING they count as one setting."""
    whole = [what for what in reversed([*known.values()]) if isinstance(what, dict) and what.get("levels")]
    if not whole:
        return runs
    setting = numbered(runs, [name for name in SETTING if name in runs], sort=False, dropna=False).to_numpy()
    quantizes = runs["points"].gt(0).to_numpy(bool, na_value=False)
    found: dict[str, NDArray[np.intp]] = {}
    texts: dict[str, dict[str, int]] = {}
    for number in np.unique(setting[quantizes]):
        rows = np.flatnonzero(setting == number)
        recipe, ids = pd.factorize(runs["config_id"].iloc[rows].astype(object))
        needed = set(ids[np.unique(recipe[quantizes[rows]])])
        what = next((what for what in whole if needed <= what["levels"].keys()), None)
        if what is None:
            continue
        places = np.array([what["levels"].get(config_id, [-1] * len(what["axes"])) for config_id in ids])
        for i, (axis, values) in enumerate(what["axes"].items()):
            names = texts.setdefault(axis, {})
            codes = [names.setdefault(text, len(names)) for text in _distinct(values)]
            column = found.setdefault(f"{AXIS}{axis}", np.full(len(runs), -1))
            column[rows] = np.append(codes, -1)[places[recipe, i]]  # the last is of -1
    columns = {
        name: pd.Series(pd.Categorical.from_codes(codes, [*texts[name.removeprefix(AXIS)]]), runs.index)
        for name, codes in found.items()
    }
    return runs.assign(**columns)


def _distinct(texts: list[str]) -> list[str]:
    return [text if texts.count(text) == 1 else f"{text} ({i + 1})" for i, text in enumerate(texts)]


def store_name(store: Store) -> str:
    """The name of a store: `zoo` for runs/zoo/store, else that of its folder."""
    path = store.path.resolve() if isinstance(store.path, Path) else store.path
    return path.parent.name if path.name == "store" else path.name
