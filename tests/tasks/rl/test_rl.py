"""Reinforcement learning of lanes side by side: rewards rise, lanes stay apart, and nothing is lost between steps."""

import re
import tomllib
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe, Space, recipe_from_dict, recipe_to_dict
from fp4dse.dse.attention import Attention, Scores
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population, Pruning, Stopped
from fp4dse.tasks.job import Rung
from fp4dse.tasks.rl import base
from fp4dse.tasks.rl.chains import Chains
from fp4dse.tasks.rl.presets import _PRESETS
from fp4dse.tasks.start import base_weights
from fp4dse.tasks.start.weights import start_from
from tests.tasks.rl.little import little

replace = msgspec.structs.replace
SMOKE = get_task("rl", "smoke")


def recipe(trainer="bf16", rollout=None, tis=None, kl=None):
    of = Training(rollout=rollout and ROLLOUT_NAMES[rollout], tis=tis, kl=kl)
    return replace(Recipe.named(trainer), training=of)


def lane(*args, lr=SMOKE.lr, seed=1, **more):
    return Lane(recipe(*args, **more), lr, seed)


LANES = [lane(), lane("bf16", "mxfp4"), lane("bf16", "mxfp4", tis=2.0)]
"""They share a population, as their trainers do."""


@pytest.fixture(scope="module")
def trained():
    return train(SMOKE, LANES, record=True).lanes


def test_rewards_rise_with_bf16_and_with_mxfp4_rollouts(trained):
    assert {result.status for result in trained} == {"done"}
    for result in trained[:2]:
        assert result.train_loss_final < result.curve_loss[0] - 0.05  # .10 to .14, by the processor
    bf16 = trained[0]
    assert bf16.val_loss == bf16.val_loss_bf16, "both evaluations are one"
    assert bf16.metrics["accuracy"] > 0.7


def test_the_loss_is_the_share_of_wrong_answers(trained):
    assert SMOKE.gap_unit == "points"
    for result in trained:
        assert result.val_loss == pytest.approx(1 - result.metrics["accuracy"], abs=1e-6)
    assert trained[1].val_loss != trained[1].val_loss_bf16, "the forward pass of the rollout, and BF16"


def test_what_is_recorded(trained):
    bf16, mxfp4, _ = (result.recorded for result in trained)
    names = {"reward", "length", "entropy", "mismatch_kl", "ratios_clipped", "gradient_norm", "accuracy"}
    assert names <= bf16.keys()
    assert bf16["step"][:3] == [1, 2, 4]
    assert max(bf16["mismatch_kl"]) < 1e-6
    assert min(mxfp4["mismatch_kl"]) > 1e-4
    for of in bf16, mxfp4:
        assert of["ratios_clipped"][0] == 0, "in the first minibatch of a rollout all ratios are 1"
        assert all(0 < length <= 5 for length in of["length"])
        assert [1 - reward for reward in of["reward"][:1]] == pytest.approx([of_first(of, trained)], abs=1e-6)


def of_first(recorded, trained):
    return next(result.curve_loss[0] for result in trained if result.recorded is recorded)


def test_a_lane_is_what_it_is_beside_any_others():
    """Alone, in another order, and beside one that diverges."""
    results = partial(train, little(SMOKE, 3), record=True)
    together = results(LANES).lanes
    diverged, *others = results([lane(lr=1e38), LANES[2], LANES[0]]).lanes
    assert (diverged.status, diverged.val_loss) == ("diverged", None)
    assert others == [together[2], together[0]]
    assert results(LANES[1:2]).lanes == [together[1]]


@pytest.mark.gpu
def test_a_captured_lane_is_what_it_is_beside_any_others():
    task = replace(SMOKE, steps=16)
    together = train(task, LANES, "cuda")
    assert not [reason for reason in together.fallbacks if "graph" in reason]
    assert train(task, [lane(lr=1e38), LANES[2], LANES[0]], "cuda").lanes[1:] == [together.lanes[2], together.lanes[0]]


def test_training_goes_on_from_a_checkpoint_between_two_minibatches(tmp_path):
    task, asked = replace(SMOKE, steps=4), iter([False, False, False, True])
    whole = train(task, LANES[:2]).lanes
    with pytest.raises(Stopped, match="after 3 of 4"):
        train(task, LANES[:2], checkpoint=tmp_path / "c.pt", should_stop=lambda: next(asked))
    assert train(task, LANES[:2], checkpoint=tmp_path / "c.pt").lanes == whole


def test_a_shorter_training_is_the_beginning_of_a_longer_one(trained):
    """So a curve says where fewer rollouts end. (Not with noise on the parameters, which falls until the end.)"""
    few = train(replace(SMOKE, steps=16), LANES[:2], record=True).lanes
    for short, long in zip(few, trained[:2], strict=True):
        assert len(short.recorded["step"]) > 4
        for name, values in short.recorded.items():
            own = name if name.startswith("step/") else f"step/{name}"
            own = own if own in short.recorded else "step"
            at = [long.recorded[own].index(step) for step in short.recorded[own]]
            assert values == [long.recorded[name][i] for i in at], name


def test_a_lane_goes_on_alone_between_two_minibatches():
    task = replace(SMOKE, steps=4)
    plain = train(task, LANES[1:]).lanes

    def second(losses, *_):
        assert all(0 <= loss <= 1 for loss in losses), "rungs go by the share of wrong answers"
        return [False, True]

    dropped, stayed = train(task, LANES[1:], pruning=Pruning([Rung(3, 0.5)], second)).lanes
    assert (dropped.status, dropped.pruned_step) == ("pruned", 3)
    assert stayed == plain[1]


def test_ratios_of_the_first_minibatch_are_one_and_weights_are_bounded():
    population = Population(SMOKE, LANES, "cpu")
    population.train_step(0)
    target = population.experience.target
    assert torch.equal(target.weight[:2], torch.ones_like(target.weight[:2])), "no correction"
    assert (target.weight[2] != 1).any()
    assert target.weight[2].max() <= 2
    rewards = 1 - population.experience.error
    plan = _PRESETS["smoke"].plan
    answers, prompts = target.tokens, population.experience.inputs[..., : plan.problems.prompt_length]
    assert torch.equal(plan.problems.is_right(prompts, answers).float().mean(1), rewards)
    log_p = population.experience._log_p(population.model)
    assert not torch.equal(log_p, target.log_old), "the step has changed the policy"


def test_dynamic_sampling_learns_from_the_first_problems_whose_answers_differ():
    """Against Python, group by group; the places that are left count for nothing."""
    plan = replace(_PRESETS["smoke"].plan, asked=2)
    chains, samples = plan.problems, plan.samples
    task = replace(SMOKE, experience=partial(SMOKE.experience.func, plan))
    population = Population(task, LANES[:2], "cpu")
    rollouts, seen = population.experience, []
    answers = rollouts._answers
    rollouts._answers = lambda *args: seen.append((args[0], answers(*args))) or seen[-1][1]
    population.train_step(0)
    [(prompts, drawn)] = seen
    right = chains.is_right(prompts, drawn.answers)
    assert torch.allclose(1 - rollouts.error, right.float().mean(1)), "rewards are those of all answers"
    for of in range(2):
        groups = right[of].view(-1, samples).tolist()
        tell = [n for n, group in enumerate(groups) if len(set(group)) == 2]
        assert 0 < len(tell) < len(groups)
        assert rollouts.recorded["informative"][of] == pytest.approx(len(tell) / len(groups))
        for place in range(plan.prompts):
            part = slice(place * samples, (place + 1) * samples)
            share = rollouts.target.share[of, part]
            if place >= len(tell):
                assert not share.any()
                continue
            there = slice(tell[place] * samples, (tell[place] + 1) * samples)
            assert torch.equal(rollouts.target.tokens[of, part], drawn.answers[of, there])
            assert torch.equal(rollouts.inputs[of, part, : chains.prompt_length], prompts[of, there])
            assert torch.equal(share > 0, chains.is_part(drawn.answers[of, there]))
            assert rollouts.target.advantage[of, part].any()


def test_a_rollout_of_which_nothing_is_to_be_learned_changes_no_weight(monkeypatch):
    plan = replace(_PRESETS["smoke"].plan, asked=2)
    task = replace(SMOKE, experience=partial(SMOKE.experience.func, plan), pretrain=None)
    population = Population(task, LANES[:1], "cpu")
    before = population.model.head.weight.clone()
    monkeypatch.setattr(Chains, "is_right", lambda _, prompts, __: torch.zeros(prompts.shape[:2], dtype=torch.bool))
    population.train_step(0)
    assert torch.equal(population.model.head.weight, before)
    assert population.alive.all()


def test_the_reference_policy_is_the_one_that_training_began_with():
    """With a weight of KL, its log-probabilities in the first rollout are the trainer's own."""
    plan = _PRESETS["smoke"].plan
    plan = replace(plan, clip=replace(plan.clip, kl=0.1))
    task = replace(SMOKE, experience=partial(SMOKE.experience.func, plan))
    population = Population(task, LANES[:1], "cpu")
    population.train_step(0)
    target = population.experience.target
    assert torch.equal(target.log_ref, target.log_old)
    population.train_step(1)
    population.train_step(2)
    assert not torch.equal(target.log_ref, target.log_old)


@pytest.mark.heavy
def test_a_recipes_weight_of_kl_is_of_its_lane_alone():
    """It stands in for the preset's, holds the policy near its start, and leaves other lanes their bits."""
    task, of_task = little(SMOKE, 4), little(SMOKE, 4, clip=replace(_PRESETS["smoke"].plan.clip, kl=0.1))
    members = [lane(), lane(kl=0.1), lane(kl=0.0), lane("bf16", "mxfp4", kl=5.0)]
    plain, own, none, strong = train(task, members, record=True).lanes
    assert own == train(task, members[1:2], record=True).lanes[0]
    assert plain == train(task, members[:1], record=True).lanes[0] == none
    assert own == train(of_task, members[:1], record=True).lanes[0]
    assert none == train(of_task, members[2:3], record=True).lanes[0]
    assert plain != own
    assert plain.recorded["gradient_norm"] != strong.recorded["gradient_norm"]

    def alone(losses, *_):
        return [True, False]

    kept, _ = train(task, members[:2], pruning=Pruning([Rung(3, 0.5)], alone)).lanes
    assert kept == train(task, members[:1]).lanes[0]


def test_a_weight_of_kl_is_an_axis_and_changes_no_recipe_without_one():
    plain = Recipe.named("bf16")
    assert recipe_from_dict(recipe_to_dict(plain) | {"training": {"kl": "task"}}) == plain
    held = recipe(kl=0.02)
    assert (held.label(), held.columns()["kl"], plain.columns()["kl"]) == ("bf16, kl 0.02", 0.02, None)
    assert held.config_id != recipe(kl=0.0).config_id != plain.config_id
    assert (recipe(tis=2.0).config_id, recipe(tis=2.0).label()) == ("38dac3f6b39123d0", "bf16, tis 2")
    assert recipe("mxfp4", kl=0.02).baseline() == held.canonical(), "it changes what BF16 learns"
    axis = Space("kl", base="bf16", axes={"training.kl": ["task", 0, 0.02]})
    assert {of.config_id for of in axis.recipes()} == {recipe(kl=kl).config_id for kl in (None, 0.0, 0.02)}


def test_the_base_policy_is_made_once_and_the_same_beside_others():
    preset = _PRESETS["smoke"]
    few = preset.plan.problems, preset.shape, replace(preset.lessons, steps=3)
    both = base.base_policy(*few, [0, 1], "cpu")
    again = base.base_policy(*few, [1], "cpu")
    fresh = base_weights._train(base.lessons_task(*few), [Lane(Recipe.named("bf16"), preset.lessons.lr, 1)], "cpu")
    assert both.keys() == again.keys() == fresh.keys() == preset.shape.parameters(16).keys()
    for name, value in both.items():
        assert torch.equal(value[1], again[name][0])
        assert torch.equal(value[1], fresh[name][0])


def test_other_weights_take_the_place_of_the_base_policy():
    untrained = Population(replace(SMOKE, pretrain=None), [lane(seed=5)], "cpu").model
    weights = {name: value[0].clone() for name, value in untrained.state_dict().items()}
    population = Population(start_from(replace(SMOKE, steps=1), weights, "five"), [lane(seed=0)], "cpu")
    for name, value in population.model.state_dict().items():
        assert torch.equal(value[0], weights[name])
    population.train_step(0)


def test_other_tasks_refuse_a_rollout():
    task = get_task("regression", "smoke")
    for field, asked in ("rollout", recipe("bf16", "mxfp4")), ("tis", recipe(tis=2.0)), ("kl", recipe(kl=0.0)):
        with pytest.raises(ConfigError, match=rf"training.{field}: .*nothing with regression"):
            train(task, [Lane(asked, 1e-3, 0)])


def test_a_quantized_attention_core_needs_a_rollout_of_its_own():
    mxfp4 = Recipe.named("mxfp4")
    core = replace(mxfp4, attention=Attention(scores=Scores(mxfp4.fprop.x, mxfp4.fprop.x)))
    task = replace(SMOKE, steps=1, pretrain=None)
    with pytest.raises(ConfigError, match=r"training.rollout: found 'trainer'; accepted: a rollout of its own"):
        train(task, [Lane(core, 1e-3, 0)])
    own = replace(core, training=Training(rollout=ROLLOUT_NAMES["mxfp4"]))
    assert train(task, [Lane(own, 1e-3, 0)]).lanes[0].status == "done"


def test_the_table_of_the_docs_is_a_recipes():
    page = (Path(__file__).parents[3] / "docs" / "rl.md").read_text(encoding="utf-8")
    [table] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    found = recipe_from_dict(recipe_to_dict(Recipe.named("bf16")) | tomllib.loads(table))
    assert found == recipe("bf16", "mxfp4-rceil-w4a16", 2.0, 0.02)


def test_a_rollout_in_a_recipe():
    plain = recipe_to_dict(Recipe.named("bf16"))
    named = recipe_from_dict(plain | {"training": {"rollout": "mxfp4", "tis": 2}})
    assert named == recipe("bf16", "mxfp4", 2.0)
    assert recipe_from_dict(recipe_to_dict(named)) == named
    assert named.label() == "bf16, tis 2, rollout mxfp4"
    assert (named.columns()["rollout"], named.columns()["tis"]) == ("mxfp4", 2.0)
    assert named.baseline() == Recipe.named("bf16").canonical()
    assert not named.is_baseline
    halves = {"x": "bf16", "w": "mxfp4"}
    assert recipe_from_dict(plain | {"training": {"rollout": halves}}).columns()["rollout"] == "mxfp4-w4a16"
    own = recipe_from_dict(recipe_to_dict(Recipe.named("mxfp4")) | {"training": {"rollout": "mxfp4"}})
    assert own.config_id == Recipe.named("mxfp4").config_id, "the trainer's own forward pass"
    assert recipe_from_dict(plain | {"training": {"rollout": "trainer"}}) == Recipe.named("bf16")


MISTAKES = {
    "name": ({"rollout": "fp3"}, r"training.rollout: found 'fp3'; accepted: trainer, none, bf16, mxfp4"),
    "half": ({"rollout": {"x": "bf16"}}, r"training.rollout.w: found nothing"),
    "eden": ({"rollout": "ms-eden"}, r"training.rollout.x: found .*; accepted: quantizers without MS-EDEN"),
    "held": ({"rollout": {"x": {"like": "nvfp4", "tensor_scale": "held"}, "w": "nvfp4"}}, r"training.rollout.x: found"),
    "stages": (
        {"noise": {"kind": "noise", "stages": 1}},
        r"training.noise.stages: found 1; accepted: 0, or .* from 2 on",
    ),
    "kl": ({"kl": -1}, r"training.kl: found -1; accepted: task, a number from 0"),
    "tis": ({"tis": 0}, r"training.tis: found 0; accepted: task, a number above 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    changes, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        recipe_from_dict(recipe_to_dict(Recipe.named("bf16")) | {"training": changes})
