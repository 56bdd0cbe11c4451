"""Commands run in an empty folder, with workers that are fakes."""

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from tests.commands.running import FEW, Answer, call, swept, worker_mode


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
    """The folder in which `swept` has run."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "few.toml").write_text(FEW)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.chdir(folder)
        worker_mode(patch, "ok")
        assert swept(call) == 0
    return folder


@pytest.fixture
def finished(run, once_finished, tmp_path) -> None:
    """The folder of `run` as `swept` leaves it: most of such a sweep's time goes into its report."""
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
