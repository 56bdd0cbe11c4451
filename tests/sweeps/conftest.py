"""What tests of sweeps share."""

import pytest

from fp4dse.sweeps.running import driver


@pytest.fixture(autouse=True, scope="module")
def no_best_so_far(request):
    """A sweep does not look for its best recipe so far, which takes more than all else of one with fake workers. Those
    of test_sweep.py do, whatever befalls them, and commands."""
    if request.module.__name__.endswith("test_sweep"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "best_gaps", lambda *_: [])
        yield
