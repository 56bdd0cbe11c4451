"""Which spaces were swept into a store, and what each of them asks: spaces.json beside the rows.

    {"quickstart": "Formats, where to round stochastically, and the rotation of the weight gradient: 48 recipes"}

The space that was swept last stands last. Rows do not say it: a row that two spaces ask for is trained once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fp4dse.results.files import read_json, write_atomic

if TYPE_CHECKING:
    from fp4dse.results.store import Store

FILE = "spaces.json"


def note_space(store: Store, name: str, summary: str) -> None:
    """Store that a space is swept into the store. summary: what it asks, as its file says; may be empty."""
    with store.lock():
        known = spaces(store)
        noted = {**{other: asks for other, asks in known.items() if other != name}, name: summary}
        if list(noted.items()) != list(known.items()):
            _write(store, noted)


def merge_spaces(store: Store, other: Store) -> None:
    """Take over what was swept into another store; what was swept into this one last stays last."""
    ours = spaces(store)
    new = {name: asks for name, asks in spaces(other).items() if name not in ours}
    if new:
        _write(store, new | ours)


def _write(store: Store, noted: dict[str, str]) -> None:
    write_atomic(store.path / FILE, f"{json.dumps(noted, indent=1, ensure_ascii=False)}\n".encode())


def spaces(store: Store) -> dict[str, str]:
    """Name -> summary of the spaces that were swept into the store, the latest last; StoreError if unreadable."""
    path = store.path / FILE
    return {str(name): str(asks) for name, asks in read_json(path).items()} if path.exists() else {}


def store_name(store: Store) -> str:
    """What a store is called: `zoo` for runs/zoo/store, else its folder's name."""
    path = store.path.resolve() if isinstance(store.path, Path) else store.path
    return path.parent.name if path.name == "store" else path.name
