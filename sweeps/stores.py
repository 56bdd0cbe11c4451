"""Finds the stores on this machine, with a line for each, and the folders and files that a sweep keeps beside a store.

By default a sweep goes to `runs/NAME/store`, with its report beside. A store may be behind a URL, job folders may not:
workers write there as they train. They are in `<store>/jobs`, or in `runs/<name of the URL>/jobs` of the working
directory.
"""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import msgspec

from fp4dse.dse import ConfigError, StoreError
from fp4dse.dse.cost import DEFAULT_COST, CostTarget
from fp4dse.results import Store, open_store
from fp4dse.results.store.remote import AnyPath, RemotePath, locate
from fp4dse.sweeps.running.state import read_state

log = logging.getLogger(__name__)

RUNS = Path("runs")
BESIDE = frozenset({"jobs", "failed", "slurm", "state.json", "stop"})
"""Files that a sweep keeps in the folder of its store beside the store's own."""


class StoreFacts(msgspec.Struct, frozen=True):
    """A store. `sweep`: what was swept into it last, and `state` what became of that, None where nothing was;
    `age_s`: since it last changed; `unreadable`: why nothing more is known of it."""

    store: str
    sweep: str | None = None
    state: str | None = None
    rows: int = 0
    tasks: list[str] = []
    bytes: int = 0
    age_s: float = 0.0
    unreadable: str | None = None


def default_store(space: str) -> Path:
    """The folder that a sweep of this space goes to if none is named."""
    return RUNS / space / "store"


def latest_store() -> Path:
    """The store that was swept into last, for commands that are given none. ConfigError if there is none."""
    if not (stores := swept_stores()):
        accepted = f"the folder of a store (there is none under {RUNS}/; try `fp4dse quickstart`)"
        raise ConfigError("--store", None, accepted)
    return stores[-1]


def swept_stores() -> list[Path]:
    """All stores that were swept into here, the latest last."""
    states = sorted(RUNS.glob("*/store/state.json"), key=lambda path: path.stat().st_mtime)
    return [state.parent for state in states]


def list_stores() -> list[StoreFacts]:
    """The stores runs/NAME/store, the one that changed last first."""
    found = [path for path in RUNS.glob("*/store") if (path / "store.json").is_file()]
    return sorted(map(_facts, found), key=lambda facts: facts.age_s)


def _facts(path: Path) -> StoreFacts:
    sweep = state = None
    changed = (path / "store.json").stat().st_mtime
    try:
        last = read_state(path)
        sweep, changed = last.name, max(changed, last.updated)
        state = "running" if last.driver_is_alive else last.ended or "its process is gone"
    except StoreError:
        pass  # made by a merge, or by hand
    try:
        store = open_store(path)
        rows = store.runs(["task", "preset"])
        files = [file for folder in ("inbox", "parts") for file in (path / folder).glob("*") if file.is_file()]
        stats = [file.stat() for file in files]
    except (StoreError, OSError) as error:
        return StoreFacts(str(path), sweep, state, age_s=time.time() - changed, unreadable=str(error))
    return StoreFacts(
        store=str(path),
        sweep=sweep,
        state=state,
        rows=len(rows),
        tasks=sorted(set(rows["task"] + ":" + rows["preset"])),
        bytes=sum(stat.st_size for stat in stats),
        age_s=time.time() - max([changed, *(stat.st_mtime for stat in stats)]),
    )


def open_swept(store: str | Path, cost: CostTarget = DEFAULT_COST) -> Store:
    """The store to sweep into, made if it is not there. One that was deleted while a sweep ran is made anew, and said
    to be: the job folders that were written since are taken in."""
    folder = locate(store)
    left = sorted(BESIDE & {entry.name for entry in folder.iterdir()}) if folder.is_dir() else []
    if left and not (folder / "store.json").exists():
        log.warning("%s: the store is gone, but for %s; it is begun anew with what they hold", folder, ", ".join(left))
    return open_store(store, create=True, beside=BESIDE, cost=cost)


def home(folder: AnyPath) -> Path:
    """The folder on this machine that belongs to a store."""
    if isinstance(folder, RemotePath):
        return RUNS / re.sub(r"[^A-Za-z0-9_.-]+", "-", str(folder).partition("?")[0])
    return folder


def work_folder(store: str | AnyPath) -> Path:
    """The folder of a store's job folders."""
    return (home(locate(store)) / "jobs").absolute()


def report_path(store: str | AnyPath) -> Path:
    """The report beside the store: `runs/NAME/report.html`; for a store behind a URL, in its folder on this machine."""
    store = locate(store)
    if isinstance(store, RemotePath):
        return home(store) / "report.html"
    return store.with_name("report.html" if store.name == "store" else f"{store.name}-report.html")
