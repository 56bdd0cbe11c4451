"""The numbers behind the report, computed once, by the functions that the views of `fp4dse query` call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pandas as pd

from fp4dse.dse import Quantizer
from fp4dse.results.stats.factors import AXES as RECIPE_AXES
from fp4dse.results.stats.factors import AXIS, varied_by
from fp4dse.results.stats.learning_rates import learning_rates
from fp4dse.results.stats.paired import MEASURED, OVERHEAD, SETTING, numbered, rows_at_best_lr
from fp4dse.results.stats.recipes.equal_cost import matched
from fp4dse.results.stats.recipes.equivalence import against
from fp4dse.results.stats.recipes.front_chance import chance_of
from fp4dse.results.stats.recipes.ranked import with_chance
from fp4dse.results.stats.recipes.recommendation import VERDICTS_READ, confirmed_if_any, verdicts_from
from fp4dse.results.stats.recipes.summary import noise_floor, summarize
from fp4dse.results.stats.recipes.verdict import Verdict
from fp4dse.results.stats.techniques.divergence import divergence
from fp4dse.results.stats.techniques.effects import EFFECTS_READ, effects
from fp4dse.results.stats.techniques.factor_tables import factor_tables
from fp4dse.results.stats.techniques.marginal import marginal
from fp4dse.results.stats.techniques.recovered import RECOVERED_READ, recovered_if_any
from fp4dse.results.store.schema import ROW
from fp4dse.results.store.store import Store
from fp4dse.results.text.labels import Labels, short_labels
from fp4dse.results.text.pareto_table import setting_titles

AXES = {
    "overhead": "modelled step time, BF16 = 1",
    "points": "techniques, points",
    "bits_per_element": "stored bits per operand element",
    "measured": "measured time of emulating layers, BF16 = 1",
}
"""Columns that can be an overhead axis -> what the axis says."""

MACHINE = ["device_name", "device", "threads", "dtype", "quantizer_backend", "gemm_backend", "host"]
SOFTWARE = ["torch_version", "python_version", "fp4dse_version", "git_commit"]
_MORE = ["run_id", "failure", "fallbacks", "lane_s", "created_at", *MACHINE, *SOFTWARE]
_MORE += [name for name in ("overhead", "overhead_of") if name in ROW.names]
COLUMNS = list(dict.fromkeys([*VERDICTS_READ, *EFFECTS_READ, *RECOVERED_READ, *_MORE, *MEASURED]))
"""The columns of runs that a report reads."""


Statistics = Callable[[Quantizer], Mapping[str, Any]]
"""quantizer -> mse (relative, None if nothing is lost), clipped, flushed (shares, None for a plain operand), bits.
Quantizing is the business of another room, so whoever writes the report passes the function in."""


@dataclass(frozen=True)
class Findings:
    """The data of all panels. Each frame has the name of the function that made it, and a column `setting`."""

    store: Store
    statistics: Statistics | None
    """It remembers each quantizer's: settings have most of theirs in common."""
    runs: pd.DataFrame
    axes: dict[str, str]
    """Columns of `recipes` that hold an overhead -> what the axis says; the default axis first."""
    labels: Labels
    """Short names of recipes."""
    titles: dict[tuple[Any, ...], str]
    """SETTING values -> what a setting is called, in the order of the report."""
    recipes: pd.DataFrame
    """summarize, with p_front, a column for each axis, and `setting`: the index in `titles`."""
    floors: pd.DataFrame
    verdicts: list[Verdict]
    """One a setting, in the order of `titles`."""
    versus_best: pd.DataFrame
    matched: pd.DataFrame
    """At equal stored bits."""
    rates: pd.DataFrame
    """learning_rates."""
    effects: pd.DataFrame
    marginal: pd.DataFrame
    divergence: pd.DataFrame
    confirmed: pd.DataFrame
    """Without lines where nothing was confirmed."""
    recovered: pd.DataFrame
    """Without lines where nothing is rounded without training."""
    recipe_texts: Mapping[str, str]
    """config_id -> recipe as JSON, of the recipes on a front."""

    @cached_property
    def settings(self) -> list[Findings]:
        """The same for each setting alone, in the order of `titles`."""
        runs = dict(iter(self.runs.groupby(list(SETTING), sort=False, observed=True)))
        frames = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "runs"}
        return [
            replace(
                self,
                runs=runs[keys],
                titles={keys: title},
                verdicts=[self.verdicts[i]],
                **{name: of[of["setting"].eq(i)] for name, of in frames.items() if isinstance(of, pd.DataFrame)},
            )
            for i, (keys, title) in enumerate(self.titles.items())
        ]

    @cached_property
    def front(self) -> pd.DataFrame:
        """The lines of `recipes` that are on a front, the cheapest first."""
        front = self.recipes[self.recipes["on_front"]]
        return front.sort_values(["setting", OVERHEAD, "gap"], kind="stable")


def findings(runs: pd.DataFrame, store: Store, statistics: Statistics | None = None) -> Findings:
    """The findings of some runs. runs: COLUMNS of the store's runs, or of some of them, with at least one row."""
    rows = rows_at_best_lr(runs)
    recovered = recovered_if_any(rows)
    varied = varied_by(rows)
    rows = rows.drop(columns=[name for name in rows if name in RECIPE_AXES or name.startswith(AXIS)])  # most of them
    tables = [*factor_tables(rows, varied=varied)]
    recipes = summarize(rows)
    recipes = _compared_first(as_texts(with_chance(recipes, chance_of(rows, recipes, varied=varied))))
    versus_best, rates = as_texts(against(rows, varied=varied)), as_texts(learning_rates(runs))
    new = as_texts(confirmed_if_any(runs))
    present = [name for name in AXES if name in runs and runs[name].notna().any()]
    if "measured" in present and runs.groupby(list(SETTING))["measured_of"].nunique().gt(1).any():
        present.remove("measured")  # figures of several devices are not one axis
    axes = {name: AXES.get(name, name) for name in dict.fromkeys([OVERHEAD, *present])}
    lacking = [name for name in axes if name not in recipes]
    costs = as_texts(runs.groupby([*SETTING, "config_id"], sort=False)[lacking].mean().reset_index())
    recipes = recipes.merge(costs, how="left", on=[*SETTING, "config_id"])
    titles = setting_titles(recipes)
    quantizing = recipes[~recipes["is_baseline"]]
    return Findings(
        store=store,
        statistics=cache(statistics) if statistics else None,
        runs=runs,
        axes=axes,
        labels=short_labels(quantizing["label"], quantizing["name"]),
        titles=titles,
        recipes=_with_setting(recipes, titles),
        floors=_with_setting(noise_floor(runs), titles),
        verdicts=verdicts_from(rows, recipes, rates, new, varied),
        versus_best=_with_setting(versus_best, titles),
        matched=_with_setting(matched(rows, varied=varied), titles),
        rates=_with_setting(rates, titles),
        effects=_with_setting(effects(rows, tables=tables), titles),
        marginal=_with_setting(marginal(rows, tables), titles),
        divergence=_with_setting(divergence(rows, tables), titles),
        confirmed=_with_setting(new, titles),
        recovered=_with_setting(recovered, titles),
        recipe_texts=store.recipe_texts(list(recipes.loc[recipes["on_front"], "config_id"].unique())),
    )


def as_texts(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with texts where it has categories (see Store.runs)."""
    coded = [name for name in frame if isinstance(frame[name].dtype, pd.CategoricalDtype)]
    return frame.astype(dict.fromkeys(coded, str)) if coded else frame


def _compared_first(recipes: pd.DataFrame) -> pd.DataFrame:
    """The lines in their order, but those of settings last in which no recipe is compared with BF16: a page opens with
    the first."""
    compared = (recipes["gap"].notna() & ~recipes["is_baseline"]).groupby([recipes[name] for name in SETTING])
    return recipes.loc[compared.transform("any").sort_values(ascending=False, kind="stable").index]


def _with_setting(frame: pd.DataFrame, titles: dict[tuple[Any, ...], str]) -> pd.DataFrame:
    """The frame with the column `setting`, the index of the setting in `titles`, in that order."""
    frame = as_texts(frame)
    index = {keys: i for i, keys in enumerate(titles)}
    number = numbered(frame, SETTING, sort=False, dropna=False).to_numpy(int)
    firsts = frame.loc[~pd.Series(number, frame.index).duplicated(), list(SETTING)]
    found = np.array([index[keys] for keys in firsts.itertuples(index=False, name=None)], int)[number]
    return frame.assign(setting=found).sort_values("setting", kind="stable")
