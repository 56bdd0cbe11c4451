"""Weights in files: whole, repeatable, and the start of every lane of a population."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fp4dse.dse import ConfigError, Recipe
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population
from fp4dse.tasks.engine.evaluation import evaluate
from fp4dse.tasks.start.make_weights import make_weights
from fp4dse.tasks.start.weights import digest_of, read_about, read_weights, start_from, write_weights

BF16 = Recipe.named("bf16")
TASKS = [("regression", "smoke"), ("vision", "resnet-smoke"), ("language", "moe-smoke")]
"""Of these the ResNet has buffers, the decoder shapes of all kinds."""


@pytest.fixture(scope="module")
def trained():
    """Task -> the task with few steps, the weights that a lane of it ends with, its result."""
    found = {}
    for of in TASKS:
        task = msgspec.structs.replace(get_task(*of), steps=3)
        found[of] = (task, *make_weights(task, Lane(BF16, task.lr, 0)))
    return found


@pytest.mark.parametrize("of", TASKS)
def test_a_lane_trained_for_its_weights_is_a_lane_like_any_other(trained, of):
    task, _, result = trained[of]
    others = [Lane(BF16, task.lr, 1), Lane(BF16, task.lr, 0)]
    assert train(task, others).lanes[1].val_loss == result.val_loss


@pytest.mark.parametrize("of", TASKS)
def test_every_lane_starts_from_the_weights_whatever_its_seed_and_recipe(trained, of, tmp_path):
    task, weights, result = trained[of]
    write_weights(tmp_path / "w.safetensors", weights, {})
    started = start_from(task, read_weights(tmp_path / "w.safetensors"), "w.safetensors")
    lanes = [Lane(Recipe.named(name), task.lr, seed) for name in ("nvfp4", "nvfp4-sr") for seed in (0, 5)]
    population = Population(started, lanes, "cpu")
    for name, tensor in population.model.state_dict().items():
        assert all(torch.equal(lane, weights[name]) for lane in tensor)
    alone = Population(started, [Lane(BF16, task.lr, 0)], "cpu")
    assert evaluate(alone)[0][0] == result.val_loss


def test_the_digest_is_over_numbers_and_enters_that_of_the_task(trained):
    task, weights, _ = trained["regression", "smoke"]
    started = start_from(task, weights, "w")
    other = start_from(task, {name: value * 2 for name, value in weights.items()}, "w")
    assert started.start == digest_of(dict(reversed(weights.items())))
    assert len({task.digest, started.digest, other.digest}) == 3
    assert (task.start, started.rates) == (None, {})


@given(st.dictionaries(st.text("ab.", min_size=1), st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
def test_files_give_back_what_was_written_and_are_the_same_bytes_again(tmp_path_factory, shapes):
    folder = tmp_path_factory.mktemp("weights")
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    write_weights(folder / "a.safetensors", weights, {"x": 1, "y": "é"})
    write_weights(folder / "b.safetensors", dict(reversed(weights.items())), {"y": "é", "x": 1})
    assert (folder / "a.safetensors").read_bytes() == (folder / "b.safetensors").read_bytes()
    again = read_weights(folder / "a.safetensors")
    assert digest_of(again) == digest_of(weights) == digest_of(load_file(folder / "a.safetensors"))
    assert read_about(folder / "a.safetensors") == {"x": 1, "y": "é"}


def test_half_precision_is_the_same_start_as_its_float32(tmp_path):
    half = {"w": torch.randn(3, 4).bfloat16()}
    save_file(half, tmp_path / "half.safetensors")
    save_file({"w": half["w"].float()}, tmp_path / "whole.safetensors")
    assert digest_of(read_weights(tmp_path / "half.safetensors")) == digest_of(
        read_weights(tmp_path / "whole.safetensors")
    )
    assert read_about(tmp_path / "half.safetensors") == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("layers.1.weight"), ("layers.1.weight: found nothing", "as the model has it")),
        (lambda w: w.update(more=torch.ones(2)), ("more: found 'shape [2]'", "layers.0.weight, layers.1.weight")),
        (lambda w: w.update({"layers.0.weight": torch.ones(2, 2)}), ("layers.0.weight: found 'shape [2, 2]'",)),
        (lambda w: w["layers.0.weight"].fill_(float("nan")), ("layers.0.weight: found 'NaN or infinity'",)),
    ],
)
def test_weights_that_do_not_fit_are_one_line_with_the_first_tensor(trained, tmp_path, change, words):
    _, weights, _ = trained["regression", "smoke"]
    changed = {name: value.clone() for name, value in weights.items()}
    change(changed)
    path = tmp_path / "w.safetensors"
    save_file(changed, path)
    with pytest.raises(ConfigError) as caught:
        get_task("regression", "smoke", None, str(path))
    assert all(word in str(caught.value) for word in ("--from", "w.safetensors", *words))


@pytest.mark.parametrize("content", [None, b"", b"no header at all", b"\x02\0\0\0\0\0\0\0{]"])
def test_a_file_that_is_missing_or_broken_is_one_line(tmp_path, content):
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--from: found .*w\.safetensors'; accepted: a .*\.safetensors file"):
        read_weights(path)


def test_a_lane_that_diverges_leaves_no_weights():
    task = msgspec.structs.replace(get_task("regression", "smoke"), steps=12)
    with pytest.raises(ConfigError, match="diverged at step"):
        make_weights(task, Lane(BF16, 1e30, 0))
