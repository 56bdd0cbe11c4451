"""Layers that must stay in BF16: the cost of quantizing each unit of a study alone, and the gain of sparing it.

    alone    gap of BF16 with this unit quantized, against BF16
    gain     what the gap of the recipe falls by where this unit is spared

Both are means of differences within a seed, at one learning rate, with intervals that hold for all units at once
(equivalence.against). A choice of units to spare is made on the gains, so its own are too good to be true: what it is
expected to gain is their sum, and what it gains is measured on fresh seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit

from fp4dse.results.stats.estimates.intervals import CONFIDENCE
from fp4dse.results.stats.estimates.rankings import spearman, spearman_interval
from fp4dse.results.stats.layers.study import Spared, Study
from fp4dse.results.stats.levels import are_shares, levels
from fp4dse.results.stats.paired import DERIVED, SETTING, by_seed, rows_at_best_lr, stacked
from fp4dse.results.stats.recipes.equivalence import against
from fp4dse.results.stats.stages import CONFIRM, STAGE, of_stage

_UNIT = ["unit", "layers", "scope", "products", "step", "fisher"]
_EFFECTS = [
    "alone",
    "alone_low",
    "alone_high",
    "alone_verdict",
    "gain",
    "gain_low",
    "gain_high",
    "gain_verdict",
    "gain_per_percent",
]
COLUMNS = [*SETTING, *_UNIT, "pairs", *_EFFECTS]


def sensitivity(runs: pd.DataFrame, study: Study) -> pd.DataFrame:
    """One line per SETTING and unit of a study, the largest gain first.

    Columns: SETTING, unit, layers, scope, products, step, fisher (of Measured), pairs (seeds), alone, alone_low,
    alone_high, gain, gain_low, gain_high (log ratios of losses, 95 % for all units at once; NaN without two seeds, or
    where a lane diverged), gain_per_percent (of multiply-adds spared), alone_verdict, gain_verdict (`higher` and
    `lower` than zero, `same` within the margin, `open`, `diverged`)."""
    parts = []
    for _, rows in _rows(runs, study).groupby(list(SETTING), sort=False, observed=True):
        alone = _effects(rows, study.baseline_id, [unit.alone for unit in study.units])
        spared = _effects(rows, study.config_id, [unit.spared for unit in study.units])
        lines = pd.DataFrame([[getattr(unit, name) for name in ("label", *_UNIT[1:])] for unit in study.units])
        lines = lines.set_axis(_UNIT, axis="columns").astype(dict.fromkeys(_UNIT[3:], float))
        lines = lines.assign(**{name: rows[name].iloc[0] for name in SETTING}, pairs=spared["pairs"].to_numpy())
        for name in ("", "_low", "_high", "_verdict"):
            lines[f"alone{name}"] = alone[f"effect{name}"].to_numpy()
        opposite = {"higher": "lower", "lower": "higher"}
        lines["gain"], lines["gain_low"] = -spared["effect"].to_numpy(), -spared["effect_high"].to_numpy()
        lines["gain_high"] = -spared["effect_low"].to_numpy()
        lines["gain_verdict"] = [opposite.get(verdict, verdict) for verdict in spared["effect_verdict"]]
        parts.append(lines.assign(gain_per_percent=lines["gain"] / (100 * lines["products"])))
    return stacked(parts, COLUMNS).sort_values([*SETTING, "gain"], ascending=[*[True] * len(SETTING), False])


def fisher_agreement(lines: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """Spearman's correlation of the scores of units with what they cost `alone` and what sparing them `gain`s, NaN with
    fewer than three, and its interval over units. lines: of `sensitivity`, of one setting."""
    found = {}
    for name in ("alone", "gain"):
        known = lines.dropna(subset=["fisher", name])
        rank = float(spearman(known["fisher"], known[name])) if len(known) > 2 else math.nan
        found[name] = rank, *spearman_interval(known["fisher"], known[name])
    return found


CHOICE_COLUMNS = [*SETTING, "recipe", "config_id", "products", "seeds", "gap", "gap_low", "gap_high"]
CHOICE_COLUMNS += ["gain", "gain_low", "gain_high", "predicted", "predicted_low", "predicted_high"]
CHOICE_COLUMNS += ["missed", "missed_low", "missed_high"]


def measured_choice(runs: pd.DataFrame, study: Study, choice: Spared) -> pd.DataFrame:
    """The recipe of a study, the chosen one and that with first and last blocks spared, on fresh seeds.

    Columns: SETTING, recipe (`base`, `chosen`, `ends`), config_id, products (multiply-adds spared), seeds, gap (to
    BF16), gain (what the gap is below the base's), both with 95 % limits; of the chosen one also predicted (the sum of
    its units' gains on the seeds that chose it) and missed (gain - predicted), with theirs."""
    parts = []
    names = {"base": study.config_id, "chosen": choice.config_id, "ends": choice.ends}
    shares = {"base": 0.0, "chosen": choice.products, "ends": choice.ends_products}
    fresh = _of(of_stage(runs, CONFIRM), study, choice.seeds)
    screened = _rows(runs, study)
    for keys, rows in fresh.groupby(list(SETTING), sort=False, observed=True):
        losses = _losses(rows)
        same = screened[(screened[list(SETTING)] == list(keys)).all(axis="columns")]
        before = _losses(same)
        predicted = _mean(_predicted(before, study, choice))
        for name, config_id in names.items():
            if config_id is None:
                continue
            gap = _mean(_difference(losses, config_id, study.baseline_id))
            gain = _mean(_difference(losses, study.config_id, config_id))
            line: dict[str, object] = dict(zip(SETTING, keys, strict=True))
            line |= {"recipe": name, "config_id": config_id, "products": shares[name], "seeds": gap.n}
            line |= gap.named("gap")
            line |= (gain if name != "base" else _NOTHING).named("gain")
            line |= (predicted if name == "chosen" else _NOTHING).named("predicted")
            line |= (_apart(gain, predicted) if name == "chosen" else _NOTHING).named("missed")
            parts.append(line)
    return pd.DataFrame(parts, columns=CHOICE_COLUMNS)


class Mean(NamedTuple):
    """A mean with its standard error and degrees of freedom."""

    value: float
    error: float
    freedom: float
    n: int = 0

    def named(self, name: str) -> dict[str, float]:
        """The value and its 95 % limits under a name."""
        half = stdtrit(self.freedom, 0.5 + CONFIDENCE / 2) * self.error if self.freedom > 0 else np.nan
        return {name: self.value, f"{name}_low": self.value - half, f"{name}_high": self.value + half}


_NOTHING = Mean(np.nan, np.nan, np.nan)


def _rows(runs: pd.DataFrame, study: Study) -> pd.DataFrame:
    return _of(of_stage(runs, None), study, study.seeds)


def _of(runs: pd.DataFrame, study: Study, seeds: Iterable[int]) -> pd.DataFrame:
    """The rows of a study's task, rate and seeds, as if there were no others and no stages."""
    here = runs["task"].eq(study.task) & runs["preset"].eq(study.preset) & runs["lr"].eq(study.lr)
    rows = runs[here & runs["seed"].isin(list(seeds))]
    return rows.drop(columns=[name for name in (STAGE, *DERIVED) if name in rows])


def _effects(rows: pd.DataFrame, reference: str, config_ids: Sequence[str]) -> pd.DataFrame:
    """effect, _low, _high, _verdict and pairs of recipes against a reference, in the order asked for."""
    there = {*config_ids, reference} - ({reference} if reference not in set(rows["config_id"]) else set())
    lines = against(rows[rows["config_id"].isin(there)], reference) if reference in there else None
    columns = {"difference": "effect", "low": "effect_low", "high": "effect_high", "verdict": "effect_verdict"}
    if lines is None:
        return pd.DataFrame(np.nan, range(len(config_ids)), [*columns.values(), "pairs"])
    return lines.rename(columns=columns).set_index("config_id").reindex(config_ids)[[*columns.values(), "pairs"]]


def _losses(rows: pd.DataFrame) -> pd.DataFrame:
    """Log losses, a line a recipe, a column a seed; inf where the lane diverged."""
    if rows.empty:
        return pd.DataFrame()
    judged = rows_at_best_lr(rows)
    recipes, log = by_seed(judged, pd.Series(levels(judged["loss"], are_shares(judged)), judged.index))
    seeds = np.sort(judged["seed"].unique())
    found = pd.DataFrame(log, recipes, seeds)
    found.loc[found.index.isin(judged.loc[judged["diverged"], "config_id"])] = np.inf
    return found


def _difference(losses: pd.DataFrame, a: str, b: str) -> NDArray[np.float64]:
    """Log losses of a less those of b, per seed; NaN where there is none."""
    if a not in losses.index or b not in losses.index:
        return np.array([])
    with np.errstate(invalid="ignore"):
        return np.asarray(losses.loc[a].to_numpy(float) - losses.loc[b].to_numpy(float))


def _predicted(losses: pd.DataFrame, study: Study, choice: Spared) -> NDArray[np.float64]:
    """The sum of the gains of the chosen units, per seed."""
    each = [_difference(losses, study.config_id, study.units[i].spared) for i in choice.units]
    return np.sum(each, axis=0) if each else np.array([])


def _mean(values: NDArray[np.float64]) -> Mean:
    if np.isinf(values).any():
        return Mean(float(np.inf * np.sign(values[np.isinf(values)][0])), np.nan, np.nan, len(values))
    known = values[np.isfinite(values)]
    if not len(known):
        return _NOTHING
    error = known.std(ddof=1) / math.sqrt(len(known)) if len(known) > 1 else np.nan
    return Mean(float(known.mean()), float(error), len(known) - 1, len(known))


def _apart(a: Mean, b: Mean) -> Mean:
    """The difference of two independent means (Welch)."""
    variance = a.error**2 + b.error**2
    if not variance > 0:
        return Mean(a.value - b.value, np.nan, np.nan)
    freedom = variance**2 / (a.error**4 / a.freedom + b.error**4 / b.freedom)
    return Mean(a.value - b.value, math.sqrt(variance), freedom)
