"""The shipped spaces of reinforcement learning hold the arms that they are to answer with, and all of them train."""

import itertools

import msgspec
import pytest

from fp4dse.dse.noise import NOISE_NAMES
from fp4dse.dse.outliers import Residual
from fp4dse.sweeps.arguments import find_space
from fp4dse.tasks import Lane, get_task, train


@pytest.mark.parametrize(
    ("name", "preset"),
    [("rl", "smoke"), ("rl-fixes", "smoke"), ("rl-inject", "smoke"), ("rl-kl", "smoke"), ("rl-replay", "moe-smoke")],
)
def test_every_recipe_trains_on_the_smoke_preset(name, preset):
    task = msgspec.structs.replace(get_task("rl", preset), steps=1)
    together = {}
    for recipe in find_space(name).recipes():
        together.setdefault(recipe.signature(), []).append(Lane(recipe, task.lr, 0))
    results = [result for lanes in together.values() for result in train(task, lanes, record=True).lanes]
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
