"""A sweep that is refused before anything is trained leaves the state of the last one as it was, and says nothing
itself: its caller prints the error."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from fp4dse.dse import ConfigError, Space
from fp4dse.sweeps import run_search, run_sweep

FAKE = str(Path(__file__).with_name("fake_worker.py"))
SPACE = Space.from_dict({"name": "few", "axes": {"wgrad.rotation": ["none", "rht16"]}})
NO_SUCH_LAYER = [{"kind": ["attention"], "wgrad": "bf16"}]
ELSEWHERE = Space.from_dict({"name": "elsewhere", "base": "nvfp4", "axes": {"layers": [NO_SUCH_LAYER]}})


def sweep(store, **more):
    arguments = {"tasks": [("regression", "quickstart")], "seeds": [0], "store": store, "jobs": 1, **more}
    space = arguments.pop("space", SPACE)
    return run_sweep(space, worker=(sys.executable, FAKE, "ok"), **arguments)


REFUSED = {
    "an executor that there is not": partial(sweep, executor="k8s"),
    "an option that the executor does not have": partial(sweep, options={"partition": "gpu"}),
    "a value that an option does not take": partial(sweep, options={"lanes": "many"}),
    "a seed that another stage has": partial(sweep, stage="confirm"),
    "a rule for layers that the model does not have": partial(sweep, space=ELSEWHERE),
    "an executor of a search that there is not": partial(run_search, SPACE, sampler="random", trials=1, executor="k8s"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_sweep_leaves_the_state_as_it_was(tmp_path, what):
    store, shown = tmp_path / "store", []
    assert sweep(store).done
    os.utime(store / "state.json", (1000, 1000))  # commands without --store take the store with the latest state
    before = (store / "state.json").read_bytes()
    with pytest.raises(ConfigError):
        REFUSED[what](store=store, progress=shown.append)
    assert (store / "state.json").read_bytes() == before
    assert (store / "state.json").stat().st_mtime == 1000
    assert [state.ended for state in shown] == []


def test_a_refused_sweep_into_a_new_store_leaves_no_state(tmp_path):
    with pytest.raises(ConfigError, match="option"):
        sweep(tmp_path / "store", options={"partition": "gpu"})
    assert not (tmp_path / "store" / "state.json").exists()


def test_an_unknown_executor_makes_no_store(tmp_path):
    with pytest.raises(ConfigError, match="accepted: local, ray, slurm, folder"):
        sweep(tmp_path / "store", executor="k8s")
    assert not (tmp_path / "store").exists()
