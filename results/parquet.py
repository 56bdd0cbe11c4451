"""Rows in and out of files, always under the one schema, each run once.

Parts are Parquet. The small files of the inbox are Arrow IPC: a Parquet file of a few rows takes 5 ms to open and to
read, because each of a hundred columns has its own header, an IPC file 0.2 ms; and there are thousands of them.

The same run may stand in several files: tried again after a failure, or copied when a crash fell between writing a
part and deleting its inputs. `read` gives one row per run: done or diverged first, then pruned,
then failed ones, and of these the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from fp4dse.results.remote import Place, RemotePath
from fp4dse.results.schema import ROW

ALL = pc.scalar(True)
"""The condition that every row meets."""

IDENTITY = ["run_id", "status", "created_at"]
"""The columns that decide which of several rows of a run counts."""

HEADER = b"ARROW1\0\0" + ROW.serialize().to_pybytes()
"""How an IPC file under ROW begins. Comparing bytes is faster than comparing a hundred fields."""


def encode(table: pa.Table) -> memoryview:
    """A Parquet file in memory, so that one plain write meets all that a disk can answer."""
    sink = pa.BufferOutputStream()
    # no dictionary for ids, nor within lists, which would go by longer names: their values do not repeat
    repeating = [field.name for field in table.schema if field.name != "run_id"]
    pq.write_table(table, sink, compression="zstd", use_dictionary=repeating)
    return memoryview(sink.getvalue())


def encode_small(table: pa.Table) -> memoryview:
    """An Arrow IPC file in memory; for the inbox."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def dataset(files: Sequence[Place]) -> ds.Dataset:
    """The files as one data set under ROW; a column that a file lacks reads as null."""
    if not files:
        return ds.dataset(ROW.empty_table())
    small, large = [file for file in files if is_small(file)], [file for file in files if not is_small(file)]
    if small and large:
        return ds.dataset([_open(small), _open(large)])
    return _open(files)


def is_small(file: Place) -> bool:
    """Whether it is one of the inbox's IPC files. Parquet files in the inbox are of earlier versions."""
    return file.name.endswith(".arrow")


def _open(files: Sequence[Place]) -> ds.Dataset:
    """Files of one format as a data set."""
    first = files[0]
    form = "ipc" if is_small(first) else "parquet"
    if isinstance(first, RemotePath):
        names = [file.path for file in files if isinstance(file, RemotePath)]  # as all of a store are
        return ds.dataset(names, schema=ROW, format=form, filesystem=first.fs)
    return ds.dataset([str(file) for file in files], schema=ROW, format=form)


def whole(file: Place) -> pa.Table:
    """All rows and columns of one file under ROW. FileNotFoundError, ArrowInvalid or OSError as `scan`."""
    if not is_small(file):
        return _open([file]).to_table()
    data = file.read_bytes()
    table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
    if data.startswith(HEADER) or table.schema.equals(ROW):
        return table
    has = set(table.schema.names)
    columns = [table[f.name].cast(f.type) if f.name in has else pa.nulls(len(table), f.type) for f in ROW]
    return pa.Table.from_arrays(columns, schema=ROW)


def scan(files: Sequence[Place], columns: Sequence[str], condition: ds.Expression | None = None) -> pa.Table:
    """All rows, copies included. FileNotFoundError if a file is gone, ArrowInvalid or OSError if one is broken."""
    return dataset(files).to_table(list(columns), filter=condition)


def read(files: Sequence[Place], columns: Sequence[str], condition: ds.Expression | None = None) -> pa.Table:
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
    ids = table["run_id"]
    return np.zeros(len(ids), bool) if _all_differ(ids.chunks) else ids.to_pandas().duplicated(keep=False).to_numpy()


def copied_ids(files: Sequence[Place], condition: ds.Expression) -> pa.Array:
    """Ids of the runs that have several rows; there are mostly none, which is seen without holding all ids at once."""
    batches = dataset(files).to_batches(columns=["run_id"], filter=condition)
    if _all_differ(batch.column(0) for batch in batches):
        return pa.array([], pa.string())
    ids = scan(files, ["run_id"], condition)
    return ids.filter(pa.array(repeated(ids)))["run_id"].unique()


def _all_differ(ids: Iterable[pa.Array]) -> bool:
    """Whether no two ids are equal, told from 64-bit digests of them: False means look closer. A fast way to the usual.

    ids: texts of 16 bytes, as `schema.run_id` makes them (others: False).
    """
    digests = [np.empty(0, np.uint64)]
    for some in ids:
        digest = _digests(some)
        if digest is None:
            return False
        digests.append(digest)
    joined = np.concatenate(digests)
    joined.sort()
    return not (joined[1:] == joined[:-1]).any()


def _digests(ids: pa.Array) -> np.ndarray | None:
    """A number of 64 bits for each id; None if one is not 16 bytes long."""
    if not len(ids):
        return np.empty(0, np.uint64)
    _, ends, data = ids.buffers()
    if ids.null_count or data is None:
        return None
    ends = np.frombuffer(ends, np.int32)[ids.offset : ids.offset + len(ids) + 1]
    if not (np.diff(ends) == 16).all():
        return None
    halves = np.frombuffer(data, np.uint64, 2 * len(ids), ends[0]).reshape(-1, 2)
    return halves[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ halves[:, 1]


def why_unreadable(file: Place) -> str | None:
    """What is wrong with a file, in one line; None if it can be read, or is gone because it was joined into a part."""
    try:
        whole(file)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError) as error:
        return str(error).splitlines()[0]
    return None


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """Counts become nullable integers, so that a hole does not turn a block size of 16 into 16.0."""
    return table.to_pandas(types_mapper={pa.int32(): pd.Int32Dtype()}.get)
