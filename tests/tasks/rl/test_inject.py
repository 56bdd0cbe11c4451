"""One part of MXFP4's error alone in the weights that sample: they are the parts of `decompose`, and all make Q(W)."""

import itertools

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.inject import INJECT_NAMES, PARTS, Inject, inject_name
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.kernels import decompose
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population

replace = msgspec.structs.replace
TASK = replace(get_task("rl", "smoke"), steps=2, pretrain=None)


def lane(inject=None, rollout=None, seed=0, lr=TASK.lr):
    training = Training(inject=inject and INJECT_NAMES[inject], rollout=rollout and ROLLOUT_NAMES[rollout])
    return Lane(replace(Recipe.named("bf16"), training=training), lr, seed)


def test_each_part_is_that_of_the_decomposition():
    names = list(INJECT_NAMES)
    population = Population(TASK, [lane(name) for name in names], "cpu")
    injected = population.experience.injected
    changed = injected.applied({})
    assert changed.keys() == {"0.qkv", "0.out", "0.mlp.up", "0.mlp.down"}
    for name, layer in injected.layers.items():
        for number, which in enumerate(names):
            w = layer.weight.detach()[number]
            parts = decompose(w, QUANTIZERS["mxfp4-rceil"])
            expected = w.double() + sum(getattr(parts, part) for part in which.split("+"))
            assert torch.equal(changed[name][number], expected.float())


def test_all_parts_together_are_rollouts_in_which_weights_alone_are_rounded():
    """To the bit, also of the held-out answers."""
    every, w4a16 = train(TASK, [lane("scale+dead+grid"), lane(rollout="mxfp4-rceil-w4a16")], record=True).lanes
    assert every.val_loss == w4a16.val_loss
    assert every.val_loss_bf16 == w4a16.val_loss_bf16
    assert every.curve_loss == w4a16.curve_loss
    for name in ("reward", "mismatch_kl", "entropy", "accuracy"):
        assert every.recorded[name] == w4a16.recorded[name]


def test_a_lane_is_what_it_is_beside_any_others():
    task = replace(TASK, steps=2)
    together = train(task, [lane("scale"), lane("grid"), lane()], record=True).lanes
    diverged, *others = train(task, [lane("dead", lr=1e38), lane(), lane("scale")], record=True).lanes
    assert diverged.status == "diverged"
    assert others == [together[2], together[0]]
    assert train(task, [lane()], record=True).lanes == together[2:], "without errors all is as ever"
    assert together[2].recorded["mismatch_kl"][0] < 1e-6 < together[0].recorded["mismatch_kl"][0]


@pytest.mark.gpu
def test_a_captured_lane_with_errors_is_what_it_is_beside_any_others():
    task = replace(TASK, steps=16)
    together = train(task, [lane("scale"), lane("grid"), lane()], "cuda")
    assert not [reason for reason in together.fallbacks if "graph" in reason]
    assert train(task, [lane("dead", lr=1e38), lane(), lane("scale")], "cuda").lanes[1:] == together.lanes[2::-2]


def test_names_are_all_combinations():
    combinations = [of for n in (1, 2, 3) for of in itertools.combinations(PARTS, n)]
    assert list(INJECT_NAMES) == ["+".join(of) for of in combinations]
    for name, inject in INJECT_NAMES.items():
        assert inject.has == tuple(part in name for part in PARTS)
        assert inject_name(inject) == name
    assert inject_name(Inject("scale", QUANTIZERS["nvfp4"])) == "scale of nvfp4"


def test_it_is_a_word_of_recipes_and_has_a_place():
    recipe = recipe_from_dict({**recipe_to_dict(Recipe.named("bf16")), "training": {"inject": "scale+grid"}})
    assert recipe.training.inject == INJECT_NAMES["scale+grid"]
    assert recipe.label() == "bf16, inject scale+grid"
    with pytest.raises(ConfigError, match=r"training\.inject: found 'scale'; accepted: none \(with a rollout"):
        recipe_from_dict({**recipe_to_dict(Recipe.named("nvfp4")), "training": {"inject": "scale"}})
    residual = {"parts": "grid", "of": {"like": "mxfp4", "outliers": "residual"}}
    with pytest.raises(ConfigError, match=r"training\.inject\.of: .*nothing done about outliers"):
        recipe_from_dict({**recipe_to_dict(Recipe.named("bf16")), "training": {"inject": residual}})
    with pytest.raises(ConfigError, match=r"training\.inject: found 'scale'; accepted: nothing with regression"):
        train(get_task("regression", "smoke"), [lane("scale")])
