"""Stores that the pages are written from, for tests that ask them the same again and again."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import pytest

from fp4dse.results import Store, open_store
from fp4dse.results.views import VIEWS


def asked_once(store: Store) -> Store:
    """The store; it answers each query once."""
    answers = cache(store.sql)
    store.sql = lambda query: answers(query).copy()
    return store


def joined(store: Path, folder: Path) -> Store:
    """A copy in a new folder with the same rows in one part: of many small ones, most of a query is reading footers."""
    copy, original = open_store(folder, create=True), open_store(store)
    assert copy.merge(original) == len(original.runs(["run_id"]))
    return copy


@contextmanager
def views_made_once() -> Iterator[None]:
    """Of the same rows a view is made once: it takes longer than the queries."""
    made = {}

    def once(name, function, runs):
        key = (name, len(runs), *runs.columns)
        if key not in made:
            made[key] = function(runs)
        return made[key]

    with pytest.MonkeyPatch.context() as patched:
        for name, function in VIEWS.items():
            patched.setitem(VIEWS, name, partial(once, name, function))
        yield
