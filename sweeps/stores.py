"""Which stores lie on this machine, and what each of them holds, in a line."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from fp4dse.dse import StoreError
from fp4dse.results import open_store
from fp4dse.sweeps.places import RUNS
from fp4dse.sweeps.state import read_state


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


def list_stores(folder: Path = RUNS) -> list[StoreFacts]:
    """The stores `folder`/NAME/store, the one that changed last first: what commands take that are given none."""
    places = [path for path in folder.glob("*/store") if (path / "store.json").is_file()]
    return sorted(map(facts, places), key=lambda found: found.age_s)


def facts(path: Path) -> StoreFacts:
    """What a store holds."""
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
