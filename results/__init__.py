"""What became of the lanes: the Parquet store, queries, statistics, the Pareto front, tables and the report."""

from fp4dse.results.schema import recipe_columns, run_id
from fp4dse.results.stats import add_gap, compare, noise_floor, summarize
from fp4dse.results.store import Store, open_store

__all__ = [
    "Store",
    "add_gap",
    "compare",
    "noise_floor",
    "open_store",
    "recipe_columns",
    "run_id",
    "summarize",
]
