"""Files that are whole or absent, one writer at a time, and errors that say what to do.

A file is written under a hidden name, flushed to the disk and renamed: whoever looks sees all of it or none of it,
whenever the writer is killed. Hidden files that a killed writer left behind are nobody's data.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from fp4dse.dse import StoreError
from fp4dse.dse.program.urls import redacted
from fp4dse.results.store.remote import AnyPath, RemotePath
from fp4dse.results.store.retries import stop_waiting_when

ADVICE = {
    errno.ENOSPC: "the disk is full; what was stored before is safe, free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; what was stored before is safe, free some space and run again",
    errno.EROFS: "the file system is read-only; copy the store to a place that can be written",
    errno.EACCES: "no permission to write here; copy the store to a place that can be written",
    errno.EPERM: "no permission to write here; copy the store to a place that can be written",
}


S = TypeVar("S")
T = TypeVar("T")
AT_ONCE = 16


@contextlib.contextmanager
def writing(path: AnyPath) -> Iterator[None]:
    """Turns an OSError inside into a StoreError of one line that names `path`."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, f"cannot be written ({redacted(error.strerror or error)})")
        raise StoreError(f"{path}: {advice}") from error


@contextlib.contextmanager
def reading(path: AnyPath) -> Iterator[None]:
    """Turns an OSError inside, but for a file that is gone, into a StoreError that says that nothing is lost."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        what = f"cannot be read now ({error.strerror or str(error).splitlines()[0]})"
        where = f"{path}: {error.filename}" if error.filename and str(error.filename) != str(path) else str(path)
        raise StoreError(
            f"{redacted(where)}: {redacted(what)}; nothing was changed or left out, run it again when it can be"
        ) from error


def write_atomic(path: AnyPath, data: bytes | memoryview) -> None:
    """Put `data` at `path`, whole or not at all, on the disk before this returns. StoreError if it cannot be done."""
    if isinstance(path, RemotePath):
        with writing(path):
            path.write_bytes(data)
        return
    hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with open(hidden, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(hidden, path)
        except BaseException:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def move(file: AnyPath, target: AnyPath) -> None:
    """Move a file to another name in the same store."""
    if isinstance(file, RemotePath):
        assert isinstance(target, RemotePath)
        file.replace(target)
    else:
        os.replace(file, str(target))


def in_parallel(action: Callable[[S], T], files: Sequence[S]) -> list[T]:
    """`action` of every file, in their order, several at once.

    Most of it is waiting: for a server's answer, or for a disk that discards blocks as they become free, on which
    deleting one file takes 4 ms, and sixteen at once 0.15 ms each. A thread gets its share whole: handing over file by
    file costs more than reading a small one. Who asks to stop, and the first error, end the waits of all of them.
    One file on a disk needs no thread.
    """
    if len(files) < 2 and all(isinstance(file, Path) for file in files):
        return [action(file) for file in files]
    step = -(-len(files) // AT_ONCE) or 1
    shares = [files[start : start + step] for start in range(0, len(files), step)]
    over = threading.Event()

    def act(share: Sequence[S]) -> list[T]:
        return [action(file) for file in share if not over.is_set()]

    with stop_waiting_when(over.is_set), ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            found = [pool.submit(copy_context().run, act, share) for share in shares]
            for one in as_completed(found):
                one.result()
            return list(chain.from_iterable(one.result() for one in found))
        except BaseException:
            over.set()
            raise


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, so that a rename survives a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_json(path: AnyPath) -> dict[str, Any]:
    """A JSON object; StoreError if the file is unreadable or holds something else."""
    try:
        data = json.loads(path.read_bytes())
    except RecursionError:
        raise StoreError(f"{path}: cannot be read (it is nested too deeply)") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read ({redacted(error)})") from None
    if not isinstance(data, dict):
        raise StoreError(f"{path}: found {type(data).__name__}; accepted: a JSON object")
    return data
