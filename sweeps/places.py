"""Where a sweep keeps what is not a result: job folders on a disk, its state and requests to stop beside the store.

A store may be behind a URL, job folders may not: workers write there as they train. They are in `<store>/jobs`, or in
`runs/<name of the URL>/jobs` of the working directory.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

from fp4dse.dse import StoreError
from fp4dse.results.store.atomic import write_atomic
from fp4dse.results.store.remote import AnyPath, RemotePath, locate, without_retries

RUNS = Path("runs")
"""Where sweeps go by default: `runs/NAME/store`, with the report beside."""
BESIDE = frozenset({"jobs", "failed", "slurm", "state.json", "stop"})
"""What a sweep keeps in the folder of its store beside the store's own."""


def home(place: AnyPath) -> Path:
    """The folder on this machine that belongs to a store."""
    if isinstance(place, RemotePath):
        return RUNS / re.sub(r"[^A-Za-z0-9_.-]+", "-", str(place).partition("?")[0])
    return place


def work_folder(store: str | AnyPath) -> Path:
    """Where the job folders of a store are."""
    return (home(locate(store)) / "jobs").absolute()


def request_stop(store: str | AnyPath) -> None:
    """Ask the sweep that writes to a store to end; it looks every two seconds, wherever it runs."""
    write_atomic(locate(store) / "stop", f"{time.time()}\n".encode())


def stop_requested(store: AnyPath) -> bool:
    """Whether someone asked. A store that cannot be reached right now is asked again later."""
    with contextlib.suppress(OSError, StoreError):
        return (without_retries(store) / "stop").exists()
    return False


def withdraw_stop(store: AnyPath) -> None:
    """Forget requests: they were for the sweep that is over."""
    with contextlib.suppress(OSError):
        (without_retries(store) / "stop").unlink(missing_ok=True)
