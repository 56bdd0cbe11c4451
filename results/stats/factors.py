"""The factors that a set of recipes varies. A row has a column for each axis of its recipe; a sweep varies few of them,
often several together.

No model can separate columns that divide the recipes in the same way: they are one factor, named as an axis of a space
is (`*.g.rounding`, `wgrad.rotation`). A column that follows from another one alone (the block size from the scale
format, say), or from two with which it was never fully crossed, belongs to one of them. What is left are factors that
were varied on their own. Where an axis of the space that was swept divides the recipes as a factor does, the factor has
the axis's name and values (`*`: mxfp4, nvfp4, and not `*.scale`: e8m0, e4m3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse import Recipe
from fp4dse.results.stats.paired import SETTING

AXES = tuple(Recipe.named("nvfp4").columns())
"""The columns of a row that say how its recipe is built."""

OFF = {name: value for name, value in Recipe.named("bf16").columns().items() if value is not None}
"""The columns that every row has had since there are such, and their values where the technique is off: what a row that
is older than the column was trained with."""

AXIS = "axis:"
"""Before the name of an axis, of a column with the values that recipes have on it (see spaces.with_axes)."""

PLAIN = ("none", "nearest", "ste", "full", "amax", "master", "fp32", "bf16", "exact", "task")
"""Values that stand for a technique being off; a factor that has one of them is measured from there."""

FEW = 64
"""Recipes that are looked at first, where all have to agree."""

CACHED = 64
"""Sets of recipes whose factors are kept: `varied_by` asks for one setting after another, and each statistic of a store
asks for all of them again."""

_SLOTS = {
    "*": "fprop_x fprop_w dgrad_g dgrad_w wgrad_g wgrad_x",
    "backward": "dgrad_g dgrad_w wgrad_g wgrad_x",
    "forward": "fprop_x fprop_w",
    "dgrad": "dgrad_g dgrad_w",
    "wgrad": "wgrad_g wgrad_x",
    "*.g": "dgrad_g wgrad_g",
    "*.w": "fprop_w dgrad_w",
    "*.x": "fprop_x wgrad_x",
}
_STAGE_SETS = {
    frozenset(("fprop", "dgrad", "wgrad")): "*",
    frozenset(("dgrad", "wgrad")): "backward",
    frozenset(("fprop",)): "fprop",
}
_TELLING = "rotation rounding element scale tensor_scale adapt scaling outliers channels source block arithmetic range"
_RANK = {field: i for i, field in enumerate([*_TELLING.split(), "tensor_amax"])}


class Factor(NamedTuple):
    """One factor. codes: [recipes], the index of each recipe's level in `levels`."""

    name: str
    columns: tuple[str, ...]
    """The columns that divide the recipes alike; the factor is named after the most important one."""
    carries: tuple[str, ...]
    """Columns that follow from this factor, alone or with another, and cannot be separated from it."""
    levels: tuple[str, ...]
    reference: int
    """Index of the level that differences are measured from."""
    codes: NDArray[np.intp]


class Varied(NamedTuple):
    """The factors of the recipes of a setting that quantize."""

    recipes: pd.Index
    """config_ids, rising; the codes of factors are in their order."""
    factors: list[Factor]


VariedBySetting = Mapping[tuple[Any, ...], Varied]
"""By values of SETTING. Settings without a recipe that quantizes have none."""


def varied_by(rows: pd.DataFrame) -> VariedBySetting:
    """The factors of the recipes that quantize, of each setting alone: what is said of one does not depend on which
    others stand in the frame; none where rows lack columns that say how a recipe is built. rows: SETTING, config_id,
    points, AXES and any of AXIS."""
    if not set(AXES) <= set(rows):
        return {}
    quantize = np.flatnonzero(rows["points"].gt(0))
    read = ["points", *AXES, *(name for name in rows if name.startswith(AXIS))]  # not all that a row has: half as long
    settings = rows[list(SETTING)].iloc[quantize].groupby(list(SETTING), sort=False, observed=True)
    all_ids, told = rows["config_id"].to_numpy(str), rows[read].notna().sum(axis=1).to_numpy()
    found = {}
    for setting, places in settings.indices.items():
        here = quantize[places]
        here = here[np.lexsort((-told[here], all_ids[here]))]  # rows that are older than a column know less of a recipe
        ids, first = np.unique(all_ids[here], return_index=True)
        found[setting] = Varied(pd.Index(ids.astype(object)), factors(rows[read].iloc[here[first]].pipe(_completed)))
    return found


def _completed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with what those that are older than a column were trained with, so that no factor tells a row's age."""
    lacking = rows[[*OFF]].isna().any()
    filled = {name: rows[name].astype(object).fillna(OFF[name]) for name in lacking.index[lacking]}
    return rows.assign(**filled)


def factors(recipes: pd.DataFrame) -> list[Factor]:
    """The factors that differ among recipes. recipes: one row each, with the columns AXES, and any of AXIS."""
    parts: dict[bytes, list[str]] = {}
    codes: dict[bytes, NDArray[np.intp]] = {}
    for column in AXES:
        code = pd.factorize(recipes[column].array, use_na_sentinel=False)[0]
        if code.size and code.max() > 0:
            parts.setdefault(code.tobytes(), []).append(column)
            codes[code.tobytes()] = code
    keys = sorted(parts, key=lambda key: -codes[key].max())  # the finest first: it carries the coarser ones
    kept: list[bytes] = []
    carried: dict[bytes, list[str]] = {}
    for key, finer in _carriers(tuple(keys)).items():
        if finer:
            carried[finer].extend(parts[key])
        else:
            kept.append(key)
            carried[key] = []
    least_telling = sorted(kept, key=lambda key: -min(_RANK.get(_field(column), 99) for column in parts[key]))
    by_pairs = _determined(tuple(kept)) if kept else {}
    for key in least_telling:
        carriers = (one for pair, one in by_pairs[key].items() if set(pair) <= set(kept))
        if carrier := next(carriers, None):
            kept.remove(key)
            carried[carrier].extend([*parts[key], *carried[key]])
    found = [_named_by_axis(_factor(recipes, parts[key], carried[key]), recipes) for key in kept]
    return sorted(found, key=lambda factor: AXES.index(factor.columns[0]))


def combined(codes: Sequence[NDArray[np.intp]], recipes: int) -> NDArray[np.int64]:
    """[recipes]: a number for each combination of the codes [recipes] of some factors, in their order."""
    number, most = np.zeros(recipes, np.int64), 1
    for of in codes:
        levels = int(of.max(initial=0)) + 1
        if most * levels >= 1 << 62:
            found, number = np.unique(number, return_inverse=True)
            most = len(found)
        number, most = number * levels + of, most * levels
    return number


def _follows(a: NDArray[np.intp], b: NDArray[np.intp]) -> bool:
    """True if the level of b determines that of a."""
    of_level = np.empty(int(b.max()) + 1, np.intp)
    of_level[b] = a
    return bool((of_level[b] == a).all())


@lru_cache(maxsize=CACHED)
def _carriers(keys: tuple[bytes, ...]) -> dict[bytes, bytes | None]:
    """For each factor, in their order, the first one before it that determines its level and follows from none itself;
    None where there is none. Factors are the bytes of their codes."""
    out: dict[bytes, bytes | None] = {}
    kept: dict[bytes, NDArray[np.intp]] = {}
    for key in keys:
        codes = np.frombuffer(key, np.intp)
        out[key] = next((finer for finer, of in kept.items() if _follows(codes, of)), None)
        if out[key] is None:
            kept[key] = codes
    return out


@lru_cache(maxsize=CACHED)
def _determined(kept: tuple[bytes, ...]) -> dict[bytes, dict[tuple[bytes, bytes], bytes]]:
    """For each factor the pairs of two others, in the order of `kept`, whose levels together determine its, if it was
    not fully crossed with one of them; and which one that is. Factors are the bytes of their codes.

    So the range of stochastic rounding, which formats without a tensor scale lack, follows from rounding and tensor
    scale. A third factor of a fractional design follows from two others as well, but is crossed with each.
    """
    codes = {key: np.frombuffer(key, np.intp) for key in kept}
    levels = [int(codes[key].max()) + 1 for key in kept]
    table = np.stack([codes[key] for key in kept], axis=1).astype(np.min_scalar_type(max(levels)))  # [recipes, factors]
    out: dict[bytes, dict[tuple[bytes, bytes], bytes]] = {key: {} for key in kept}
    for i, j in combinations(range(len(kept)), 2):
        cell, cells = pd.factorize(codes[kept[i]] * levels[j] + codes[kept[j]])
        sample = np.empty(len(cells), np.intp)
        sample[cell] = np.arange(len(cell))  # a recipe of each cell
        some = (table[sample[cell[:FEW]]] == table[:FEW]).all(axis=0)
        some[[i, j]] = False
        for k in np.flatnonzero(some):
            if not (table[sample[cell], k] == table[:, k]).all():
                continue
            loose = [one for one in (i, j) if not _crossed(codes[kept[k]], codes[kept[one]])]
            if loose:
                out[kept[k]][kept[i], kept[j]] = kept[loose[0]]
    return out


def _crossed(a: NDArray[np.intp], b: NDArray[np.intp]) -> bool:
    """True if all levels of a were tried with all of b."""
    n, m = int(a.max()) + 1, int(b.max()) + 1
    return n * m <= len(a) and bool(np.bincount(a * m + b, minlength=n * m).all())


def _factor(recipes: pd.DataFrame, columns: list[str], carries: list[str]) -> Factor:
    fields = sorted({_field(column) for column in columns}, key=lambda field: (_RANK.get(field, 99), field))
    main = [column for column in columns if _field(column) == fields[0]]
    texts = [_texts(recipes[column]) for column in main]
    codes, first = _by_level(*texts[0])
    values = [[names[which[row]] for which, names in texts] for row in first]
    levels = ["/".join(dict.fromkeys(value)) if len(set(value)) == 1 else "/".join(value) for value in values]
    plain = [i for i, level in enumerate(levels) if level in PLAIN]
    reference = plain[0] if plain else 0
    if not plain and "points" in recipes:
        reference = int(recipes["points"].groupby(codes).mean().argmin())
    prefix = "+".join(dict.fromkeys(_prefixes(main)))
    name = f"{prefix}.{fields[0]}" if prefix else fields[0]
    return Factor(name, tuple(columns), tuple(carries), tuple(levels), reference, codes)


def _named_by_axis(factor: Factor, recipes: pd.DataFrame) -> Factor:
    """The factor with the name and values of the first axis that divides the recipes alike, if one does."""
    for column in filter(lambda name: name.startswith(AXIS), recipes):
        codes, values = pd.factorize(recipes[column])
        pairs = np.unique(np.stack([factor.codes, codes]), axis=1)
        if len(values) == len(factor.levels) == pairs.shape[1] and codes.min() == 0:
            levels = tuple(str(values[code]) for code in pairs[1])
            return factor._replace(name=column.removeprefix(AXIS), levels=levels)
    return factor


def _by_level(which: NDArray[np.intp], names: list[str]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Codes in the order of the names that there are, and a row of each. which, names: of `_texts`."""
    order = np.unique(names, return_inverse=True)[1]
    _, first, codes = np.unique(order[which], return_index=True, return_inverse=True)
    return codes, first


def _field(column: str) -> str:
    """`dgrad_g_rounding` → `rounding`; `estimator_w` stays."""
    stage, _, rest = column.partition("_")
    if stage not in ("fprop", "dgrad", "wgrad"):
        return column
    return rest.partition("_")[2] if rest[:2] in ("x_", "w_", "g_") else rest


def _prefixes(columns: list[str]) -> list[str]:
    """The parts of a recipe that the columns of one field belong to, as an axis names them: `*`, `*.g`, `fprop.x` …"""
    prefixes = [column.removesuffix(_field(column)).rstrip("_") for column in columns]
    if "" in prefixes:
        return []
    if named := _STAGE_SETS.get(frozenset(prefixes)):
        return [named]
    left, words = set(prefixes), []
    for word, slots in _SLOTS.items():  # the largest sets first
        if set(slots.split()) <= left:
            words.append(word)
            left -= set(slots.split())
    return [*words, *(prefix.replace("_", ".") for prefix in prefixes if prefix in left)]


def _texts(values: pd.Series) -> tuple[NDArray[np.intp], list[str]]:
    """Levels as text: the place of each row's in a list of names, of which rows may lack the last. Null is `none`, or
    `absent` beside another `none`: a plain operand has no such level."""
    codes, uniques = pd.factorize(values)
    names = [f"{value:g}" if isinstance(value, float) else str(value) for value in uniques]
    return np.where(codes < 0, len(names), codes), [*names, "absent" if "none" in names else "none"]
