"""A lane trains to the same bits alone and beside any others, in every task and with whatever a recipe does."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest

from fp4dse.dse import Recipe
from fp4dse.dse.layers.precision import Finish, Precise
from fp4dse.dse.optimizer import SGD, Muon, StableSPAM
from fp4dse.dse.schedule import Cosine, Linear, Triangle
from fp4dse.dse.training import Training
from fp4dse.tasks import TASKS, Lane, get_task, train
from fp4dse.tasks.engine import Pruning
from fp4dse.tasks.job import Rung
from fp4dse.tasks.task import Problem, Task
from fp4dse.tasks.threads import torch_threads
from tests.tasks import plain_net

replace = msgspec.structs.replace

SMOKE = [
    (name, preset)
    for name, presets in TASKS.items()
    for preset, task in presets.items()
    if preset.endswith("smoke") and not task.rolls_out  # tests/tasks/rl/test_rl.py has those
]
Lanes = tuple[Task, list[Lane]]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for one another take long on a machine that is busy."""
    with torch_threads(1):
        yield


def short(name: str, preset: str, steps: int = 3) -> Task:
    """Of few steps, with little held out, in two passes, few samples drawn, and a base that has hardly learned."""
    task = get_task(name, preset)
    if task.pretrain:
        base, lr = task.pretrain.args
        task = replace(task, pretrain=partial(task.pretrain.func, replace(base, steps=2), lr))
    if name == "diffusion":
        (size,) = task.finish.args
        task = replace(task, finish=partial(task.finish.func, replace(size, samples=16)))
    return replace(task, steps=steps, eval_rows=min(task.eval_rows, 16), problem=partial(little, task.problem))


def little(problem: Callable, seeds: Sequence[int]) -> Problem:
    """The problem with the first of its held-out samples."""
    whole = problem(seeds)
    return replace(whole, val_x=whole.val_x[:, :24], val_y=whole.val_y[:, :24])


def recipes(task: Task, named=(("nvfp4", 0), ("nvfp4-sr", 1), ("nvfp4-sr", 0), ("ue5m3-sr", 1))) -> Lanes:
    """Lanes of recipes that share their structural signature, some with a recipe or a seed in common, of two rates."""
    return task, [Lane(Recipe.named(name), task.lr * (1 + seed / 4), seed) for name, seed in named]


def of_every_preset(name: str, preset: str) -> Lanes:
    return recipes(short(name, preset))


def of_one_recipe(name: str) -> Lanes:
    task = short("vision", "cnn-smoke")
    return task, [Lane(Recipe.named(name), task.lr, seed) for seed in range(3)]


def with_precise_layers_and_a_finish() -> Lanes:
    around = {"precise": Precise(attention=True, head=False), "finish": Finish(share=0.5, what="forward")}
    task, lanes = recipes(short("vision", "smoke"))
    return task, [replace(lane, recipe=replace(lane.recipe, **around)) for lane in lanes]


def with_fine_tuning() -> Lanes:
    task, lanes = recipes(short("regression", "smoke", 6))
    around = {"finish": Finish(share=0.5, what="all-but-weights"), "training": Training(schedule=Triangle(share=0.5))}
    return task, [replace(lane, recipe=replace(lane.recipe, **around)) for lane in lanes]


def with_numbers_of_their_own() -> Lanes:
    numbers = [{}, {"weight_decay": 0.3}, {"clip": 0.1}, {"loss_scale": 1024.0}, {"beta2": 0.999}]
    numbers += [{"loss_scale": 2.0**127, "loss_scale_growth": 2}, {"loss_scale": 64.0, "loss_scale_growth": 3}]
    numbers += [{"schedule": Cosine(warmup=0.5)}, {"schedule": Linear(floor=0.5)}]
    task, nvfp4 = short("regression", "smoke", 8), Recipe.named("nvfp4")
    lanes = [Lane(replace(nvfp4, training=Training(**each)), 1e-2, i % 3) for i, each in enumerate(numbers)]
    return task, lanes


def in_batches_of(rows: int) -> Lanes:
    task, lanes = of_every_preset("regression", "smoke")
    return replace(task, steps=3, batch=rows, eval_rows=rows), lanes


def of_a_plain_module() -> Lanes:
    return recipes(plain_net.task_of(steps=5), (("nvfp4", 0), ("nvfp4-sr", 1), ("nvfp4-sr", 0)))


def of_a_plain_module_with(training: Training) -> Lanes:
    recipe = replace(Recipe.named("ue5m3-graphcore"), training=training)
    return plain_net.task_of(steps=5), [Lane(recipe, 1e-2, seed) for seed in range(3)]


STABLE = Training(optimizer=StableSPAM(reset=3), loss_scale=64.0, schedule=None, clip=0.1)
CASES: dict[str, Callable[[], Lanes]] = {
    **{f"{name}:{preset}+bf16": partial(of_every_preset, name, f"{preset}+bf16") for name, preset in SMOKE},
    "language:moe-smoke+swiglu8": partial(of_every_preset, "language", "moe-smoke+swiglu8"),
    **{f"{name}:{preset} on 2 threads": partial(of_every_preset, name, preset) for name, preset in SMOKE},
    **{
        f"recording {name}": partial(of_one_recipe, name)
        for name in (
            *("bf16", "nvfp4-stable-spam", "nvfp4-muon", "nvfp4-sr-rht", "nvidia-nvfp4-finish", "wang-dge-occ"),
            *("averis", "metis", "luq-smp", "tetrajet2-outcontrol", "arcquant"),
        )
    },
    "precise layers and a finish": with_precise_layers_and_a_finish,
    "fine-tuning but for the weights": with_fine_tuning,
    "numbers of their own": with_numbers_of_their_own,
    **{f"batches of {rows}": partial(in_batches_of, rows) for rows in (1, 7, 33)},
    "recording a plain module": of_a_plain_module,
    "a plain module with SGD": partial(
        of_a_plain_module_with, Training(optimizer=SGD(), weight_decay=0.1, accumulate=2)
    ),
    "a plain module with Muon": partial(of_a_plain_module_with, Training(optimizer=Muon(), weight_decay=0.1)),
    "a plain module with Stable-SPAM": partial(of_a_plain_module_with, STABLE),
}


ON_TWO = ["regression:smoke", "vision:resnet-smoke", "diffusion:dit-smoke", "language:moe-smoke"]
"""Those that train on two threads among the quick tests: between them they have all kinds of layers."""


def cases():
    """CASES, some of them slow."""
    slow = {case for case in CASES if "2 threads" in case} - {f"{name} on 2 threads" for name in ON_TWO}
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in CASES]


def test_what_trains_on_two_threads_is_there():
    assert {f"{name} on 2 threads" for name in ON_TWO} <= set(CASES)


@pytest.mark.parametrize("case", cases())
def test_a_lane_is_what_it_is_beside_any_others(case):
    """Alone, in another order, at the end or the start, and beside one that diverges."""
    task, lanes = CASES[case]()

    def results(lanes):
        with torch_threads(2 if "2 threads" in case else 1):
            return train(task, lanes, record="recording" in case)

    together = results(lanes).lanes
    assert all(result.status == "done" for result in together)
    assert len({tuple(result.curve_loss) for result in together}) > len(lanes) / 2
    last = len(lanes) - 1
    assert results([lanes[last]]).lanes == [together[last]]  # the first has another seed than it has together
    chosen = [last - 1, 0, *range(2, last - 1, 2)]
    wild = Lane(lanes[0].recipe, 1e38, 7)
    first, diverged, *others = results([lanes[1], wild, *(lanes[i] for i in chosen)]).lanes
    assert [first, *others] == [together[i] for i in (1, *chosen)]
    assert (diverged.status, diverged.val_loss) == ("diverged", None)
    assert diverged.diverged_step is not None


def test_the_last_lane_of_a_population_goes_on_alone():
    task, lanes = recipes(short("vision", "smoke", 8))
    lanes = lanes[1:3]
    plain = train(task, lanes).lanes

    def second(losses, *_):
        return [False, True]

    dropped, stayed = train(task, lanes, pruning=Pruning([Rung(4, 0.5)], second)).lanes
    assert (dropped.status, dropped.pruned_step) == ("pruned", 4)
    assert stayed == plain[1]
