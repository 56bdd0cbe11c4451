"""The value of adding one technique: pairs of recipes that differ in one factor alone, without a model.

For two levels of a factor, all pairs of recipes that agree in every other factor are found; each pair gives the paired
difference of log loss on every seed that both finished. Over all pairs that is the marginal value of the technique
given the others, and its spread says how much it depends on them. For one recipe it is the list of its neighbours.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from fp4dse.dse import ConfigError
from fp4dse.results.stats.estimates.intervals import (
    CONFIDENCE,
    TIED,
    adjusted,
    known_error,
    mean_interval,
    same_computation,
)
from fp4dse.results.stats.estimates.mean_of_pairs import mean_of_pairs, pooled_beside_lanes
from fp4dse.results.stats.estimates.spread import lane_variances
from fp4dse.results.stats.factors import Factor, combined
from fp4dse.results.stats.levels import are_shares
from fp4dse.results.stats.paired import SETTING, stacked
from fp4dse.results.stats.recipes.equivalence import open_ties, versus_one, without_claims
from fp4dse.results.stats.recipes.margins import margin_of
from fp4dse.results.stats.techniques.factor_tables import FactorTable, Tables, factor_tables


def marginal(runs: pd.DataFrame, tables: Tables | None = None) -> pd.DataFrame:
    """The value of each level of each factor over its reference level, per SETTING, from matched pairs of recipes.

    Columns: SETTING, factor, reference, level, matches (pairs of recipes that differ in nothing else), difference (mean
    log loss ratio, below 0 where it helps), low, high (95 % over seeds), p, q (p adjusted for all levels), helps (share
    of matches where it lowers the loss), tenth, ninetieth (percentiles of the matches' own means: its effect beside the
    techniques that suit it best and worst), diverges, recovers (matches where it alone, or the reference alone,
    diverged), untried (levels of other factors that one of the two was tried with and the other never, as text; then
    the matches speak of what both were tried with alone). Lowest difference first. tables: of `factor_tables`, if they
    are at hand."""
    parts = []
    shares = {keys: bool(are_shares(part).any()) for keys, part in runs.groupby(list(SETTING), observed=True)}
    for keys, table in factor_tables(runs) if tables is None else tables:
        lanes = lane_variances(table.y)
        lines = []
        for f in table.factors:
            cell = _cells(table, f)
            for level in np.unique(f.codes):
                from_, to = _matches(f, cell, f.reference, level)
                if level != f.reference and len(to):
                    line = {"factor": f.name, "reference": f.levels[f.reference], "level": f.levels[level]}
                    lines.append(line | _compared(table, from_, to, lanes, shares[keys]))
                    lines[-1]["untried"] = ", ".join(_untried(table, f, level))
        if lines:
            parts.append(_with_intervals(pd.DataFrame(lines)).assign(**dict(zip(SETTING, keys, strict=True))))
    columns = [*SETTING, "factor", "reference", "level", "matches", "difference", "low", "high", "p", "q", "helps"]
    out = stacked(parts, [*columns, "tenth", "ninetieth", "diverges", "recovers", "untried"])
    return out.sort_values([*SETTING, "difference"], ignore_index=True)


def _compared(
    table: FactorTable,
    from_: NDArray[np.intp],
    to: NDArray[np.intp],
    lanes: tuple[NDArray[np.float64], NDArray[np.float64]],
    shares: bool,
) -> dict[str, float | int | str]:
    """The mean over all matches of a level, each once, with the variance over seeds and that of independent lanes.
    lanes: of `lane_variances`; shares: the losses are of counts, which tie by chance."""
    d = table.y[to] - table.y[from_]
    pairs, seeds = np.isfinite(d).any(axis=1), np.isfinite(d).any(axis=0)
    largest = np.nanmax(np.abs(d[:, seeds]), axis=0, initial=0)  # of each match, not of the mean
    [same] = same_computation(largest[None], shares)
    blown, before = table.diverged[to], table.diverged[from_]
    line: dict[str, float | int | str] = dict.fromkeys(("difference", "variance", "alone", "freedom"), np.nan)
    line |= dict.fromkeys(("lane_freedom", "helps", "tenth", "ninetieth"), np.nan)
    if pairs.any():
        (lane, freedom), used = lanes, np.stack([from_, to], axis=1)[pairs]
        finished = np.nanmean(d[pairs], axis=1)
        line |= mean_of_pairs(d[pairs], lane[used], freedom[used])
        line["helps"] = np.mean(finished < 0)
        line["tenth"], line["ninetieth"] = np.quantile(finished, [0.1, 0.9])
    diverges, recovers = int((blown & ~before).sum()), int((before & ~blown).sum())
    return {"matches": len(to), "same": same, "diverges": diverges, "recovers": recovers, **line}


def _with_intervals(lines: pd.DataFrame) -> pd.DataFrame:
    """low, high, p and q: variances over seeds pooled over the levels, as far as they are alike beside independent
    lanes; q is p adjusted for all levels. What is the same computation in every match has 0 to 0 and p = 1."""
    columns = (lines[name].to_numpy(float) for name in ("variance", "alone", "freedom", "lane_freedom"))
    variance, freedom = pooled_beside_lanes(*columns)
    difference, known = lines["difference"].to_numpy(float), freedom > 0
    error = np.sqrt(variance)
    known &= error > TIED**2  # else the seeds tie, at 0 or not
    error = np.where(known, known_error(error, difference), np.nan)
    freedom = np.where(known, freedom, np.nan)
    half = stdtrit(freedom, 0.5 + CONFIDENCE / 2) * error
    with np.errstate(divide="ignore", invalid="ignore"):
        p = 2 * stdtr(freedom, -np.abs(difference) / error)
    same = lines["same"].to_numpy(bool)
    low, high, p = (
        np.where(same, of, found) for of, found in ((0.0, difference - half), (0.0, difference + half), (1.0, p))
    )
    return lines.assign(low=low, high=high, p=p, q=adjusted(p))


def neighbours(runs: pd.DataFrame, config_id: str, margin: float | None = None) -> pd.DataFrame:
    """The recipes that differ from one in a single factor, and what that changes.

    Columns: SETTING, factor, from_level, level, config_id, label (of the neighbour), pairs, difference (log loss ratio
    neighbour / recipe, below 0 where the change helps), low, high (95 %, of all neighbours at once), p, p_same, margin,
    verdict, more_seeds (see `against`). Where the recipe is the best of all, verdicts know that the best is a lucky
    one. Lowest difference first. ConfigError if there are no quantizing runs of `config_id`.
    """
    parts = []
    found = False
    settings = dict(list(runs.groupby(list(SETTING), observed=True)))
    of_setting = {keys: margin_of(part, margin).value for keys, part in settings.items()}
    shares = {keys: are_shares(part).any() for keys, part in settings.items()}
    for keys, table in factor_tables(runs):
        if config_id not in table.config_ids:
            continue
        found = True
        row = table.config_ids.get_loc(config_id)
        cells = [_cells(table, f) for f in table.factors]
        near = [(cell == cell[row]) & (f.codes != f.codes[row]) for f, cell in zip(table.factors, cells, strict=True)]
        if not np.any(near):
            continue
        labels = settings[keys].drop_duplicates("config_id").set_index("config_id")["recipe_label"]
        lines = _versus_recipe(table, row, np.any(near, axis=0), of_setting[keys])
        lines = open_ties(lines) if shares[keys] else lines
        for f, others in zip(table.factors, near, strict=True):
            ids = table.config_ids[others]
            line = lines[others].assign(factor=f.name, from_level=f.levels[f.codes[row]], config_id=ids)
            line = line.assign(level=[f.levels[i] for i in f.codes[others]], label=labels[ids].to_numpy())
            parts.append(line.assign(**dict(zip(SETTING, keys, strict=True))))
    if not found:
        raise ConfigError("recipe", config_id, "a recipe that quantizes and that the store holds runs of")
    columns = [*SETTING, "factor", "from_level", "level", "config_id", "label", "pairs", "difference", "low", "high"]
    columns += ["p", "p_same", "margin", "verdict", "more_seeds"]
    return stacked(parts, columns).sort_values([*SETTING, "difference"], ignore_index=True)


def _versus_recipe(table: FactorTable, row: int, near: NDArray[np.bool_], margin: float) -> pd.DataFrame:
    """A line for each recipe of a setting against one of them, which hold for those that are near it at once."""
    finished = ~table.diverged & np.isfinite(table.y).any(axis=1)
    mean = np.where(finished, mean_interval(table.y)["mean"], np.inf)
    chosen = finished & (mean[row] <= mean.min())
    knobs = pd.DataFrame({f.name: f.codes for f in table.factors}, table.config_ids)
    lines = versus_one(table.config_ids, table.y, row, chosen, knobs, margin, near)
    return without_claims(lines, table.diverged | table.diverged[row])


def _cells(table: FactorTable, f: Factor) -> NDArray[np.int64]:
    """[recipes]: equal where all factors but `f` are."""
    return combined([other.codes for other in table.factors if other.name != f.name], len(f.codes))


def _matches(
    f: Factor, cell: NDArray[np.int64], reference: int, level: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Recipes at the reference and at the level, in pairs that share a cell."""
    a, b = np.flatnonzero(f.codes == reference), np.flatnonzero(f.codes == level)
    _, i, j = np.intersect1d(cell[a], cell[b], return_indices=True)
    return a[i], b[j]


def _untried(table: FactorTable, f: Factor, level: int) -> list[str]:
    """`factor = level` of other factors that the level or the reference of `f` was tried with, and the other never."""
    alone, sides = [], [np.flatnonzero(f.codes == code) for code in (level, f.reference)]
    for g in table.factors:
        if g.name != f.name:
            with_, without = (np.bincount(g.codes[side], minlength=len(g.levels)) > 0 for side in sides)
            alone += [f"{g.name} = {g.levels[code]}" for code in np.flatnonzero(with_ != without)]
    return alone
