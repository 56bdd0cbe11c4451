"""One explicit Arrow schema for a row = one trained lane, used for writing and for reading.

Parquet readers drop or retype columns that only some files have, without a word. With one schema stated in code a
column that a file lacks reads as null and nothing else can happen. Two rules keep stores readable for years: a new
column raises SCHEMA_VERSION (so that an older program refuses instead of dropping it), and no column ever changes
its type. 17 has the columns of 16; its `recorded` may have steps of a series apart, which an older program would take
for a series.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from fp4dse.dse import Recipe, StoreError, points, recipe_files
from fp4dse.dse.cost import OVERHEAD_OF, activation_bits, bits_per_element, overhead, rollout_overhead

SCHEMA_VERSION = 17

TEXT, WHOLE, COUNT, REAL = pa.string(), pa.int64(), pa.int32(), pa.float64()
"""Column types. A COUNT column reaches pandas as nullable Int32; WHOLE is for numbers that a done row always has."""


class Column(NamedTuple):
    """A column of a row; docs/schema.md shows the meaning."""

    type: pa.DataType
    meaning: str = ""
    """Empty for the axes of the recipe: schema_page.py puts theirs together from their names."""


KEY: dict[str, Column] = {
    "config_id": Column(TEXT, "16 hex digits over the canonical recipe; learning rate and seed are not part of it"),
    "lr": Column(REAL, "learning rate, its highest value where it has a schedule"),
    "task": Column(TEXT, "what is learned"),
    "preset": Column(TEXT, "how big"),
    "dataset_digest": Column(TEXT, "over the data as they were trained on, and over the weights of `--from`"),
    "seed": Column(WHOLE, "of initial weights, data order and stochastic rounding"),
    "device_class": Column(TEXT, "what of the device can change bits"),
    "software_class": Column(TEXT, "what of the software can change bits"),
    "rev_quantizers": Column(WHOLE, "revision of the quantizers; a fix that changes results raises it"),
    "rev_engine": Column(WHOLE, "revision of the training engine"),
    "rev_task": Column(WHOLE, "revision of the task"),
}
"""The columns that identify a row: equal keys mean the same training, bit for bit."""

_CASTS = {name: {TEXT: str, WHOLE: int, REAL: float}[column.type] for name, column in KEY.items()}

STATUSES = ("done", "diverged", "pruned", "failed")
"""`failed` is the machine's fault and is tried again; `diverged` is a result. `pruned`, dropped at a rung, is one for
sweeps with rungs; others train it."""

RECIPE: dict[str, Column] = {
    "recipe": Column(TEXT, "the canonical recipe as JSON"),
    "recipe_label": Column(TEXT, "the recipe in words"),
    "recipe_name": Column(TEXT, "the shipped recipe that it equals, or null"),
    "is_baseline": Column(pa.bool_(), "plain BF16"),
    "baseline_id": Column(
        TEXT,
        "config_id of what gaps are measured from: BF16 with the optimizer, clip, loss scale, schedule and the rest of "
        "the training side of a recipe that quantizes; plain BF16 for one that does not. Read as such from older rows",
    ),
    "points": Column(WHOLE, "overhead as the technique count of arXiv 2509.17791; 0 for BF16"),
    "bits_per_element": Column(REAL, "stored bits per operand element, scales included, mean over the six operands"),
    "activation_bits": Column(REAL, "bits that the backward pass keeps of each element of a layer's input"),
    "overhead": Column(
        REAL,
        "modelled time of a training step relative to BF16 on a named chip; where the chip lacks what the "
        "recipe needs, as if it had it (`fp4dse cost` says so)",
    ),
    "overhead_of": Column(TEXT, "the model, the chip and the revision of the cost model that it is of"),
    "rollout_overhead": Column(
        REAL,
        "modelled time of a token that the recipe's rollout, or else its own forward pass, samples, relative to "
        "BF16, of the default model on the default chip: 128 answers of 4,096 tokens at once",
    ),
    "signature": Column(
        TEXT,
        "what of the recipe decides the shape of the computation; lanes that share it run together",
    ),
    **{
        name: Column({str: TEXT, int: COUNT, float: REAL, type(None): REAL}[type(value)])  # None: a number, the task's
        for name, value in Recipe.named("nvfp4").columns().items()
    },
}
"""Columns that follow from the recipe alone; `recipe_columns` fills them."""

OUTCOME: dict[str, Column] = {
    "status": Column(
        TEXT,
        "done, diverged (a result), pruned (dropped at a rung) or failed (the machine's fault, tried again)",
    ),
    "diverged_step": Column(COUNT, "the step at which the loss became NaN or Inf"),
    "pruned_step": Column(COUNT, "the step after which the lane was dropped"),
    "failure": Column(TEXT, "why the lane failed, in one line"),
    "train_loss_min": Column(REAL, "lowest logged training loss"),
    "train_loss_final": Column(
        REAL,
        "mean training loss of the last tenth of the steps (before rev_engine 7 of the last twentieth), whose batches "
        "are the same for all recipes of a seed",
    ),
    "val_loss": Column(
        REAL,
        "loss on held-out data after training, with the quantizers of the forward pass on as in training, but for "
        "rounding by chance, which is rounding to nearest (before rev_engine 7 it was by chance); what gaps are made "
        "of",
    ),
    "val_loss_bf16": Column(
        REAL,
        "the same with BF16 in place of every quantizer: the loss of the weights that training found. Null for rows "
        "of older engines and lanes that did not finish",
    ),
    "val_loss_merged": Column(
        REAL,
        "as val_loss, with trained factors added to the weights before these are quantized (the merge of LoRA); null "
        "where a recipe has no factors",
    ),
    "val_metric": Column(REAL, "the task's metric on the held-out data, evaluated as val_loss"),
    "metric_name": Column(TEXT, "its name, null if the task has none"),
    "metric_better": Column(TEXT, "`lower` or `higher`: which way it is better; null if the task does not say"),
    "gap_unit": Column(
        TEXT,
        "`points`: val_loss is a share, and gaps are differences of it, a hundredth a point of accuracy; null: gaps "
        "are logarithms of ratios",
    ),
    "lr_source": Column(
        TEXT,
        "where the learning rate is from: `tuned` (the preset's, for the recipe's class), `preset` (the preset's, "
        "which nobody tuned), `given` (--lr or the space) or `searched` (sweep --tune; of a fresh "
        "seed, by the screened ones); null in old rows",
    ),
    "dataset_contents": Column(
        TEXT, "packages and versions that the data were made of (`--data python`); null: preset and path say it all"
    ),
    "start_digest": Column(TEXT, "over the weights that all lanes started from (`--from`); null: drawn by the seed"),
    "start_method": Column(
        TEXT,
        "by what these were fitted to a recipe's quantizers (`weights fit`: gptq, block-ap …); null: by nothing, or "
        "nobody knows, as in rows before schema 16",
    ),
    "steps": Column(COUNT, "optimizer steps"),
    "parameters": Column(REAL, "of the model, without embeddings and head; null if the task does not say"),
    "tokens": Column(REAL, "that the whole training reads, repeated ones too; null if the task has none"),
    "train_s": Column(REAL, "seconds of training of the whole population of lanes"),
    "setup_s": Column(REAL, "seconds before the first step"),
    "lane_s": Column(REAL, "train_s / lanes"),
    "lanes": Column(COUNT, "how many were trained together"),
    "tokens_per_s": Column(
        REAL,
        "that the population read in a second of training; null if the task has no tokens or a lane ended before the "
        "others",
    ),
    "peak_memory_bytes": Column(
        WHOLE,
        "of the population: on a GPU the most that its tensors took; on a CPU the most that the whole process took "
        "(resident set), Python, libraries and data included, which hides what a small model keeps",
    ),
    "kept_bytes": Column(
        REAL,
        "that the forward pass of the population's first step kept for its backward pass, parameters apart; null if "
        "that is not known",
    ),
    "device": Column(TEXT, "cpu or cuda"),
    "device_name": Column(TEXT, "as the driver gives it"),
    "threads": Column(COUNT, "of the worker"),
    "dtype": Column(TEXT, "of activations between layers"),
    "quantizer_backend": Column(TEXT, "which path quantized"),
    "gemm_backend": Column(
        TEXT,
        "which products were used: one name, or three in the order fprop, dgrad, wgrad; `/promoted+rest`: "
        "the unit adds some products in bits of its own before they are added in FP32, and what it does not hold after",
    ),
    "fallbacks": Column(pa.list_(TEXT), "paths that were wanted and not taken, with the reason"),
    "torch_version": Column(TEXT, "of PyTorch"),
    "python_version": Column(TEXT, "of Python"),
    "fp4dse_version": Column(TEXT, "of this program"),
    "git_commit": Column(TEXT, "the commit of this program"),
    "host": Column(TEXT, "name of the machine"),
    "stage": Column(
        TEXT,
        "`confirm`: a fresh seed of a candidate (`fp4dse confirm`); `tune`: it chose a learning rate (`sweep --tune`); "
        "null: screened, which all views but `confirmed` are of",
    ),
    "created_at": Column(pa.timestamp("us", tz="UTC"), "when the row was made, UTC"),
}

CURVES: dict[str, Column] = {
    "curve_step": Column(pa.list_(pa.int32()), "the steps at which the training loss was logged"),
    "curve_loss": Column(pa.list_(REAL), "the training loss there"),
}
"""Read only when asked for: they are most of a store's bytes."""

BY_NAME: dict[str, Column] = {
    "metrics": Column(pa.map_(TEXT, REAL), "all metrics of the task by name"),
    "pictures": Column(pa.map_(TEXT, pa.binary()), "PNG files by name"),
    "recorded": Column(
        pa.map_(TEXT, pa.list_(REAL)),
        "gradient norms, noise ratios, errors and lost shares at the log-spaced steps `step`, and series NAME of other "
        "steps, `step/NAME`: what a rollout and an update have anyway, at every step; if asked for (`sweep --record`)",
    ),
}
"""Read only by `store.by_name`: what a task measures, draws and records beyond its loss and its first metric."""

ABOUT_ROW: dict[str, Column] = {
    "schema_version": Column(COUNT, "version of this schema that the row was written with"),
    "run_id": Column(TEXT, "16 hex digits over the key: equal ids mean the same training"),
}
COLUMNS = {**ABOUT_ROW, **KEY, **RECIPE, **OUTCOME, **CURVES, **BY_NAME}
ROW = pa.schema([(name, column.type) for name, column in COLUMNS.items()])
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
        "baseline_id": r.baseline().config_id,
        "points": points(r),
        "bits_per_element": bits_per_element(r),
        "activation_bits": activation_bits(r),
        "overhead": overhead(r),
        "overhead_of": OVERHEAD_OF,
        "rollout_overhead": rollout_overhead(r),
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
