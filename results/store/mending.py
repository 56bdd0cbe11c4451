"""What `torn/` holds, brought back where it turns out to be whole: copied there again, or moved there by mistake."""

from __future__ import annotations

import re

from fp4dse.results.store.atomic import each, move, reading, writing
from fp4dse.results.store.compaction import listed
from fp4dse.results.store.inbox import is_small
from fp4dse.results.store.integrity import Broken, check, content
from fp4dse.results.store.reader import Reader
from fp4dse.results.store.remote import Place


def mend(store: Place, reader: Reader) -> dict[str, list[str]]:
    """Move the broken files of a store to `torn/` and those of `torn/` that are not broken back; the lock is held.

    Returns names: "returned", and "broken" with the reason, all that `torn/` holds now.
    """
    reader.move_broken(anew=True)
    torn = listed(store, "torn")
    with reading(store):
        reasons = each(_why_broken, torn)
    returned, broken = [], []
    for file, reason in zip(torn, reasons, strict=True):
        if reason:
            broken.append(f"{file.name}: {reason}")
            continue
        with writing(store):
            move(file, store / _home(file) / file.name)
        returned.append(file.name)
    return {"returned": returned, "broken": broken}


def _home(file: Place) -> str:
    """The folder that a file of this name was written to."""
    return "parts" if re.fullmatch(r"(join\d-)?[0-9a-f]{16}\.parquet", file.name) else "inbox"


def _why_broken(file: Place) -> str | None:
    try:
        (content if is_small(file) else check)(file)
    except Broken as broken:
        return broken.reasons[file]
    return None
