"""What became of the lanes: the Parquet store, queries, statistics, the Pareto front, tables and the report.

What statistics and reports are made with is imported when it is asked for: a sweep needs the store alone.
"""

from typing import TYPE_CHECKING

from fp4dse.dse.lazy import lazy
from fp4dse.results.schema import recipe_columns, run_id
from fp4dse.results.store import Store, open_store

if TYPE_CHECKING:
    from fp4dse.results.adding import marginal, neighbours
    from fp4dse.results.chance import front_chance, hypervolume
    from fp4dse.results.diverged import divergence
    from fp4dse.results.equivalence import against, compare
    from fp4dse.results.lasso import stability
    from fp4dse.results.linear import effects
    from fp4dse.results.paired import add_gap, learning_rates
    from fp4dse.results.pareto import front
    from fp4dse.results.pooled import pooled_effects
    from fp4dse.results.report import write_report
    from fp4dse.results.rivals import matched
    from fp4dse.results.summary import noise_floor, summarize
    from fp4dse.results.tables import pareto_table, records

__getattr__ = lazy(
    __name__,
    adding=("marginal", "neighbours"),
    chance=("front_chance", "hypervolume"),
    diverged=("divergence",),
    equivalence=("against", "compare"),
    lasso=("stability",),
    linear=("effects",),
    paired=("add_gap", "learning_rates"),
    pareto=("front",),
    pooled=("pooled_effects",),
    report=("write_report",),
    rivals=("matched",),
    summary=("noise_floor", "summarize"),
    tables=("pareto_table", "records"),
)

__all__ = [
    "Store",
    "add_gap",
    "against",
    "compare",
    "divergence",
    "effects",
    "front",
    "front_chance",
    "hypervolume",
    "learning_rates",
    "marginal",
    "matched",
    "neighbours",
    "noise_floor",
    "open_store",
    "pareto_table",
    "pooled_effects",
    "recipe_columns",
    "records",
    "run_id",
    "stability",
    "summarize",
    "write_report",
]
