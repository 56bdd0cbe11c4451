"""Reading and writing rows in Parquet files, always under the one schema, each run once.

Parts are Parquet. The small files of the inbox are Arrow IPC (inbox.py): a Parquet file of a few rows takes 5 ms to
open and to read, because each of a hundred columns has its own header, an IPC file 0.2 ms; and there are thousands.

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

from fp4dse.results.store.atomic import in_parallel
from fp4dse.results.store.inbox import POSITIONS, by_format, read_ipc, with_schema
from fp4dse.results.store.integrity import Broken, digest_in, first_line, verified_bytes
from fp4dse.results.store.remote import AnyPath, RemotePath
from fp4dse.results.store.schema import KEY, ROW

ALL = pc.scalar(True)
"""The condition that every row meets."""

ROW_GROUP = 1 << 17
"""Rows of a part that a reader has to hold at once, even if it looks for a few of them."""

VALUES_AT_ONCE = 1 << 17
"""Values that `to_pandas` may hold twice: of long tables it converts one column after the other, so that texts and
codes are never all held at once; of a short one all at once, as a call takes half a millisecond."""

IDENTITY = ["run_id", "status", "created_at"]
"""The columns that decide which of several rows of a run counts."""

CONDITIONS = [*KEY, *IDENTITY, "is_baseline", "baseline_id", "bits_per_element"]
"""The columns that a condition may ask for."""

IS_BF16 = ds.field("is_baseline") | (ds.field("bits_per_element") == 16)
"""The condition that a recipe is BF16, with any training side: what gaps may be measured from."""

CHECKED = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)


def is_one_of(column: str, values: Iterable[str]) -> ds.Expression:
    """The condition that a text is one of these."""
    return ds.field(column).isin(pa.array(list(values), pa.string()))


def checked_format(coded: str) -> ds.ParquetFileFormat:
    """The format CHECKED, with one column of texts read as codes of them."""
    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    return ds.ParquetFileFormat(dictionary_columns={coded}, default_fragment_scan_options=options)


def encode(table: pa.Table) -> memoryview:
    """A Parquet file in memory, so that one plain write meets all that a disk can answer."""
    sink = pa.BufferOutputStream()
    # no dictionary for ids, nor within lists, which would go by longer names: their values do not repeat
    repeating = [field.name for field in table.schema if field.name != "run_id"]
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=repeating,
        row_group_size=ROW_GROUP,
        write_page_checksum=True,
    )
    return memoryview(sink.getvalue())


def dataset(files: Sequence[AnyPath], columns: Sequence[str] = ROW.names, more: Sequence[pa.Field] = ()) -> ds.Dataset:
    """The files as one data set with these columns, CONDITIONS, and `more` that ROW does not know; a column that a file
    lacks reads as null. Broken names inbox files that are not what was written; Parquet files are Verified before."""
    wanted = {*columns, *CONDITIONS}
    schema = pa.schema([*(field for field in ROW if field.name in wanted), *more])
    small, large = by_format(files)
    sources = [ds.dataset(_in_memory(small, schema))] if small or not large else []
    return ds.dataset([*sources, _on_disk(large, schema)]) if large else sources[0]


def _on_disk(files: Sequence[AnyPath], schema: pa.Schema, form: ds.ParquetFileFormat = CHECKED) -> ds.Dataset:
    """Parquet files as a data set; the checksums of their pages are compared."""
    first = files[0]
    if isinstance(first, RemotePath):
        names = [file.path for file in files if isinstance(file, RemotePath)]  # as all of a store are
        return ds.dataset(names, schema=schema, format=form, filesystem=first.fs)
    return ds.dataset([str(file) for file in files], schema=schema, format=form)


def _in_memory(files: Sequence[AnyPath], schema: pa.Schema) -> pa.Table:
    """The rows of IPC files. Broken names those that are not what was written."""
    found, reasons = read_ipc(files, schema)
    if reasons:
        raise Broken(reasons)
    return pa.concat_tables([schema.empty_table(), *(table for _, table in found)])


def read_part(file: AnyPath) -> pa.Table:
    """All rows of a Parquet file and all columns: those of ROW, then those that it does not know. Broken if it is not
    what was written; OSError if that cannot be told now."""
    data = verified_bytes(file)
    try:
        table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
        if not digest_in(file.name):
            table.validate(full=True)
        return with_schema(table)
    except (pa.ArrowException, OSError) as error:
        raise Broken({file: first_line(error)}) from None


def unknown_fields(files: Sequence[AnyPath]) -> list[pa.Field]:
    """The columns of the files that ROW does not know. Errors as of `dataset`."""
    small, large = by_format(files)
    found, reasons = read_ipc(small)
    if reasons:
        raise Broken(reasons)
    schemas = [*(table.schema for _, table in found), *in_parallel(_schema, large)]
    fields = {field.name: field for schema in schemas for field in schema if field.name not in POSITIONS}
    return list(fields.values())


def _schema(file: AnyPath) -> pa.Schema:
    if isinstance(file, RemotePath):
        return pq.read_schema(file.path, filesystem=file.fs)
    return pq.read_schema(str(file))


def scan(files: Sequence[AnyPath], columns: Sequence[str], condition: ds.Expression | None = None) -> pa.Table:
    """All rows, copies included. FileNotFoundError if a file is gone; Broken, ArrowInvalid or OSError if one is bad."""
    return dataset(files, columns).to_table(list(columns), filter=condition)


def read(
    rows: Sequence[AnyPath] | ds.Dataset, columns: Sequence[str], condition: ds.Expression | None = None
) -> pa.Table:
    """One row per run, of files or of their dataset. `condition` may only ask for what is equal in all rows of a run.
    Errors as of `scan`."""
    source = rows if isinstance(rows, ds.Dataset) else dataset(rows, columns)
    table = source.to_table(list(dict.fromkeys([*columns, *IDENTITY])), filter=condition)
    keep = winners(table)
    return (table if keep.all() else table.filter(pa.array(keep))).select(columns)


def read_all(files: Sequence[AnyPath]) -> pa.Table:
    """One row per run with all columns: those of ROW, then those that it does not know."""
    more = unknown_fields(files)
    return read(dataset(files, ROW.names, more), [*ROW.names, *(field.name for field in more)])


def long_texts(files: Sequence[AnyPath], key: str, column: str, condition: ds.Expression) -> dict[str, str]:
    """key -> text of some rows, of a column whose texts are long and repeat: each is held once while parts are read.
    Errors as of `scan`."""
    small, large = by_format(files)
    found = dataset(small, [key, column]).to_table([key, column], filter=condition)
    tables = [found]
    if large:
        known = pa.schema([field for field in ROW if field.name in {key, *CONDITIONS}])
        schema = known.append(pa.field(column, pa.dictionary(pa.int32(), pa.string())))
        tables.append(_on_disk(large, schema, checked_format(column)).to_table([key, column], filter=condition))
    return {k: text for some in tables for k, text in zip(some[key].to_pylist(), some[column].to_pylist(), strict=True)}


def winners(table: pa.Table) -> np.ndarray:
    """The rows that count, bool [rows]: per run the last of the newest of the finished ones, else of the pruned
    ones, else of the failed ones. Needs IDENTITY."""
    copies = is_duplicate(table)
    keep = ~copies
    if copies.any():
        few = table.select(IDENTITY).filter(pa.array(copies)).to_pandas()
        worth = few["status"].map({"failed": 0, "pruned": 1}).fillna(2)
        few = few.assign(row=np.flatnonzero(copies), finished=worth)
        few = few.sort_values(["finished", "created_at"], kind="stable", na_position="first")
        keep[few.drop_duplicates("run_id", keep="last")["row"]] = True
    return keep


def is_duplicate(table: pa.Table) -> np.ndarray:
    """True for rows of a run that has several, bool [rows]."""
    ids = table["run_id"]
    return np.zeros(len(ids), bool) if _all_differ(ids.chunks) else ids.to_pandas().duplicated(keep=False).to_numpy()


def duplicate_run_ids(rows: ds.Dataset, condition: ds.Expression) -> pa.Array:
    """Ids of the runs that have several rows; there are mostly none, which is seen without holding all ids at once."""
    batches = rows.to_batches(columns=["run_id"], filter=condition)
    if _all_differ(batch.column(0) for batch in batches):
        return pa.array([], pa.string())
    ids = rows.to_table(["run_id"], filter=condition)
    return ids.filter(pa.array(is_duplicate(ids)))["run_id"].unique()


def _all_differ(ids: Iterable[pa.Array]) -> bool:
    """True if no two ids are equal, by 64-bit digests of them; False means look closer. Fast in the usual case.

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


def to_pandas(table: pa.Table, categories: bool = False) -> pd.DataFrame:
    """The table as a frame. Counts become nullable integers, so that a hole does not turn a block size of 16 into 16.0.

    categories: texts are categories, in alphabetical order: a byte or so a row instead of the text, and a group-by
    that compares numbers.
    """
    whole_numbers = {pa.int32(): pd.Int32Dtype()}.get
    parts = []
    while names := table.column_names[: max(1, VALUES_AT_ONCE // max(1, len(table)))]:
        some = table.select(names)
        table = table.drop_columns(names)
        part = some.to_pandas(types_mapper=whole_numbers, strings_to_categorical=categories)
        for name, values in part.items() if categories else ():
            if isinstance(values.dtype, pd.CategoricalDtype):
                part[name] = values.cat.set_categories(sorted(values.cat.categories))
        parts.append(part)
    return pd.concat(parts, axis=1) if parts else table.to_pandas()
