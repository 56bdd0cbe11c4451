"""Many small files into few large ones, at no moment with a row missing.

A query opens every file, and a Parquet file of a hundred columns takes milliseconds to open. Sweeps leave an Arrow file
per job, and one part each, searches one per batch. So files move up, `JOIN_AT` or more at a time:

    inbox/*.arrow  ->  parts/<hash>.parquet  ->  parts/join1-<hash>.parquet  ->  parts/join2-<hash>.parquet

A join writes its file, whole, before it deletes the first of those that it joins: a row is always in at least one file,
and one that is in two counts once (parquet.winners). Who dies in between leaves copies, which the next level drops.

Readers hold no lock, and a listing is not taken at one instant: what is made and deleted while a folder is being read
may be missed. So each level is listed by a look of its own, the lowest first. Take the highest level that a row had
reached before that level's look began. It can be missed there only if it was joined onwards before that look ended, so
before the next level's look began; but then the next level would be the highest. Hence every row is seen.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from fp4dse.dse import StoreError
from fp4dse.results.files import each, move, write_atomic, writing
from fp4dse.results.parquet import IDENTITY, encode, repeated, scan, whole, why_unreadable
from fp4dse.results.remote import Place
from fp4dse.results.schema import ROW

log = logging.getLogger(__name__)

FILES_PER_PART = 1024
"""At most so many files of the inbox make a part: some 300 MB of rows in memory, if a job has 50 lanes."""
LEVELS = 3
JOIN_AT = 16
SMALL_BYTES = 2 << 20
"""A part of so many bytes, some thousand rows, is joined no more."""


def level_of(file: Place) -> int:
    """How often the rows of a part were joined with those of other parts."""
    found = re.fullmatch(r"join([1-9])-[0-9a-f]+\.parquet", file.name)
    return min(int(found[1]), LEVELS - 1) if found else 0


def listed(store: Place, folder: str) -> list[Place]:
    """The files with rows in `inbox`, `parts` or `torn`, level by level (see above), then by name."""
    found = []
    for level in range(LEVELS if folder == "parts" else 1):
        seen = [file for form in ("*.arrow", "*.parquet") for file in (store / folder).glob(form)]
        seen = [file for file in seen if not file.name.startswith(".") and level_of(file) == level]
        found += sorted(seen, key=lambda file: file.name)
    return found


def write_part(store: Place, table: pa.Table, level: int = 0) -> None:
    """Put rows on the disk as one part. Named after what it holds: the same rows written again are the same file."""
    data = encode(table)
    name = f"{hashlib.sha256(data).hexdigest()[:16]}.parquet"
    write_atomic(store / "parts" / (f"join{level}-{name}" if level else name), data)


def join_inbox(store: Place, files: Sequence[Place]) -> int:
    """Turn files of the inbox into parts; returns how many. Those that cannot be read move to `torn/`, logged."""
    joined = 0
    for start in range(0, len(files), FILES_PER_PART):
        chunk = files[start : start + FILES_PER_PART]
        tables = each(partial(_whole, store), chunk)
        readable = [file for file, table in zip(chunk, tables, strict=True) if table is not None]
        if readable:
            write_part(store, pa.concat_tables(table for table in tables if table is not None).combine_chunks())
        _delete(store, readable)
        joined += len(readable)
    return joined


def join_parts(store: Place) -> int:
    """Join small parts into parts of the next level wherever there are JOIN_AT of them; returns how many.

    StoreError names a part that cannot be read.
    """
    joined = 0
    for level in range(LEVELS - 1):
        parts = [part for part in listed(store, "parts") if level_of(part) == level]
        if len(parts) < JOIN_AT:
            continue
        sizes = each(lambda part: part.stat().st_size, parts)
        small = [part for part, size in zip(parts, sizes, strict=True) if size < SMALL_BYTES]
        for start in range(0, len(small) - JOIN_AT + 1, JOIN_AT):
            group = small[start : start + JOIN_AT]
            try:
                table = scan(group, ROW.names)
            except (pa.ArrowException, OSError):
                refuse_broken(group)
                raise
            write_part(store, without_copies(table), level + 1)
            _delete(store, group)
            joined += len(group)
    return joined


def without_copies(table: pa.Table) -> pa.Table:
    """Each row once: a run that was trained twice keeps both rows, which differ in status or in time."""
    if not repeated(table).any():
        return table
    rows = table.select(IDENTITY).to_pandas()
    copies = rows.duplicated(keep="last") & rows["created_at"].notna()
    return table.take(np.flatnonzero(~copies))


def refuse_broken(parts: Sequence[Place]) -> None:
    """StoreError if one of the parts cannot be read: too many rows to go on without."""
    for part in parts:
        if reason := why_unreadable(part):
            advice = "restore it from a copy, or move it away and lose its rows"
            raise StoreError(f"{part}: cannot be read ({reason}); {advice}")


def _whole(store: Place, file: Place) -> pa.Table | None:
    """The rows of an inbox file; one that cannot be read is moved aside."""
    try:
        return whole(file)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
    with writing(store):
        (store / "torn").mkdir(exist_ok=True)
        move(file, store / "torn" / file.name)
    log.warning("%s: cannot be read (%s); moved to torn/, its lanes count as missing", file, reason)
    return None


def _delete(store: Place, files: Sequence[Place]) -> None:
    with writing(store):
        each(lambda file: file.unlink(missing_ok=True), files)
