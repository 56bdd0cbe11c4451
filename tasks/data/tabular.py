"""A table with a target: `--data FILE:COLUMN`, of a CSV file with a header or a Parquet file.

Every other column is a feature. All must be numbers, except those that are named as categories, as in
`FILE:COLUMN?categories=A,B`: such a column becomes one of zeros and ones for each value that it has. A fifth of the
rows, the same ones for every seed, is held out; features and target are shifted and scaled to mean 0 and variance 1
over the others, so that a loss of 1 is that of always saying the mean.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.tasks.data.user_files import Fingerprint, fingerprint, first_line, refuse_large_parquet, split_column
from fp4dse.tasks.draws import fixed_order

if TYPE_CHECKING:
    import pyarrow as pa

MOST_CATEGORIES = 256
"""Of a column: more are names or numbers, not kinds."""


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
def _read(path: str, file: Path, asked: str | None, _: Fingerprint) -> Table:
    columns = _columns(file)
    target, names = (asked, []) if asked and asked in columns else _categories(path, asked or "")
    if target not in columns or len(columns) < 2:
        raise ConfigError("--data", path, f"FILE:COLUMN with one of {', '.join(columns)}, and another column beside it")
    for name in names:
        if name not in columns or name == target:
            others = ", ".join(other for other in columns if other != target)
            raise ConfigError(f"--data {path}: categories", name, others)
    words = [name for name, column in columns.items() if not _is_number(column.type) and name not in names]
    values: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        where = f"--data {file}: column {name}"
        if name in names:
            values |= _indicators(where, name, column)
        else:
            hint = f"; or words as categories, {file}:{target}?categories={','.join([*names, *words])}"
            values[name] = _numbers(where, column, hint if name != target and target not in words else "")
    digest = hashlib.sha256(f"{list(values)} {target}".encode() + np.stack([*values.values()], axis=1).tobytes())
    y = values.pop(target)[:, None]
    x = np.stack([*values.values()], axis=1)
    order = fixed_order(len(y))
    cut = len(y) - len(y) // 5
    train, held_out = order[:cut].numpy(), order[cut:].numpy()
    if not len(held_out):
        raise ConfigError("--data", path, f"5 rows or more (found {len(y)})")
    if np.ptp(y[train]) == 0:
        raise ConfigError("--data", path, f"a target that varies ({target} is {y[0, 0]:g} in every row)")
    x, y = _standardized(x, train), _standardized(y, train)
    a, b, c, d = (torch.from_numpy(part[rows]) for rows in (train, held_out) for part in (x, y))
    return Table(f"{file.name}:{asked}", a, b, c, d, digest.hexdigest()[:16])


def _categories(path: str, asked: str) -> tuple[str, list[str]]:
    """`COLUMN?categories=A,B` as the target and the other names."""
    target, mark, option = asked.partition("?")
    key, _, names = option.partition("=")
    if mark and (key != "categories" or not all(names.split(","))):
        raise ConfigError("--data", path, "FILE:COLUMN?categories=COLUMN,COLUMN")
    return target, names.split(",") if mark else []


def _columns(file: Path) -> dict[str, pa.ChunkedArray]:
    """Column name -> pyarrow column."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    try:
        if file.suffix == ".csv":
            table = pa.csv.read_csv(file)
        elif file.suffix == ".parquet":
            refuse_large_parquet(file)
            table = pa.parquet.read_table(file)
        else:
            raise ConfigError("--data", str(file), "a file that ends in .csv or .parquet")
    except pa.ArrowException as error:
        raise ConfigError("--data", str(file), f"a readable table ({first_line(error)})") from None
    for name in table.column_names:
        if not name or table.column_names.count(name) > 1:
            raise ConfigError(f"--data {file}: header", name, "a name for each column, each once")
    return dict(zip(table.column_names, table.columns, strict=True))


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return any(is_kind(kind) for is_kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def _numbers(where: str, column: pa.ChunkedArray, hint: str) -> np.ndarray:
    """float64 [n]. ConfigError names the first row, counted from 1, that has no finite number."""
    if _is_number(column.type):
        values = np.asarray(column.to_numpy(), dtype=np.float64)
    else:
        values = np.array([_number(value) for value in column.to_pylist()])
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        found = column[int(wrong[0])].as_py()
        more = f" ({len(wrong)} rows have none)" if len(wrong) > 1 else ""
        accepted = f"a finite number{more}{hint if isinstance(found, str) and found.strip() else ''}"
        raise ConfigError(f"{where}, row {wrong[0] + 1}", found, accepted)
    if not _is_number(column.type):
        raise ConfigError(where, str(column.type), f"a column of numbers{hint}")
    return values


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        return math.nan


def _indicators(where: str, name: str, column: pa.ChunkedArray) -> dict[str, np.ndarray]:
    """`NAME=VALUE` -> float64 [n], 1 where the column has the value."""
    values = column.to_pylist()
    for row, value in enumerate(values):
        if value is None or value == "" or value != value:
            raise ConfigError(f"{where}, row {row + 1}", value, "a category in every row")
    known = sorted(set(values), key=str)
    if len(known) > MOST_CATEGORIES:
        raise ConfigError(where, f"{len(known)} different values", f"{MOST_CATEGORIES} categories at most")
    return {f"{name}={one}": np.array([value == one for value in values], dtype=np.float64) for one in known}


def _standardized(values: np.ndarray, train: np.ndarray) -> np.ndarray:
    known = values[train]
    varies = np.ptp(known, axis=0) > 0
    return (np.where(varies, values - known.mean(axis=0), 0.0) / np.where(varies, known.std(axis=0), 1.0)).astype(
        np.float32
    )
