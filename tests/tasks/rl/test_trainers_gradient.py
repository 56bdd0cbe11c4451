"""The recorded error of a trainer's gradient is that of its products alone: the same tokens count, as much, in BF16."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.noise import NOISE_NAMES
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population
from fp4dse.tasks.engine.recorder import measure
from fp4dse.tasks.inspection.diagnosis import gradients
from fp4dse.tasks.rl.grpo import is_clipped, log_probability
from fp4dse.tasks.rl.presets import _PRESETS

replace = msgspec.structs.replace
SMOKE = replace(get_task("rl", "smoke"), steps=8)
CLIP = _PRESETS["smoke"].plan.clip


def quantized(**training):
    return replace(Recipe.uniform(QUANTIZERS["mxfp4-rceil"]), training=Training(**training))


def lanes(*recipes, lr=1e-3):
    return [Lane(recipe, lr, seed) for seed, recipe in enumerate(recipes)]


def by_hand(population, lane):
    """Gradient of the weights that count by BF16 products: c ∇log π summed over the tokens of the minibatch, c being
    the derivative of the loss by log π in the trainer's own pass."""
    inputs, target = population.experience.batch()
    with population.numerics.temporarily(training=False), torch.no_grad():
        log_p = log_probability(population.model(inputs)[0].float(), target.tokens)
    ratio = (log_p - target.log_old).exp()
    per_token = torch.where(is_clipped(log_p, target, CLIP), 0.0, -ratio * target.advantage * target.weight)
    weights = {name: value[[lane, lane]].detach().clone() for name, value in population.model.state_dict().items()}
    twin = Population(SMOKE, lanes(Recipe.named("bf16"), Recipe.named("bf16")), "cpu").model
    twin.load_state_dict(weights)
    logits = twin(inputs[[lane, lane]])[0].float()
    again = logits[:, :, -target.tokens.shape[2] :].log_softmax(-1)
    again = again.gather(-1, target.tokens[[lane, lane], ..., None])[0, ..., 0]
    (again * per_token[lane] * target.share[lane]).mean().backward()
    return {name: p.grad[0].double() for name, p in twin.named_parameters()}


@pytest.mark.parametrize("steps", [1, 2, 6], ids="after {} steps".format)
def test_it_is_relative_to_the_gradient_that_the_same_tokens_have_in_bf16(steps):
    population = Population(SMOKE, lanes(quantized(), quantized(noise=NOISE_NAMES["weights"]), lr=1e-2), "cpu")
    for step in range(steps):
        population.train_step(step)
    population.numerics.step.fill_(steps)
    if steps % population.experience.every == 0:
        population.experience.collect()
    batch = population._batch()
    found = measure(SMOKE, population.model, population.numerics, population.optimizer, *batch)
    assert not any(name.startswith("gradient_error") for name in found), "only on request"
    in_bf16 = population.experience.in_bf16()
    found = measure(SMOKE, population.model, population.numerics, population.optimizer, *batch, in_bf16)
    with population.numerics.temporarily(training=False):
        logits = population.model(batch[0])
        SMOKE.loss(logits, batch[1]).mean((1, 2)).sum().backward()
    for lane in range(2):
        plain = by_hand(population, lane)
        for part in ("", "blocks.0"):
            names = [name for name in plain if name.startswith(part)]
            own = [dict(population.model.named_parameters())[name].grad[lane].double() for name in names]
            true = torch.cat([plain[name].flatten() for name in names])
            error = torch.cat([g.flatten() for g in own]) - true
            name = f"gradient_error/{part}" if part else "gradient_error"
            assert found[name][lane] == pytest.approx(float(error.norm() / true.norm()), rel=1e-3)
            assert 0.05 < found[name][lane] < 1.5


def test_a_diagnosis_sees_the_error_that_is_recorded():
    population = Population(SMOKE, lanes(quantized(), quantized()), "cpu")
    for step in range(3):
        population.train_step(step)
    used, plain = (gradients(population, 3, way) for way in ("recipe", "bf16"))
    in_bf16 = population.experience.in_bf16()
    found = measure(
        SMOKE, population.model, population.numerics, population.optimizer, *population.batch_of(3), in_bf16
    )
    assert torch.allclose((used - plain).norm(dim=1) / plain.norm(dim=1), found["gradient_error"])


def test_a_bf16_trainer_has_none_whatever_its_rollouts_are():
    sampled = replace(Recipe.named("bf16"), training=Training(rollout=ROLLOUT_NAMES["mxfp4-rceil"], tis=2.0))
    for lane in train(SMOKE, lanes(Recipe.named("bf16"), sampled), record=True).lanes:
        assert lane.recorded["gradient_error"] == lane.recorded["gradient_error/blocks.0"]
        assert lane.recorded["gradient_error"] == [0.0] * len(lane.recorded["step"])


@pytest.mark.parametrize("adapts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_recording_it_changes_no_bit_and_a_lane_has_its_own_in_any_company(adapts):
    """Also of lanes that train adapters alone, whose frozen weights have no part in the error."""
    of = lanes(quantized(), quantized(noise=NOISE_NAMES["qerl"]))
    if adapts:
        factors = recipe_to_dict(quantized())
        factors["fprop"]["w"]["outliers"], factors["training"] = "lora", {"trains": "learned"}
        of = lanes(recipe_from_dict(factors), recipe_from_dict(factors))
    task = replace(SMOKE, steps=4)
    together = train(task, of, record=True).lanes
    assert [replace(lane, recorded={}) for lane in together] == train(task, of).lanes
    assert train(task, of[1:], record=True).lanes == together[1:]
    for lane in together:
        found = lane.recorded["gradient_error/blocks.0"]
        assert all(0 < value < 3 for value in found)
        assert not adapts or lane.recorded["gradient_error"] == found, "nothing else is trained"


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["smoke", "moe-smoke"])
def test_it_is_measured_beside_captured_steps_and_changes_none(preset):
    task = replace(get_task("rl", preset), steps=16)
    of = lanes(quantized(), quantized(noise=NOISE_NAMES["weights"]))
    together = train(task, of, "cuda", record=True)
    assert not [reason for reason in together.fallbacks if "graph" in reason]
    assert [replace(lane, recorded={}) for lane in together.lanes] == train(task, of, "cuda").lanes
    for lane in together.lanes:
        found = lane.recorded["gradient_error/blocks.0"]
        known = [value for value in found if value == value]  # not where all answers earn the same: no gradient
        assert known, found
        assert all(0 < value < 3 for value in known), found
