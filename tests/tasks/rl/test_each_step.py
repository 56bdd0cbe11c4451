"""What a rollout and a step have anyway is recorded at every step, whole, and changes nothing."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Recipe
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population, Pruning, Stopped, recent
from fp4dse.tasks.engine.recorder import measure
from fp4dse.tasks.job import Rung
from fp4dse.tasks.rl.grpo import is_clipped
from fp4dse.tasks.rl.presets import _PRESETS
from tests.tasks.rl.little import little

replace = msgspec.structs.replace
SMOKE = get_task("rl", "smoke")
CLIP = _PRESETS["smoke"].plan.clip
STEPS = 7
TASK = replace(little(SMOKE, STEPS, prompts=8), lr=4e-3)
"""At a rate at which ratios are clipped."""
OF_ROLLOUTS = ["reward", "length", "entropy", "mismatch_kl"]
OF_STEPS = ["ratios_clipped", "gradient_norm"]
MEASURED = ["accuracy", "gnr", "gradient_error", "weight_error", "change_error", "weight_error/scale"]


def lane(seed=0, lr=TASK.lr, **training):
    return Lane(replace(Recipe.named("bf16"), training=Training(**training)), lr, seed)


LANES = [lane(), lane(1, rollout=ROLLOUT_NAMES["mxfp4"]), lane(2, rollout=ROLLOUT_NAMES["mxfp4"], tis=2.0)]


@pytest.fixture(scope="module")
def trained():
    return train(TASK, LANES, record=True).lanes


def test_it_has_a_number_at_every_step_and_what_is_measured_has_its_own(trained):
    for result in trained:
        of = result.recorded
        assert of["step"] == [1, 2, 4, 7]
        for name in OF_ROLLOUTS + OF_STEPS:
            assert of[f"step/{name}"] == list(range(1, STEPS + 1)), name
            assert len(of[name]) == STEPS
            assert None not in of[name]
        for name in MEASURED:
            assert f"step/{name}" not in of
            assert len(of[name]) == len(of["step"]), name


def test_a_rollout_has_one_number_in_all_of_its_steps_and_its_reward_is_that_of_the_losses(trained):
    for result in trained:
        for name in OF_ROLLOUTS:
            values = result.recorded[name]
            assert values[0::2][: STEPS // 2] == values[1::2], "two minibatches of a rollout"
            assert len(set(values)) > 2 or (name == "mismatch_kl" and result is trained[0])
        assert len(set(result.recorded["gradient_norm"])) == STEPS
        rewards = [1 - result.recorded["reward"][step - 1] for step in result.curve_step]
        assert result.curve_loss == pytest.approx(rewards, abs=1e-7)


@pytest.mark.heavy
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_numbers_of_a_step_are_those_of_passes_apart(accumulate):
    """The share of clipped tokens, counted from log-probabilities before the step, and the norm of `measure`."""
    whole = Recipe.uniform(QUANTIZERS["mxfp4"])
    recipe = whole if accumulate == 1 else lane(accumulate=2).recipe  # whose parts round as the whole does
    lanes = [Lane(recipe, TASK.lr, seed) for seed in range(2)]
    expected = {name: [] for name in OF_STEPS}
    found = train(TASK, lanes, record=True).lanes
    twin = Population(TASK, lanes, "cpu", record=True)
    for step in range(STEPS):
        twin._enter(step)
        if step % twin.experience.every == 0:
            twin.experience.collect()
        inputs, target = twin.experience.batch()
        with torch.no_grad():
            log_p = twin.experience._log_p_now(inputs, target)
        counts = target.share > 0
        clipped = (is_clipped(log_p, target, CLIP) & counts).sum((1, 2)) / counts.sum((1, 2))
        expected["ratios_clipped"].append(clipped.tolist())
        of = measure(TASK, twin.model, twin.numerics, twin.optimizer, inputs, target)
        expected["gradient_norm"].append(of["gradient_norm"].tolist())
        twin.train_step(step)
    assert torch.tensor(expected["ratios_clipped"]).gt(0).any(dim=0).all()
    for name, values in expected.items():
        for number, result in enumerate(found):
            assert result.recorded[name] == pytest.approx([of[number] for of in values], rel=1e-5, abs=1e-7), name


def test_recording_changes_no_bit_of_the_training(trained):
    without = train(TASK, LANES).lanes
    assert [replace(result, recorded={}) for result in trained] == without


@pytest.mark.heavy
def test_a_lane_has_the_same_numbers_alone_and_beside_one_that_diverges(trained):
    diverged, *others = train(TASK, [lane(0, lr=1e38), LANES[2], LANES[0]], record=True).lanes
    assert others == [trained[2], trained[0]]
    assert train(TASK, LANES[1:2], record=True).lanes == [trained[1]]
    assert diverged.recorded["step/reward"] == list(range(1, diverged.diverged_step + 1))
    assert len(diverged.recorded["gradient_norm"]) == diverged.diverged_step


@pytest.mark.parametrize("stop", [3, 4], ids=["within a rollout", "between two"])
def test_the_series_is_whole_after_a_checkpoint(trained, tmp_path, stop):
    asked = iter([False] * stop + [True])
    with pytest.raises(Stopped, match=f"after {stop} of {STEPS}"):
        train(TASK, LANES, record=True, checkpoint=tmp_path / "c.pt", should_stop=lambda: next(asked))
    assert train(TASK, LANES, record=True, checkpoint=tmp_path / "c.pt").lanes == trained


def test_of_a_checkpoint_without_series_what_it_has_is_kept_and_nothing_is_made_up(trained):
    """Older versions measured the same numbers with all others."""
    first, again = (Population(TASK, LANES, "cpu", record=True) for _ in range(2))
    for step in range(3):
        first.train_step(step)
    state = {name: value for name, value in first.state(3).items() if not name.startswith("recorded/each/")}
    rewards = torch.tensor([result.recorded["reward"] for result in trained])
    state |= {f"recorded/{step}/reward": rewards[:, step] for step in (0, 1)}
    again.load_state(state, 3)
    for step in range(3, STEPS):
        again.train_step(step)
    again.fetch(STEPS)
    for number, result in enumerate(trained):
        of, rest = again.recorder.of_lane(number, None), list(range(4, STEPS + 1))
        assert of["step/reward"] == [1, 2, *rest]
        assert of["reward"] == [result.recorded["reward"][int(step) - 1] for step in of["step/reward"]]
        assert of["step/entropy"] == rest
        assert of["accuracy"] == result.recorded["accuracy"]


def test_the_series_is_whole_where_lanes_leave(trained):
    def all_but_the_first(losses, *_):
        return [False, True, True]

    dropped, *stayed = train(TASK, LANES, record=True, pruning=Pruning([Rung(5, 0.5)], all_but_the_first)).lanes
    assert stayed == trained[1:]
    assert dropped.recorded["step/entropy"] == [1, 2, 3, 4, 5]
    assert dropped.recorded["entropy"] == trained[0].recorded["entropy"][:5]


def test_the_series_does_not_depend_on_when_it_is_fetched(trained, monkeypatch):
    monkeypatch.setattr(recent, "BUFFERED_STEPS", 4)
    assert train(TASK, LANES, record=True).lanes == trained


def test_dynamic_sampling_and_experts_have_theirs():
    task = replace(little(get_task("rl", "moe-smoke"), 4, asked=2), pretrain=None)
    of = train(task, [lane(), lane(1)], record=True).lanes[0].recorded
    assert of["step/informative"] == [1, 2, 3, 4]
    assert "step/rerouted" not in of, "it takes a pass of its own"
    assert len(of["rerouted"]) == len(of["step"])


@pytest.mark.gpu
def test_captured_steps_record_too():
    task = replace(TASK, steps=16)
    without, with_it = (train(task, LANES, "cuda", record=record) for record in (False, True))
    assert not [reason for reason in with_it.fallbacks if "graph" in reason]
    assert [replace(result, recorded={}) for result in with_it.lanes] == without.lanes
    for result in with_it.lanes:
        rewards = [1 - result.recorded["reward"][step - 1] for step in result.curve_step]
        assert result.curve_loss == pytest.approx(rewards, abs=1e-6)
        norms = [norm for norm in result.recorded["gradient_norm"] if norm]  # 0 where all answers of all problems tie
        assert len({*norms}) == len(norms) > task.steps // 2, "each step has its own"
