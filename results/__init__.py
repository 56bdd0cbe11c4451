"""What became of the lanes: the Parquet store, queries, statistics, the Pareto front, tables and the report.

What statistics and reports are made with is imported when it is asked for: a sweep needs the store alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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

_LATER = {
    "marginal": "adding",
    "neighbours": "adding",
    "front_chance": "chance",
    "hypervolume": "chance",
    "divergence": "diverged",
    "against": "equivalence",
    "compare": "equivalence",
    "stability": "lasso",
    "effects": "linear",
    "add_gap": "paired",
    "learning_rates": "paired",
    "front": "pareto",
    "pooled_effects": "pooled",
    "write_report": "report",
    "matched": "rivals",
    "noise_floor": "summary",
    "summarize": "summary",
    "pareto_table": "tables",
    "records": "tables",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


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
