"""The recorded error of a trainer's gradient is that of its products alone: the same tokens count, as much, in BF16."""

import math

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
from fp4dse.tasks.job import number
from fp4dse.tasks.rl.grpo import is_clipped, log_probability
from fp4dse.tasks.rl.presets import _PRESETS
from tests.tasks.rl.little import little

replace = msgspec.structs.replace
SMOKE = replace(get_task("rl", "smoke"), steps=8)
CLIP = _PRESETS["smoke"].plan.clip


def quantized(**training):
    return replace(Recipe.uniform(QUANTIZERS["mxfp4-rceil"]), training=Training(**training))


def lanes(*recipes, lr=1e-3):
    return [Lane(recipe, lr, seed) for seed, recipe in enumerate(recipes)]


def own(population, lane):
    """Gradient of the weights that the trainer's products give, as plain backward passes leave it."""
    inputs, target = population.experience.batch()
    with population.numerics.temporarily(training=False):
        population.task.loss(population.model(inputs), target).mean((1, 2)).sum().backward()
    found = {name: p.grad[lane].double() for name, p in population.model.named_parameters()}
    population.model.zero_grad()
    return found


def by_hand(population, lane):
    """Gradient of the weights that count by BF16 products: c ∇log π summed over the tokens of the minibatch, c being
    the derivative of the loss by log π in the trainer's own pass."""
    inputs, target = population.experience.batch()
    with population.numerics.temporarily(training=False), torch.no_grad():
        log_p = log_probability(population.model(inputs)[0].float(), target.tokens)
    ratio = (log_p - target.log_old).exp()
    per_token = torch.where(is_clipped(log_p, target, CLIP), 0.0, -ratio * target.advantage * target.weight)
    weights = {name: value[[lane, lane]].detach().clone() for name, value in population.model.state_dict().items()}
    twin = Population(population.task, lanes(Recipe.named("bf16"), Recipe.named("bf16")), population.device).model
    twin.load_state_dict(weights)
    logits = twin(inputs[[lane, lane]])[0].float()
    again = logits[:, :, -target.tokens.shape[2] :].log_softmax(-1)
    again = again.gather(-1, target.tokens[[lane, lane], ..., None])[0, ..., 0]
    (again * per_token[lane] * target.share[lane]).mean().backward()
    return {name: p.grad[0].double() for name, p in twin.named_parameters()}


def errors_by_hand(population, lane):
    """‖g - g*‖ / ‖g*‖, overall and of the block: 0 / 0 where all answers of a problem earn the same."""
    used, plain, found = own(population, lane), by_hand(population, lane), {}
    for part in ("", "blocks.0"):
        g, true = (torch.cat([x.flatten() for name, x in of.items() if name.startswith(part)]) for of in (used, plain))
        found[f"gradient_error/{part}" if part else "gradient_error"] = float((g - true).norm() / true.norm())
    return found


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
    for lane in range(2):
        for name, error in errors_by_hand(population, lane).items():
            assert found[name][lane] == pytest.approx(error, rel=1e-3)
            assert error > 0.05, "more than products of BF16 have"


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
        assert all(value > 0 for value in found)
        assert not adapts or lane.recorded["gradient_error"] == found, "nothing else is trained"


@pytest.mark.heavy
@pytest.mark.parametrize("preset", ["smoke", "moe-smoke"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_training_records_it_at_its_steps_and_changes_none(device, preset):
    """Beside captured steps, too. It may be any number above 0: ‖g*‖ is small where the gradients of a minibatch's
    answers cancel. So each is computed by hand, in a training of the same lanes that records and captures nothing.

    One percent: both have the bits of the same policy and answers, but the losses by hand are other operations. A
    number in FP32 that they round otherwise is rounded to BF16 before products, which a sum that cancels shows.
    """
    task = little(get_task("rl", preset), 4, prompts=8)
    of = lanes(quantized(), quantized(noise=NOISE_NAMES["weights"]))
    together = train(task, of, device, record=True)
    assert not [reason for reason in together.fallbacks if "graph" in reason]
    assert [replace(lane, recorded={}) for lane in together.lanes] == train(task, of, device).lanes
    recorded = [lane.recorded for lane in together.lanes]
    places = {int(step) - 1: place for place, step in enumerate(recorded[0]["step"])}
    assert list(places) == [0, 1, 3]  # both steps of the first rollout, and the last of the second
    population = Population(task, of, device)
    population.graphs = None
    for step in range(task.steps):
        if step in places:
            population.batch_of(step)
            if step % population.experience.every == 0:
                population.experience.collect()
            for lane, of_lane in enumerate(recorded):
                for name, error in errors_by_hand(population, lane).items():
                    found, wanted = (math.nan if x is None else x for x in (of_lane[name][places[step]], number(error)))
                    assert found == pytest.approx(wanted, rel=1e-2, nan_ok=True), (step, lane, name)
        population.train_step(step)
    assert any(value for of_lane in recorded for value in of_lane["gradient_error"]), "not all answers earn the same"
