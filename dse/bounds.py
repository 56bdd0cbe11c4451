"""How much memory a compressed file would take, told from what it declares, before any of it is unpacked.

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
    """What is wrong with a file that would take `wanted` bytes of memory, in words; None if nothing is."""
    most = limit(file_bytes)
    if wanted <= most:
        return None
    return f"it would take {_size(wanted)} of memory; the limit for a file of {_size(file_bytes)} is {_size(most)}"


def why_parquet_too_large(source: Any, file_bytes: int) -> str | None:
    """The same of a Parquet file (a path, or an open file), told from its footer and, where texts that stand once in a
    dictionary may be many in their column, from which of them each row has. pyarrow's errors if it cannot be read."""
    import pyarrow.parquet as pq  # which a worker that reads no Parquet does without

    metadata = pq.read_metadata(source)
    total, texts = 0, set()
    for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
        for column in (group.column(i) for i in range(group.num_columns)):
            width = _WIDTHS.get(column.physical_type, _TEXT)
            total += max(column.total_uncompressed_size, column.num_values * width)
            many = column.num_values * column.total_uncompressed_size > LEAST_BYTES // 64
            if column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page and many:
                texts.add(column.path_in_schema)
    for name in sorted(texts):
        if total <= limit(file_bytes):
            total += _text_bytes(source, name)
    return why_too_large(total, file_bytes)


def _text_bytes(source: Any, name: str) -> int:
    """Bytes of all texts of one column, none of them repeated in memory."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    total = 0
    rows = 256 if "." in name else 1 << 14  # within lists and structs Arrow unpacks texts, a batch at a time
    for batch in pq.ParquetFile(source, read_dictionary=[name]).iter_batches(rows, columns=[name]):
        column = batch.column(0)
        while pa.types.is_nested(column.type):  # down to the one leaf that was asked for
            inner = column.flatten()
            column = inner[0] if isinstance(inner, list) else inner
        if not pa.types.is_dictionary(column.type):
            total += column.nbytes
        elif len(column.dictionary):
            lengths = pc.binary_length(column.dictionary)
            total += pc.sum(lengths.take(column.indices)).as_py() or 0
    return total


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
