"""Commands run in an empty folder, with workers that are fakes."""

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from tests.commands.running import FEW, Answer, call, short_reports, swept, worker_mode


@pytest.fixture
def whole_report():
    """For tests that read the report."""


@pytest.fixture(autouse=True)
def short_report(request, monkeypatch):
    """A page of one line for the others: most of what a small sweep takes goes into its report."""
    if "whole_report" not in request.fixturenames:
        short_reports(monkeypatch)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder that holds the space few.toml."""
    monkeypatch.chdir(tmp_path)
    Path("few.toml").write_text(FEW)
    worker_mode(monkeypatch, "ok")

    def run(*arguments: str) -> Answer:
        capsys.readouterr()
        return Answer(call(*arguments), *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def once_finished(tmp_path_factory) -> Path:
    """The folder in which `swept` has run, with a report of one line."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "few.toml").write_text(FEW)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.chdir(folder)
        worker_mode(patch, "ok")
        short_reports(patch)
        assert swept(call) == 0
    return folder


@pytest.fixture
def finished(run, once_finished, tmp_path) -> None:
    """The folder of `run` as `swept` leaves it."""
    shutil.copytree(once_finished, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def timed(monkeypatch):
    """Sets what layers take: microseconds, beside 10 in BF16, and whether that is steady."""
    from fp4dse.kernels import layer_time

    def is_(us: float, steady: bool = True):
        def times(recipe, model, device):
            return [layer_time.LayerTime(model.linears[0], 1, 0, us, 10.0, steady, "eager")]

        monkeypatch.setattr(layer_time, "layer_times", times)

    return is_
