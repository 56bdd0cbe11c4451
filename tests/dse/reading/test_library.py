"""Recipes go through files and dicts unchanged, and a mistake in a file gives one line that says what to do."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import (
    QUANTIZERS,
    SLOTS,
    ConfigError,
    Recipe,
    Space,
    load_recipe,
    recipe_files,
    recipe_from_dict,
    recipe_to_dict,
    recipe_to_toml,
)
from fp4dse.dse.attention import Attention, Scores
from fp4dse.dse.estimator import Estimator
from fp4dse.dse.own_formats import FloatElement
from fp4dse.dse.reading.shorthand import NAMES
from fp4dse.dse.record import unlabelled
from fp4dse.dse.rollout import Rollout
from fp4dse.dse.rounding import Ema, Nearest
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import E4M3, E6M2
from fp4dse.dse.training import Training
from tests.each import each

replace = msgspec.structs.replace


def mended(recipe: Recipe) -> Recipe:
    """The recipe with less of what breaks rules: nearly always a valid one."""
    for slot in SLOTS:
        stage, operand = slot.split(".")
        q = recipe.slot(slot)
        if isinstance(q.rounding, Ema):
            q = replace(q, rounding=Ema(min(q.rounding.beta, 0.5)) if slot == "fprop.w" else Nearest())
        if quantizer_faults(q) or q.codec == "eden":
            element = q.element if q.element in ("e2m1", "e1m2", "e3m0", "int4") else "e2m1"
            scale = E4M3() if isinstance(q.scale, E6M2) else q.scale
            plain = {"tensor_scale": None, "scaling": "amax", "adapt": "none", "arithmetic": "fp32", "outliers": None}
            plain["range"] = "full"
            q = replace(q, element=element, scale=scale, **plain)
        recipe = replace(recipe, **{stage: replace(getattr(recipe, stage), **{operand: q})})
    without = [
        ("estimator", Estimator()),
        ("fprop", replace(recipe.fprop, channels=None)),
        ("training", replace(recipe.training, rollout=None)),
        ("training", Training()),
        ("finish", None),
        ("gemm", "exact"),
    ]
    for field, value in without:
        recipe = replace(recipe, **{field: value}) if recipe.validate() else recipe
    return recipe


VALID = st.from_type(Recipe).map(mended).filter(lambda recipe: not recipe.validate())


@given(recipe=VALID)
def test_dicts_read_back(recipe):
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe


@given(recipe=VALID)
def test_toml_reads_back(recipe):
    again = recipe_from_dict(tomllib.loads(recipe_to_toml(recipe)))
    assert unlabelled(again) == unlabelled(recipe)  # formats that are called alike have got a number behind


def test_formats_of_ones_own_are_defined_wherever_a_quantizer_has_one():
    """In the attention core and in the rollout as in a stage."""
    own = replace(QUANTIZERS["mxfp4"], element=FloatElement(mantissa=1, emin=0, max=6.0, name="mine"))
    core = replace(Recipe.named("nvfp4"), attention=Attention(Scores(q=own, k=own)))
    sampled = replace(Recipe.named("bf16"), training=Training(rollout=Rollout(own, own, kv_cache=own)))
    for recipe in (core, sampled):
        text = recipe_to_toml(recipe)
        assert "[elements.mine]" in text
        assert recipe_from_dict(tomllib.loads(text)) == recipe


@given(recipe=VALID)
def test_json_with_every_default_spelled_out_reads_back(recipe):
    """As a store keeps it."""
    assert recipe_from_dict(msgspec.json.decode(msgspec.json.encode(recipe))) == recipe


def reordered(value):
    return {key: reordered(value[key]) for key in reversed(value)} if isinstance(value, dict) else value


@given(recipe=VALID)
def test_the_order_of_keys_does_not_matter(recipe):
    assert recipe_from_dict(reordered(recipe_to_dict(recipe))) == recipe


def test_defaults_spelled_out_give_the_same_id():
    operand = {
        "element": "e2m1",
        "block": 16,
        "scale": {"zero": "keep", "format": "e4m3"},
        "tensor_scale": {"target": 448},
        "rounding": {"mode": "nearest"},
        "range": "full",
    }
    stages = {"fprop": "xw", "dgrad": "gw", "wgrad": "gx"}
    data = {stage: {**dict.fromkeys(slots, operand), "rotation": "none"} for stage, slots in stages.items()}
    assert recipe_from_dict(data).config_id == Recipe.named("nvfp4").config_id


def test_reading_leaves_the_data_as_it_was():
    data = {"fprop": {"x": {"like": "nvfp4", "block": 32}, "w": "nvfp4"}, "dgrad": {"g": "bf16", "w": "bf16"}}
    data |= {"wgrad": {"g": "bf16", "x": "bf16"}}
    before = str(data)
    recipe_from_dict(data)
    assert str(data) == before


def test_a_quantizer_may_be_like_another():
    data = recipe_to_dict(Recipe.named("nvfp4"))
    data["dgrad"] = {"g": {"like": "mxfp4", "scale": "e8m0-rceil", "rounding": "stochastic"}, "w": "mxfp4"}
    g = recipe_from_dict(data).dgrad.g
    assert (g.block, g.label()) == (32, "mxfp4-rceil SR")


@pytest.mark.parametrize("type_", NAMES, ids=lambda type_: getattr(type_, "__name__", str(type_)))
def test_names_stand_for_distinct_things_but_for_the_short_e8m0(type_):
    values = list(NAMES[type_].values())
    assert len(set(values)) == len(values) - ("e8m0" in NAMES[type_])


# --- shipped files -----------------------------------------------------------------------------------------------


@each("file", recipe_files().values())
def test_a_shipped_recipe_says_what_it_is_and_where_it_comes_from(file):
    assert file.summary
    assert file.source
    assert recipe_from_dict(tomllib.loads(recipe_to_toml(file.recipe))) == file.recipe


def test_the_shipped_recipes_are_distinct():
    assert len({file.recipe.config_id for file in recipe_files().values()}) == len(recipe_files())


def test_nvfp4_sr_rounds_its_two_gradients_stochastically_in_the_unbiased_range():
    recipe = Recipe.named("nvfp4-sr")
    for g in (recipe.dgrad.g, recipe.wgrad.g):
        assert g.label() == "nvfp4 16/17 SR"


def test_toml_names_what_has_a_name():
    assert recipe_to_toml(Recipe.named("nvfp4-sr-rht")).splitlines()[-4:] == [
        "[wgrad]",
        'g = { like = "nvfp4-1716", rounding = "stochastic" }',
        'x = "nvfp4"',
        'rotation = "rht16"',
    ]


@each("file", recipe_files().values())
def test_every_operand_of_a_printed_recipe_says_what_it_starts_from(file):
    """Whoever changes the others to another format sees that this one keeps its own."""
    printed = tomllib.loads(recipe_to_toml(file.recipe))
    operands = [printed[stage][operand] for stage, operand in (slot.split(".") for slot in SLOTS)]
    assert all(isinstance(of, str) or "like" in of for of in operands)


def test_a_printed_operand_is_like_one_of_its_own_format():
    assert 'g = { like = "ue5m3-t448", rounding = "stochastic", range = "16/17" }' in recipe_to_toml(
        Recipe.named("ue5m3-sr")
    )


def test_a_table_that_does_not_say_what_it_starts_from_is_refused(tmp_path):
    text = recipe_to_toml(Recipe.named("mxfp4-sr-rht"))
    (tmp_path / "mine.toml").write_text(re.sub(r"g = \{.*\}", 'g = { rounding = "stochastic" }', text))
    with pytest.raises(ConfigError, match=r"dgrad.g: found '\{ rounding \}'; accepted: `like`"):
        load_recipe("mine.toml", tmp_path)
    space = "\n".join(f"[base.{line[1:]}" if line.startswith("[") else line for line in text.splitlines())
    (tmp_path / "try.toml").write_text(re.sub(r"g = \{.*\}", 'g = { tensor_scale = "amax" }', space))
    with pytest.raises(ConfigError, match=r"base.dgrad.g: found '\{ tensor_scale \}'"):
        Space.load(tmp_path / "try.toml")


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("training.rollout.w", '[training.rollout]\nx = "mxfp4"\nw = { rounding = "stochastic" }'),
        ("attention.dv.g", '[attention.dv]\ng = { rounding = "stochastic" }'),
        ("fprop.channels.format", '[fprop.channels]\nkind = "held"\nshare = 0.1\nformat = { arithmetic = "fp32" }'),
    ],
)
def test_so_is_one_beside_the_six_operands(key, table, tmp_path):
    text = recipe_to_toml(Recipe.named("nvfp4"))
    (tmp_path / "mine.toml").write_text(f"{text}\n{table}\n")
    with pytest.raises(ConfigError, match=rf"{key}: found '\{{ \w+ \}}'; accepted: `like`"):
        load_recipe("mine.toml", tmp_path)


@each("file", recipe_files().values())
def test_a_recipe_as_plain_data_is_a_base_of_a_space(file):
    """Which leaves out what is a default of Quantizer."""
    assert Space.from_dict({"base": recipe_to_dict(file.recipe)}).base == file.recipe


def test_a_recipe_is_loaded_by_name_or_from_a_file_beside(tmp_path):
    (tmp_path / "mine.toml").write_text(recipe_to_toml(Recipe.named("mxfp4-sr-rht")))
    assert load_recipe("mine.toml", tmp_path) == load_recipe("mxfp4-sr-rht")
    assert load_recipe(str(tmp_path / "mine.toml")) == load_recipe("mxfp4-sr-rht")


# --- mistakes ----------------------------------------------------------------------------------------------------

PLAIN = """
[dgrad]
g = "bf16"
w = "bf16"
[wgrad]
g = "bf16"
x = "bf16"
"""


def fprop(x: str, more: str = "") -> str:
    return f'[fprop]\nx = {x}\nw = "nvfp4"\n{more}\n{PLAIN}'


QUANTIZER_NAMES = ", ".join(QUANTIZERS)

MISTAKES = {
    # what: (file, key, found, accepted)
    "unknown quantizer": (fprop('"nvfp5"'), "fprop.x", "'nvfp5'", f"{QUANTIZER_NAMES}, or a table"),
    "number for quantizer": (fprop("4"), "fprop.x", "4", QUANTIZER_NAMES),
    "list for quantizer": (fprop('["nvfp4"]'), "fprop.x", "['nvfp4']", QUANTIZER_NAMES),
    "date for quantizer": (fprop("2026-01-01"), "fprop.x", "datetime.date(2026, 1, 1)", QUANTIZER_NAMES),
    "unknown field": (fprop("{ blocks = 16 }"), "fprop.x.blocks", "'blocks'", "element, block, scale"),
    "unknown element": (fprop('{ element = "e9m9" }'), "fprop.x.element", "'e9m9'", "e2m1, e1m2"),
    "unlisted block": (fprop("{ block = 24 }"), "fprop.x.block", "24", "16, 32"),
    "float block": (fprop("{ block = 16.0 }"), "fprop.x.block", "16.0", "16, 32"),
    "text block": (fprop('{ block = "16" }'), "fprop.x.block", "'16'", "16, 32"),
    "bool block": (fprop("{ block = true }"), "fprop.x.block", "True", "16, 32"),
    "unknown range": (fprop('{ range = "16/18" }'), "fprop.x.range", "'16/18'", "full, 16/17"),
    "unknown scale": (fprop('{ scale = "e9m9" }'), "fprop.x.scale", "'e9m9'", "e8m0, e8m0-floor, e8m0-ceil"),
    "unknown scale tag": (
        fprop('{ scale = { format = "e9m9" } }'),
        "fprop.x.scale.format",
        "'e9m9'",
        "e8m0, e6m2, e4m3",
    ),
    "scale tag of a wrong type": (
        fprop("{ scale = { format = [8] } }"),
        "fprop.x.scale.format",
        "[8]",
        "e8m0, e6m2, e4m3",
    ),
    "missing scale tag": (
        fprop('{ scale = { rule = "floor" } }'),
        "fprop.x.scale.format",
        "nothing",
        "e8m0, e6m2, e4m3",
    ),
    "field of another scale": (
        fprop('{ scale = { format = "e4m3", rule = "floor" } }'),
        "fprop.x.scale.rule",
        "'rule'",
        "zero",
    ),
    "unknown rule": (
        fprop('{ scale = { format = "e8m0", rule = "odd" } }'),
        "fprop.x.scale.rule",
        "'odd'",
        "floor, ceil, rceil, even, nearest, encode",
    ),
    "unknown rounding": (fprop('{ rounding = "sr" }'), "fprop.x.rounding", "'sr'", "nearest, half-away, stochastic"),
    "field of a part that has none": (
        fprop('{ rounding = { mode = "nearest", bits = 8 } }'),
        "fprop.x.rounding.bits",
        "'bits'",
        "ties",
    ),
    "target is a text": (
        fprop('{ tensor_scale = { target = "448" } }'),
        "fprop.x.tensor_scale.target",
        "'448'",
        "a number above 0",
    ),
    "target is zero": (fprop("{ tensor_scale = { target = 0 } }"), "fprop.x.tensor_scale.target", "0", "above 0"),
    "target is infinite": (
        fprop("{ tensor_scale = { target = inf } }"),
        "fprop.x.tensor_scale.target",
        "inf",
        "above 0",
    ),
    "target above the scale format": (
        fprop('{ like = "nvfp4", tensor_scale = { target = 500 } }'),
        "fprop.x.tensor_scale.target",
        "500.0",
        "at most 448, the largest e4m3 block scale",
    ),
    "like nothing": (fprop('{ like = "nvfp5" }'), "fprop.x.like", "'nvfp5'", QUANTIZER_NAMES),
    "like of a wrong type": (fprop("{ like = 4 }"), "fprop.x.like", "4", QUANTIZER_NAMES),
    "field beside like": (fprop('{ like = "nvfp4", blocks = 1 }'), "fprop.x.blocks", "'blocks'", "element, block"),
    "unknown rotation": (fprop('"nvfp4"', 'rotation = "rht17"'), "fprop.rotation", "'rht17'", "none, rht16, rht32"),
    "rotation size": (fprop('"nvfp4"', "rotation = { size = 17 }"), "fprop.rotation.size", "17", "16, 32, 64, 128"),
    "rotation without size": (
        fprop('"nvfp4"', 'rotation = { signs = "none" }'),
        "fprop.rotation.size",
        "nothing",
        "16, 32, 64, 128",
    ),
    "operand of another stage": (fprop('"nvfp4"', 'g = "nvfp4"'), "fprop.g", "'g'", "x, w, rotation"),
    "missing operand": ('[fprop]\nw = "nvfp4"' + PLAIN, "fprop.x", "nothing", QUANTIZER_NAMES),
    "missing stage": (PLAIN, "fprop", "nothing", "a table with x, w, rotation"),
    "stage is a text": ('fprop = "nvfp4"' + PLAIN, "fprop", "'nvfp4'", "a table with x, w, rotation"),
    "unknown stage": (fprop('"nvfp4"') + "[backward]\n", "backward", "'backward'", "fprop, dgrad, wgrad"),
    "summary is a number": ("summary = 3\n" + fprop('"nvfp4"'), "summary", "3", "a text"),
    "key with a line break": (fprop('{ "a\\nb" = 1 }'), "fprop.x.a b", "'a\\nb'", "element, block"),
}


@pytest.mark.parametrize(("text", "key", "found", "accepted"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gives_one_line_with_file_key_found_and_accepted(text, key, found, accepted, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(file))
    message = str(caught.value)
    assert message.startswith(f"{file}: {key}: found {found}; accepted: ")
    assert accepted in message.partition("; accepted: ")[2]
    assert "\n" not in message


def not_utf8(file: Path) -> None:
    file.write_bytes(b'summary = "\xff"\n')


def not_toml(file: Path) -> None:
    file.write_text("fprop = [\n")


FILES = {
    "missing": (lambda file: None, "No such file or directory"),
    "a folder": (Path.mkdir, "Is a directory"),
    "not UTF-8": (not_utf8, "byte 11 is not UTF-8"),
    "not TOML": (not_toml, "Invalid value"),
}


@pytest.mark.parametrize(("make", "found"), FILES.values(), ids=FILES)
def test_a_file_that_cannot_be_read_gives_one_line(make, found, tmp_path):
    file = tmp_path / "mine.toml"
    make(file)
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(file))
    assert str(caught.value).startswith(f"{file}: found '{found}")
    assert "TOML file" in caught.value.accepted
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [None, "nvfp4", [], 3])
def test_a_recipe_is_a_table(data):
    with pytest.raises(ConfigError, match=r"recipe: found .*; accepted: a table with fprop, dgrad, wgrad"):
        recipe_from_dict(data)


def test_a_long_value_is_shortened():
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict({"fprop": ["x" * 1000], "dgrad": {}, "wgrad": {}})
    assert len(str(caught.value)) < 250
