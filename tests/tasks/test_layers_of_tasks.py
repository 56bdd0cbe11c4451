"""The layers of a task's model are known without training, and are those that training finds."""

import msgspec
import pytest

from fp4dse.dse import Recipe
from fp4dse.tasks import Lane, get_task
from fp4dse.tasks.counting import MOST_PARAMETERS
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.layers import find_layers, layers_of
from tests.tasks.plain_net import task_of

SMALL = [("regression", "smoke"), ("language", "smoke"), ("language", "moe-smoke"), ("vision", "smoke")]
SMALL += [("vision", "cnn-smoke"), ("diffusion", "smoke"), ("language", "smoke+bf16")]


@pytest.mark.parametrize("asked", SMALL, ids=":".join)
def test_they_are_the_layers_that_training_has(asked):
    task = get_task(*asked)
    trained = Population(task, [Lane(Recipe.named("nvfp4").canonical(), 1e-3, 0)], "cpu").numerics.places
    found = find_layers(*asked)
    assert [layer.place for layer in found] == list(trained.values())
    assert all(layer.products > 0 for layer in found)


def test_what_a_layer_multiplies():
    """qkv of `smoke`: 32 tokens of width 32 onto 96."""
    found = {layer.place.name: layer.products for layer in find_layers("language", "smoke")}
    assert found["block0.qkv"] == 32 * 32 * 96
    assert found["block0.down"] == 32 * 64 * 32
    experts = [layer for layer in find_layers("language", "moe-smoke") if layer.place.role == "down"]
    assert len(experts) == 4
    stem = next(layer for layer in find_layers("vision", "cnn-smoke") if layer.place.name == "conv1")
    assert stem.products % (3 * 3) == 0


def test_a_plain_module_is_looked_at_too():
    task = task_of()
    found = layers_of(task)
    trained = Population(task, [Lane(Recipe.named("nvfp4").canonical(), 1e-3, 0)], "cpu").numerics.places
    assert [layer.place for layer in found] == list(trained.values())
    assert sum(layer.products for layer in found) > 0


def test_a_model_that_is_too_large_to_look_at_is_not_built():
    task = msgspec.structs.replace(get_task("regression", "smoke"), size=MOST_PARAMETERS + 1)
    assert layers_of(task) is None
