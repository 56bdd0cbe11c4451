"""Set-up for all tests: hypothesis without deadlines, GPU tests only where there is a GPU."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)
    """A process that has sent its last result takes two seconds to free what it has imported and made, if it is let.
    What is registered after this runs before it."""

settings.register_profile("fp4dse", max_examples=50, deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fp4dse")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory, pytestconfig):
    """What tests make up is not remembered for the user. Processes of one session share it. The native code, which has
    the hash of its sources in its name and takes a compiler five seconds, is kept for the next session."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    own = shared / "cache" / "fp4dse"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own.parent))
        if (cache := getattr(pytestconfig, "cache", None)) is None:  # -p no:cacheprovider
            yield
            return
        kept = cache.mkdir("native")
        _copy_native(kept, own)
        yield
        _copy_native(own, kept)
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            for file in sorted(kept.glob("native-*.so"), key=os.path.getmtime)[:-4]:
                file.unlink()  # of sources of long ago


def _copy_native(source: Path, target: Path) -> None:
    """Copy the library, which appears whole, as another process may look for it."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.glob("native-*.so"):
        if not (target / file.name).exists():
            hidden = target / f".{file.name}.{os.getpid()}"
            shutil.copyfile(file, hidden)
            hidden.replace(target / file.name)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    """The folder of a user's cache that has nothing but the native code."""
    before = Path(os.environ["XDG_CACHE_HOME"]) / "fp4dse"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    _copy_native(before, tmp_path / "empty" / "fp4dse")
    return tmp_path / "empty" / "fp4dse"


@pytest.fixture(autouse=True, scope="session")
def no_power_cuts():
    """No test waits until a file is on the disk: none cuts the power. Tests that look at this call put their own there.
    Of processes that tests start nothing is changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_command_line():
    """The command line is built once, as in any process; hundreds of tests call it, and it takes 40 ms."""
    with pytest.MonkeyPatch.context() as patch:
        if (typer := sys.modules.get("typer.main")) is not None:  # the tests of dse run without
            patch.setattr(typer, "get_command", functools.cache(typer.get_command))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: no search for garbage goes through it again, which takes half a second. And
    garbage is searched for rarely, as its search took four hundredths of the time of tests. At the exit all is let go
    of, or Triton's library counts on standard error what it still holds; not before, as pytest searches twice then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)
        atexit.register(gc.unfreeze)


def pytest_report_header() -> str:
    return "tests marked gpu are left out where torch sees no CUDA device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch  # only where a test asks for it: the tests of dse run without

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=gpu)  # 1,500 that are skipped one by one take seconds
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
