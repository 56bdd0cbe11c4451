"""One explicit Arrow schema for a row = one trained lane, used for writing and for reading.

Parquet readers drop or retype columns that only some files have, without a word. With one schema stated in code a
column that a file lacks reads as null and nothing else can happen. Two rules keep stores readable for years: a new
column raises SCHEMA_VERSION (so that an older program refuses instead of dropping it), and no column ever changes
its type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa

from fp4dse.dse import Recipe, StoreError, points, recipe_files
from fp4dse.dse.cost import OVERHEAD_OF, activation_bits, bits_per_element, overhead

SCHEMA_VERSION = 5

TEXT, WHOLE, COUNT, REAL = pa.string(), pa.int64(), pa.int32(), pa.float64()
"""Column types. A COUNT column reaches pandas as nullable Int32; WHOLE is for numbers that a done row always has."""

KEY: dict[str, pa.DataType] = {
    "config_id": TEXT,
    "lr": REAL,
    "task": TEXT,
    "preset": TEXT,
    "dataset_digest": TEXT,
    "seed": WHOLE,
    "device_class": TEXT,
    "software_class": TEXT,
    "rev_quantizers": WHOLE,
    "rev_engine": WHOLE,
    "rev_task": WHOLE,
}
"""The columns that identify a row: equal keys mean the same training, bit for bit."""

_CASTS: dict[str, type] = {name: {TEXT: str, WHOLE: int, REAL: float}[type_] for name, type_ in KEY.items()}

STATUSES = ("done", "diverged", "pruned", "failed")
"""`failed` is the machine's fault and is tried again; `diverged` is a result. `pruned`, dropped at a rung, is one for
sweeps with rungs; others train it."""

RECIPE: dict[str, pa.DataType] = {
    "recipe": TEXT,  # JSON, canonical; fp4dse.dse.recipe_from_dict reads it back
    "recipe_label": TEXT,
    "recipe_name": TEXT,  # the shipped recipe that it equals, or null
    "is_baseline": pa.bool_(),
    "points": WHOLE,
    "bits_per_element": REAL,
    "activation_bits": REAL,  # kept for the backward pass per element of a layer's input
    "overhead": REAL,  # modelled step time, 1.0 = BF16's
    "overhead_of": TEXT,  # model, chip and revision of the cost model that it is of
    "signature": TEXT,
    **{
        name: {str: TEXT, int: COUNT, float: REAL, type(None): REAL}[type(value)]  # None: a number that is the task's
        for name, value in Recipe.named("nvfp4").columns().items()
    },
}
"""What follows from the recipe alone; `recipe_columns` fills it."""

OUTCOME: dict[str, pa.DataType] = {
    "status": TEXT,
    "diverged_step": COUNT,
    "pruned_step": COUNT,
    "failure": TEXT,
    "train_loss_min": REAL,
    "train_loss_final": REAL,
    "val_loss": REAL,
    "val_metric": REAL,
    "metric_name": TEXT,
    "metric_better": TEXT,
    "steps": COUNT,
    "train_s": REAL,  # of the whole population
    "setup_s": REAL,
    "lane_s": REAL,  # train_s / lanes
    "lanes": COUNT,
    "peak_memory_bytes": WHOLE,
    "device": TEXT,
    "device_name": TEXT,
    "threads": COUNT,
    "dtype": TEXT,
    "quantizer_backend": TEXT,
    "gemm_backend": TEXT,  # one name, or three in the order of fprop, dgrad, wgrad
    "fallbacks": pa.list_(TEXT),
    "torch_version": TEXT,
    "python_version": TEXT,
    "fp4dse_version": TEXT,
    "git_commit": TEXT,
    "host": TEXT,
    "created_at": pa.timestamp("us", tz="UTC"),
}

CURVES: dict[str, pa.DataType] = {"curve_step": pa.list_(pa.int32()), "curve_loss": pa.list_(REAL)}
"""Read only when asked for: they are most of a store's bytes."""

BY_NAME: dict[str, pa.DataType] = {
    "metrics": pa.map_(TEXT, REAL),  # all of the task's
    "pictures": pa.map_(TEXT, pa.binary()),  # PNG files
    "recorded": pa.map_(TEXT, pa.list_(REAL)),  # at the steps that stand under "step", where it was asked for
}
"""Read only by `store.by_name`: what a task measures, draws and records beyond its loss and its first metric."""

ROW = pa.schema({"schema_version": COUNT, "run_id": TEXT, **KEY, **RECIPE, **OUTCOME, **CURVES, **BY_NAME})
SCALARS = [name for name in ROW.names if name not in {**CURVES, **BY_NAME}]


def run_id(row: Mapping[str, Any]) -> str:
    """16 hex digits: SHA-256 over the key columns. StoreError names a key column that is missing."""
    values = []
    for name in KEY:
        if row.get(name) is None:
            raise StoreError(f"row: {name} is missing; it is part of the key ({', '.join(KEY)})")
        values.append(_CASTS[name](row[name]))
    return hashlib.sha256(msgspec.json.encode(values)).hexdigest()[:16]


@lru_cache(maxsize=65536)
def recipe_columns(recipe: Recipe) -> dict[str, object]:
    """config_id and every RECIPE column of a row. The dict is shared between calls: copy before changing it."""
    r = recipe.canonical()
    signature = r.signature()
    return {
        "config_id": r.config_id,
        "recipe": msgspec.json.encode(r, order="sorted").decode(),
        "recipe_label": r.label(),
        "recipe_name": _names().get(r.config_id),
        "is_baseline": r.config_id == Recipe.named("bf16").config_id,
        "points": points(r),
        "bits_per_element": bits_per_element(r),
        "activation_bits": activation_bits(r),
        "overhead": overhead(r),
        "overhead_of": OVERHEAD_OF,
        "signature": " ".join("/".join(part) for part in msgspec.structs.astuple(signature)),
        **r.columns(),
    }


@lru_cache(maxsize=1)
def _names() -> dict[str, str]:
    return {file.recipe.config_id: name for name, file in recipe_files().items()}


def to_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as an Arrow table; `run_id` and `schema_version` are filled in.

    StoreError names a column that is unknown, has the wrong type, or belongs to the key and is missing.
    """
    known = set(ROW.names)  # pyarrow makes a list of them at every look
    full = []
    for row in rows:
        unknown = [name for name in row if name not in known]
        if unknown:
            raise StoreError(f"row: unknown column {unknown[0]!r}; known are {', '.join(ROW.names)}")
        if row.get("status") not in STATUSES:
            raise StoreError(f"row: status is {row.get('status')!r}; accepted: {', '.join(STATUSES)}")
        full.append({**row, "run_id": run_id(row), "schema_version": SCHEMA_VERSION})
    columns = []
    for field in ROW:
        try:
            columns.append(pa.array([row.get(field.name) for row in full], field.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise StoreError(f"row: {field.name} must be {field.type}: {str(error).splitlines()[0]}") from None
    return pa.Table.from_arrays(columns, schema=ROW)
