"""The shipped spaces of reinforcement learning hold the arms that they are to answer with, and all of them train."""

import itertools
from functools import partial

import pytest
from msgspec.structs import replace

from fp4dse.dse.noise import NOISE_NAMES
from fp4dse.dse.outliers import Residual
from fp4dse.sweeps.arguments import find_space
from fp4dse.tasks import Lane, get_task, train


def one_step(preset):
    """The task of a preset with one step of rollouts of four problems, and with few held-out ones."""
    task = get_task("rl", preset)
    [of] = task.problem.args
    plan = replace(of.plan, prompts=4, held_out=32)
    batch = task.batch * plan.prompts // of.plan.prompts
    problem, experience = partial(task.problem.func, replace(of, plan=plan)), partial(task.experience.func, plan)
    return replace(task, steps=1, batch=batch, problem=problem, experience=experience)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "preset", "every"),
    [
        ("rl", "smoke", 1),
        ("rl-fixes", "smoke", 2),
        pytest.param("rl-fixes", "smoke", 1, marks=pytest.mark.slow),
        ("rl-inject", "smoke", 1),
        ("rl-kl", "smoke", 1),
        ("rl-replay", "moe-smoke", 1),
    ],
)
def test_every_recipe_trains_on_the_smoke_preset(name, preset, every):
    """every: one population of lanes in so many; each takes half a second, however many lanes it has."""
    task = one_step(preset)
    together = {}
    for recipe in find_space(name).recipes():
        together.setdefault(recipe.signature(), []).append(Lane(recipe, task.lr, 0))
    results = [result for lanes in list(together.values())[::every] for result in train(task, lanes, record=True).lanes]
    assert {result.status for result in results} == {"done"}
    norms = {result.recorded["gradient_norm"][-1] for result in results}
    assert len(norms) > 3, "they are not all the same"


def test_a_divergence_has_500_updates_to_grow_in_and_starts_from_the_policies_of_small():
    long, small = get_task("rl", "small-500"), get_task("rl", "small")
    assert long.steps == 500
    assert (long.batch, long.lr, long.size) == (small.batch, small.lr, small.size)
    assert long.pretrain.args == small.pretrain.args, "remembered under one name"
    assert len(list(find_space("rl-kl").recipes())) <= 12


def fixes_of(recipe):
    """Of the rollout: macro-block scaling, fallback, rotation, noise."""
    sampling = recipe.sampling().fprop
    assert sampling.x == sampling.w
    noise = recipe.training.noise
    assert noise in (None, *NOISE_NAMES.values())
    macro, fallback = sampling.w.scaling == "macro", sampling.w.outliers == Residual()
    return macro, fallback, sampling.rotation is not None, noise is not None


def test_all_combinations_of_the_fixes_are_there_under_both_trainers():
    recipes = list(find_space("rl-fixes").recipes())
    trainers = {"bf16": set(), "qat": set(), "mxfp4": set()}
    for recipe in recipes:
        if recipe.dgrad.source == "forward":
            continue  # humans&'s
        forward, backward = recipe.fprop.w.is_plain, recipe.dgrad.g.is_plain
        kind = "bf16" if forward else "qat" if backward else "mxfp4"
        trainers[kind].add(fixes_of(recipe))
    everything = set(itertools.product([False, True], repeat=4))
    assert trainers["bf16"] == trainers["mxfp4"] == everything
    assert trainers["qat"] == {found for found in everything if sum(found) <= 1}


def test_the_seeds_four_arms_are_there():
    """{BF16, MXFP4} rollouts × {BF16, MXFP4} trainers; BF16 with itself is the baseline of every sweep."""
    found = set()
    for recipe in find_space("rl").recipes():
        rollout = recipe.sampling().fprop
        if (
            recipe.training.tis is None
            and rollout.x == rollout.w
            and recipe.dgrad.g.is_plain == recipe.fprop.w.is_plain
        ):
            found.add((rollout.w.element, recipe.fprop.w.element))
    assert found >= {("e2m1", "bf16"), ("bf16", "e2m1"), ("e2m1", "e2m1")}
