"""What fitting and its rotation take, as the page of fine-tuning has it."""

from inspect import signature

import msgspec
import pytest

from fp4dse.commands.weights import fit as fit_command
from fp4dse.dse import recipe_from_dict
from fp4dse.dse.cost import DEFAULT_CHIP, DEFAULT_MODEL, load_chip, load_model, overhead
from fp4dse.dse.cost.report import rollout
from fp4dse.results import open_store
from fp4dse.tasks import Lane, get_task
from fp4dse.tasks.engine import Population
from fp4dse.tasks.fitted.fit import quantized_layers
from tests.results.finetune_page import DOCS, finetune_page, percent


@pytest.fixture(scope="module")
def page():
    return finetune_page()


def trained_tokens():
    """Of each lane of the store."""
    [tokens] = open_store(DOCS / "study" / "finetune-store").sql("SELECT DISTINCT tokens FROM runs")["tokens"]
    return int(tokens)


@pytest.fixture(scope="module")
def small():
    """finetune:small, whose base is left untrained: of it only shapes and counts are asked."""
    task = get_task("finetune", "small")
    return msgspec.structs.replace(task, pretrain=lambda seeds, _device: task.problem(seeds).init)


def test_fitting_takes_what_the_page_says_beside_training(page, small):
    """Passes as tests/tasks/fitted/test_passes.py counts them."""
    samples = signature(fit_command).parameters["samples"].default
    texts, tokens = small.steps * small.batch, trained_tokens()
    calibration = tokens // texts * samples
    layers = quantized_layers(Population(small, [Lane(recipe("nvfp4"), 1e-4, 0)], "cpu"))
    forwards = calibration * len(layers)
    assert forwards == calibration * (2 + 3 * 2), "Block-AP's, of each block"
    said = percent(page, "Fitting](#from-fitted-weights) at `small` reads", "The passes of")
    sent = [samples, len(layers), forwards, 3 * tokens, round(100 * forwards / (3 * tokens))]
    assert said == [samples, calibration, texts, tokens, *sent]
    assert tokens == 50 * calibration
    assert percent(page, ".0039). It read", "* Is")[:4] == [texts, tokens, samples, calibration]


def test_what_a_rotation_costs_is_what_the_page_says(page):
    said = percent(page, "models a step with NVFP4 weights as", ", and the same token")
    steps, token = [], []
    for x in ("bf16", "nvfp4"):
        pair = [recipe(x, rotation) for rotation in ("hadamard32", "none")]
        steps += [round(overhead(of), 3) for of in pair]
        rotated, plain = (rollout(of, load_model(DEFAULT_MODEL), load_chip(DEFAULT_CHIP))[0] for of in pair)
        assert rotated["sequences"] == 1
        token.append(round(rotated["token_us"] / plain["token_us"], 2))
    assert (said, token[1]) == ([*steps[:2], token[0], *steps[2:]], 1)


def recipe(x, rotation="none"):
    sides = {side: {"g": "bf16", other: "bf16"} for side, other in (("dgrad", "w"), ("wgrad", "x"))}
    return recipe_from_dict({"fprop": {"x": x, "w": "nvfp4", "rotation": rotation}, **sides})
