"""Recipes as settings of other libraries, and what those cannot express."""

import ast
import inspect
import json
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Hadamard, Quantizer, Recipe, recipe_files, recipe_from_dict
from fp4dse.dse.export import LISTS, TARGETS, differences, export
from fp4dse.dse.export.torchao import SIGNS
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.rules import faults
from fp4dse.kernels import quantize
from tests.each import each

ALL = [(target, settings) for target, known in LISTS.items() for settings in known()]
NAMES = [f"{target}-{i}" for i, (target, _) in enumerate(ALL)]


@each("target, settings", ALL)
def test_every_setting_is_found_by_the_recipe_that_it_computes(target, settings):
    assert not list(faults(settings.recipe))
    found = export(settings.recipe, target)
    assert not found.cannot
    assert found.settings == settings


@each("target, settings", ALL)
def test_settings_are_python(target, settings):
    if target == "modelopt":
        return  # a file of YAML: test_rules.py
    names = {node.id for node in ast.walk(ast.parse(settings.text)) if isinstance(node, ast.Name)}
    assert names & {"recipe", "config", "linear"}


@pytest.mark.parametrize("target", LISTS)
def test_no_two_settings_compute_the_same(target):
    ids = [settings.recipe.config_id for settings in LISTS[target]()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("settings", [s for target, s in ALL if target == "torchao"], ids=lambda s: s.recipe.config_id)
def test_torchao_has_the_objects_named_and_they_take_these_arguments(settings):
    pytest.importorskip("torchao", "0.18")
    names: dict = {}
    exec(settings.text, names)
    made = names.get("config") or names.get("linear")
    if isinstance(made, partial):
        inspect.signature(made.func).bind("input", "weight", **made.keywords)
        assert made.func.__module__.startswith("torchao")
    elif made is None:
        assert settings.recipe.config_id == Recipe.named("bf16").config_id
    else:
        assert type(made).__module__.startswith("torchao")


def test_torchao_gets_the_signs_that_a_fixed_rotation_has_here():
    """The first column of the Hadamard matrix is all ones: a rotated unit vector begins with its sign."""
    rows = quantize(torch.eye(16), Quantizer(element="none"), rotation=Hadamard(size=16, signs="fixed")).elements
    assert tuple(rows[:, 0].sign().tolist()) == SIGNS


def te_line(name: str) -> str:
    done = export(Recipe.named(name), "te")
    assert not done.cannot
    return next(line for line in done.settings.text.splitlines() if line.startswith("recipe ="))


def test_transformer_engines_default_is_the_recipe_named_after_it():
    assert te_line("te-nvfp4") == "recipe = NVFP4BlockScaling()"
    assert not export(Recipe.named("te-nvfp4"), "te").settings.environment


def test_arguments_are_those_that_differ_from_the_default_and_have_variables():
    done = export(Recipe.named("nvfp4"), "te")
    off = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
    assert te_line("nvfp4") == f"recipe = NVFP4BlockScaling({', '.join(f'{name}=True' for name in off)})"
    assert done.settings.environment == {f"NVTE_NVFP4_{name.upper()}": "1" for name in off}


def test_four_over_six_and_a_bf16_backward_pass_are_arguments():
    recipe = recipe_from_dict(
        {
            "fprop": {"x": "nvfp4-4over6-mse", "w": "nvfp4-4over6-mse"},
            "dgrad": {"g": "bf16", "w": "bf16", "source": "forward"},
            "wgrad": {"g": "bf16", "x": "bf16", "source": "forward"},
        }
    )
    done = export(recipe, "te")
    assert not done.cannot
    for part in ("nvfp4_4over6='all'", "nvfp4_4over6_err_mode='MSE'", "backward_override='dequantized'"):
        assert part in done.settings.text
    assert done.settings.environment["NVTE_NVFP4_4OVER6_ERR_MODE"] == "MSE"


@pytest.mark.parametrize("target", ["te", "torchao"])
def test_how_many_random_bits_there_are_is_the_librarys_choice(target):
    recipe = Recipe.named("te-nvfp4")
    g = msgspec.structs.replace(recipe.dgrad.g, rounding=Stochastic(bits=8))
    eight = msgspec.structs.replace(recipe, dgrad=msgspec.structs.replace(recipe.dgrad, g=g))
    done = export(eight, target)
    assert not done.cannot
    assert any("how many" in note for note in done.settings.notes)


def test_what_cannot_be_expressed_is_named_with_what_there_is_instead():
    done = export(Recipe.named("nvidia-nvfp4"), "te")
    precise = "precise first 0.032, last 0.129: of how many blocks? --blocks says so"
    assert done.cannot == ["gradients range 16/17 (it has full)", "wgrad rotation rht16 (it has fixed16)", precise]
    assert done.settings.recipe.config_id == Recipe.named("te-nvfp4").config_id
    assert export(Recipe.named("nvidia-nvfp4"), "te", 62).cannot == done.cannot[:2]


COMPUTED = {
    "te": {"bf16", "te-nvfp4", "nvfp4", "te-mxfp8-nvfp4", "te-nvfp4-mxfp8", "te-nvfp4-1d"}
    | {"nemotron-3-super", "rl-row-scaled"},
    "torchao": {"bf16", "te-nvfp4", "nemotron-3-super"},
    "modelopt": {"bf16"},
    "te_quant": {"bf16", "te-nvfp4", "nemotron-3-super"},
}
"""Target -> the shipped recipes that it computes in a model of 88 blocks."""


@each("name", recipe_files())
@each("target", COMPUTED)
def test_a_recipe_is_either_computed_exactly_or_refused_with_reasons(name, target):
    assert (not export(Recipe.named(name), target, 88).cannot) == (name in COMPUTED[target])


def test_where_only_one_side_is_quantized_the_element_says_it_all():
    lines = differences(Recipe.named("tseng-mxfp4"), Recipe.named("bf16"))
    assert lines[0] == "backward element e2m1 (it has bf16)"
    assert {line.split()[1] for line in lines} == {"element", "rotation"}


@each("name", recipe_files())
def test_json_is_the_canonical_recipe_and_reads_back(name):
    text = export(Recipe.named(name), "json").settings.text
    assert recipe_from_dict(json.loads(text)) == Recipe.named(name).canonical()


def test_the_page_shows_what_is_printed():
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    first = export(Recipe.named("te-nvfp4"), "torchao").settings.text.split("\n#")[0]
    assert "".join(f"    {line}\n" if line else "\n" for line in first.splitlines()) in page
    assert "".join(f"      {line}\n" for line in export(Recipe.named("nvidia-nvfp4"), "te").cannot) in page


def test_the_page_shows_a_file_of_formats_per_layer():
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    text = export(Recipe.named("nemotron-3-super"), "te_quant", 88).settings.text
    assert "".join(f"    {line}\n" for line in text.splitlines()) in page


def test_an_unknown_target_is_answered_with_the_known_ones():
    assert TARGETS == ("te", "torchao", "modelopt", "te_quant", "json")
    with pytest.raises(ConfigError, match="--to: found 'onnx'; accepted: te, torchao, modelopt, te_quant, json"):
        export(Recipe.named("nvfp4"), "onnx")
