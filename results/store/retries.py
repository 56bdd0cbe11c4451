"""Retries while a server cannot be reached: an outage of minutes costs minutes, not a sweep.

Everything that a store does on a server can be done again without harm: reading changes nothing, writing puts the same
bytes under the same name, deleting twice is deleting once. So what fails is tried again, after waits that double and
are drawn at random so that many clients do not come back in step, until it works or TOTAL_S seconds are over. What a
server refuses (no permission, no such bucket) it would refuse again: that is an error at once.

Many threads may wait for one server. The first of them says so, and the first that reaches it again.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from fp4dse.dse.program.urls import redacted

log = logging.getLogger(__name__)

T = TypeVar("T")

TOTAL_S = 600.0
"""Seconds for which a server is waited for."""
FIRST_S, LONGEST_S = 0.5, 30.0
"""The first wait, and the one that doubling ends at; each is drawn from its upper half."""
STEP_S = 0.2
"""Seconds after which a wait looks again whether it is to end."""

_REFUSALS = re.compile(
    r"AWS Error (ACCESS_DENIED|NO_SUCH_\w+|RESOURCE_NOT_FOUND|SIGNATURE_DOES_NOT_MATCH|INVALID_\w+|VALIDATION|"
    r"MISSING_\w+|UNRECOGNIZED_CLIENT|NOT_INITIALIZED|MALFORMED_\w+|OPT_IN_REQUIRED|REQUEST_EXPIRED)"
    r"|HTTP status (3\d\d|4(?!08|29)\d\d)"
)

_stop_requested: ContextVar[Callable[[], bool]] = ContextVar("ends", default=lambda: False)

_unreachable: dict[str, tuple[float, str]] = {}
"""Servers that are waited for: since when, and why."""
_lock = threading.Lock()


class ShortRead(OSError):
    """Fewer bytes arrived than the file has: the connection was cut, which not every library reports."""


@contextlib.contextmanager
def stop_waiting_when(when: Callable[[], bool]) -> Iterator[None]:
    """Inside, waits end with their error as soon as `when()` is true: somebody asked to stop. Outer conditions hold,
    too. A thread has to be started in a copy of the context (contextvars)."""
    around = _stop_requested.get()
    token = _stop_requested.set(lambda: around() or when())
    try:
        yield
    finally:
        _stop_requested.reset(token)


def is_refusal(error: OSError) -> bool:
    """True if trying again would bring the same answer."""
    definite = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
    return isinstance(error, definite) or bool(_REFUSALS.search(str(error)))


def is_server_error(error: BaseException) -> bool:
    """True if an error, which a library may have wrapped, is of a server or a connection, not of what was read."""
    by_kind = isinstance(error, ConnectionError | TimeoutError | ShortRead)
    return by_kind or bool(re.search(r"AWS Error|curlCode|google::cloud", str(error)))


def with_retries(action: Callable[[], T], what: object) -> T:
    """`action()`, tried again while a server cannot be reached. what: the file or store that is waited for, for the
    log. Raises the action's last OSError once TOTAL_S are over, and a refusal at once."""
    begin, wait, waited = time.monotonic(), FIRST_S, False
    while True:
        try:
            result = action()
        except OSError as error:
            left = begin + TOTAL_S - time.monotonic()
            if not is_refusal(error) and left > 0 and not _stop_requested.get()():
                _report_unreachable(what, error, left)
                waited = True
                if _wait(min(wait * random.uniform(0.5, 1.0), left)):
                    wait = min(2 * wait, LONGEST_S)
                    continue
            if waited:
                _forget(what)
            raise
        if waited:
            _report_reached(what)
        return result


def why_unreachable(what: object) -> str | None:
    """The reason why the server of a file or store is waited for now, or None."""
    found = _unreachable.get(_server(what))
    return found and found[1]


def _server(what: object) -> str:
    """`s3://bucket` of `s3://bucket/store/file?…`."""
    return "/".join(str(what).partition("?")[0].split("/")[:3])


def _report_unreachable(what: object, error: OSError, left: float) -> None:
    reason = redacted(str(error).splitlines()[0] if str(error) else type(error).__name__)
    with _lock:
        if _server(what) in _unreachable:
            return
        _unreachable[_server(what)] = time.monotonic(), reason
    log.warning("%s: cannot be reached (%s); trying again for up to %.3g min", what, reason, left / 60)


def _report_reached(what: object) -> None:
    if found := _forget(what):
        log.warning("%s: reached again after %.0f s", what, time.monotonic() - found[0])


def _forget(what: object) -> tuple[float, str] | None:
    with _lock:
        return _unreachable.pop(_server(what), None)


def _wait(seconds: float) -> bool:
    """False if the wait was ended before its time."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if _stop_requested.get()():
            return False
        time.sleep(min(left, STEP_S))
    return not _stop_requested.get()()
