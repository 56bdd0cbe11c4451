"""The uncertainty of the front: every recipe's gap is drawn many times from the posterior of shrinkage.py.

A front of noisy means is made of the luckiest recipes as well as of the best. The posterior knows what its factors and
the other recipes say of a recipe, and how far its seeds may be off; a front of a draw is one that may be the true one.

A seed that is hard for all recipes, or on which BF16 was lucky, moves all gaps alike (spread.py). That part is drawn
once for all recipes: it moves the gaps, the hypervolume, and on the front those alone that cost more than BF16.

Recipes whose gaps are equal on every seed trained to the same bits (a loss scale that changes nothing, say). They are
drawn once: of two that cost the same either both are on the front or none is, and the dearer one never is. Costs that
differ in their last digits are one cost (pareto.equal_costs). Recipes that a draw makes equal, because their techniques
do nothing in it, have bits of their own: of k that cost the same one is the lowest, and each has 1/k of the place.

    p_front       share of draws in which the recipe is on the front, with one kind of software at least
    expected      mean of the drawn gaps: what the gap is expected to be on new seeds; its interval is the middle 95 %
    hypervolume   area between the front and a fixed reference point; drawn from each recipe's own seeds, and its
                  interval is the reflected one, 2·h - h*, because a front of noisy means is too good, and one of
                  noisier draws too good once more

With many recipes and few seeds the chance spreads over all that might be on the front; that is the finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse import ConfigError
from fp4dse.dse.cost import BAND
from fp4dse.results.stats.estimates.intervals import CONFIDENCE
from fp4dse.results.stats.estimates.shrinkage import Posterior, posterior, unmoved
from fp4dse.results.stats.estimates.spread import Spread, spread_over_seeds
from fp4dse.results.stats.factors import VariedBySetting, varied_by
from fp4dse.results.stats.paired import OVERHEAD, SETTING, bf16_cost, by_seed, rows_at_best_lr, setting_of
from fp4dse.results.stats.recipes.pareto import equal_costs, front, fronts_of_any, hypervolumes, places, rivals
from fp4dse.results.stats.recipes.summary import summarize

Parts = dict[tuple[Any, ...], tuple[pd.Index, NDArray[np.float64]]]
"""Values of SETTING -> config_ids and their gaps by seed."""

RESAMPLES = 1000
GAP_REFERENCE = math.log(2)
"""The hypervolume's corner: twice the loss of BF16."""
REFERENCES = {"points": 10.0, "bits_per_element": 16.0, "overhead": 1.0}
"""The corner's other coordinate: all techniques at once, the bits of BF16, the time of BF16."""


def front_chance(
    runs: pd.DataFrame, overhead: str = OVERHEAD, resamples: int = RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """The lines of `summarize` that compete (they quantize, have a finite gap and an overhead), with what is expected.

    Four more columns: p_front, in which share of the draws the recipe is on the front (1/k of those in which k tie for
    a place); expected, expected_low, expected_high: its gap on new seeds, with the 95 % interval. The last three are
    unlike gap, gap_low and gap_high in that they know of the other recipes, so that the best recipe is not the
    luckiest. NaN where no recipe of the setting has two seeds; expected is the gap there. Order: SETTING, overhead,
    gap.
    """
    rows = rows_at_best_lr(runs)
    return chance_of(rows, summarize(rows, overhead), overhead, resamples, seed)


def chance_of(
    rows: pd.DataFrame,
    recipes: pd.DataFrame,
    overhead: str = OVERHEAD,
    resamples: int = RESAMPLES,
    seed: int = 0,
    varied: VariedBySetting | None = None,
) -> pd.DataFrame:
    """`front_chance` from frames that are at hand. rows: of `rows_at_best_lr`; recipes: of their `summarize`; varied:
    of their `varied_by`, if it is at hand, too."""
    competing, parts = competing_recipes(rows, recipes, overhead)
    competing = competing.assign(p_front=np.nan, expected=competing["gap"].astype(float))
    competing = competing.assign(expected_low=np.nan, expected_high=np.nan)
    knobs = {keys: codes_of(part, varied) for keys, part in rows.groupby(list(SETTING), sort=False)}
    for one in _drawn(competing, parts, knobs, resamples, seed):
        lines, spread = one.lines, one.spread
        if np.isfinite(spread.error).all():
            costs, hits, gaps = lines[costs_of(overhead)].to_numpy(float).T, np.zeros(len(lines)), []
            bf16, middle, among = bf16_cost(lines, overhead), np.zeros(len(lines)), rivals(costs, one.computation)
            for draw, shared in one.draws:
                middle += draw.sum(axis=0) / resamples  # the shared part is zero on average, and has heavy tails
                draw += shared[:, None]
                hits += places(fronts_of_any(costs, draw, bf16), among).sum(axis=0)
                gaps.append(draw.astype(np.float32))
            drawn = np.concatenate(gaps)
            middle = middle if one.moved else spread.mean
            low, high = np.quantile(drawn, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2], axis=0)
            competing.loc[lines.index, "p_front"] = hits / resamples
            competing.loc[lines.index, ["expected", "expected_low", "expected_high"]] = np.stack([middle, low, high], 1)
    return competing.sort_values([*SETTING, overhead, "gap", "label"]).reset_index(drop=True)


def hypervolume(
    runs: pd.DataFrame,
    overhead: str = OVERHEAD,
    reference: tuple[float, float] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> pd.DataFrame:
    """The area that the front dominates, per SETTING: the quality of the trade-off in one number.

    Columns: SETTING, axis (name of the overhead), reference_overhead, reference_gap, hypervolume, low, high (95 %, NaN
    where no recipe has two seeds), recipes (that compete), on_front (how many). reference: (overhead, gap); default
    REFERENCES, and twice the loss of BF16. ConfigError if an axis has no default.
    """
    if reference is None:
        if overhead not in REFERENCES:
            raise ConfigError("overhead", overhead, f"{', '.join(REFERENCES)}, or state the reference point")
        reference = (REFERENCES[overhead], GAP_REFERENCE)
    rows = rows_at_best_lr(runs)
    competing, parts = competing_recipes(rows, summarize(rows, overhead), overhead)
    out = []
    for lines, spread, _, _, draws in _drawn(competing, parts, None, resamples, seed):
        area = float(hypervolumes(lines[overhead], spread.mean[None], reference)[0])
        low = high = math.nan
        if np.isfinite(spread.error).all():
            drawn = [hypervolumes(lines[overhead], draw + shared[:, None], reference) for draw, shared in draws]
            tails = np.quantile(np.concatenate(drawn), [0.5 + CONFIDENCE / 2, 0.5 - CONFIDENCE / 2])
            low, high = np.clip(2 * area - tails, 0, None)
        facts = {name: lines[name].iloc[0] for name in SETTING}
        facts |= {"axis": overhead, "reference_overhead": reference[0], "reference_gap": reference[1]}
        counts = {
            "recipes": len(lines),
            "on_front": int(front(lines[overhead], lines["gap"], bf16_cost(lines, overhead)).sum()),
        }
        out.append({**facts, "hypervolume": area, "low": low, "high": high, **counts})
    columns = [*SETTING, "axis", "reference_overhead", "reference_gap", "hypervolume", "low", "high", "recipes"]
    return pd.DataFrame(out, columns=[*columns, "on_front"])


def competing_recipes(rows: pd.DataFrame, lines: pd.DataFrame, overhead: str) -> tuple[pd.DataFrame, Parts]:
    """The lines of `summarize` that may be on a front, with costs that differ in their last digits made equal, and per
    setting the recipes with their gaps by seed. rows: of `rows_at_best_lr`; lines: of their `summarize`."""
    lines = lines[lines["points"].gt(0) & np.isfinite(lines["gap"].astype(float)) & lines[overhead].notna()].copy()
    for name in costs_of(overhead):
        lines[name] = lines.groupby(list(SETTING), sort=False)[name].transform(equal_costs)
    parts = {keys: by_seed(part, part["gap"]) for keys, part in rows.groupby(list(SETTING), sort=False)}
    return lines, parts


def costs_of(overhead: str) -> list[str]:
    """The columns whose fronts count: the modelled overhead has a band (summary.py)."""
    return [overhead, *(BAND if overhead == OVERHEAD else ())]


def codes_of(part: pd.DataFrame, varied: VariedBySetting | None = None) -> pd.DataFrame:
    """Per config_id the codes of the factors of all recipes of a setting that quantize; without columns where rows lack
    those that say how a recipe is built. part: rows of the setting; varied: of `varied_by` of these rows or more, if it
    is at hand. KeyError if it is of other rows."""
    quantize = part["points"].gt(0)
    varied = varied_by(part) if varied is None else varied
    if not varied or not quantize.any():
        return pd.DataFrame(index=pd.Index(np.asarray(part.loc[quantize, "config_id"].unique())))
    found = varied[setting_of(part)]
    return pd.DataFrame({factor.name: factor.codes for factor in found.factors}, index=found.recipes)


def from_zero(codes: pd.DataFrame) -> list[NDArray[np.intp]]:
    """The codes of each factor without those that no recipe here has."""
    return [np.unique(codes[name], return_inverse=True)[1] for name in codes]


class _Drawn(NamedTuple):
    """A setting and the draws of its gaps."""

    lines: pd.DataFrame
    spread: Spread
    computation: NDArray[np.intp]
    """[recipes]: equal for those that train to the same bits."""
    moved: bool
    """The draws are drawn towards a model."""
    draws: Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]
    """Gaps [chunk, recipes] and the shared part [chunk]."""


def _drawn(
    competing: pd.DataFrame,
    parts: Parts,
    knobs: Mapping[tuple[Any, ...], pd.DataFrame] | None,
    resamples: int,
    seed: int,
) -> Iterator[_Drawn]:
    """Each setting with its draws. knobs: `codes_of` each; None: each recipe has what its own seeds say."""
    for keys, lines in competing.groupby(list(SETTING), sort=False):
        lines = lines.iloc[np.argsort(lines["config_id"].to_numpy(str))]  # draws depend on no order of rows
        recipes, gaps = parts[keys]
        distinct, first, which = np.unique(
            gaps[recipes.get_indexer(lines["config_id"])], axis=0, return_index=True, return_inverse=True
        )
        spread = spread_over_seeds(distinct)
        if knobs is None:
            found = unmoved(spread)
        else:
            found = posterior(spread, distinct, from_zero(knobs[keys].loc[lines["config_id"].iloc[first]]))
        draws = _draws(found, resamples, np.random.default_rng(seed))
        everyone = spread._replace(mean=spread.mean[which], error=spread.error[which], freedom=spread.freedom[which])
        each = ((draw[:, which], shared) for draw, shared in draws)
        yield _Drawn(lines, everyone, which, found.factors is not None, each)


def _draws(
    found: Posterior, resamples: int, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    spread = found.spread
    for draw in found.draws(resamples, rng):
        shared = rng.standard_t(spread.seeds - 1, len(draw)) if spread.seeds > 1 else np.zeros(len(draw))
        yield draw, spread.shared_error * shared
