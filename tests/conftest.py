"""Set-up for all tests: hypothesis without deadlines, GPU tests only where there is a GPU."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("fp4dse", max_examples=50, deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fp4dse")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """What tests make up is not remembered for the user. The processes of one `pytest -n` share it, so that native code
    is built once."""
    of_all = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        of_all = of_all.parent
    (of_all / "cache").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(of_all / "cache"))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch  # only where a test asks for it: the tests of dse run without

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
