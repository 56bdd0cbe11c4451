"""The views of `fp4dse query` that take more than SQL: what the statistics say, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pandas as pd
import pyarrow as pa

from fp4dse.results.stats.learning_rates import learning_rates
from fp4dse.results.stats.paired import SETTING
from fp4dse.results.stats.recipes.confirmed import confirmed
from fp4dse.results.stats.recipes.equal_cost import matched
from fp4dse.results.stats.recipes.equivalence import against
from fp4dse.results.stats.recipes.front_chance import front_chance, hypervolume
from fp4dse.results.stats.recipes.ranked import versus_soonest
from fp4dse.results.stats.recipes.recommendation import VERDICTS_READ
from fp4dse.results.stats.recipes.summary import noise_floor, summarize
from fp4dse.results.stats.recipes.tokens_worth import margins
from fp4dse.results.stats.rollouts.effects import rollout_effects
from fp4dse.results.stats.rollouts.numbers import RECORDED_READ, nothing_recorded, rollout_numbers
from fp4dse.results.stats.sizes.agreement import agreement, published
from fp4dse.results.stats.sizes.extrapolation import extrapolation
from fp4dse.results.stats.sizes.lacking import recipes_lacking, sizes_lacking
from fp4dse.results.stats.sizes.loss_law import loss_law
from fp4dse.results.stats.sizes.points import SIZES_READ
from fp4dse.results.stats.sizes.scaling import scaling
from fp4dse.results.stats.techniques.divergence import divergence
from fp4dse.results.stats.techniques.effects import EFFECTS_READ, effects
from fp4dse.results.stats.techniques.lasso import stability
from fp4dse.results.stats.techniques.marginal import marginal
from fp4dse.results.stats.techniques.pooled import pooled_effects
from fp4dse.results.stats.techniques.recovered import RECOVERED_READ, recovered


def front(runs: pd.DataFrame) -> pd.DataFrame:
    """The recipes that are on the front, or were in some draw: the lines of `front_chance` where p_front is not 0.

    Columns: those of `recipes`; p_front: the chance that the recipe is on the true front, from 1,000 draws; expected,
    expected_low, expected_high: the gap that new seeds would give, with its 95 % interval, from this recipe's seeds,
    its factors and the other recipes; NaN where no recipe has two seeds. Order: cheapest first."""
    lines = front_chance(runs)
    return lines[lines["on_front"] | lines["p_front"].gt(0)].reset_index(drop=True)


VIEWS: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "recipes": summarize,
    "front": front,
    "confirmed": confirmed,
    "hypervolume": hypervolume,
    "effects": effects,
    "pooled": pooled_effects,
    "marginal": marginal,
    "matched": matched,
    "versus_best": against,
    "versus_soonest": versus_soonest,
    "margins": margins,
    "learning_rates": learning_rates,
    "stability": stability,
    "noise_floor": noise_floor,
    "recovered": recovered,
    "rollout_numbers": rollout_numbers,
    "rollout_effects": rollout_effects,
    "divergence": divergence,
    "loss_law": loss_law,
    "scaling": scaling,
    "extrapolation": extrapolation,
    "agreement": agreement,
    "published": published,
}
"""View -> the function of the runs that makes it. A view is made only for a query that names it."""

LACKING: dict[str, Callable[[pd.DataFrame, str], str]] = {
    "loss_law": sizes_lacking,
    "scaling": sizes_lacking,
    "extrapolation": sizes_lacking,
    "agreement": partial(recipes_lacking, least=2),
    "published": recipes_lacking,
    "rollout_numbers": nothing_recorded,
    "rollout_effects": nothing_recorded,
}
"""View -> a function of the runs and the store's path: empty, or why they cannot support it and what would."""

BRIEF: dict[str, tuple[str, ...]] = {
    "recipes": (
        "task label gap overhead",
        "on_front",
        "time_to_quality",
        "note",
        "gap_bf16",
        "gap_low gap_high",
        "overhead_low overhead_high",
        "pairs",
        "rollout_overhead",
        "iteration_overhead rollout_share",
        "preset",
    ),
    "front": (
        "task label gap overhead",
        "on_front",
        "p_front",
        "expected",
        "gap_bf16",
        "expected_low expected_high",
        "overhead_low overhead_high",
        "preset",
    ),
    "confirmed": ("task label gap screened", "recommended", "estimate low high", "overhead", "verdict moved", "preset"),
    "hypervolume": ("task hypervolume", "low high", "axis", "recipes on_front", "preset"),
    "effects": ("task factor level with_factor with_level effect", "low high", "reference", "q"),
    "pooled": ("factor level with_factor with_level effect", "low high", "agree", "reference", "q"),
    "marginal": ("task factor level difference", "low high untried", "matches", "reference", "helps"),
    "matched": ("task value label gap", "rival_label difference", "verdict", "low high"),
    "versus_best": ("task label difference", "verdict", "more_seeds", "low high", "pairs"),
    "versus_soonest": ("task label difference", "verdict", "more_seeds", "low high", "pairs", "ranked_by"),
    "margins": ("task margin margin_of", "preset"),
    "learning_rates": ("task label lr", "grid at_edge", "source", "optimism", "same_grid"),
    "stability": ("task factor level selected", "coefficient", "low high"),
    "noise_floor": ("task noise_floor", "val_loss", "seeds", "lr", "preset"),
    "recovered": (
        "task start label of_base",
        "of_base_low of_base_high",
        "of_bf16",
        "loss lost",
        "pairs",
        "ptq_label",
        "lr",
    ),
    "rollout_numbers": ("task label number value", "low high", "difference", "difference_low difference_high", "seeds"),
    "rollout_effects": ("treatment trainer number difference", "low high", "without", "q", "lr", "pairs seeds", "task"),
    "divergence": ("task factor level with_factor with_level diverged", "recipes"),
    "loss_law": ("task floor parameters_exponent tokens_exponent", "presets", "misfit", "note"),
    "scaling": ("task label eff_n eff_d", "largest_gap", "eff_n_low eff_n_high", "size_exponent", "presets", "note"),
    "extrapolation": ("task preset label model predicted measured", "error", "agree pairs", "low high"),
    "agreement": (
        "preset published group agree pairs",
        "cheapest lane_s",
        "spearman spearman_low spearman_high",
        "ceiling_agree ceiling_spearman",
        "recipes",
    ),
    "published": ("preset published scheme published_gap gap", "gap_low gap_high", "group", "label"),
}
"""View -> the columns that a narrow terminal shows: what cannot be left out, then groups, the weightiest first."""


def for_paper(name: str, answer: pd.DataFrame) -> pd.DataFrame:
    """The columns of a view that a table in print has: the two weightiest groups of BRIEF, without those that say the
    same in all lines, and of a pair of levels the other one as `with`."""
    named = [column for column in " ".join(BRIEF[name][:2]).split() if column in answer]
    found = answer[[column for column in named if len(answer) < 2 or answer[column].nunique(dropna=False) > 1]]
    if {"with_factor", "with_level"} <= set(found):
        other = found["with_factor"] + " = " + found["with_level"]
        position = found.columns.get_loc("with_factor")
        found = found.drop(columns=["with_factor", "with_level"])
        found.insert(position, "with", other)
    return found


VIEWS_READ = list(dict.fromkeys([*VERDICTS_READ, *EFFECTS_READ, *SIZES_READ, *RECOVERED_READ, "lane_s"]))
"""The columns of runs that views are made from."""

MORE_READ: dict[str, tuple[str, ...]] = {"rollout_numbers": RECORDED_READ, "rollout_effects": RECORDED_READ}
"""View -> columns of runs that it is made from beside those, read for it alone: they are most of a store's bytes."""


def columns_read(names: Iterable[str]) -> list[str]:
    """The columns of runs that these views are made from."""
    return [*VIEWS_READ, *dict.fromkeys(column for name in names for column in MORE_READ.get(name, ()))]


_TEXTS = {
    *SETTING,
    "config_id",
    "baseline_id",
    "label",
    "name",
    "metric_name",
    "metric_better",
    "gap_unit",
    "note",
    "kind",
    "factor",
    "level",
}
_TEXTS |= {
    "with_factor",
    "with_level",
    "reference",
    "basis",
    "untried",
    "axis",
    "by",
    "rival",
    "rival_label",
    "ptq_label",
    "start",
    "verdict",
}
_TEXTS |= {"grid", "model", "published", "group", "scheme", "differs", "source", "margin_of", "ranked_by"}
_TEXTS -= {"rev_quantizers", "rev_engine", "rev_task"}
"""The columns of views that are texts, for views without a value in them."""


def to_arrow(name: str, runs: pd.DataFrame) -> pa.Table:
    """The view as a table whose columns have a type even where there is no value in them."""
    table = pa.Table.from_pandas(VIEWS[name](runs), preserve_index=False).replace_schema_metadata(None)
    fields = []
    for field in table.schema:
        empty = len(table) == 0 or pa.types.is_null(field.type)
        type_ = (pa.string() if field.name in _TEXTS else pa.float64()) if empty else field.type
        fields.append(pa.field(field.name, type_))
    return table.cast(pa.schema(fields))
