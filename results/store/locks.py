"""Locks: one writer at a time, whatever happens to the others.

On a disk the kernel holds the lock and frees it however the process ends. A server has no such lock, so there writers
use claims.

A claim is an object `.lock-<who>` that its owner writes again every `BEAT_S` seconds. Who wants to write puts a claim,
then looks: if there is another that is alive, it takes its own away and says whose the other is. Of two that start at
once at least one sees the other. Ages are differences between times that the server wrote, so no clock of ours matters.
A process of this machine that is gone has no claim, however young what it left is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fp4dse.dse import StoreError
from fp4dse.dse.reading.files import decode_json
from fp4dse.results.store.atomic import writing
from fp4dse.results.store.remote import AnyPath, RemotePath, without_retries

BEAT_S = 20.0
STALE_S = 90.0
"""A claim that was not renewed for so long is a dead process's."""
LAST_S = 10.0
"""So long the last sign of life may take."""


@contextlib.contextmanager
def exclusive(path: AnyPath) -> Iterator[None]:
    """Hold the lock file `path`; the kernel frees it however the process ends. On a server it is a claim (see above).

    StoreError names the process that holds it, if another does.
    """
    if isinstance(path, RemotePath):
        with claim(path.parent):
            yield
        return
    with writing(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(busy(path.parent, _holder(fd))) from None
        with writing(path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield
    finally:
        os.close(fd)


def _holder(fd: int) -> str:
    try:
        record = json.loads(os.pread(fd, 4096, 0))
        return f"process {record['pid']} on {record['host']}"
    except (ValueError, KeyError, OSError):  # it has just taken the lock and not yet written its name
        return "another process"


class Owner(msgspec.Struct, frozen=True):
    """The process that a claim is of; `born`: its `birth`."""

    pid: int
    host: str
    born: int | None = None

    @property
    def is_gone(self) -> bool:
        """True if the process is known to have ended, which only one of this machine can be."""
        return self.host == socket.gethostname() and not is_alive(self.pid, self.born)


@contextlib.contextmanager
def claim(folder: RemotePath) -> Iterator[None]:
    """Be the one writer below `folder`. StoreError names the other writer, or the error of the server."""
    mine = folder / f".lock-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    record = msgspec.json.encode(Owner(os.getpid(), socket.gethostname(), birth(os.getpid())))
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a beat that is lost is made up for by the next
                without_retries(mine).write_bytes(record)

    try:
        mine.write_bytes(record)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({error})") from error
    thread = threading.Thread(target=beat, daemon=True)
    try:
        _refuse_others(folder, mine)
        thread.start()
        yield
    finally:
        over.set()
        if thread.ident:
            thread.join(LAST_S)
        if not thread.is_alive():  # else the server is away; the claim will be a dead process's
            with contextlib.suppress(OSError):
                without_retries(mine).unlink(missing_ok=True)


def _refuse_others(folder: RemotePath, mine: RemotePath) -> None:
    now = mine.stat().st_mtime_ns
    for other in folder.glob(".lock-*"):
        if other.name == mine.name:
            continue
        try:
            age_s = (now - other.stat().st_mtime_ns) / 1e9
            owner = decode_json(other.read_bytes(), Owner)
        except (FileNotFoundError, msgspec.DecodeError):  # it was taken away meanwhile
            continue
        if age_s < STALE_S and not owner.is_gone:
            raise StoreError(busy(folder, f"process {owner.pid} on {owner.host}"))
        other.unlink(missing_ok=True)


def busy(store: AnyPath, owner: str) -> str:
    """The message for the second of two drivers."""
    watch, stop = f"fp4dse status --watch --store {store}", f"fp4dse stop --store {store}"
    return f"{store}: {owner} is writing to this store; see it with `{watch}`, end it with `{stop}`, or use another"


def birth(pid: int) -> int | None:
    """Start time of a process in ticks since the machine started, which tells it from a later one of the same number.
    None if there is none, if it has ended and its parent does not ask, or the system does not say."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in ("Z", "X") else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None


def is_alive(pid: int, born: int | None) -> bool:
    """True if the process that started then is running; if the time is unknown, if one of its number is."""
    return birth(pid) == born if born is not None else _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
