"""Mean effects of techniques and their interactions: a linear model of log loss over all recipes.

    log loss[recipe, seed] = mean + seed + Σ effect of each factor's level + Σ effect of each pair of levels

The log loss is that of `paired.COMPARED`: where a recipe changes the optimizer, the clip or the schedule, what this
does to BF16 is taken off. So the effect of such a factor is a difference of differences: what it does to FP4 beyond
BF16.

Balance. Every recipe weighs the same however many seeds it has, and recipes that share all factor levels share one
weight. Levels are coded to sum to zero, so a level's marginal mean is over the others' levels alike, tried often or
seldom: a sampler that favours good combinations biases nothing that the model can express. Where all combinations were
tried equally often this is the classical analysis of variance. A pair of levels that was never tried together has no
effect of its own, and the smallest one that agrees with the rest is assumed for it. Where so many lack that nothing is
left to tell an interaction by, as with one of 2 × 2, it has no effect at all, and its note says so.

Shares. A term's share is its Type III sum of squares over the total: by how much R² falls if the model does without it.
It is 0 … 1 in any design. Shares add up to R² in a balanced design, where they are the classical η²; in another one
what several terms explain alike is in nobody's share.

Intervals. Seeds are the replicates: each gives an estimate of every effect. Their variance, held against that of
independent lanes, is pooled over the effects as far as these are alike (spread.shrunken). Where a part of the
combinations was tried, what the model leaves unexplained between recipes is added for those that were not: other ones
might have said something else. With one seed the recipes are the replicates, and `basis` says so. q is p adjusted for
all lines of a setting (false discovery rate, Benjamini and Hochberg): of what has q below 0.05, one in twenty is
chance.

Nothing is said across combinations of levels that were never tried. An effect is over those levels of the other factors
that both of its levels were tried with, and `note` names them; without any there is none. A marginal mean needs all.

Diverged recipes have no log loss. They are left out, and the share that diverged stands beside each level; or effects
are taken on ranks within a seed, where diverged is last.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse import ConfigError
from fp4dse.results.stats.estimates.least_squares import Fit, fit, sum_to_zero, undetermined
from fp4dse.results.stats.estimates.row_space import RowSpace, row_space
from fp4dse.results.stats.factors import AXES, Factor, combined
from fp4dse.results.stats.paired import DERIVED, NEEDED, SETTING, stacked
from fp4dse.results.stats.techniques.contrasts import Lines, Term, Tried, as_frame, estimates, with_intervals
from fp4dse.results.stats.techniques.factor_tables import FactorTable, Response, Tables, factor_tables

EFFECTS_READ = list(dict.fromkeys([*NEEDED, *DERIVED, "recipe_label", "points", *AXES]))
"""The columns of runs that effects are computed from."""

RIDGE = 1e-8
"""Weight of `as small as possible` for interactions, and for main effects that the recipes do not determine."""

COLUMNS = [
    *SETTING,
    "kind",
    "factor",
    "level",
    "with_factor",
    "with_level",
    "reference",
    "effect",
    "low",
    "high",
    "p",
    "q",
]
COLUMNS += ["error", "freedom", "share", "mean", "recipes", "diverged", "basis", "note"]


def effects(runs: pd.DataFrame, response: Response = "gap", tables: Tables | None = None) -> pd.DataFrame:
    """Main effects and pairwise interactions, per SETTING, over the recipes that quantize, at their best rates.

    Columns: SETTING, kind (`main` or `interaction`), factor, level, with_factor, with_level (null for main), reference
    (of main: the level that the effect is measured from), effect (log loss ratio, or difference of rank in 0 … 1; below
    0 where it helps), low, high (95 %), p, q (p adjusted for all lines of the setting), error, freedom (standard error
    and its degrees of freedom), share (of the variance between recipes that the factor or pair alone explains: what R²
    falls by without it, 0 … 1), mean (of main: the marginal mean gap or rank; NaN without a baseline), recipes (with
    this level), diverged (the share of them with a diverged seed), basis (`seeds` or `recipes`), note (why there is no
    effect, else empty).

    The reference level has a line, with effect 0. The effect of an interaction is what two levels do together beyond
    what each does on average. Order: SETTING, main before interaction, large shares first. A line whose note is not
    empty and whose effect is NaN says what could not be told. tables: of `factor_tables` with this response, if they
    are at hand. ConfigError on another response.
    """
    if response not in ("gap", "rank"):
        raise ConfigError("response", response, "gap, rank")
    parts = []
    for keys, table in factor_tables(runs, response) if tables is None else tables:
        lines = [*_lines(table)]
        if lines:
            line = with_intervals(as_frame(lines), response == "rank")
            parts.append(line.assign(**dict(zip(SETTING, keys, strict=True))))
    out = stacked(parts, COLUMNS)
    largest = out.groupby([*SETTING, "kind", "factor", "with_factor"], dropna=False)["share"].transform("max")
    out = out.assign(order=-largest.astype(float).fillna(-1), interacts=out["kind"].eq("interaction"))
    out = out.sort_values([*SETTING, "interacts", "order", "factor", "with_factor"], kind="stable")
    return out[COLUMNS].reset_index(drop=True)


def _lines(table: FactorTable) -> Iterator[Lines]:
    finished = np.asarray(np.isfinite(table.y).any(axis=1))
    y = table.y[finished]
    y = y[:, np.isfinite(y).any(axis=0)]
    mains, blocks, places, start = [], [], [], 1
    for f in table.factors:
        present, codes = np.unique(f.codes[finished], return_inverse=True)
        if len(present) > 1:
            coding = sum_to_zero(len(present))
            columns = slice(start, start := start + len(present) - 1)
            mains.append(Term((f,), (present,), (coding,), columns))
            blocks.append(coding[codes])
            places.append(codes)
    if len(y) < 2 or not mains:
        for f in table.factors:
            yield _without(table, f, "fewer than two recipes finished" if len(y) < 2 else "one level finished")
        return
    weight = _weights([term.factors[0].codes[finished] for term in mains])
    design = np.hstack([np.ones((len(y), 1)), *blocks])
    unknown = undetermined(design, weight)
    pairs, met, determined, free = {}, {}, [], design.shape[1]
    for (a, a_places), (b, b_places) in combinations(zip(mains, places, strict=True), 2):
        names, n, m = (a.factors[0].name, b.factors[0].name), len(a.present[0]), len(b.present[0])
        columns = slice(start, start := start + (n - 1) * (m - 1))
        pairs[names] = Term(a.factors + b.factors, a.present + b.present, a.coding + b.coding, columns)
        met[names] = np.bincount(a_places * m + b_places, minlength=n * m).reshape(n, m) > 0
        met[names[::-1]] = met[names].T
        determined.append(max(int(met[names].sum()) - n - m + 1, 0))
        free += determined[-1]
    joint = free < len(y)
    space = row_space(design, blocks if joint else [], weight)
    ridge = np.full(space.coordinates.shape[1], RIDGE)
    ridge[: len(unknown)][~unknown] = 0.0
    model = fit(space.coordinates, y, weight, ridge)
    total = float(weight @ np.square(model.centred - np.average(model.centred, weights=weight)))
    note = "" if joint else f"interactions need {free + 1} recipes that finished, found {len(y)}"
    tried = Tried(mains, pairs if joint else {}, met, float(np.prod([len(term.present[0]) for term in mains])))
    modelled = {term.factors[0].name: term for term in mains}
    for f in table.factors:
        if f.name not in modelled:
            yield _without(table, f, "one level finished")
        else:
            term = modelled[f.name]
            why = "it changes only together with others" if unknown[term.columns].any() else note
            lost = bool(unknown[term.columns].any())
            yield _main(table, term, model, total, why, lost, tried, space)
    for term, known in zip(pairs.values(), determined, strict=True) if joint else []:
        yield _interaction(table, term, model, total, finished, not known, tried, space)


def _main(
    table: FactorTable,
    term: Term,
    model: Fit,
    total: float,
    note: str,
    lost: bool,
    tried: Tried,
    space: RowSpace,
) -> Lines:
    f, present, coding = term.factors[0], term.present[0], term.coding[0]
    reference = int(np.flatnonzero(present == f.reference)[0]) if f.reference in present else 0
    contrasts = np.zeros((len(present), len(space.basis)))
    contrasts[:, term.columns] = coding - coding[reference]
    notes, complete = [note] * len(present), np.full(len(present), 2 * len(present) / tried.cells)
    whole, none = np.ones(len(present), bool), np.zeros(len(present), bool)
    for i in range(len(present)):
        only = []
        for other, both in tried.support(term, i, reference):
            if both.all():
                continue
            whole[i] = whole[reference] = False
            complete[i] *= len(both) / max(both.sum(), 1)
            pair, first = tried.between(term, other)
            if not both.any() or pair is None:
                none[i] = True
                only.append(other.factors[0].name)
                continue
            mine, theirs = coding[i] - coding[reference], other.coding[0][both].mean(axis=0)
            contrasts[i, pair.columns] += np.outer(*((mine, theirs) if first else (theirs, mine))).ravel()
            names = [other.factors[0].levels[j] for j in other.present[0][both]]
            only.append(f"{other.factors[0].name} = {', '.join(names)}")
        if only and i != reference and not lost:
            support = f"{'not tried alike over' if none[i] else 'over'} {'; '.join(only)}"
            notes[i] = f"{note}; {support}" if note else support
    inside, untold = space.contrasts(contrasts)
    cannot = lost | none | untold
    cannot[reference] = lost
    means = model.coefficients[0] + coding @ model.coefficients[term.columns] - table.baseline
    out = estimates(model, inside, cannot, complete)
    for name in ("seed_variance", "lane_variance", "misfit"):
        out[name][reference] = np.nan
    missing = sorted(set(f.codes) - set(present))
    levels, none_left = [*present, *missing], len(missing)
    more = {name: np.append(values, [np.nan] * none_left) for name, values in out.items() if np.ndim(values)}
    more["mean"] = np.append(np.where(lost | ~whole, np.nan, means), [np.nan] * none_left)
    tried_with, diverged = _counts(f.codes, table.diverged)
    return {
        **out,
        **more,
        "level": [f.levels[i] for i in levels],
        "note": [*notes, *["no recipe finished"] * none_left],
        "kind": "main",
        "factor": f.name,
        "with_factor": None,
        "with_level": None,
        "reference": f.levels[present[reference]],
        "share": _share(model, term, space, total) if not lost else np.nan,
        "recipes": tried_with[levels],
        "diverged": diverged[levels],
    }


def _counts(codes: NDArray[np.intp], diverged: NDArray[np.bool_], least: int = 0) -> tuple[NDArray[np.int_], Any]:
    """Per code, of `least` at least, how many recipes have it, and the share of them that diverged, NaN of none."""
    count = np.bincount(codes, minlength=least)
    with np.errstate(invalid="ignore"):
        return count, np.bincount(codes, diverged, least) / count


def _interaction(
    table: FactorTable,
    term: Term,
    model: Fit,
    total: float,
    finished: NDArray[np.bool_],
    lost: bool,
    tried: Tried,
    space: RowSpace,
) -> Lines:
    (f, g), (rows, columns) = term.factors, term.present
    contrasts = np.einsum("ip,jq->ijpq", *term.coding).reshape(len(rows) * len(columns), -1)
    complete = np.full(len(contrasts), (len(rows) - 1) * (len(columns) - 1) / tried.cells)
    inside, untold = space.contrasts(contrasts, term.columns.start)
    cannot = lost | untold
    levels = len(g.levels)
    cell, cells = f.codes * levels + g.codes, (rows[:, None] * levels + columns).ravel()
    recipes, diverged = _counts(cell, table.diverged, len(f.levels) * levels)
    empty = ~np.isin(cells, cell[finished])
    return {
        **estimates(model, inside, cannot, complete),
        "kind": "interaction",
        "factor": f.name,
        "level": [f.levels[i] for i in rows for _ in columns],
        "with_factor": g.name,
        "with_level": [g.levels[j] for _ in rows for j in columns],
        "reference": None,
        "share": _share(model, term, space, total) if not lost else np.nan,
        "mean": np.nan,
        "recipes": recipes[cells],
        "diverged": diverged[cells],
        "note": np.where(empty, "no recipe finished", np.where(cannot, "too few of these pairs finished", "")),
    }


def _share(model: Fit, term: Term, space: RowSpace, total: float) -> float:
    """The share of a term; see the top."""
    rise = model.rise(space.basis[term.columns], RIDGE * model.weight)
    return rise / total if total > 0 else np.nan


def _without(table: FactorTable, f: Factor, why: str) -> Lines:
    """A factor that is in no model: its levels, and how often they diverged."""
    levels = np.unique(f.codes)
    recipes, diverged = _counts(f.codes, table.diverged)
    names: Lines = {"kind": "main", "factor": f.name, "level": [f.levels[i] for i in levels], "with_factor": None}
    names |= {"with_level": None, "reference": f.levels[f.reference], "effect": np.nan, "share": np.nan}
    counts = {"recipes": recipes[levels], "diverged": diverged[levels]}
    return {**names, **counts, "mean": np.nan, "basis": None, "note": why}


def _weights(codes: list[NDArray[np.intp]]) -> NDArray[np.float64]:
    """One over the number of recipes that share all levels. codes: [recipes] per factor."""
    _, cell, recipes = np.unique(combined(codes, len(codes[0])), return_inverse=True, return_counts=True)
    return np.asarray(1 / recipes[cell])
