"""The inbox: thousands of Arrow IPC files of a few rows each, read in one go.

Each file has the schema of a hundred columns before its rows and once more after them, and to parse it takes longer
than to read the rows. All files of one version begin with the same bytes, so their schema is parsed once: what stands
between the schema and the end of the rows is, in one file after the other, a stream as Arrow reads it. That takes for
granted that the bytes are what was written, so only files whose digest was compared are read so.

    file     "ARROW1\\0\\0", schema, rows, end of the stream, footer, its length (4 bytes), "ARROW1"
    stream   schema, rows of file 1, rows of file 2, …
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import pyarrow as pa

from fp4dse.dse.program.bounds import is_compressed
from fp4dse.results.store.atomic import AT_ONCE, in_parallel
from fp4dse.results.store.integrity import Broken, digest_in, first_line, verified_bytes, warn_of_unknown
from fp4dse.results.store.remote import AnyPath
from fp4dse.results.store.schema import ROW

MAGIC = b"ARROW1\0\0"
SCHEMA = ROW.serialize().to_pybytes()
HEADER = MAGIC + SCHEMA
"""The first bytes of an IPC file under ROW."""
END = b"\xff\xff\xff\xff\0\0\0\0"
AT_MOST = 256
"""So many files are one in memory at a time: an array for each file and column would take more than the rows."""

POSITIONS = {name: position for position, name in enumerate(ROW.names)}


def is_ipc(file: AnyPath) -> bool:
    """True for the inbox's IPC files. Parquet files in the inbox are of earlier versions."""
    return file.name.endswith(".arrow")


def by_format(files: Iterable[AnyPath]) -> tuple[list[AnyPath], list[AnyPath]]:
    """The IPC files, and the Parquet files."""
    ipc: list[AnyPath] = []
    parquet: list[AnyPath] = []
    for file in files:
        (ipc if is_ipc(file) else parquet).append(file)
    return ipc, parquet


def encode_ipc(table: pa.Table) -> memoryview:
    """An IPC file in memory."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


Found = tuple[list[tuple[list[AnyPath], pa.Table]], dict[AnyPath, str]]
"""Tables, each with the files that it is of, and the files that are broken with their reasons."""


def read_ipc(files: Sequence[AnyPath], schema: pa.Schema | None = None) -> Found:
    """The rows of IPC files under a schema, or with all columns: those of ROW, then those that it does not know.
    OSError if a file cannot be read now."""
    step = min(AT_MOST, -(-len(files) // AT_ONCE) or 1)
    groups = [files[start : start + step] for start in range(0, len(files), step)]
    tables, reasons = [], {}
    for found, broken in in_parallel(partial(_read_group, schema=schema), groups):
        tables += found
        reasons.update(broken)
    return tables, reasons


def _read_group(files: Sequence[AnyPath], schema: pa.Schema | None) -> Found:
    alike: list[AnyPath] = []
    stream = [SCHEMA]
    tables: list[tuple[list[AnyPath], pa.Table]] = []
    reasons: dict[AnyPath, str] = {}
    for file in files:
        try:
            data = verified_bytes(file)
            rows = _rows_in(data) if digest_in(file.name) else None
            if rows is None:
                tables.append(([file], _read_alone(file, data, schema)))
            else:
                _refuse_compressed(file, rows)
                alike.append(file)
                stream.append(rows)
        except Broken as broken:
            reasons.update(broken.reasons)
    if alike:
        names = None if schema is None else [name for name in schema.names if name in POSITIONS]
        options = pa.ipc.IpcReadOptions(included_fields=[] if names is None else [POSITIONS[name] for name in names])
        table = pa.ipc.open_stream(pa.py_buffer(b"".join(stream)), options=options).read_all().combine_chunks()
        tables.insert(0, (alike, with_schema(table, schema)))
    return tables, reasons


def _rows_in(data: bytes) -> memoryview | None:
    """The bytes of the rows of a file under ROW; None if it is of another version."""
    footer = int.from_bytes(data[-10:-6], "little") + 10
    end = len(data) - footer - len(END)
    alike = data.startswith(HEADER) and data[end : end + len(END)] == END
    return memoryview(data)[len(HEADER) : end] if alike else None


def _refuse_compressed(file: AnyPath, stream: memoryview) -> None:
    """Broken if it has rows that are compressed: no version wrote such, and a few bytes may be gigabytes."""
    try:
        found = any(map(is_compressed, pa.ipc.MessageReader.open_stream(pa.py_buffer(stream))))
    except (IndexError, EOFError, OSError, pa.ArrowException) as error:
        raise Broken({file: first_line(error)}) from None
    if found:
        raise Broken({file: "its rows are compressed, so that their size is not known"})


def _read_alone(file: AnyPath, data: bytes, schema: pa.Schema | None) -> pa.Table:
    """The rows of a file of another version, or of unknown origin. Broken if Arrow finds it invalid."""
    try:
        _refuse_compressed(file, memoryview(data)[len(MAGIC) :])
        pa.ipc.open_file(pa.py_buffer(data))  # whether it has its end
        table = pa.ipc.open_stream(pa.py_buffer(data)[len(MAGIC) :]).read_all()
        if not digest_in(file.name):
            table.validate(full=True)
        warn_of_unknown(table.schema)
        return with_schema(table, schema)
    except (pa.ArrowException, OSError) as error:
        raise Broken({file: first_line(error)}) from None


def with_schema(table: pa.Table, schema: pa.Schema | None = None) -> pa.Table:
    """The table under a schema (None: ROW and all that it does not know); what it lacks is null."""
    if schema is None:
        schema = pa.schema([*ROW, *(field for field in table.schema if field.name not in POSITIONS)])
    if table.schema.equals(schema):
        return table
    has = set(table.schema.names)
    columns = [table[f.name].cast(f.type) if f.name in has else pa.nulls(len(table), f.type) for f in schema]
    return pa.Table.from_arrays(columns, schema=schema)
