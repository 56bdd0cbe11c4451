"""Held-out losses have no chance in them: what is rounded by chance in training is rounded to nearest."""

import ast
from pathlib import Path

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Recipe
from fp4dse.dse.optimizer import AdamW
from fp4dse.dse.outliers import OUTLIER_NAMES
from fp4dse.dse.rounding import Ema, Nearest, Stochastic
from fp4dse.dse.scale import TensorScale
from fp4dse.dse.stages import Fprop, Hadamard
from fp4dse.dse.training import Training
from fp4dse.kernels import lanes as kernel_lanes
from fp4dse.kernels.quant.backend import Backend
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population
from fp4dse.tasks.engine.evaluation import evaluate
from tests.tasks.plain_net import task_of

ROOT = Path(__file__).parents[2]
replace = msgspec.structs.replace
BF16 = Recipe.named("bf16")
NVFP4 = QUANTIZERS["nvfp4"]


def by_chance(name, **changes):
    return replace(QUANTIZERS[name], rounding=Stochastic(), **changes)


def forward(q, w=None, rotation=None):
    """A recipe that quantizes the forward pass alone, so that what differs is seen there."""
    return replace(BF16, fprop=Fprop(x=q, w=w or q, rotation=rotation))


RECIPES = {
    "nvfp4": Recipe.uniform(by_chance("nvfp4")),
    "mxfp4, 8 bits": forward(replace(QUANTIZERS["mxfp4"], rounding=Stochastic(bits=8))),
    "one operand": forward(by_chance("nvfp4"), replace(NVFP4, rounding=Ema())),
    "held maxima": forward(by_chance("nvfp4", tensor_scale=TensorScale(amax="held", steps=2))),
    "rotated": forward(by_chance("nvfp4"), rotation=Hadamard(16)),
    "scales": forward(replace(NVFP4, scale=replace(NVFP4.scale, rounding="stochastic"))),
    "eden": forward(QUANTIZERS["ms-eden"], rotation=Hadamard(128)),
    "hif4": forward(by_chance("hif4")),
    "split": forward(by_chance("amxfp4")),
    "residual": forward(by_chance("nvfp4", outliers=OUTLIER_NAMES["residual"])),
}


STEPS = 5
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def trained(task, recipe, device="cpu"):
    """A population after a few steps; on a GPU the last ones are replayed."""
    population = Population(task, [Lane(recipe, task.lr, seed) for seed in (0, 1)], device)
    for step in range(STEPS):
        population.train_step(step)
    return population


def with_weights_of(other, recipe):
    """A population of another recipe with all state of `other` that it can have."""
    lanes = [Lane(recipe, lane.lr, lane.seed) for lane in other.lanes]
    population = Population(other.task, lanes, other.device)
    state = other.state(STEPS)
    kept = recipe != BF16  # a BF16 lane has no quantizer that could carry something
    population.load_state({name: v for name, v in state.items() if kept or not name.startswith("kept/")}, STEPS)
    return population


def short(*name):
    return replace(get_task(*name), steps=8)


@pytest.mark.parametrize("backend", ["compiled", "eager", CUDA])
@pytest.mark.parametrize("name", RECIPES)
def test_the_held_out_loss_is_that_of_the_nearest_twin_with_the_same_weights(name, backend, monkeypatch):
    if backend == "eager":
        monkeypatch.setattr(kernel_lanes, "backend", lambda _: Backend("eager"))
    recipe = RECIPES[name]
    one = trained(short("regression", "smoke"), recipe, "cuda" if backend == "cuda" else "cpu")
    twin = with_weights_of(one, recipe.evaluated())
    found = evaluate(one)
    assert torch.equal(found[0], evaluate(twin)[0])
    # the twin, which has no chance in its forward pass, computes in evaluation as it trains
    twin.numerics.training = False
    step = twin.task.steps
    twin.numerics.step.fill_(step)
    x, y = twin.problem.val_x[twin.data_index], twin.problem.val_y[twin.data_index]
    as_trained = twin.task.loss(twin.model(x), y)
    assert torch.allclose(found[0], as_trained, rtol=1e-5)
    assert torch.equal(evaluate(one)[0], found[0])


TASKS = {
    "regression": lambda: short("regression", "smoke"),
    "convolutions": lambda: short("vision", "resnet-smoke"),
    "experts": lambda: short("language", "moe-smoke"),
    "diffusion": lambda: short("diffusion", "smoke"),
    "a plain torch module": lambda: task_of(steps=8),
}


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("task", TASKS)
def test_both_figures_are_those_of_lanes_that_have_these_weights(task, device):
    recipe = RECIPES["nvfp4"]
    one = trained(TASKS[task](), recipe, device)
    quantized, in_bf16 = evaluate(one)[0], evaluate(one, "bf16")[0]
    assert torch.equal(quantized, evaluate(with_weights_of(one, recipe.evaluated()))[0])
    assert torch.equal(in_bf16, evaluate(with_weights_of(one, BF16))[0])
    assert not torch.equal(quantized, in_bf16)


def test_a_recipe_without_quantizers_that_is_not_bf16_is_evaluated_in_bf16_too():
    untouched = Recipe.uniform(replace(NVFP4, element="none"))
    one = trained(short("regression", "smoke"), untouched)
    assert torch.equal(evaluate(one, "bf16")[0], evaluate(with_weights_of(one, BF16))[0])
    assert not torch.equal(evaluate(one, "bf16")[0], evaluate(one)[0])


def test_evaluation_changes_no_state_and_no_later_step():
    task = short("regression", "smoke")
    one, other = (trained(task, RECIPES["held maxima"]) for _ in range(2))
    evaluate(one)
    evaluate(one, "bf16")
    for population in (one, other):
        population.train_step(STEPS)
    mine, theirs = one.state(STEPS + 1), other.state(STEPS + 1)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name].nan_to_num(), theirs[name].nan_to_num()) for name in mine)


def test_rows_have_both_figures_and_bf16_has_one():
    task = short("regression", "smoke")
    for recipe in (BF16, RECIPES["nvfp4"]):
        lanes = train(task, [Lane(recipe, task.lr, seed) for seed in (0, 1)]).lanes
        assert all((lane.val_loss == lane.val_loss_bf16) == (recipe is BF16) for lane in lanes)


def test_what_a_baseline_leaves_out_changes_no_bit_of_bf16():
    """A loss scale that is a power of two, and the optimizer that tasks have anyway."""
    training = Training(optimizer=AdamW(), loss_scale=1024.0)
    assert training.of_baseline() == Training()
    for name in (("regression", "smoke"), ("vision", "smoke"), ("language", "smoke")):
        task = short(*name)
        recipes = BF16, replace(BF16, training=training)
        plain, same = (train(task, [Lane(r, task.lr, seed) for seed in (0, 1)]).lanes for r in recipes)
        assert plain == same


def test_the_evaluated_recipe_rounds_to_nearest_in_the_forward_pass_alone():
    recipe = RECIPES["nvfp4"].canonical()
    evaluated = recipe.evaluated()
    assert {evaluated.slot(f"fprop.{x}").rounding for x in "xw"} == {Nearest()}
    assert (evaluated.dgrad, evaluated.wgrad) == (recipe.dgrad, recipe.wgrad)
    assert evaluated.evaluated() == evaluated
    assert Recipe.named("nvfp4").evaluated() == Recipe.named("nvfp4").canonical()


# --- modes -------------------------------------------------------------------------------------------------------


def test_an_evaluation_that_fails_leaves_training_as_it_was(monkeypatch):
    one = trained(short("regression", "smoke"), RECIPES["nvfp4"])
    monkeypatch.setattr(one.model, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(one, "bf16")
    assert (one.numerics.training, one.numerics.evaluation) == (True, "")


SET_ONCE = {
    "kernels/convert.py: numerics": "a copy, of this moment",
    "kernels/recompute.py: _pass": "a with block itself",
    "tasks/bench/kept.py: _kept": "numerics that are made there",
    "tasks/engine/population.py: _build": "numerics that are made there",
    "tasks/engine/population.py: _enter": "for the whole step",
    "tasks/image_preset.py: in_bf16": "numerics that are made there",
    "tasks/own/one_by_one.py: of_lane": "a lane's follow those of all",
    "tasks/teacher.py: __init__": "numerics that are made there",
}
"""Functions that set a mode of numerics without a `with` block, each with the reason why none is left behind."""


def test_modes_of_numerics_are_set_in_with_blocks():
    found = set()
    for file in [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]:
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and any(map(_sets_a_mode, ast.walk(function))):
                found.add(f"{file.relative_to(ROOT)}: {function.name}")
    assert found == SET_ONCE.keys()


def _sets_a_mode(node):
    """True for `x.training = …` and its like, of another object than `self` and a context of autograd."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr in {*kernel_lanes.MOMENT, "recompute"} - {"step"}
        and ast.unparse(node.value) not in ("self", "ctx")
    )


@pytest.mark.parametrize("line", ["numerics.training = False", "a.part, b = 1, 2", "p.numerics.precise_stages |= more"])
def test_a_mode_that_is_set_without_one_is_found(line):
    assert any(map(_sets_a_mode, ast.walk(ast.parse(line))))
