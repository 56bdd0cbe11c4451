"""A lane trains to the same bits alone and in any company, in every task."""

import msgspec
import pytest
import torch

from fp4dse.dse import Recipe
from fp4dse.tasks import TASKS, Lane, get_task, train
from fp4dse.tasks.engine import Pruning
from fp4dse.tasks.job import Rung

SMOKE = [(name, preset) for name, presets in TASKS.items() for preset in presets if preset.endswith("smoke")]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for one another take long on a machine that is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def of_task(name, preset, names, steps=6):
    task = msgspec.structs.replace(get_task(name, preset), steps=steps)
    return task, [Lane(Recipe.named(n), task.lr, seed) for seed, n in enumerate(names)]


@pytest.mark.parametrize(
    ("between", "threads"), [("", 2), ("+bf16", 1), pytest.param("", 1, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(("name", "preset"), SMOKE)
def test_a_lane_is_what_it_is_in_company(name, preset, between, threads):
    """Alone, in another order, at the end or the start, and beside one that diverges."""
    torch.set_num_threads(threads)
    task = msgspec.structs.replace(get_task(name, preset + between), steps=6)
    names = ("nvfp4", "nvfp4-sr", "ue5m3-sr")
    lanes = [Lane(Recipe.named(n), task.lr * (1 + seed / 4), seed) for n in names for seed in (0, 1)]
    together = train(task, lanes).lanes
    assert train(task, [lanes[5]]).lanes == [together[5]]  # the first has another seed than it has together
    chosen = [4, 0, 2]
    first, wild, *others = train(task, [lanes[1], Lane(lanes[0].recipe, 1e30, 7), *(lanes[i] for i in chosen)]).lanes
    assert [first, *others] == [together[i] for i in (1, *chosen)]
    assert (wild.status, wild.val_loss) == ("diverged", None)
    assert wild.diverged_step is not None


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4-stable-spam", "nvfp4-sr-rht", "nvidia-nvfp4-finish", "wang-dge-occ"])
@pytest.mark.parametrize(("name", "preset"), [("regression", "smoke"), ("vision", "cnn-smoke")])
def test_so_it_is_with_whatever_a_recipe_does(name, preset, recipe):
    task, lanes = of_task(name, preset, [recipe] * 3)
    together = train(task, lanes, record=True).lanes
    assert [train(task, [lane], record=True).lanes[0] for lane in lanes] == together


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_so_it_is_with_batches_of_odd_sizes(rows):
    task, lanes = of_task("regression", "smoke", ["bf16"] * 9, steps=3)
    task = msgspec.structs.replace(task, batch=rows, eval_rows=rows)
    together = train(task, lanes).lanes
    assert [train(task, [lane]).lanes[0] for lane in lanes[1::3]] == together[1::3]


def test_the_last_lane_of_a_population_goes_on_alone():
    task, lanes = of_task("vision", "smoke", ["nvfp4", "nvfp4-sr"], steps=8)
    plain = train(task, lanes).lanes

    def second(losses, *_):
        return [False, True]

    dropped, stayed = train(task, lanes, pruning=Pruning([Rung(4, 0.5)], second)).lanes
    assert (dropped.status, dropped.pruned_step) == ("pruned", 4)
    assert stayed == plain[1]
