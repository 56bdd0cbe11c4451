"""What is recorded is what the definitions say, and recording changes nothing."""

import msgspec
import pytest
import torch

from fp4dse.dse import SLOTS, Recipe
from fp4dse.dse.layers.precision import Finish
from fp4dse.dse.training import Training
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population
from fp4dse.tasks.engine.recorder import Recorder, measure, recorded_steps

replace = msgspec.structs.replace
TASK = replace(get_task("regression", "smoke"), steps=6)


def lanes(name="nvfp4-sr", lrs=(TASK.lr, 2 * TASK.lr), **changes):
    return [Lane(replace(Recipe.named(name), **changes), lr, seed) for seed, lr in enumerate(lrs)]


def test_steps_are_powers_of_two_and_the_last():
    assert sorted(recorded_steps(10)) == [0, 1, 3, 7, 9]
    assert sorted(recorded_steps(8)) == [0, 1, 3, 7]
    assert recorded_steps(1) == {0}


@pytest.mark.parametrize("name", ["nvfp4-sr", "ue5m3-graphcore", "tetrajet-qema"])
def test_recording_changes_no_bit_of_the_training(name):
    without, with_it = (train(TASK, lanes(name), record=record).lanes for record in (False, True))
    assert all(lane.recorded == {} for lane in without)
    assert [replace(lane, recorded={}) for lane in with_it] == without


def test_every_layer_and_slot_is_there_at_every_recorded_step():
    for lane in train(TASK, lanes(), record=True).lanes:
        assert lane.recorded["step"] == [1, 2, 4, 6]
        layers = ["", "/layers.0", "/layers.1"]
        wanted = {f"{what}{layer}" for what in ("gradient_norm", "gnr") for layer in layers}
        wanted |= {f"{what}/{slot}" for what in ("clipped", "flushed") for slot in SLOTS}
        assert set(lane.recorded) == wanted | {"step"}
        assert all(len(values) == 4 and None not in values for values in lane.recorded.values())
        assert all(0 <= v < 0.3 for slot in SLOTS for v in lane.recorded[f"flushed/{slot}"])
        assert min(lane.recorded["flushed/dgrad.g"]) > 0


def test_a_lane_is_recorded_the_same_in_any_company():
    together = train(TASK, lanes(lrs=(1e-3, 2e-3, 3e-3)), record=True).lanes
    assert train(TASK, lanes(lrs=(1e-3, 2e-3, 3e-3))[1:], record=True).lanes == together[1:]


def population(**changes):
    made = Population(TASK, lanes(**changes), "cpu")
    return made, measure(TASK, made.model, made.numerics, made.optimizer, *made._batch())


def test_norm_and_ratio_are_those_of_the_definition():
    """Against gradients that are taken by hand: from the recipe, and from the same with BF16 backward stages."""
    _, got = population()
    bf16 = Recipe.named("bf16")
    gradients = []
    for changes in ({}, {"dgrad": bf16.dgrad, "wgrad": bf16.wgrad}):
        twin = Population(TASK, lanes(**changes), "cpu")
        x, y = twin._batch()
        TASK.loss(twin.model(x), y).sum().backward()
        gradients.append([p.grad.double().flatten(1) for p in twin.model.parameters()])
    used, true = gradients
    for end, i in (("/layers.0", 0), ("/layers.1", 1)):
        assert torch.allclose(got[f"gradient_norm{end}"], used[i].norm(dim=1), rtol=1e-5)
        d = used[i].shape[1]
        sigma = (used[i] - true[i]).square().mean(dim=1).sqrt()
        assert torch.allclose(got[f"gnr{end}"], true[i].norm(dim=1) / (sigma * d**0.5), rtol=1e-3)
    assert torch.allclose(got["gradient_norm"], torch.cat(used, 1).norm(dim=1), rtol=1e-5)


def test_a_loss_scale_and_parts_of_a_batch_do_not_change_what_is_measured():
    _, plain = population()
    _, scaled = population(training=Training(loss_scale=1024.0))
    assert all(torch.equal(scaled[name], value) for name, value in plain.items())
    _, parts = population(training=Training(accumulate=2))
    assert torch.allclose(parts["gradient_norm"], plain["gradient_norm"], rtol=0.05)


def test_a_backward_pass_without_quantizers_has_no_noise_and_what_is_not_used_no_share():
    whole = train(TASK, lanes(finish=Finish(share=0.5, what="all")), record=True).lanes[0].recorded
    assert [value is None for value in whole["gnr"]] == [False, False, True, True]
    assert [value is None for value in whole["flushed/fprop.x"]] == [False, False, True, True]
    assert None not in whole["gradient_norm"]


def test_of_a_diverged_lane_what_was_measured_before_is_left():
    calm, wild = train(TASK, lanes(lrs=(1e-3, 1e30)), record=True).lanes
    assert wild.diverged_step is not None
    assert wild.recorded["step"] == [s for s in calm.recorded["step"] if s - 1 < wild.diverged_step]


def test_what_was_recorded_survives_a_checkpoint_and_the_loss_of_lanes():
    _, measured = population()
    recorder, again = Recorder(6), Recorder(6)
    recorder.add(0, measured)
    recorder.add(1, measured)
    again.load_state({name: value[[1]] for name, value in recorder.state().items()}, 2)
    assert again.of_lane(0, None) == recorder.of_lane(1, None)
