"""Files that a user names with `--data`: `PATH`, or `PATH:COLUMN` for tables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from fp4dse.dse import ConfigError
from fp4dse.dse.program.bounds import why_parquet_too_large


def split_column(text: str) -> tuple[Path, str | None]:
    """`PATH:COLUMN` as path and column; a path that exists as it stands has none."""
    head, colon, column = text.rpartition(":")
    return (Path(text), None) if not colon or Path(text).exists() else (Path(head), column)


def absolute(text: str) -> str:
    """`PATH` or `PATH:COLUMN` with an absolute path."""
    path, column = split_column(text)
    return str(path.resolve()) if column is None else f"{path.resolve()}:{column}"


def read_column(file: Path, column: str) -> list[str]:
    """A column of text of a Parquet file; nulls are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file)
        if column not in schema.names:
            raise ConfigError("--data", f"{file}:{column}", f"FILE:COLUMN with one of {', '.join(schema.names)}")
        kind = schema.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ConfigError("--data", f"{file}:{column}", f"a column of text (this one is {kind})")
        refuse_large_parquet(file)
        rows: list[str] = pq.read_table(file, columns=[column])[column].drop_null().to_pylist()
        return rows
    except pa.ArrowException as error:
        raise ConfigError("--data", str(file), f"a readable Parquet file ({first_line(error)})") from None


def refuse_large_parquet(file: Path) -> None:
    """ConfigError where a Parquet file would take much more memory than its size makes one think."""
    if reason := why_parquet_too_large(str(file), file.stat().st_size):
        raise ConfigError("--data", str(file), f"a file that takes less memory ({reason})")


def first_line(error: Exception) -> str:
    """First line of an error's message, at most 120 characters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


Fingerprint = tuple[tuple[str, int, int], ...]
"""Path, bytes and time of the last change of each file."""


def fingerprint(files: Iterable[Path]) -> Fingerprint:
    """Size and time of change of each file, by which a change is noticed without reading the files."""
    return tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files)


def hash_files(files: Iterable[Path]) -> str:
    """SHA-256 of the SHA-256 digests of the files, in order."""
    state = hashlib.sha256()
    for file in files:
        with open(file, "rb") as opened:
            state.update(hashlib.file_digest(opened, "sha256").digest())
    return state.hexdigest()
