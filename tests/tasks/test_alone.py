"""A lane trains to the same bits alone, in a pair and in larger company, in every task."""

import msgspec
import pytest
import torch

from fp4dse.dse import Recipe
from fp4dse.kernels.backend import _eager
from fp4dse.tasks import TASKS, Lane, get_task, train
from fp4dse.tasks.job import Rung

SMOKE = [(name, preset) for name, presets in TASKS.items() for preset in presets if preset.endswith("smoke")]


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """The reference itself: compiling it takes longer than all these tests, and gives the same bits."""
    monkeypatch.setattr("fp4dse.kernels.lanes.backend", lambda device: _eager())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for one another take long on a machine that is busy
    yield
    torch.set_num_threads(threads)


def of_task(name, preset, names, steps=3):
    task = msgspec.structs.replace(get_task(name, preset), steps=steps)
    return task, [Lane(Recipe.named(n), task.lr, seed) for seed, n in enumerate(names)]


@pytest.mark.parametrize("between", ["", "+bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "preset"), SMOKE)
def test_a_lane_is_what_it_is_in_company(name, preset, between):
    task, lanes = of_task(name, preset + between, ["nvfp4", "nvfp4-sr", "ue5m3-sr"])
    together = train(task, lanes).lanes
    assert train(task, lanes[1:2]).lanes == together[1:2]
    assert train(task, [lanes[2], lanes[1]]).lanes == [together[2], together[1]]


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4-stable-spam", "nvfp4-sr-rht", "nvidia-nvfp4-finish", "wang-dge-occ"])
@pytest.mark.parametrize(("name", "preset"), [("regression", "smoke"), ("vision", "cnn-smoke")])
def test_so_it_is_with_whatever_a_recipe_does(name, preset, recipe):
    task, lanes = of_task(name, preset, [recipe] * 3, steps=6)
    together = train(task, lanes, record=True).lanes
    assert [train(task, [lane], record=True).lanes[0] for lane in lanes] == together


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_so_it_is_with_batches_of_odd_sizes(rows):
    task, lanes = of_task("regression", "smoke", ["bf16"] * 9)
    task = msgspec.structs.replace(task, batch=rows, eval_rows=rows)
    together = train(task, lanes).lanes
    assert [train(task, [lane]).lanes[0] for lane in lanes[1::3]] == together[1::3]


def test_the_last_lane_of_a_population_goes_on_alone():
    task, lanes = of_task("vision", "smoke", ["nvfp4", "nvfp4-sr"], steps=8)
    plain = train(task, lanes).lanes

    def second(losses, *_):
        return [False, True]

    dropped, stayed = train(task, lanes, rungs=[Rung(4, 0.5)], keep_lanes=second).lanes
    assert (dropped.status, dropped.pruned_step) == ("pruned", 4)
    assert stayed == plain[1]
