"""What the tests of the page of reinforcement learning share."""

import pytest

from fp4dse.results import Store
from tests.results.asked_once import asked_once, joined
from tests.results.rl.rl_page import DOCS, PAGE


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Store:
    """The rows that the page is of. Tests of several files ask its queries."""
    return asked_once(joined(DOCS / "study" / "rl-store", tmp_path_factory.mktemp("rl") / "store"))


@pytest.fixture(scope="session")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")
