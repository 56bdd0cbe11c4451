"""Opens the storage of Optuna's studies: a journal file (a path), a database (`postgresql://…`, `sqlite:///…`), or
another process's storage behind Optuna's gRPC proxy (`grpc://127.0.0.1:13000`). The only module that knows Optuna's
storages.

Optuna's journal cannot be read any more once something was added behind a torn line, so a file is looked through before
it is opened. Every entry that is written here begins with MARK, and a file is ours if its first entry does: only such
a file is ever changed other than by adding to it. What else may lie at a path that somebody named (a database, a text,
a journal of other studies) stays as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from fp4dse.dse import ConfigError

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

MARK = b'{"by":"fp4dse",'
"""The beginning of an entry of a journal of ours; Optuna ignores a key that it does not know."""
SQLITE = b"SQLite format 3\x00"
LONGEST = 1 << 24
"""Bytes of a line from which on it is no entry."""
WAIT_S = 10
"""Seconds in which a storage behind a proxy has to answer."""


def open_storage(url: str | Path) -> optuna.storages.BaseStorage:
    """The storage behind a path or URL. ConfigError if it is no storage, a package is missing, or nobody answers; what
    it says has no credentials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scheme, separator, rest = str(url).partition("://")
    if not separator:
        return _open_journal(Path(url))
    if scheme == "grpc":
        return _open_proxy(str(url))
    if scheme == "postgresql":
        scheme = "postgresql+psycopg"
    try:
        return optuna.storages.RDBStorage(f"{scheme}://{rest}")
    except Exception as error:  # whatever the database's driver raises
        accepted = f"a database that answers ({_reason(error, str(url))})"
        raise ConfigError("--storage", without_credentials(url), accepted) from None


def serve_grpc(url: str | Path, port: int) -> None:
    """Offer a storage to other processes of this machine until interrupted."""
    import optuna

    with warnings.catch_warnings(), contextlib.suppress(KeyboardInterrupt):
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.run_grpc_proxy_server(open_storage(url), host="127.0.0.1", port=port)


def without_credentials(url: str | Path) -> str:
    """A URL without user, password and query; a path as it is."""
    scheme, separator, rest = str(url).partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}" if separator else scheme


def _reason(error: Exception, url: str) -> str:
    """The message of an error in one line; its kind alone where it quotes the credentials of the URL."""
    text = " ".join(str(error).split())[:200]
    user = url.partition("://")[2].rpartition("@")[0]
    secrets = [*re.split("[:@/]", user)[1:], *(value for _, value in parse_qsl(url.partition("?")[2]))]
    return type(error).__name__ if any(secret and secret in text for secret in secrets) else text


def _open_proxy(url: str) -> optuna.storages.GrpcStorageProxy:
    import optuna

    accepted = "grpc://HOST:PORT"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.path or "@" in url:
        raise ConfigError("--storage", without_credentials(url), accepted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        proxy = optuna.storages.GrpcStorageProxy(host=host, port=port)
    try:
        proxy.wait_server_ready(timeout=WAIT_S)
    except ConnectionError as error:
        proxy.close()
        raise ConfigError("--storage", url, f"{accepted} of a storage that answers ({error})") from None
    return proxy


# --- a journal file ------------------------------------------------------------------------------------------------


def _open_journal(path: Path) -> optuna.storages.JournalStorage:
    import optuna

    if re.match(r"[a-z][a-z0-9+.-]+:/", str(path)):
        raise ConfigError("--storage", str(path).partition(":")[0] + ":…", "a path, or a URL with :// in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mend_journal(path)
        return optuna.storages.JournalStorage(_journal(path))
    except OSError as error:
        raise ConfigError("--storage", str(path), f"a file that can be read and written ({error.strerror})") from None
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("--storage", str(path), f"a journal that Optuna can read ({error!r})") from None


def _journal(path: Path) -> optuna.storages.journal.JournalFileBackend:
    """Optuna's journal file with entries that are marked as ours; what is added need not survive a power cut: waiting
    for the disk is most of the time that mirroring takes."""
    from optuna.storages.journal import JournalFileBackend
    from optuna.storages.journal._file import get_lock_file

    class Journal(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            lines = [MARK + json.dumps(entry, separators=(",", ":")).encode()[1:] + b"\n" for entry in logs]
            with get_lock_file(self._lock), open(self._file_path, "ab") as file:
                file.write(b"".join(lines))

    return Journal(str(path))


class Fault(NamedTuple):
    """A file is `foreign` (no journal at all), `torn` in its last line, or `broken` before it."""

    kind: Literal["foreign", "torn", "broken"]
    ours: bool
    line: int
    offset: int
    """Bytes before the line."""


def mend_journal(path: Path) -> bool:
    """Cut a torn last line off a journal of ours; set one that is broken elsewhere aside, so that it is made anew.

    Returns whether anything was done. ConfigError, and the file as it was, where it is not ours and Optuna cannot read
    it. What is behind the last newline was never read by anyone.
    """
    if not _fault(path):
        return False
    from optuna.storages.journal import JournalFileSymlinkLock
    from optuna.storages.journal._file import get_lock_file

    with get_lock_file(JournalFileSymlinkLock(str(path))):  # another process may just be writing that line
        fault = _fault(path)
        if fault is None:
            return False
        if not fault.ours:
            raise ConfigError("--storage", str(path), _accepted(path, fault))
        if fault.kind == "torn":
            log.warning("%s: the last line is torn; cut off", path)
            os.truncate(path, fault.offset)
        else:
            aside = next(
                free for n in itertools.count(1) if not os.path.lexists(free := f"{path}.broken{n if n > 1 else ''}")
            )
            log.warning("%s: line %d is broken; set aside as %s, made anew from the store", path, fault.line, aside)
            os.rename(path, aside)
    return True


def _fault(path: Path) -> Fault | None:
    """The first fault of a file; None if there is none, or no file."""
    if not path.exists():
        return None
    if not path.is_file():
        raise ConfigError("--storage", str(path), "a file, or the path of one that is not there yet")
    ours, offset = False, 0
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(LONGEST)
            if not line:
                return None
            torn = not line.endswith(b"\n") and len(line) < LONGEST
            if number == 1:
                ours = line.startswith(MARK) and (torn or _is_entry(line))
                if not ours and not _is_entry(line):
                    return Fault("foreign", False, number, offset)
            if torn:
                return Fault("torn", ours, number, offset)
            if not _is_entry(line):
                return Fault("broken", ours, number, offset)
            offset += len(line)
    return None


def _is_entry(line: bytes) -> bool:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and isinstance(entry.get("op_code"), int) and "worker_id" in entry


def _accepted(path: Path, fault: Fault) -> str:
    with path.open("rb") as file:
        if file.read(len(SQLITE)) == SQLITE:
            return f"a journal of Optuna's; this is an SQLite file: sqlite:///{path}"
    if fault.kind == "foreign":
        return "a journal of Optuna's, or a path where nothing is yet; this file is neither and stays as it is"
    what = "its last line is torn" if fault.kind == "torn" else f"line {fault.line} is broken"
    return f"a whole journal; {what}, and as fp4dse did not begin this file it stays as it is: name another one"
