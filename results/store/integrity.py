"""Verification of the store's files, before anything else reads them: readers crash on flipped bits.

The name of each file ends in digits of the SHA-256 of its bytes. An inbox file is small and read whole: its digest is
compared at every reading. A Parquet part is verified once: what was verified, with size and times of change, is
remembered in the user's cache. Not in the store: readers hold no lock there and may have no right to write, and a copy
of a store is to be verified anew, as copying is where bits flip. Bits that flip later and leave the times as they are
meet the checksums of Parquet's pages, which Arrow compares when it reads them, and DuckDB, twice as fast, does not;
`fp4dse store mend` verifies all anew.

*Broken* is a file only if all of it was read, its length checked, twice, and its digest is wrong, or if its name has no
digest and Arrow finds its content invalid. A file that cannot be read now (no permission, a connection cut) is not
broken: that is an OSError, and nothing is moved or left out because of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fp4dse.dse import StoreError
from fp4dse.dse.program.bounds import why_parquet_too_large
from fp4dse.dse.program.cache import cache_folder
from fp4dse.results.store.atomic import in_parallel, write_atomic
from fp4dse.results.store.remote import AnyPath, RemotePath
from fp4dse.results.store.retries import ShortRead, with_retries
from fp4dse.results.store.schema import ROW

log = logging.getLogger(__name__)

DIGITS = 16
WRONG = "its bytes are not those that its name is the digest of"

_KNOWN = frozenset(ROW.names)


class Broken(Exception):
    """Files that are not what was written, each with the reason."""

    def __init__(self, reasons: dict[AnyPath, str]) -> None:
        super().__init__("; ".join(f"{file}: {reason}" for file, reason in reasons.items()))
        self.reasons = reasons


def file_name(stem: str, data: bytes | memoryview, ending: str) -> str:
    """The name of a file that holds `data`; the digits are its digest."""
    return f"{stem}{'-' if stem else ''}{hashlib.sha256(data).hexdigest()[:DIGITS]}.{ending}"


def digest_in(name: str) -> str | None:
    """The digest that a name carries (8 digits until 2026); None if it was not written by a store."""
    found = re.search(rf"(?:^|-)([0-9a-f]{{{DIGITS}}}|[0-9a-f]{{8}})\.(?:arrow|parquet)$", name)
    return found[1] if found else None


def verified_bytes(file: AnyPath) -> bytes:
    """All bytes of a file, as they were written. Broken if they are not; OSError if that cannot be told now."""
    wanted = digest_in(file.name) or ""
    for _ in range(2):
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest().startswith(wanted):
            return data
        if isinstance(file, Path):
            _refuse_short(len(data), file)
    raise Broken({file: WRONG})


def check(file: AnyPath) -> None:
    """Verify a Parquet file. Broken or OSError as of `verified_bytes`; StoreError if it would take more memory than a
    file of its size may."""
    wanted = digest_in(file.name)
    if wanted:
        if not any(_sha256(file).startswith(wanted) for _ in range(2)):
            raise Broken({file: WRONG})
        too_large = (
            with_retries(lambda: _why_too_large(file), file) if isinstance(file, RemotePath) else _why_too_large(file)
        )
    else:
        too_large = _check_without_digest(file)
    if too_large:
        raise StoreError(f"{file}: {too_large}; move it away, or join what it holds in smaller files")


def _why_too_large(file: AnyPath) -> str | None:
    """The reason why a file is too large, or None."""
    opened = file.fs.open_input_file(file.path) if isinstance(file, RemotePath) else pa.OSFile(str(file))
    with opened as source:
        warn_of_unknown(pq.read_schema(source))
        return why_parquet_too_large(source, source.size())


def _check_without_digest(file: AnyPath) -> str | None:
    """Broken if Arrow finds the file invalid; else why it is too large, if it is."""
    source = pa.BufferReader(data := verified_bytes(file))
    try:
        if too_large := why_parquet_too_large(source, len(data)):
            return too_large
        parquet = pq.ParquetFile(source, page_checksum_verification=True)
        warn_of_unknown(parquet.schema_arrow)
        for batch in parquet.iter_batches():
            batch.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise Broken({file: first_line(error)}) from None
    return None


def warn_of_unknown(schema: pa.Schema) -> None:
    """Say once that there are columns which this version does not know."""
    if unknown := tuple(name for name in schema.names if name not in _KNOWN):
        _warn_of(unknown)


@cache
def _warn_of(unknown: tuple[str, ...]) -> None:
    names = ", ".join(unknown)
    log.warning("columns that this fp4dse does not know are kept but not shown; upgrade to read them: %s", names)


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class VerifiedFiles:
    """The Parquet files of a store that were verified, remembered from one process to the next."""

    def __init__(self, store: AnyPath) -> None:
        where = str(store.absolute()) if isinstance(store, Path) else str(store)
        self._file = cache_folder() / "verified" / f"{hashlib.sha256(where.encode()).hexdigest()[:DIGITS]}.json"
        self._known: dict[str, list[int]] | None = None

    def broken(self, files: Sequence[AnyPath]) -> dict[AnyPath, str]:
        """The reasons of those files that are not what was written; only files that are new or were changed are read.
        Errors as of `check`."""
        if self._known is None:
            self._known = self._read()
        known = self._known
        signs = dict(zip(files, in_parallel(_fingerprint, files), strict=True))
        unseen = [file for file, sign in signs.items() if sign is None or known.get(_key(file)) != sign]
        reasons: dict[AnyPath, str] = {}
        for found in in_parallel(broken_file, unseen):
            reasons.update(found)
        good = {_key(file): sign for file in unseen if file not in reasons and (sign := signs[file])}
        if good:
            self._known = {key: known[key] for key in map(_key, files) if key in known} | good
            self._write()
        return reasons

    def forget(self) -> None:
        """Verify all files again."""
        self._known = {}

    def _read(self) -> dict[str, list[int]]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(self._file.read_bytes())
            if isinstance(found, dict):
                return found
        return {}

    def _write(self) -> None:
        """Store what was verified. The last writer wins; files that this forgets are verified once more."""
        with contextlib.suppress(OSError, StoreError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._file, json.dumps(self._known).encode())


def _key(file: AnyPath) -> str:
    return f"{file.parent.name}/{file.name}"


def _fingerprint(file: AnyPath) -> list[int] | None:
    """Size and times of a file, which differ once it was changed or copied. None where the times are unknown."""
    found = file.stat()
    if isinstance(file, Path):
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    return [found.st_size, found.st_mtime_ns] if found.st_mtime_ns else None


def broken_file(file: AnyPath) -> dict[AnyPath, str]:
    """The file with the reason if it is not what was written; errors as of `check`."""
    try:
        (verified_bytes if file.name.endswith(".arrow") else check)(file)
    except Broken as broken:
        return broken.reasons
    return {}


def _sha256(file: AnyPath) -> str:
    """SHA-256 of all bytes of a file, read in pieces."""
    if isinstance(file, RemotePath):
        return file.sha256()
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        _refuse_short(opened.tell(), file)
    return digest


def _refuse_short(arrived: int, file: Path) -> None:
    if arrived < (size := file.stat().st_size):
        raise ShortRead(f"{arrived} of {size} bytes arrived")


ROWS_OF = """
import pyarrow, pyarrow.parquet, sys
data = pyarrow.BufferReader(sys.stdin.buffer.read())
if sys.argv[1] == "arrow":
    file = pyarrow.ipc.open_file(data)
    print(sum(file.get_batch(i).num_rows for i in range(file.num_record_batches)))
else:
    print(pyarrow.parquet.read_metadata(data).num_rows)
"""


def count_lanes(file: AnyPath) -> str:
    """`3 lanes`: the number that a broken file states, for people. Read in a process of its own, which may crash."""
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        command = [sys.executable, "-c", ROWS_OF, "arrow" if file.name.endswith(".arrow") else "parquet"]
        asked = subprocess.run(command, input=file.read_bytes(), capture_output=True, timeout=60)
        count = int(asked.stdout)
        if 0 < count < 1e9:
            return f"{count:,} lanes" if count > 1 else "1 lane"
    return "all its lanes"
