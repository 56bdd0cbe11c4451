"""Compaction: many small files become few large ones, and no row is missing at any moment.

A query opens every file, and a Parquet file of a hundred columns takes milliseconds to open. Sweeps leave an Arrow file
per job, and one part each, searches one per batch. So files move up, `JOIN_AT` or more at a time:

    inbox/*.arrow  ->  parts/<hash>.parquet  ->  parts/join1-<hash>.parquet  ->  parts/join2-<hash>.parquet

A join writes its file, whole, before it deletes the first of those that it joins: a row is always in at least one file,
and one that is in two counts once (parquet.winners). Who dies in between leaves copies, which the next level drops.
Columns that this version does not know go along. A file that cannot be read now stops a join, which deletes nothing
then; only what is broken (integrity.py) is moved aside, to `torn/`.

Readers hold no lock, and a listing is not taken at one instant: what is made and deleted while a folder is being read
may be missed. So each level is listed by a look of its own, the lowest first. Take the highest level that a row had
reached before that level's look began. It can be missed there only if it was joined onwards before that look ended, so
before the next level's look began; but then the next level would be the highest. Hence every row is seen.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from fp4dse.results.store.atomic import in_parallel, move, reading, write_atomic, writing
from fp4dse.results.store.inbox import by_format, read_ipc
from fp4dse.results.store.integrity import Broken, count_lanes, file_name
from fp4dse.results.store.parquet import IDENTITY, encode, is_duplicate, read_part
from fp4dse.results.store.remote import AnyPath

log = logging.getLogger(__name__)

FILES_PER_PART = 1024
"""At most so many files of the inbox make a part: some 300 MB of rows in memory, if a job has 50 lanes."""
LEVELS = 3
JOIN_AT = 16
SMALL_BYTES = 2 << 20
"""A part of so many bytes, some thousand rows, is joined no more."""


def level_of(file: AnyPath) -> int:
    """The number of times that the rows of a part were joined with those of other parts."""
    found = re.fullmatch(r"join([1-9])-[0-9a-f]+\.parquet", file.name)
    return min(int(found[1]), LEVELS - 1) if found else 0


def list_files(store: AnyPath, folder: str) -> list[AnyPath]:
    """The files with rows in `inbox`, `parts` or `torn`, level by level (see above), then by name."""
    found = []
    for level in range(LEVELS if folder == "parts" else 1):
        seen = [file for form in ("*.arrow", "*.parquet") for file in (store / folder).glob(form)]
        seen = [file for file in seen if not file.name.startswith(".") and level_of(file) == level]
        found += sorted(seen, key=lambda file: file.name)
    return found


def write_part(store: AnyPath, table: pa.Table, level: int = 0) -> None:
    """Put rows on the disk as one part. Named after what it holds: the same rows written again are the same file."""
    data = encode(table)
    write_atomic(store / "parts" / file_name(f"join{level}" if level else "", data, "parquet"), data)


def join_inbox(store: AnyPath, files: Sequence[AnyPath]) -> int:
    """Turn files of the inbox into parts; returns how many. Those that are broken move to `torn/`, logged.

    StoreError names a file that cannot be read now; it and those after it stay where they are.
    """
    return sum(_join(store, files[start : start + FILES_PER_PART], 0) for start in range(0, len(files), FILES_PER_PART))


def join_parts(store: AnyPath) -> int:
    """Join small parts into parts of the next level wherever there are JOIN_AT of them; returns how many.

    Parts that are broken move to `torn/`, logged. StoreError names one that cannot be read now.
    """
    joined = 0
    for level in range(LEVELS - 1):
        parts = [part for part in list_files(store, "parts") if level_of(part) == level]
        if len(parts) < JOIN_AT:
            continue
        sizes = in_parallel(lambda part: part.stat().st_size, parts)
        small = [part for part, size in zip(parts, sizes, strict=True) if size < SMALL_BYTES]
        for start in range(0, len(small) - JOIN_AT + 1, JOIN_AT):
            joined += _join(store, small[start : start + JOIN_AT], level + 1)
    return joined


def _join(store: AnyPath, files: Sequence[AnyPath], level: int) -> int:
    """Make one part of the given level of the files, with all their columns, and delete them; returns how many."""
    joined = 0
    for group in _of_one_type(_read_files(store, files)):
        rows = pa.concat_tables([table for _, table in group], promote_options="default").combine_chunks()
        write_part(store, without_duplicates(rows) if level else rows, level)
        done = [file for files, _ in group for file in files]
        _delete(store, done)
        joined += len(done)
    return joined


Tables = list[tuple[list[AnyPath], pa.Table]]
"""Rows with all their columns, and the files that they are of."""


def _read_files(store: AnyPath, files: Sequence[AnyPath]) -> Tables:
    """The tables of the files; broken files are moved to `torn/`."""
    small, large = by_format(files)
    with reading(store):
        found, reasons = read_ipc(small)
        for file, table in zip(large, in_parallel(_whole, large), strict=True):
            if isinstance(table, Broken):
                reasons |= table.reasons
            else:
                found.append(([file], table))
    for file, reason in reasons.items():
        quarantine(store, file, reason)
    return found


def _whole(part: AnyPath) -> pa.Table | Broken:
    try:
        return read_part(part)
    except Broken as broken:
        return broken


def _of_one_type(tables: Tables) -> list[Tables]:
    """In groups in which every column has one type: of those that ROW does not know each file may have its own."""
    groups: list[tuple[dict[str, pa.DataType], Tables]] = []
    for files, table in tables:
        types = {field.name: field.type for field in table.schema}
        for known, group in groups:
            if all(known.get(name, type_) == type_ for name, type_ in types.items()):
                known.update(types)
                group.append((files, table))
                break
        else:
            groups.append((types, [(files, table)]))
    return [group for _, group in groups]


def without_duplicates(table: pa.Table) -> pa.Table:
    """Each row once: a run that was trained twice keeps both rows, which differ in status or in time."""
    if not is_duplicate(table).any():
        return table
    rows = table.select(IDENTITY).to_pandas()
    copies = rows.duplicated(keep="last") & rows["created_at"].notna()
    return table.take(np.flatnonzero(~copies))


def quarantine(store: AnyPath, file: AnyPath, reason: str) -> None:
    """Move a broken file to `torn/`, and say so."""
    lanes = count_lanes(file)
    with writing(store):
        (store / "torn").mkdir(exist_ok=True)
        move(file, store / "torn" / file.name)
    log.warning("%s: moved to torn/ (%s). %s", file, reason, consequence(lanes))


def consequence(lanes: str) -> str:
    """The sentences on what a broken file takes away, and what to do."""
    return (
        f"Missing now: {lanes}. The same `fp4dse sweep` trains them again; or put an intact copy of the file into "
        "torn/ and run `fp4dse store mend`"
    )


def _delete(store: AnyPath, files: Sequence[AnyPath]) -> None:
    with writing(store):
        in_parallel(lambda file: file.unlink(missing_ok=True), files)
