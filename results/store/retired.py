"""Rules that hide rows: those with a revision of a component below the one that `store invalidate` set.

    {"engine": 3, "vision": 2}        retired.json: component -> the first revision that counts

A component is `quantizers`, `engine` or a task. The rows stay, only hidden; so a file that says anything else is an
error, as it might hide rows in silence.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow.dataset as ds

from fp4dse.dse import StoreError
from fp4dse.results.store.parquet import ALL
from fp4dse.results.store.remote import AnyPath

Rules = dict[str, int]

RULED = ["task", "rev_quantizers", "rev_engine", "rev_task"]
"""The columns that rules look at."""

MOST = 1 << 31
"""No revision reaches this."""


def checked_rules(data: dict[str, Any], file: AnyPath) -> Rules:
    """The content of retired.json. StoreError names what is wrong with it."""
    for component, below in data.items():
        if type(below) is not int or not 0 <= below < MOST:
            fix = "mend it, or delete the file and run `fp4dse store invalidate` again"
            raise StoreError(f"{file}: {component}: found {below!r}; accepted: the first revision that counts; {fix}")
    return data


def stronger(ours: Rules, theirs: Rules) -> Rules:
    """The rules of both: of two rules for a component, the one that hides more."""
    return {name: max(rules[name] for rules in (ours, theirs) if name in rules) for name in {**ours, **theirs}}


def valid(rules: Rules) -> ds.Expression:
    """The rows that no rule hides."""
    found = ALL
    for component, below in rules.items():
        if component in ("quantizers", "engine"):
            found &= ds.field(f"rev_{component}") >= below
        else:
            found &= (ds.field("task") != component) | (ds.field("rev_task") >= below)
    return found


def as_json(rules: Rules) -> bytes:
    """JSON with a line for each rule."""
    lines = ",\n".join(f"  {json.dumps(component)}: {below}" for component, below in sorted(rules.items()))
    return f"{{\n{lines}\n}}\n".encode()
