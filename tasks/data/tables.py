"""A table of numbers with a target: `--data FILE:COLUMN`, of a CSV file with a header or a Parquet file.

Every other column is a feature. A fifth of the rows, the same ones for every seed, is held out; features and target are
shifted and scaled to mean 0 and variance 1 over the others, so that a loss of 1 is that of always saying the mean.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.kernels.arithmetic.philox import STREAMS, random32
from fp4dse.tasks.data.files import fingerprint, first_line, split_column


class Table(msgspec.Struct, frozen=True):
    """x: float32 [n, features], y: float32 [n, 1], standardized. digest: of the file's columns and the target."""

    name: str
    train_x: Tensor
    train_y: Tensor
    val_x: Tensor
    val_y: Tensor
    digest: str


def read_table(path: str) -> Table:
    """`FILE:COLUMN`. ConfigError where there is no such file or column, or something that is no finite number."""
    file, target = split_column(path)
    if not file.is_file():
        raise ConfigError("--data", path, "FILE:COLUMN of a .csv or .parquet file that exists")
    return _read(path, file, target, fingerprint([file]))


@cache
def _read(path: str, file: Path, target: str | None, _: tuple) -> Table:
    columns = _columns(file)
    if target not in columns or len(columns) < 2:
        raise ConfigError("--data", path, f"FILE:COLUMN with one of {', '.join(columns)}, and another column beside it")
    values = np.stack([_numbers(path, name, column) for name, column in columns.items()], axis=1)
    at = list(columns).index(target)
    features = np.delete(values, at, axis=1)
    digest = hashlib.sha256(f"{list(columns)} {target}".encode() + values.tobytes()).hexdigest()[:16]
    order = torch.argsort(random32(torch.zeros(1, dtype=torch.int64), STREAMS["data"], 0, 0, len(values))[0])
    cut = len(values) - len(values) // 5
    train, held_out = order[:cut].numpy(), order[cut:].numpy()
    if not len(held_out):
        raise ConfigError("--data", path, f"5 rows or more (found {len(values)})")
    if np.ptp(values[train, at]) == 0:
        raise ConfigError("--data", path, f"a target that varies ({target} is {values[0, at]:g} in every row)")
    x, y = _standardized(features, train), _standardized(values[:, [at]], train)
    a, b, c, d = (torch.from_numpy(part[rows]) for rows in (train, held_out) for part in (x, y))
    return Table(f"{file.name}:{target}", a, b, c, d, digest)


def _columns(file: Path) -> dict:
    """Column name -> pyarrow column."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    try:
        if file.suffix == ".csv":
            table = pa.csv.read_csv(file)
        elif file.suffix == ".parquet":
            table = pa.parquet.read_table(file)
        else:
            raise ConfigError("--data", str(file), "a file that ends in .csv or .parquet")
    except pa.ArrowException as error:
        raise ConfigError("--data", str(file), f"a readable table ({first_line(error)})") from None
    return dict(zip(table.column_names, table.columns, strict=True))


def _numbers(path: str, name: str, column) -> np.ndarray:
    """float64 [n]."""
    import pyarrow as pa

    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ConfigError("--data", path, f"columns of numbers (column {name} is {kind})")
    values = np.asarray(column.to_numpy(), dtype=np.float64)
    if missing := int((~np.isfinite(values)).sum()):
        raise ConfigError("--data", path, f"a finite number in every row (column {name} lacks it in {missing})")
    return values


def _standardized(values: np.ndarray, train: np.ndarray) -> np.ndarray:
    known = values[train]
    varies = np.ptp(known, axis=0) > 0
    return (np.where(varies, values - known.mean(axis=0), 0.0) / np.where(varies, known.std(axis=0), 1.0)).astype(
        np.float32
    )
