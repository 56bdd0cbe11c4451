"""Oscillating weights are found as defined, between steps, and finding them changes nothing."""

import msgspec
import pytest
import torch

from fp4dse.dse import Quantizer, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.layers.precision import Finish
from fp4dse.kernels import LaneNumerics, QuantLinear, quantize
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population, Pruning
from fp4dse.tasks.job import Rung
from fp4dse.tasks.optimizers.oscillation import MANY, WINDOW, Oscillation
from tests.tasks.in_two import train_in_two

replace = msgspec.structs.replace
TASK = replace(get_task("regression", "smoke"), steps=40)
NAMES = {f"{what}{end}" for what in ("oscillation", "oscillating") for end in ("", "/layers.0", "/layers.1")}


def lanes(*names: str, **changes) -> list[Lane]:
    return [Lane(replace(Recipe.named(name), **changes), TASK.lr, seed) for name in names for seed in (0, 1)]


def found(result) -> dict[str, list[float | None]]:
    return {name: values for name, values in result.recorded.items() if name.startswith("oscillat")}


def test_ratios_are_those_of_the_definition():
    """Against weights that are looked at by hand before every step, of a training that records nothing."""
    population = Population(TASK, lanes("nvfp4"), "cpu")
    weights = []
    for step in range(TASK.steps):
        weights.append([p.detach()[1].clone() for p in population.model.parameters()])
        population.train_step(step)
    recorded = train(TASK, lanes("nvfp4"), record=True).lanes[1].recorded
    assert recorded["step"] == [1, 2, 4, 8, 16, 32, 40]
    assert {name for name in recorded if name.startswith("oscillat")} == NAMES
    for place, end in ((-2, 31), (-1, 39)):
        movement = []
        for layer in range(2):
            w = torch.stack([of[layer] for of in weights[end - WINDOW : end + 1]])
            q = torch.stack([quantize(one, Quantizer.named("nvfp4")).values for one in w])
            movement.append([of.double().diff(dim=0).abs().sum(0) for of in (q, w)])
        ratios = [q / (w + 1e-8) for q, w in movement]
        for layer, (q, w) in enumerate(movement):
            assert recorded[f"oscillation/layers.{layer}"][place] == pytest.approx(float(q.sum() / w.sum()), rel=1e-4)
            share = (ratios[layer] >= MANY).double().mean().item()
            assert recorded[f"oscillating/layers.{layer}"][place] == pytest.approx(share, abs=2 / w.numel())
        q, w = (sum(of[i].sum() for of in movement) for i in (0, 1))
        assert recorded["oscillation"][place] == pytest.approx(float(q / w), rel=1e-4)


def test_before_a_whole_window_there_is_no_number():
    for result in train(TASK, lanes("nvfp4"), record=True).lanes:
        for values in found(result).values():
            assert [value is None for value in values] == [True] * 5 + [False] * 2
    assert not found(train(replace(TASK, steps=WINDOW), lanes("nvfp4"), record=True).lanes[0])


def test_a_weight_that_crosses_a_threshold_at_every_step_oscillates_and_one_that_drifts_does_not():
    """In MXFP4 with the largest weight at 6 the grid is E2M1's own, and 0.25 is between 0 and 0.5."""
    numerics = LaneNumerics([Recipe.named("mxfp4")] * 2, [0, 1])
    weight = torch.zeros(2, 4, 32)
    weight[:, :, 0] = 6.0
    layer = QuantLinear(weight, None, numerics, 0)
    watched = Oscillation(layer, numerics, {WINDOW})
    for step in range(WINDOW + 1):
        with torch.no_grad():
            layer.weight[0, 1, 3] = 0.251 if step % 2 else 0.249
            layer.weight[1, 2, 5] = 0.1 + 0.01 * step  # once from 0 to 0.5
        moved = watched.observe(step)
        assert (moved is not None) == (step == WINDOW)
    got = watched.statistics(moved)
    assert got["oscillating/"].tolist() == [1 / 128, 0]
    assert got["oscillation/"].tolist() == pytest.approx([0.5 / 0.002, 0.5 / 0.3], rel=1e-3)
    assert got["oscillating"].tolist() == [1 / 128, 0]
    assert watched.state() == {}


@pytest.mark.parametrize("name", ["hif4-ascend", "ufp4", "metis"])
def test_random_signs_that_are_drawn_anew_move_no_weight(name):
    """Of a rotation, or of the vectors that singular components are found from: only the weight that moves does."""
    numerics = LaneNumerics([Recipe.named(name)] * 2, [0, 1])
    torch.manual_seed(0)
    layer = QuantLinear(torch.randn(2, 32, 64), None, numerics, 0)
    watched, products = Oscillation(layer, numerics, {WINDOW}), []
    for step in range(WINDOW + 1):
        numerics.step.fill_(step)
        products.append(numerics.forward(0, torch.eye(64).expand(2, -1, -1).contiguous(), layer.weight.detach()).y)
        with torch.no_grad():
            layer.weight[1, 0, 0] += 0.01
        moved = watched.observe(step)
    assert not torch.equal(products[0], products[-1])
    assert torch.equal(moved.decoded[0], torch.zeros(32 * 64))
    assert moved.decoded[1].any()


@pytest.mark.parametrize("name", ["nvfp4-sr", "ue5m3-graphcore", "tetrajet-qema", "hif4-ascend"])
def test_recording_it_changes_no_bit_of_the_training(name):
    without, with_it = (train(TASK, lanes(name), record=record).lanes for record in (False, True))
    assert all(found(lane)["oscillation"][-1] > 0 for lane in with_it)
    assert [replace(lane, recorded={}) for lane in with_it] == without


def test_it_is_the_same_in_any_company_after_a_checkpoint_and_without_the_lanes_that_left(tmp_path):
    members = lanes("nvfp4", "nvfp4-sr")
    whole = train(TASK, members, record=True).lanes
    assert train(TASK, members[2:3], record=True).lanes == whole[2:3]
    for stop in (5, 20, 33):
        assert train_in_two(TASK, members, file=tmp_path / f"{stop}.pt", after=stop, record=True) == whole
    stays = Pruning([Rung(20, 0.5)], lambda *_: [False, True, True, False])
    pruned = train(TASK, members, record=True, pruning=stays).lanes
    assert pruned[1:3] == whole[1:3]


def test_where_the_forward_weights_are_not_quantized_there_is_no_number():
    assert not found(train(TASK, lanes("bf16"), record=True).lanes[0])
    [result, _] = train(TASK, lanes("nvfp4", finish=Finish(share=0.1, what="forward")), record=True).lanes
    assert [value is None for value in found(result)["oscillation"]] == [True] * 5 + [False, True]


@pytest.mark.heavy
def test_a_lane_whose_rule_keeps_a_layer_precise_has_no_number_there():
    task = replace(get_task("vision", "smoke"), steps=34)
    plain = Recipe.named("nvfp4")
    rules = [{"kind": "mlp", "*": "bf16"}], [{"kind": "mlp", "*": "mxfp4"}]
    recipes = [plain, *(recipe_from_dict({**recipe_to_dict(plain), "layers": rule}) for rule in rules)]
    members = [Lane(recipe, 1e-3, 0) for recipe in recipes]
    whole = train(task, members, record=True).lanes
    last = [{name: values[-1] for name, values in found(result).items()} for result in whole]
    of_mlp = {f"{what}/layer.block0_{name}" for what in ("oscillation", "oscillating") for name in ("up", "down")}
    assert {name for name, value in last[1].items() if value is None} == of_mlp
    assert not any(value is None for one in (last[0], last[2]) for value in one.values())
    assert last[0]["oscillation/layer.block0_up"] != last[2]["oscillation/layer.block0_up"]
    assert [train(task, [member], record=True).lanes[0].val_loss for member in members] == [of.val_loss for of in whole]


def test_layers_that_a_recipe_keeps_precise_are_left_out():
    task = replace(get_task("vision", "smoke"), steps=34)
    result = train(task, [Lane(Recipe.named("nvfp4"), 1e-3, 0)], record=True).lanes[0]
    layers = {name.partition("/")[2] for name in found(result)} - {""}
    assert layers == {f"layer.block0_{name}" for name in ("qkv", "out", "up", "down")}
