"""What the tests of the page of reinforcement learning share."""

import pytest

from fp4dse.results import Store
from tests.results.asked_once import asked_once, joined, views_made_once
from tests.results.rl.rl_page import DOCS, PAGE


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Store:
    """The rows that the page is of. Tests of several files ask its queries."""
    return asked_once(joined(DOCS / "study" / "rl-store", tmp_path_factory.mktemp("rl") / "store"))


@pytest.fixture(scope="session")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def few_views():
    with views_made_once():
        yield


@pytest.fixture(scope="module")
def every_effect(store, few_views):
    return store.sql("FROM rollout_effects")


@pytest.fixture(scope="module")
def effects(every_effect):
    """The effects of fixes on `rl:small`."""
    return every_effect[every_effect["preset"].eq("small")]
