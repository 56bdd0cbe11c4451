"""The score of BF16 is squared gradient times squared error, of the layers that a recipe quantizes."""

import pytest
import torch

from fp4dse.dse import ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.layers.place import Place
from fp4dse.kernels.layers import QuantLinear
from fp4dse.kernels.quant.quantize import quantize
from fp4dse.tasks.inspection import fisher
from fp4dse.tasks.inspection.fisher import Scoring, fisher_scores
from fp4dse.tasks.layers import find_layers
from tests.tasks.plain_net import task_of

UP = Place("mlp", 0, 1, "up", name="block0.up")
HEAD = Place("head", name="head")


def scored(recipe, place=UP):
    """Scores of a layer after one backward pass, its operands with their gradients, and the gradient of its output."""
    numerics = Scoring(recipe, 2)
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(2, *shape, generator=generator) for shape in ((48, 64), (32, 64), (48, 32)))
    layer = QuantLinear(w, None, numerics, 3, place)
    x.requires_grad_()
    layer(x).backward(g)
    return numerics.scores, x, layer.weight


def test_it_is_squared_gradient_times_squared_error():
    recipe = Recipe.named("mxfp4")
    scores, x, w = scored(recipe)
    expected = torch.zeros(2, dtype=torch.float64)
    for operand in (x, w):
        error = quantize(operand.detach(), recipe.fprop.x).values - operand.detach()
        expected += (operand.grad.double() * error.double()).square().sum(dim=(1, 2))
    assert torch.allclose(scores[3], expected, rtol=1e-5)


def test_a_rotated_operand_is_judged_rotated_back():
    """Q(x) - x of a rotation that cancels is small beside x."""
    plain = scored(Recipe.named("mxfp4"))[0][3]
    forward = {**recipe_to_dict(Recipe.named("mxfp4"))}
    forward["fprop"] = {**forward["fprop"], "rotation": "hadamard32"}
    turned = scored(recipe_from_dict(forward))[0][3]
    assert (turned < 3 * plain).all()
    assert (turned > plain / 3).all()


def test_what_is_precise_has_no_score():
    assert scored(Recipe.named("mxfp4"), HEAD)[0] == {}
    assert scored(Recipe.named("bf16"))[0] == {}


def test_layers_of_a_trained_model_have_scores(monkeypatch):
    monkeypatch.setattr(fisher, "BATCHES", 2)
    found = fisher_scores(Recipe.named("mxfp4"), ("language", "smoke"), 1e-2, [0, 1])
    assert list(found) == [layer.place for layer in find_layers("language", "smoke")]
    assert {place.name for place, score in found.items() if score == 0} == {"head"}
    finer = fisher_scores(Recipe.named("nvfp4"), ("language", "smoke"), 1e-2, [0, 1])
    assert all(finer[place] < score for place, score in found.items() if score)


def test_plain_modules_are_refused(monkeypatch):
    monkeypatch.setattr(fisher, "get_task", lambda *_: task_of())
    with pytest.raises(ConfigError, match="--fisher"):
        fisher_scores(Recipe.named("mxfp4"), ("own.py", "build"), 1e-2, [0])
