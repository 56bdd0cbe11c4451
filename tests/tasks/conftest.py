"""What all tests of tasks share."""

import pytest

from fp4dse.tasks.language import presets


@pytest.fixture(autouse=True, scope="module")
def little_is_held_out():
    """Of text two batches, not sixteen: they are read three times after each training, which takes most of one of few
    steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presets, "EVAL_PASSES", 2)
        yield
