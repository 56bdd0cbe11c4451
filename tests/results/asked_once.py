"""Stores that the pages are written from, for tests that ask them the same again and again."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import pytest

from fp4dse.results import Store, open_store
from fp4dse.results.store import query
from fp4dse.results.views import VIEWS


def asked_once(store: Store) -> Store:
    """The store; it answers each query once."""
    answers = cache(store.sql)
    store.sql = lambda asked: answers(asked).copy()
    return store


def joined(store: Path, folder: Path) -> Store:
    """A copy in a new folder with the same rows in one part: of many small ones, most of a query is reading footers."""
    copy, original = open_store(folder, create=True), open_store(store)
    assert copy.merge(original) == len(original.runs(["run_id"]))
    return copy


@contextmanager
def views_made_once() -> Iterator[None]:
    """Of the same rows a view is made once, as are the columns that it is made from: both take longer than queries."""
    made, tables, make = {}, {}, query._views

    def once(name, function, runs):
        key = (name, len(runs), *runs.columns)
        if key not in made:
            made[key] = function(runs)
        return made[key]

    def tables_once(rows, valid, named, prices, cost, *more):
        known = tables.setdefault((rows.count_rows(filter=valid), rows.schema.to_string(), str(cost)), {})
        if lacking := [name for name in named if name not in known]:
            known.update(make(rows, valid, lacking, prices, cost, *more))
        return {name: known[name] for name in named}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(query, "_views", tables_once)
        for name, function in VIEWS.items():
            patched.setitem(VIEWS, name, partial(once, name, function))
        yield
