"""Language models learn, lane by lane, whatever the company."""

import math

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks import Lane, check_task, find_facts, get_task, train
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.language import PRESETS
from fp4dse.tasks.task import with_steps

SMOKE = ("smoke", "moe-smoke", "moe8-smoke")


def lanes_of(task, names, seeds=(0, 1)) -> list[Lane]:
    return [Lane(Recipe.named(name), task.lr * (1 + seed / 4), seed) for name in names for seed in seeds]


def decoder(task, lanes=2, training=True):
    numerics = LaneNumerics([Recipe.named("bf16")] * lanes, range(lanes))
    numerics.training = training
    return task.model(task.problem(range(lanes)).init, numerics)


@pytest.mark.parametrize(
    ("preset", "recipe"),
    [
        ("smoke", "bf16"),
        ("smoke", "nvfp4-sr-rht"),
        pytest.param("moe-smoke", "bf16", marks=pytest.mark.slow),
        pytest.param("moe-smoke", "nvfp4-sr-rht", marks=pytest.mark.slow),
        ("moe8-smoke", "nvfp4-sr-rht"),
    ],
)
def test_losses_fall_to_six_tenths(preset, recipe):
    task = with_steps(get_task("language", preset), 30)  # half of them
    for lane in train(task, lanes_of(task, (recipe,))).lanes:
        assert lane.train_loss_final < 0.6 * lane.curve_loss[0]
        assert lane.metrics["bits_per_byte"] == pytest.approx(lane.val_loss / math.log(2), rel=1e-5)
        assert lane.metrics["perplexity"] == pytest.approx(math.exp(lane.val_loss), rel=1e-5)


@pytest.mark.parametrize("preset", SMOKE)
def test_a_token_is_not_told_by_later_ones(preset):
    task = get_task("language", preset)
    model = decoder(task, training=False)
    tokens = torch.randint(256, (2, 1, 32), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[..., 20:] = 255 - changed[..., 20:]
    with torch.no_grad():
        before, after = model(tokens)[0], model(changed)[0]
    earlier = 20 if preset == "smoke" else 1  # later tokens may take an expert's last place, never an earlier one's
    assert torch.allclose(before[..., :earlier, :], after[..., :earlier, :], atol=1e-5)
    assert not torch.allclose(before[..., 20:, :], after[..., 20:, :], atol=1e-2)


def test_lanes_that_are_left_keep_their_biases_and_their_bits():
    task = msgspec.structs.replace(get_task("language", "moe8-smoke"), steps=4)
    lanes = lanes_of(task, ("nvidia-nvfp4",), seeds=(0, 1, 2))
    whole, few = (Population(task, lanes, "cpu") for _ in range(2))
    for step in range(4):
        if step == 2:
            few.keep([2, 0], step)
        whole.train_step(step)
        few.train_step(step)
    ours, theirs = whole.state(4), few.state(4)
    assert theirs["model/blocks.0.experts.bias"].abs().amax(1).gt(0).all()
    for name, value in theirs.items():
        assert torch.equal(ours[name][[2, 0]].nan_to_num(-1.0), value.nan_to_num(-1.0)), name


def test_untrained_models_know_about_nothing():
    for preset in SMOKE:
        task = get_task("language", preset)
        x, y = task.prepare(task.problem([0, 1]).val_x[:, :8].expand(2, -1, -1), None, None)
        with torch.no_grad():
            loss = task.loss(decoder(task, training=False)(x), y).mean()
        assert loss == pytest.approx(math.log(256), rel=0.02)


def test_the_balance_loss_counts_in_training_alone():
    task = get_task("language", "moe-smoke")
    x, y = task.prepare(task.problem([0]).val_x[:, :8].expand(2, -1, -1), None, None)
    with torch.no_grad():
        logits, balance = decoder(task)(x)
        trained, evaluated = (task.loss(out, y).mean() for out in ((logits, balance), decoder(task, training=False)(x)))
    assert (balance > 0.99).all()
    assert trained - evaluated == pytest.approx(0.01 * float(balance.mean()), rel=1e-2)


def test_every_product_knows_its_place():
    places = {
        name: layer.place
        for name, layer in decoder(get_task("language", "moe-smoke")).named_modules()
        if hasattr(layer, "place")
    }
    kinds = [place.kind for place in places.values()]
    assert kinds.count("attention") == 2
    assert kinds.count("router") == kinds.count("head") == 1
    assert kinds.count("mlp") == 8
    layers = [m.layer for m in decoder(get_task("language", "moe-smoke")).modules() if hasattr(m, "place")]
    assert len(set(layers)) == len(layers) == 12


@pytest.mark.parametrize(("preset", "millions"), [("9M", 9), ("60M", 58), ("350M", 368), ("1B", 1339)])
def test_sizes_are_those_of_the_paper(preset, millions):
    """Llama with a vocabulary of 32,000 and an untied head."""
    shape = PRESETS[preset].model.args[0]
    assert shape.size(32_000) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(
    ("preset", "all_of_it", "active"),
    [
        ("moe-smoke", 0.017, 0.011),
        ("moe8-1M", 2.54, 1.07),
        ("moe64-3M", 20.3, 3.2),
        ("moe8-10M", 22.9, 9.6),
        ("moe8-4B", 3590, 1180),
    ],
)
def test_a_token_meets_a_part_of_the_parameters(preset, all_of_it, active):
    """Millions, without embedding and head."""
    shape = PRESETS[preset].model.args[0]
    ends = 2 * 256 * shape.width
    assert (shape.size(256) - ends) / 1e6 == pytest.approx(all_of_it, rel=0.05)
    assert (shape.active(256) - ends) / 1e6 == pytest.approx(active, rel=0.05)
    assert PRESETS[preset].rev == 6


@pytest.mark.parametrize("preset", ["tiny", "10M", "moe-small", "moe8-1M"])
def test_a_scaling_law_counts_parameters_between_embedding_and_head_and_all_tokens_read(preset):
    task = PRESETS[preset]
    shape = task.model.args[0]
    found = shape.parameters(256)
    within = [name for name in found if name.startswith("block")]
    assert task.parameters == sum(math.prod(found[name]) for name in within) + shape.width  # the last norm
    assert task.tokens == task.steps * task.batch * shape.context


def test_a_size_counts_what_is_made():
    for preset in SMOKE:
        task = get_task("language", preset)
        assert sum(p[0].numel() for p in decoder(task).parameters()) == task.size


def test_what_cannot_be_trained_is_refused_before(monkeypatch):
    with pytest.raises(ConfigError, match="4096 samples or more, a batch of language:paper"):
        check_task(find_facts("language", "paper"), "cpu")
    huge = msgspec.structs.replace(find_facts("language", "1B"), size=10**13)
    with pytest.raises(ConfigError, match=r"found 'language:1B'; accepted: a model that fits in the \d+ GiB of cpu"):
        check_task(huge, "cpu")
    check_task(find_facts("language", "small"), "cpu")


def test_the_learning_rate_rises_before_it_falls():
    task = msgspec.structs.replace(get_task("language", "small"), steps=100, warmup=0.1, decay=0.5)
    assert [task.lr_factor(step) for step in (0, 4, 9, 30, 75, 99)] == pytest.approx([0.1, 0.5, 1, 1, 0.5, 0.02])


@pytest.mark.slow
def test_small_learns_below_2_2_bits_per_byte():
    task = get_task("language", "small")
    for lane in train(task, lanes_of(task, ("bf16",))).lanes:
        assert lane.metrics["bits_per_byte"] < 2.2
