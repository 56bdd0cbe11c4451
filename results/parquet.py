"""Rows in and out of Parquet files, always under the one schema, each run once.

The same run may stand in several files: tried again after a failure, or copied when a crash fell between writing a
part and deleting its inputs. `read` gives one row per run: done or diverged first, then pruned,
then failed ones, and of these the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from fp4dse.results.schema import ROW

IDENTITY = ["run_id", "status", "created_at"]
"""The columns that decide which of several rows of a run counts."""


def encode(table: pa.Table) -> memoryview:
    """A Parquet file in memory, so that one plain write meets all that a disk can answer."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return memoryview(sink.getvalue())


def dataset(files: Sequence[Path]) -> ds.Dataset:
    """The files as one data set under ROW; a column that a file lacks reads as null."""
    if not files:
        return ds.dataset(ROW.empty_table())
    return ds.dataset([str(file) for file in files], schema=ROW, format="parquet")


def scan(files: Sequence[Path], columns: Sequence[str], condition: ds.Expression | None = None) -> pa.Table:
    """All rows, copies included. FileNotFoundError if a file is gone, ArrowInvalid or OSError if one is broken."""
    return dataset(files).to_table(list(columns), filter=condition)


def read(files: Sequence[Path], columns: Sequence[str], condition: ds.Expression | None = None) -> pa.Table:
    """One row per run. `condition` may only ask for what is equal in all rows of a run."""
    table = scan(files, list(dict.fromkeys([*columns, *IDENTITY])), condition)
    keep = winners(table)
    return (table if keep.all() else table.filter(pa.array(keep))).select(columns)


def winners(table: pa.Table) -> np.ndarray:
    """Which rows count, bool [rows]: per run the last of the newest of the finished ones, else of the pruned
    ones, else of the failed ones. Needs IDENTITY."""
    copies = repeated(table)
    keep = ~copies
    if copies.any():
        few = table.select(IDENTITY).filter(pa.array(copies)).to_pandas()
        worth = few["status"].map({"failed": 0, "pruned": 1}).fillna(2)
        few = few.assign(row=np.flatnonzero(copies), finished=worth)
        few = few.sort_values(["finished", "created_at"], kind="stable", na_position="first")
        keep[few.drop_duplicates("run_id", keep="last")["row"]] = True
    return keep


def repeated(table: pa.Table) -> np.ndarray:
    """Which rows belong to a run that has several, bool [rows]."""
    return table["run_id"].to_pandas().duplicated(keep=False).to_numpy()


def why_unreadable(file: Path) -> str | None:
    """What is wrong with a file, in one line; None if it can be read, or is gone because it was joined into a part."""
    try:
        pq.read_table(file, schema=ROW)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError) as error:
        return str(error).splitlines()[0]
    return None


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """Counts become nullable integers, so that a hole does not turn a block size of 16 into 16.0."""
    return table.to_pandas(types_mapper={pa.int32(): pd.Int32Dtype()}.get)
