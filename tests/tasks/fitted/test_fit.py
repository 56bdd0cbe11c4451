"""The weights of a whole model, fitted layer by layer or block by block, are a start that sweeps can take."""

import math
from pathlib import Path

import msgspec
import pytest
import torch

from fp4dse.commands.weights import FITTED_BY
from fp4dse.dse import ConfigError, Recipe, recipe_from_dict
from fp4dse.dse.training import Training
from fp4dse.sweeps.weights import about, fitted
from fp4dse.tasks import Lane, get_task
from fp4dse.tasks.engine import Population
from fp4dse.tasks.engine.evaluation import evaluate, evaluating
from fp4dse.tasks.fitted.fit import ACCEPTED, Fitted, fit_weights
from fp4dse.tasks.start.weights import read_weights, start_from

replace = msgspec.structs.replace
SMOKE = get_task("finetune", "smoke")
UNTRAINED = replace(SMOKE, pretrain=lambda seeds, _device: SMOKE.problem(seeds).init)
"""Weights as they are drawn: nothing here depends on how good they are."""


def fit(method, recipe="mxfp4-rceil", lr=1e-3, task=UNTRAINED, samples=32):
    return fit_weights(task, Lane(with_forward(recipe), lr, 0), method, samples)


def with_forward(name, rotation="none"):
    of = {"fprop": {"x": name, "w": name, "rotation": rotation}}
    sides = {side: {"g": "bf16", other: "bf16"} for side, other in (("dgrad", "w"), ("wgrad", "x"))}
    return recipe_from_dict({**of, **sides})


@pytest.mark.parametrize(("method", "rotation"), [("gptq", "none"), ("mr-gptq", "hadamard32")])
def test_every_layer_puts_out_less_error_than_rounded_to_nearest(method, rotation):
    found = fit_weights(UNTRAINED, Lane(with_forward("nvfp4", rotation), 1e-3, 0), method, 32)
    assert list(found.errors) == [f"blocks.0.{name}" for name in ("qkv", "out", "mlp.up", "mlp.down")]
    for name, (nearest, best) in found.errors.items():
        assert best < 0.95 * nearest, name


def test_layers_that_stay_in_bf16_stay_as_they_are():
    found, init = fit("gptq"), UNTRAINED.problem([0]).init
    assert torch.equal(found.weights["head.weight"], init["head"][0])
    assert torch.equal(found.weights["embed"], init["embed"][0])
    assert not torch.equal(found.weights["blocks.0.qkv.weight"], init["block0.qkv"][0])


def test_a_sweep_that_starts_from_them_has_the_loss_that_was_found():
    """Of a lane that trains nothing, to a rounding of FP32."""
    found = fit("gptq")
    recipe = replace(with_forward("mxfp4-rceil"), training=Training(trains="none"))
    started = Population(start_from(UNTRAINED, found.weights, "here"), [Lane(recipe, 1e-3, 0)], "cpu")
    assert evaluate(started)[0][0].item() == pytest.approx(found.losses["fitted"], rel=1e-6)
    losses = fit("nearest").losses
    assert losses["fitted"] == pytest.approx(losses["nearest"], rel=1e-6)


def test_where_rounding_to_nearest_loses_nothing_no_share_is_given_back():
    for nearest in (2.0, 1.9999):
        assert math.isnan(Fitted({}, {"bf16": 2.0, "nearest": nearest, "fitted": 1.99}, {}).recovered)
    assert Fitted({}, {"bf16": 2.0, "nearest": 2.1, "fitted": 2.05}, {}).recovered == pytest.approx(0.5)


@pytest.mark.heavy
def test_a_trained_block_is_nearer_to_the_one_in_bf16():
    """Mean squared distance of what the block puts out, on the calibration data."""

    def distance(weights):
        population = Population(UNTRAINED, [Lane(with_forward("mxfp4-rceil"), 1e-3, 0)], "cpu")
        model, tokens = population.model, population.batch_of(0)[0]
        outputs = []
        for way, of in ("bf16", None), ("quantized", weights):
            if of is not None:
                model.load_state_dict({name: value[None] for name, value in of.items()})
            with torch.no_grad(), evaluating(population, way):
                h = torch.nn.functional.embedding(tokens[0], model.embed[0])[None]
                outputs.append(sum(model.blocks[0](h, None, model.cos, model.sin)[:2]))
        return (outputs[0] - outputs[1]).square().mean().item()

    assert distance(fit("block-ap", samples=16).weights) < 0.9 * distance(fit("nearest", samples=16).weights)


def test_what_cannot_be_fitted_is_refused():
    for change, what in (
        ({"method": "awq"}, rf"--method: found 'awq'; accepted: {', '.join(ACCEPTED)}"),
        ({"samples": 10_000}, r"--samples: found 10000; accepted: 1 to 320"),
        ({"recipe": "bf16"}, r"--recipe: .*quantizes weights"),
        (
            {"method": "mr-gptq"},
            r"fprop\.rotation: found 'none'; accepted: for mr-gptq a rotation, .*hadamard32(?!.*none)",
        ),
        ({"task": get_task("regression", "smoke")}, r"--from: .*regression has none"),
        ({"task": get_task("rl", "smoke")}, r"task: found 'rl'"),
        ({"method": "gptq", "recipe": "if4"}, r"fprop\.w\.adapt"),
    ):
        with pytest.raises(ConfigError, match=what):
            fit(**{"method": "gptq", **change})
    random = Lane(with_forward("nvfp4", "rht16"), 1e-3, 0)
    with pytest.raises(ConfigError, match=r"fprop\.rotation: found 'rht16'.*not drawn"):
        fit_weights(UNTRAINED, random, "gptq", 16)


@pytest.mark.heavy
def test_they_are_made_once_and_the_same_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = ("finetune", "smoke"), Lane(Recipe.named("mxfp4"), 1e-3, 0), "gptq", 16
    path = fitted(*asked)
    first = path.read_bytes()
    path.unlink()
    assert fitted(*asked).read_bytes() == first
    said = about(path)
    started = get_task("finetune", "smoke", None, str(path))
    assert (started.start, started.start_method) == (said["digest"], said["method"])
    assert SMOKE.start_method is None
    assert (said["method"], said["samples"], said["seed"]) == ("gptq", 16, 0)
    assert said["error_fitted"].keys() == said["error_nearest"].keys()
    assert read_weights(Path(path)).keys() == read_weights(fitted(*asked[:2], "nearest", 16)).keys()


def test_the_command_names_every_method():
    assert set(FITTED_BY) == set(ACCEPTED)
