"""Noise on the policy that samples: its sizes are those that are published, and nothing else sees it."""

from itertools import pairwise

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.noise import NOISE_NAMES, Noise
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.draws import Draws, seed_keys
from fp4dse.tasks.engine import Population
from fp4dse.tasks.rl.noise import ParameterNoise, parameters

replace = msgspec.structs.replace
SMOKE = get_task("rl", "smoke")
QERL, WEIGHTS = NOISE_NAMES["qerl"], NOISE_NAMES["weights"]


def lane(noise, rollout="mxfp4", seed=1):
    of = Training(rollout=rollout and ROLLOUT_NAMES[rollout], noise=noise)
    return Lane(replace(Recipe.named("bf16"), training=of), SMOKE.lr, seed)


LANES = [lane(None), lane(QERL), lane(WEIGHTS)]


def test_sizes_of_qerl_are_those_of_its_code():
    """Ten stages, the first without noise, then 1e-2 to 1e-4 in nine, by the same factor each."""
    sizes = QERL.sizes(40)
    assert sizes[:4] == [0] * 4
    assert sizes[4:8] == [1e-2] * 4
    assert sizes[-4:] == pytest.approx([1e-4] * 4)
    stages = sizes[4::4]
    assert [b / a for a, b in pairwise(stages)] == pytest.approx([10**-0.25] * 8)


def test_sizes_fall_exponentially_without_stages():
    assert WEIGHTS.sizes(5) == pytest.approx([10 ** (-2 - k / 4) for k in range(5)])
    assert WEIGHTS.sizes(1) == [1e-2]


def test_noise_has_the_size_that_it_is_to_have_and_is_of_a_seed_and_a_step():
    population = Population(SMOKE, LANES, "cpu")
    noises = [of.recipe.training.noise for of in LANES]
    draws = Draws(seed_keys([1, 1, 1]), torch.full((), 2 * 4))
    noise = ParameterNoise(noises, population.model, 32, 2, draws)
    norms, weights = parameters(population.model)
    assert len(norms) == 2
    assert set(weights) == {"0.qkv", "0.out", "0.mlp.up", "0.mlp.down"}
    found = noise.drawn()
    for name, value in norms.items():
        away = found[name] - value
        assert not away[[0, 2]].any()
        assert away[1].std().item() == pytest.approx(QERL.sizes(16)[4], rel=0.4)
    for name, value in weights.items():
        away = found[name] - value
        assert not away[:2].any()
        rms = value[2].square().mean().sqrt()
        assert (away[2].std() / rms).item() == pytest.approx(WEIGHTS.sizes(16)[4], rel=0.06)
    alone = ParameterNoise([QERL], population.model, 32, 2, Draws(seed_keys([1]), torch.full((), 8)))
    assert torch.equal(alone.drawn()["0.norm1"][0], found["0.norm1"][1])
    draws.step.fill_(10)
    assert not torch.equal(noise.drawn()["0.qkv"][2], found["0.qkv"][2])


def test_answers_differ_and_the_policy_that_learns_stays():
    task = replace(SMOKE, steps=6)
    noises = None, Noise("norms", 1.0, 0.5, 0), Noise("weights", 1, 1, 0)
    found = train(task, [lane(noise, None) for noise in noises], record=True).lanes
    kl = [of.recorded["mismatch_kl"][0] for of in found]
    assert kl[0] < 1e-6 < 1e-2 < min(kl[1:])
    start = [of.recorded["accuracy"][0] for of in found]
    assert start[0] == start[1] == start[2], "held-out problems are answered without it"
    assert train(task, [lane(noises[2], None)], record=True).lanes == found[2:]


def test_in_a_recipe():
    plain = recipe_to_dict(Recipe.named("bf16"))
    recipe = recipe_from_dict(plain | {"training": {"rollout": "mxfp4-rceil", "noise": "qerl"}})
    assert recipe.training.noise == Noise()
    assert recipe.columns()["noise"] == "qerl"
    assert recipe.label() == "bf16, rollout mxfp4-rceil, noise qerl"
    numbers = {"kind": "noise", "of": "weights", "start": 0.02, "end": 0.001, "stages": 0}
    own = recipe_from_dict(plain | {"training": {"noise": numbers}})
    assert own.training.noise == Noise("weights", 0.02, 0.001, 0)
    assert recipe_from_dict(recipe_to_dict(own)) == own
    assert own.config_id != recipe.config_id
    assert not own.is_baseline
    assert own.baseline() == Recipe.named("bf16").canonical()


def test_a_task_without_rollouts_refuses_it():
    with pytest.raises(ConfigError, match=r"training.noise: found 'qerl'; accepted: nothing with regression"):
        train(get_task("regression", "smoke"), [lane(QERL, None)])
