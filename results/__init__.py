"""The results of trained lanes: the Parquet store, queries, statistics, the Pareto front, tables and the report.

Statistics and reports are imported when somebody asks for their names: a sweep needs the store alone.
"""

from typing import TYPE_CHECKING

from fp4dse.dse.program.lazy import lazy
from fp4dse.results.store.schema import recipe_columns, run_id
from fp4dse.results.store.store import Store, open_store

if TYPE_CHECKING:
    from fp4dse.results.report import write_report
    from fp4dse.results.stats.learning_rates import learning_rates
    from fp4dse.results.stats.paired import add_gap
    from fp4dse.results.stats.recipes.candidates import candidates
    from fp4dse.results.stats.recipes.confirmed import confirmed
    from fp4dse.results.stats.recipes.equal_cost import matched
    from fp4dse.results.stats.recipes.equivalence import against, compare
    from fp4dse.results.stats.recipes.front_chance import front_chance, hypervolume
    from fp4dse.results.stats.recipes.pareto import front
    from fp4dse.results.stats.recipes.ranked import versus_soonest
    from fp4dse.results.stats.recipes.summary import noise_floor, summarize
    from fp4dse.results.stats.recipes.tokens_worth import margins
    from fp4dse.results.stats.sizes.agreement import agreement
    from fp4dse.results.stats.sizes.extrapolation import extrapolation
    from fp4dse.results.stats.sizes.loss_law import loss_law
    from fp4dse.results.stats.sizes.scaling import scaling
    from fp4dse.results.stats.techniques.divergence import divergence
    from fp4dse.results.stats.techniques.effects import effects
    from fp4dse.results.stats.techniques.lasso import stability
    from fp4dse.results.stats.techniques.marginal import marginal, neighbours
    from fp4dse.results.stats.techniques.pooled import pooled_effects
    from fp4dse.results.stats.techniques.recovered import recovered
    from fp4dse.results.text.frames import records
    from fp4dse.results.text.pareto_table import pareto_table

__getattr__ = lazy(
    __name__,
    **{
        "report": ("write_report",),
        "stats.learning_rates": ("learning_rates",),
        "stats.paired": ("add_gap",),
        "stats.recipes.candidates": ("candidates",),
        "stats.recipes.confirmed": ("confirmed",),
        "stats.recipes.equal_cost": ("matched",),
        "stats.recipes.equivalence": ("against", "compare"),
        "stats.recipes.front_chance": ("front_chance", "hypervolume"),
        "stats.recipes.tokens_worth": ("margins",),
        "stats.recipes.pareto": ("front",),
        "stats.recipes.ranked": ("versus_soonest",),
        "stats.recipes.summary": ("noise_floor", "summarize"),
        "stats.sizes.agreement": ("agreement",),
        "stats.sizes.extrapolation": ("extrapolation",),
        "stats.sizes.loss_law": ("loss_law",),
        "stats.sizes.scaling": ("scaling",),
        "stats.techniques.divergence": ("divergence",),
        "stats.techniques.effects": ("effects",),
        "stats.techniques.lasso": ("stability",),
        "stats.techniques.marginal": ("marginal", "neighbours"),
        "stats.techniques.pooled": ("pooled_effects",),
        "stats.techniques.recovered": ("recovered",),
        "text.frames": ("records",),
        "text.pareto_table": ("pareto_table",),
    },
)

__all__ = [
    "Store",
    "add_gap",
    "against",
    "agreement",
    "candidates",
    "compare",
    "confirmed",
    "divergence",
    "effects",
    "extrapolation",
    "front",
    "front_chance",
    "hypervolume",
    "learning_rates",
    "loss_law",
    "marginal",
    "margins",
    "matched",
    "neighbours",
    "noise_floor",
    "open_store",
    "pareto_table",
    "pooled_effects",
    "recipe_columns",
    "records",
    "recovered",
    "run_id",
    "scaling",
    "stability",
    "summarize",
    "versus_soonest",
    "write_report",
]
