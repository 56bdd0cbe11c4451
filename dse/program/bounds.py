"""Bounds the memory that a compressed file takes by what it declares, before any of it is unpacked.

A few megabytes can hold gigabytes: a column of one value, a gzip of zeros. Such a file is refused by name; who means it
stores it less densely, or in several files.
"""

from __future__ import annotations

from typing import Any

LEAST_BYTES = 1 << 30
"""Up to here nothing is refused."""
MOST_TIMES = 256
"""A file may take so many times its own size. Rows of results take some 10 to 100 times theirs."""

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_TEXT = 4
"""Bytes that Arrow takes for a text's place beside the text itself."""


def limit(file_bytes: int) -> int:
    """Bytes of memory that a file of `file_bytes` may take."""
    return max(LEAST_BYTES, MOST_TIMES * file_bytes)


def why_too_large(wanted: int, file_bytes: int) -> str | None:
    """The reason to refuse a file that would take `wanted` bytes of memory; None if there is none."""
    most = limit(file_bytes)
    if wanted <= most:
        return None
    return f"it would take {_size(wanted)} of memory; the limit for a file of {_size(file_bytes)} is {_size(most)}"


def why_parquet_too_large(source: Any, file_bytes: int) -> str | None:
    """The same for a Parquet file (a path, or an open file), found from its footer and, where texts that stand once may
    be many in their column, from those. pyarrow's errors if it cannot be read."""
    import pyarrow.parquet as pq  # which a worker that reads no Parquet does without

    metadata = pq.read_metadata(source)
    total = 0
    longest: dict[str, int] = {}  # text of a column
    alike: set[str] = set()  # columns whose texts begin as the one before
    for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
        for i, column in ((i, group.column(i)) for i in range(group.num_columns)):
            fixed = metadata.schema.column(i).length  # 0 but for texts of one length
            width = _WIDTHS.get(column.physical_type, fixed or _TEXT)
            total += max(column.total_uncompressed_size, column.num_values * width)
            name, is_alike = column.path_in_schema, "DELTA_BYTE_ARRAY" in column.encodings
            many = column.num_values * column.total_uncompressed_size > LEAST_BYTES // 64
            if column.physical_type == "BYTE_ARRAY" and (column.has_dictionary_page or is_alike) and many:
                longest[name] = max(longest.get(name, 1), column.total_uncompressed_size)
                alike |= {name} if is_alike else set()
    for name in sorted(longest):
        if total <= limit(file_bytes):
            unpacked = name in alike or "." in name
            rows = max(1, min(256, LEAST_BYTES // longest[name])) if unpacked else 1 << 14
            total += _text_bytes(source, name, [] if name in alike else [name], rows, limit(file_bytes))
    return why_too_large(total, file_bytes)


def _text_bytes(source: Any, name: str, coded: list[str], rows: int, most: int) -> int:
    """Bytes of all texts of one column, none of them repeated in memory. coded: the column, if Arrow can read it as
    codes; else its texts are counted until they are more than `most`. rows: so many are read at once."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    total = 0
    file = pq.ParquetFile(source, read_dictionary=coded)
    for batch in file.iter_batches(rows, columns=[name]):
        column = batch.column(0)
        while pa.types.is_nested(column.type):  # down to the one leaf that was asked for
            inner = column.flatten()
            column = inner[0] if isinstance(inner, list) else inner
        if not pa.types.is_dictionary(column.type):
            total += column.nbytes
        elif len(column.dictionary):
            lengths = pc.binary_length(column.dictionary)
            total += pc.sum(lengths.take(column.indices)).as_py() or 0
        if total > most and not coded:
            break
    return total


def is_compressed(message: Any) -> bool:
    """True if the rows of an Arrow IPC message are compressed: then nothing says how much memory they take. IndexError
    if it is no such message.

    It is a flatbuffer, in which each table points to the places of its fields: Message.header is field 2,
    DictionaryBatch.data field 1, RecordBatch.compression field 3 (Message.fbs of Apache Arrow).
    """
    data = memoryview(message.metadata)

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little") if at + size <= len(data) else data[at + size]

    def field(table: int, index: int) -> int:
        fields = table - int.from_bytes(data[table : table + 4], "little", signed=True)
        offset = number(fields + 4 + 2 * index, 2) if 4 + 2 * index < number(fields, 2) else 0
        return table + offset if offset else 0

    def inner(table: int, index: int) -> int:
        at = field(table, index)
        return at + number(at, 4)

    batch = inner(number(0, 4), 2)
    if message.type == "dictionary":
        batch = inner(batch, 1)
    return message.type != "schema" and field(batch, 3) > 0


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
