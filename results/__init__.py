"""The results of trained lanes: the Parquet store, queries, statistics, the Pareto front, tables and the report.

Statistics and reports are imported when somebody asks for their names: a sweep needs the store alone.
"""

from typing import TYPE_CHECKING

from fp4dse.dse.program.lazy import lazy
from fp4dse.results.store.schema import recipe_columns, run_id
from fp4dse.results.store.store import Store, open_store

if TYPE_CHECKING:
    from fp4dse.results.report import write_report
    from fp4dse.results.stats.agreement import agreement
    from fp4dse.results.stats.candidates import candidates
    from fp4dse.results.stats.confirmed import confirmed
    from fp4dse.results.stats.divergence import divergence
    from fp4dse.results.stats.effects import effects
    from fp4dse.results.stats.equal_cost import matched
    from fp4dse.results.stats.equivalence import against, compare
    from fp4dse.results.stats.extrapolation import extrapolation
    from fp4dse.results.stats.front_chance import front_chance, hypervolume
    from fp4dse.results.stats.lasso import stability
    from fp4dse.results.stats.loss_law import loss_law
    from fp4dse.results.stats.marginal import marginal, neighbours
    from fp4dse.results.stats.margins import margins
    from fp4dse.results.stats.paired import add_gap, learning_rates
    from fp4dse.results.stats.pareto import front
    from fp4dse.results.stats.pooled import pooled_effects
    from fp4dse.results.stats.recovered import recovered
    from fp4dse.results.stats.scaling import scaling
    from fp4dse.results.stats.summary import noise_floor, summarize
    from fp4dse.results.text.frames import records
    from fp4dse.results.text.pareto_table import pareto_table

__getattr__ = lazy(
    __name__,
    **{
        "report": ("write_report",),
        "stats.agreement": ("agreement",),
        "stats.candidates": ("candidates",),
        "stats.confirmed": ("confirmed",),
        "stats.divergence": ("divergence",),
        "stats.effects": ("effects",),
        "stats.equal_cost": ("matched",),
        "stats.equivalence": ("against", "compare"),
        "stats.extrapolation": ("extrapolation",),
        "stats.front_chance": ("front_chance", "hypervolume"),
        "stats.lasso": ("stability",),
        "stats.loss_law": ("loss_law",),
        "stats.marginal": ("marginal", "neighbours"),
        "stats.margins": ("margins",),
        "stats.paired": ("add_gap", "learning_rates"),
        "stats.pareto": ("front",),
        "stats.pooled": ("pooled_effects",),
        "stats.recovered": ("recovered",),
        "stats.scaling": ("scaling",),
        "stats.summary": ("noise_floor", "summarize"),
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
    "write_report",
]
