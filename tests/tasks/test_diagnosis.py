"""A look at a lane finds what is known of it beforehand, and changes nothing in its training."""

import msgspec
import pytest
import torch

from fp4dse.dse import SLOTS, ConfigError, Recipe, recipe_from_dict
from fp4dse.dse.training import Training
from fp4dse.kernels import statistics
from fp4dse.kernels.inspection.watch import watching
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population
from fp4dse.tasks.inspection.diagnosis import diagnose_lane, gradients, look, parted
from tests.tasks.plain_net import task_of

replace = msgspec.structs.replace
TASK = replace(get_task("regression", "smoke"), steps=12)
SR = {"like": "nvfp4-1716", "rounding": "stochastic"}


def backward_only(quantizer, **wgrad) -> Recipe:
    """Gradients alone are quantized."""
    plain = {"x": "bf16", "w": "bf16"}
    return recipe_from_dict(
        {"fprop": plain, "dgrad": {"g": quantizer, "w": "bf16"}, "wgrad": {"g": quantizer, "x": "bf16", **wgrad}}
    )


def looked(recipe: Recipe, passes: int = 64, task=TASK):
    population = Population(task, [Lane(recipe, task.lr, 0)], "cpu")
    population.train_step(0)
    return look(population, 1, passes)


def test_stochastic_rounding_is_unbiased():
    """bias² within four standard errors of 0, and the mean of 256 passes within 30 % of a 256th of one pass's error:
    its own standard error is √(2/ν) ≤ 8 %, ν > 300 the number of independent errors in 1,536 weights."""
    moment = looked(backward_only(SR), 256)
    for error in [moment.backward.whole, *moment.backward.layers.values()]:
        assert abs(error.bias2) < 4 * error.bias2_se
        assert error.variance > 0.01
    curve = moment.backward.whole.curve
    assert curve[-1].error == pytest.approx(curve[0].error / 256, rel=0.3)
    assert {error.error for error in moment.forward.layers.values()} == {0.0}


def test_rounding_to_nearest_is_biased_and_never_varies():
    moment = looked(backward_only("nvfp4"))
    for error in [moment.backward.whole, *moment.backward.layers.values()]:
        assert error.bias2 == pytest.approx(error.error)
        assert error.bias2 > 1e-3
        assert error.variance == pytest.approx(0, abs=1e-12)
        assert [point.error for point in error.curve] == pytest.approx([error.error] * 7)


def test_stochastic_rounding_that_clips_is_biased():
    """Against 16/17, the same with the full range: some scales are rounded down, and their largest elements clip."""
    free, clips = (
        looked(backward_only({"like": name, "rounding": "stochastic"}), 256) for name in ("nvfp4-1716", "nvfp4")
    )
    assert max(row.clipped for row in free.operands) == 0
    assert min(row.clipped for row in clips.operands) > 0
    assert clips.backward.whole.bias2 > 4 * clips.backward.whole.bias2_se


def test_where_the_forward_pass_rounds_by_chance_the_backward_error_is_the_backward_pass_s_alone():
    forward = {"x": {"like": "nvfp4-1716", "rounding": "stochastic"}, "w": "nvfp4"}
    recipe = recipe_from_dict(
        {"fprop": forward, "dgrad": {"g": "bf16", "w": "bf16"}, "wgrad": {"g": "bf16", "x": "bf16"}}
    )
    moment = looked(recipe, 16)
    assert moment.backward.whole.error == 0
    assert moment.forward.whole.variance > 0


def test_operands_are_those_that_a_quantizer_by_itself_gives():
    """The weights and the input of the first layer are at hand: `statistics` is the oracle."""
    recipe = Recipe.named("nvfp4-sr")
    population = Population(TASK, [Lane(recipe, TASK.lr, 0)], "cpu")
    moment = look(population, 0, 16)
    rows = {(row.layer, row.slot): row for row in moment.operands}
    assert set(rows) == {(f"w{i}", slot) for i in (0, 1) for slot in SLOTS} - {("w0", "dgrad.g"), ("w0", "dgrad.w")}
    x, _ = population.batch_of(0)
    weight = population.model.layers[0].weight
    for slot, tensor in (("fprop.w", weight[0]), ("fprop.x", x[0]), ("wgrad.x", x[0].T)):
        row, wanted = rows["w0", slot], statistics(tensor.contiguous(), recipe.slot(slot))
        for name in ("mse", "gain", "clipped", "flushed"):
            assert getattr(row, name) == pytest.approx(wanted[name], rel=1e-5), (slot, name)
        assert 0 < row.clipped_error + row.flushed_error < row.mse


@pytest.mark.parametrize(
    "name", ["nvfp4-sr-rht", "tetrajet-qema", "ue5m3-graphcore", "wang-dge-occ", "nvidia-nvfp4-finish"]
)
def test_looking_changes_no_bit_of_the_training(name):
    lane = Lane(Recipe.named(name), TASK.lr, 0)
    [without] = train(TASK, [lane]).lanes
    found = diagnose_lane(TASK, lane, at=(0.1, 0.5, 1.0), passes=16)
    assert [moment.step for moment in found.moments] == [1, 6, 12]
    assert (found.val_loss, found.val_loss_bf16) == (without.val_loss, without.val_loss_bf16)
    assert found.curve_loss == without.curve_loss


RULED = recipe_from_dict({"fprop": {"x": "nvfp4", "w": "nvfp4"}, "dgrad": {"g": SR, "w": "nvfp4"},
                          "wgrad": {"g": SR, "x": "nvfp4"}, "layers": [{"name": "w1", "wgrad.x": SR}]})  # fmt: skip


@pytest.mark.parametrize("recipe", [Recipe.named("tetrajet-qema"), RULED], ids=["tetrajet-qema", "a rule for a layer"])
def test_a_copy_with_the_lane_s_own_seed_has_its_gradient_whatever_stands_beside_it(recipe):
    population = Population(TASK, [Lane(recipe, TASK.lr, 3)], "cpu")
    for step in range(3):
        population.train_step(step)
    own = gradients(population, 3, "recipe")
    copies = gradients(population.copies(0, [5, 3, 8]), 3, "recipe")
    assert torch.equal(copies[1], own[0])
    assert not torch.equal(copies[0], own[0])
    other = population.copies(0, [0, 1, 2])
    other.numerics.reseed([5, 3, 8])
    assert torch.equal(gradients(other, 3, "recipe"), copies)
    bf16 = gradients(population.copies(0, [5, 3, 8]), 3, "bf16")
    assert torch.equal(bf16[0], bf16[1])


def test_layers_that_are_kept_precise_have_no_operands_and_rules_have_theirs():
    rules = [{"name": "w0", "*": "bf16"}, {"name": "w1", "wgrad.g": "mxfp8"}]
    base = {"fprop": {"x": "nvfp4", "w": "nvfp4"}, "dgrad": {"g": SR, "w": "nvfp4"}, "wgrad": {"g": SR, "x": "nvfp4"}}
    deep = replace(get_task("regression", "deep"), steps=4)
    moment = looked(recipe_from_dict({**base, "layers": rules}), 16, deep)
    assert {row.layer for row in moment.operands} == {"w1", "w2", "w3"}
    mse = {row.layer: row.mse for row in moment.operands if row.slot == "wgrad.g"}
    assert mse["w1"] < 2e-3 < 5e-3 < mse["w2"]
    assert set(moment.backward.layers) == {"w0", "w1", "w2", "w3"}


def test_a_batch_in_parts_counts_once():
    whole = looked(replace(Recipe.named("nvfp4-sr"), training=Training(accumulate=2)), 16)
    weights = {row.layer: row for row in whole.operands if row.slot == "fprop.w"}
    alone = {row.layer: row for row in looked(Recipe.named("nvfp4-sr"), 16).operands if row.slot == "fprop.w"}
    assert weights["w0"].flushed == pytest.approx(alone["w0"].flushed, abs=0.01)
    assert weights["w0"].mse == pytest.approx(alone["w0"].mse, rel=0.05)


def test_where_a_lane_diverged_is_said_with_layer_and_slot():
    found = diagnose_lane(TASK, Lane(Recipe.named("nvfp4-sr"), 1e30, 0), passes=16)
    assert found.diverged is not None
    assert (found.diverged.layer, found.diverged.slot) in {(f"w{i}", slot) for i in (0, 1) for slot in SLOTS}
    assert found.val_loss is None
    assert all(moment.step <= found.diverged.step for moment in found.moments)


def test_a_plain_torch_module_is_looked_at_lane_by_lane_with_the_same_dropout():
    task = task_of(steps=4)
    moment = looked(backward_only("nvfp4"), 16, task)
    assert moment.backward.whole.variance > 0  # of the dropout
    assert {row.slot for row in moment.operands} == {"dgrad.g", "wgrad.g"}


def test_the_curves_part_where_the_recipe_s_loss_stays_above():
    assert parted([1, 2, 4, 8], [3, 2, 2, 2], [3, 3, 1, 1]) == 4
    assert parted([1, 2, 4, 8], [4, 2, 2, 2], [3, 3, 1, 3]) is None
    assert parted([1, 2], [4, 4, 4], [3, 3]) == 1


@pytest.mark.parametrize(
    ("asked", "word"), [({"passes": 24}, "power of two"), ({"passes": 8}, "16 or more"), ({"at": (0.0,)}, "above 0")]
)
def test_wrong_numbers_are_refused(asked, word):
    with pytest.raises(ConfigError, match=word):
        diagnose_lane(TASK, Lane(Recipe.named("nvfp4"), 1e-3, 0), **asked)


def test_bf16_has_nothing_to_diagnose_and_only_one_lane_is_watched():
    with pytest.raises(ConfigError, match="one that quantizes"):
        diagnose_lane(TASK, Lane(Recipe.named("bf16"), 1e-3, 0))
    two = Population(TASK, [Lane(Recipe.named("nvfp4"), 1e-3, seed) for seed in (0, 1)], "cpu")
    with pytest.raises(ValueError, match="found 2; accepted: 1"), watching(two.numerics):
        pass
