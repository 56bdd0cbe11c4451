"""Of a module with tests, the syntax trees that it asked for go when it ends."""

import pytest

from tests.house.modules import parsed


@pytest.fixture(autouse=True, scope="module")
def parsed_no_more():
    """The trees of a few hundred modules are much to keep for the rest of the session."""
    yield
    parsed.cache_clear()
