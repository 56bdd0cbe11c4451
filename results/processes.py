"""Is a process of this machine still there? Its number may have gone to a later one, so the time of its birth tells."""

from __future__ import annotations

import os
from pathlib import Path


def birth(pid: int) -> int | None:
    """When a process began, in ticks since the machine did: it tells the process from a later one of the same number.
    None if there is none, if it has ended and its parent does not ask, or the system does not say."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in ("Z", "X") else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None


def is_alive(pid: int, born: int | None) -> bool:
    """Whether the process that was born then is there; if that is unknown, whether one of its number is."""
    return birth(pid) == born if born is not None else _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
