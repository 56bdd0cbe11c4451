"""Enumeration is product, canonical form, first of each, rules; and what it met adds up."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import (
    QUANTIZERS,
    ConfigError,
    Hadamard,
    Recipe,
    Space,
    load_recipe,
    recipe_from_dict,
    recipe_to_dict,
    recipe_to_toml,
)
from fp4dse.dse.reading.paths import parse_path
from fp4dse.dse.record import Part, field_types, options
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.space.space import Count

FPROP, GRADIENTS = [("fprop", "x"), ("fprop", "w")], [("dgrad", "g"), ("wgrad", "g")]
EVERYWHERE = [*FPROP, ("dgrad", "g"), ("dgrad", "w"), ("wgrad", "g"), ("wgrad", "x")]

AXES = {
    # path: (its slots, its values)
    "*": (EVERYWHERE, ["mxfp4", "nvfp4", "bf16", {"like": "nvfp4", "block": 32}]),
    "forward": (FPROP, ["bf16", "ue5m3", {"scale": {"format": "e8m0"}, "block": 32}]),
    "*.g": (GRADIENTS, [{"rounding": "stochastic", "range": "16/17"}, {"rounding": "nearest"}]),
    "forward.rounding": (FPROP, ["nearest", "stochastic"]),
    "backward.g.tensor_scale": (GRADIENTS, ["none", "amax", {"target": 448}, {"target": 1000}]),
    "*.range": (EVERYWHERE, ["16/17", "full"]),
    "wgrad.x.scale": ([("wgrad", "x")], ["e4m3", "ue5m3", {"format": "ue5m3", "zero": "keep"}]),
    "wgrad.rotation": ([("wgrad", "rotation")], ["none", "rht16", {"size": 16, "signs": "none"}]),
}


def naively(base: str, axes: dict[str, list]) -> tuple[int, list[Recipe]]:
    """Size of the product, and the recipes, by editing plain dicts one combination at a time."""
    kept: dict[str, Recipe] = {}
    products = list(itertools.product(*axes.values()))
    for values in products:
        data = recipe_to_dict(Recipe.named(base))
        for path, value in zip(axes, values, strict=True):
            for stage, attribute in AXES[path][0]:
                part = data[stage]
                if path == "wgrad.rotation":
                    part[attribute] = value
                elif path.rsplit(".", 1)[-1] in ("rounding", "tensor_scale", "range", "scale"):
                    part[attribute] = {**part[attribute], path.rsplit(".", 1)[-1]: value}
                elif isinstance(value, dict) and "like" not in value:
                    part[attribute] = {**part[attribute], **value}
                elif isinstance(value, dict):
                    like = recipe_to_dict(Recipe.uniform(QUANTIZERS[value["like"]]))["fprop"]["x"]
                    part[attribute] = {**like, **value}
                    del part[attribute]["like"]
                else:
                    part[attribute] = recipe_to_dict(Recipe.uniform(QUANTIZERS[value]))["fprop"]["x"]
        try:
            recipe = recipe_from_dict(data)
        except ConfigError as error:
            if "block scale" not in error.accepted:  # the one rule there is
                raise
            continue
        kept.setdefault(recipe.config_id, recipe.canonical())
    return len(products), list(kept.values())


@st.composite
def small_spaces(draw) -> tuple[str, dict[str, list]]:
    paths = draw(st.lists(st.sampled_from(list(AXES)), unique=True, max_size=4))
    values = {
        path: draw(st.lists(st.sampled_from(AXES[path][1]), min_size=1, max_size=3, unique_by=str)) for path in paths
    }
    return draw(st.sampled_from(["bf16", "mxfp4", "nvfp4-sr-rht"])), values


@given(space=small_spaces())
def test_enumeration_agrees_with_the_naive_product(space):
    base, axes = space
    raw, expected = naively(base, axes)
    count = Count()
    assert list(Space.from_dict({"base": base, "axes": axes}).recipes(count)) == expected
    assert count.raw == raw
    assert count.left == len(expected)
    assert count.raw == count.merged + sum(count.rejected.values()) + count.left


def test_the_order_is_that_of_the_product_and_the_first_spelling_counts():
    space = Space.from_dict({"axes": {"*": ["nvfp4", "bf16"], "wgrad.rotation": ["none", "rht16"]}})
    count = Count()
    assert [recipe.label() for recipe in space.recipes(count)] == ["nvfp4", "nvfp4, wgrad rht16", "bf16"]
    assert (count.raw, count.merged, count.left) == (4, 1, 3)


def test_a_later_axis_refines_an_earlier_one():
    axes = {"*": ["mxfp4"], "*.g": [{"rounding": "stochastic"}]}
    assert [r.label() for r in Space.from_dict({"axes": axes}).recipes()] == ["mxfp4, gradients SR"]
    assert [r.label() for r in Space.from_dict({"axes": dict(reversed(axes.items()))}).recipes()] == ["mxfp4"]


def test_a_space_without_axes_is_its_base():
    assert list(Space.from_dict({"base": "mxfp4"}).recipes()) == [Recipe.named("mxfp4").canonical()]


def test_axes_may_hold_records_and_whole_recipes():
    axes = {"recipe": ["nvfp4", Recipe.named("mxfp4")], "fprop.x": [QUANTIZERS["bf16"]], "*.g.rounding": [Stochastic()]}
    labels = [recipe.label() for recipe in Space.from_dict({"axes": axes}).recipes()]
    assert labels == [f"{q}, fprop.x bf16, gradients SR" for q in ("nvfp4", "mxfp4")]


def test_tens_of_thousands_of_combinations_enumerate_and_hash():
    rounding = {f"{stage}.{operand}.rounding": ["nearest", "stochastic"] for stage, operand in EVERYWHERE}
    rotations = {f"{stage}.rotation": ["none", "rht16", "rht32"] for stage in ("fprop", "dgrad", "wgrad")}
    ranges = {"*.g.range": ["full", "16/17"], "*.tensor_scale": ["none", "amax"]}
    formats = ["bf16", "mxfp4", "mxfp4-rceil", "nvfp4", "nvfp4-1716", "e4m3-b16", "ue5m3", "ue5m3-t448"]
    axes = {"*": formats, **rounding, **rotations, **ranges}
    count, start = Count(), time.perf_counter()
    ids = {recipe.config_id for recipe in Space.from_dict({"axes": axes}).recipes(count)}
    print(f"{count.raw:,} combinations in {time.perf_counter() - start:.1f} s: {count}")
    assert count.raw == 8 * 2**6 * 3**3 * 4 > 50_000
    assert len(ids) == count.left == count.raw - count.merged


# --- rules -------------------------------------------------------------------------------------------------------


def test_recipes_that_break_a_rule_are_rejected_and_counted_by_it():
    axes = {"*.tensor_scale": ["amax", {"target": 500}], "*.scale": ["e4m3", "ue5m3"]}
    count = Count()
    assert len(list(Space.from_dict({"axes": axes}).recipes(count))) == 3
    assert count.rejected == {"target-above-scale-format": 1}


def left(axes: dict, **when) -> list[str]:
    """Labels of what a rule leaves; what it rejects is counted under its reason."""
    rules = [{"when": {path.replace("_", "."): value for path, value in when.items()}, "reason": "because"}]
    count = Count()
    labels = [r.label() for r in Space.from_dict({"axes": axes, "forbid": rules}).recipes(count)]
    assert count.rejected == {"because": count.raw - count.merged - count.left}
    return labels


ALL = {"*": ["nvfp4", "mxfp4", "bf16"]}


def test_a_rule_may_name_a_whole_quantizer():
    """As everyone writes it, without the target that its canonical form has."""
    assert left(ALL, fprop_x="nvfp4") == ["mxfp4", "bf16"]


def test_a_rule_may_name_a_field():
    assert left(ALL, fprop_x_block=16) == ["mxfp4", "bf16"]
    assert left({"*": ["nvfp4", "e4m3-b16"]}, wgrad_g_scale="e4m3") == []


def test_a_tensor_scale_by_name_is_the_one_with_the_formats_target():
    targets = {"*": ["nvfp4"], "*.tensor_scale": ["none", "amax", {"target": 448}, {"target": 256}]}
    rule = [{"when": {"fprop.x.tensor_scale": "amax"}, "reason": "because"}]
    kept = Space.from_dict({"axes": targets, "forbid": rule}).recipes()
    assert [r.fprop.x.tensor_scale and r.fprop.x.tensor_scale.target for r in kept] == [None, 256]


def test_a_rule_may_name_several_fields_of_an_operand():
    axes = {"*": ["nvfp4", "nvfp4-1716"], "*.g.rounding": ["nearest", "stochastic"]}
    kept = left(axes, wgrad_g={"rounding": "stochastic", "range": "full"})
    assert kept == ["nvfp4", "nvfp4, 16/17", "nvfp4, x+w 16/17, gradients 16/17 SR"]


def test_a_rule_over_several_places_asks_for_all_of_them():
    axes = {"*": ["nvfp4"], "fprop.rounding": ["stochastic"], "backward.rounding": ["nearest", "stochastic"]}
    rule = [{"when": {"*.rounding": "stochastic"}, "reason": "because"}]
    assert [r.label() for r in Space.from_dict({"axes": axes, "forbid": rule}).recipes()] == ["nvfp4, forward SR"]


def test_every_condition_of_a_rule_must_hold():
    axes = {**ALL, "wgrad.rotation": ["none", "rht16"]}
    assert left(axes, wgrad_rotation="rht16", fprop_x="mxfp4") == ["nvfp4", "nvfp4, wgrad rht16", "mxfp4", "bf16"]


def test_a_plain_operand_has_no_rounding_that_a_rule_could_forbid():
    assert left(ALL, fprop_x_rounding="nearest") == ["bf16"]
    assert left(ALL, fprop_x_element="bf16") == ["nvfp4", "mxfp4"]


# --- files -------------------------------------------------------------------------------------------------------


def test_a_space_is_read_from_a_file_with_recipes_beside_it(tmp_path):
    (tmp_path / "mine.toml").write_text(recipe_to_toml(Recipe.named("ue5m3-sr")))
    (tmp_path / "try.toml").write_text(
        'summary = "two"\nbase = "mine.toml"\n[axes]\n"fprop.rotation" = ["none", "rht16"]\n'
    )
    space = Space.load(tmp_path / "try.toml")
    assert (space.name, space.summary, space.base) == ("try", "two", Recipe.named("ue5m3-sr"))
    assert len(list(space.recipes())) == 2


FIELDS = "element, block, scale, tensor_scale, rounding, range"
PATHS = "recipe, or a path that starts with one of fprop, dgrad, wgrad, estimator"
RULE = '[[forbid]]\nreason = "r"\n'

MISTAKES = {
    # what: (file, key, found, accepted)
    "unknown key": (
        "axis = 1",
        "axis",
        "'axis'",
        "name, summary, base, fixed, axes, forbid, require, join, design, lanes",
    ),
    "seed twice": ("[lanes]\nseeds = [0, 0, 1]", "lanes.seeds", "[0, 0, 1]", "each value once (0 is there twice)"),
    "rate twice": (
        "[lanes]\nlr = [1e-3, 0.001]",
        "lanes.lr",
        "[0.001, 0.001]",
        "each value once (0.001 is there twice)",
    ),
    "unknown chip": ('[cost]\nchip = "b20"', "cost.chip", "'b20'", "b200, b300, gb10, gb200"),
    "unknown model": ('[cost]\nmodel = "gpt"', "cost.model", "'gpt'", "llama-1b, llama-350m"),
    "unknown key of cost": ("[cost]\nchips = 1", "cost.chips", "'chips'", "model, chip"),
    "cost of a joined space": (
        'join = [{ axes = { "*.block" = [16] }, cost = { chip = "h200" } }]',
        "cost",
        "'llama-8b on gb200, revision 8'",
        "llama-8b on h200, revision 8, which join[0] has",
    ),
    "name is a number": ("name = 1", "name", "1", "a text"),
    "base is no recipe": ("[base]", "base.fprop", "nothing", "a table with x, w, rotation"),
    "unknown base": ('base = "nvfp5"', "base", "'nvfp5'", "or a .toml file"),
    "axes is a list": ("axes = []", "axes", "[]", "a table"),
    "forbid is a table": ("[forbid]", "forbid", "{}", "a list"),
    "no list": ('axes."*" = "nvfp4"', "axes.*", "'nvfp4'", "a list with at least one value"),
    "empty list": ('axes."*" = []', "axes.*", "[]", "a list with at least one value"),
    "unknown stage": ('axes."fwd" = ["nvfp4"]', "axes.fwd", "'fwd'", PATHS),
    "empty path": ('axes."" = ["nvfp4"]', "axes.", "''", PATHS),
    "unquoted path": ('axes.fprop.x = ["nvfp4"]', "axes.fprop.x", "'x'", "values, when"),
    "operand of another stage": (
        'axes."fprop.g" = ["nvfp4"]',
        "axes.fprop.g",
        "'fprop.g'",
        f"fprop, then one of x, w, rotation, channels, *, {FIELDS}",
    ),
    "unknown field": ('axes."*.round" = ["nearest"]', "axes.*.round", "'*.round'", FIELDS),
    "unknown field of an operand": ('axes."*.x.round" = ["nearest"]', "axes.*.x.round", "'*.x.round'", FIELDS),
    "field of a number": ('axes."*.block.x" = [16]', "axes.*.block.x", "'*.block.x'", "no more: it has no fields"),
    "unknown field of a rotation": (
        'axes."*.rotation.sizes" = [16]',
        "axes.*.rotation.sizes",
        "'*.rotation.sizes'",
        "*.rotation, then one of size, signs, order",
    ),
    "a part's kind alone": ('axes."*.scale.format" = ["e8m0"]', "axes.*.scale.format", "'*.scale.format'", "*.scale,"),
    "unknown kind in a condition": (
        f'{RULE}when = {{ "*.scale.format" = "e9m9" }}',
        "forbid[0].when.*.scale.format",
        "'e9m9'",
        "e8m0, e6m2",
    ),
    "unknown key of an axis": (
        'axes."*.block" = { value = [16] }',
        "axes.*.block.value",
        "'value'",
        "values, when",
    ),
    "condition without values": (
        'axes."*.block" = { values = [16], when = { "*.scale" = [] } }',
        "axes.*.block.when.*.scale",
        "[]",
        "a value, or a list with at least one",
    ),
    "requirement of nothing": ('[[require]]\nreason = "r"\nthen = {}', "require[0].then", "{}", "at least one path"),
    "unknown design": ('design = "some"', "design", "'some'", "factorial, one-at-a-time, or a table"),
    "fraction of no size": ('design = { kind = "fractional" }', "design", "'neither'", "one of runs, resolution"),
    "unknown resolution": (
        'design = { kind = "fractional", resolution = 2 }',
        "design.resolution",
        "2",
        "3, 4, 5",
    ),
    "no runs": ('design = { kind = "random", runs = 0 }', "design.runs", "0", "a whole number above 0"),
    "runs missing": ('design = { kind = "random" }', "design.runs", "nothing", "a whole number"),
    "learning rate zero": ("lanes.lr = [0.0]", "lanes.lr", "0.0", "a list of numbers above 0"),
    "seeds below zero": ("lanes.seeds = [-1]", "lanes.seeds", "[-1]", "a number of seeds, or a list of seeds"),
    "unknown space to join": ('join = ["zo"]', "join[0]", "'zo'", "a .toml file, the name of a shipped space"),
    "mistake in a joined table": ('join = [{ base = "nvfp5" }]', "join[0]: base", "'nvfp5'", "or a .toml file"),
    "unknown fixed path": ('fixed."*.round" = 1', "fixed.*.round", "'*.round'", FIELDS),
    "wrong fixed value": ('fixed."*.block" = 24', "fixed.*.block", "24", "16, 32"),
    "recipe of a recipe": ('axes."recipe.x" = ["nvfp4"]', "axes.recipe.x", "'recipe.x'", PATHS),
    "unknown quantizer": ('axes."*" = ["nvfp4", "nvfp5"]', "axes.*[1]", "'nvfp5'", "none, bf16, mxfp4"),
    "unknown rounding": ('axes."*.rounding" = ["sr"]', "axes.*.rounding[0]", "'sr'", "nearest, half-away"),
    "unlisted block": ('axes."*.block" = [16, 24]', "axes.*.block[1]", "24", "16, 32"),
    "unknown field in a table": ('axes."*.g" = [{ round = 1 }]', "axes.*.g[0].round", "'round'", FIELDS),
    "wrong value in a table": ('axes."*.g" = [{ block = 24 }]', "axes.*.g[0].block", "24", "16, 32"),
    "wrong value beside like": (
        'axes."*.g" = [{ like = "nvfp4", block = 24 }]',
        "axes.*.g[0].block",
        "24",
        "16, 32",
    ),
    "unknown rotation": ('axes."wgrad.rotation" = ["rht8"]', "axes.wgrad.rotation[0]", "'rht8'", "none, rht16"),
    "unknown recipe": ('axes.recipe = ["nvfp5"]', "axes.recipe[0]", "'nvfp5'", "amd-mxfp4, arcquant"),
    "recipe of a wrong type": ("axes.recipe = [4]", "axes.recipe[0]", "4", "the name of a recipe or a .toml file"),
    "rule without reason": (
        '[[forbid]]\nwhen = { "*" = "nvfp4" }',
        "forbid[0].reason",
        "nothing",
        "a text",
    ),
    "rule without conditions": (f"{RULE}when = {{}}", "forbid[0].when", "{}", "at least one path = value"),
    "rule with an unknown key": (f"{RULE}when = {{}}\nif = 1", "forbid[0].if", "'if'", "when, reason"),
    "rule that is a text": ('forbid = ["nvfp4"]', "forbid[0]", "'nvfp4'", "a table with when, reason"),
    "rule with an unknown path": (f'{RULE}when = {{ "fwd" = "nvfp4" }}', "forbid[0].when.fwd", "'fwd'", PATHS),
    "rule with an unknown value": (
        f'{RULE}when = {{ "*.scale" = "e9m9" }}',
        "forbid[0].when.*.scale",
        "'e9m9'",
        "e8m0",
    ),
}


@pytest.mark.parametrize(("text", "key", "found", "accepted"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gives_one_line_with_file_key_found_and_accepted(text, key, found, accepted, tmp_path):
    file = tmp_path / "try.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Space.load(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: {key}: found {found}; accepted: ")
    assert accepted in message.partition("; accepted: ")[2]
    assert "\n" not in message


@pytest.mark.parametrize("lanes", [{"lr": [0.1]}, {"seeds": 2}])
def test_lanes_of_a_joined_space_must_be_said_again(lanes):
    with pytest.raises(ConfigError, match=r"lanes\..*join\[0\] has its own"):
        Space.from_dict({"join": [{"lanes": lanes}]})
    assert Space.from_dict({"join": [{"lanes": lanes}], "lanes": {"lr": [0.2], "seeds": 1}}).lanes.lr == [0.2]


def test_a_missing_recipe_file_is_named(tmp_path):
    (tmp_path / "try.toml").write_text('base = "absent.toml"\n')
    with pytest.raises(ConfigError, match=r"absent.toml: found 'No such file or directory'"):
        Space.load(tmp_path / "try.toml")


def test_a_base_that_is_a_space_is_said_to_be_one(tmp_path):
    (tmp_path / "try.toml").write_text('base = "try.toml"\n[axes]\n"*" = ["nvfp4", "mxfp4"]\n')
    said = r"try.toml: base: found 'try.toml'; accepted: the file of a recipe, with .*; this is a space's$"
    with pytest.raises(ConfigError, match=said):
        Space.load(tmp_path / "try.toml")


@pytest.mark.parametrize("text", ["axes = [", ""])
def test_a_file_that_is_no_toml_is_told_how_a_space_looks(text, tmp_path):
    (tmp_path / "broken.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"as: base = .*axes = ") as caught:
        Space.load(tmp_path / "broken.toml")
    assert "recipe show" not in str(caught.value)


# --- conditions, fixed fields, requirements ------------------------------------------------------------------------


def labels(count: Count | None = None, **space) -> list[str]:
    return [recipe.label() for recipe in Space(**space).recipes(count)]


def test_an_axis_with_a_condition_varies_only_where_it_holds_and_counts_once_elsewhere():
    axes = {
        "*": ["mxfp4", "ue5m3"],
        "*.block": {"values": [16, 32, 64], "when": {"*.scale.format": "ue5m3"}},
    }
    count = Count()
    assert labels(count, axes=axes) == ["mxfp4", "ue5m3", "e2m1 1x32 ue5m3", "e2m1 1x64 ue5m3"]
    assert (count.raw, count.left) == (4, 4)


def test_a_condition_sees_the_axes_above_it_and_not_those_below():
    block = {"*.block": {"values": [32], "when": {"*.scale": "e4m3"}}}
    scale = {"*.scale": ["e4m3", "ue5m3"]}
    above, below = Space(base="mxfp4", axes=scale | block), Space(base="mxfp4", axes=block | scale)
    assert [r.fprop.x.block for r in Space(axes=scale | block).recipes()] == [32, 16]
    assert [r.fprop.x.block for r in Space(axes=block | scale).recipes()] == [32, 32]
    assert above.size == below.size == 2


def test_one_of_several_values_is_enough_and_every_path_must_hold():
    rule = {"when": {"*.scale.format": ["e8m0", "ue5m3"], "wgrad.rotation": "rht16"}, "reason": "because"}
    axes = {"*": ["mxfp4", "nvfp4", "ue5m3"], "wgrad.rotation": ["none", "rht16"]}
    assert labels(axes=axes, forbid=[rule]) == ["mxfp4", "nvfp4", "nvfp4, wgrad rht16", "ue5m3"]


def test_what_is_required_may_not_be_missing():
    axes = {"*.scale": ["e4m3", "ue5m3"], "*.tensor_scale": ["none", "amax"]}
    rule = {"when": {"*.scale": "e4m3"}, "then": {"*.tensor_scale": "amax"}, "reason": "range"}
    count = Count()
    assert labels(count, axes=axes, require=[rule]) == ["nvfp4", "ue5m3", "ue5m3-t448"]
    assert count.rejected == {"range": 1}
    always = {"then": {"*.tensor_scale": "amax"}, "reason": "range"}
    assert labels(axes=axes, require=[always]) == ["nvfp4", "ue5m3-t448"]


def test_fixed_fields_hold_whatever_the_axes_set_whole():
    axes = {"recipe": ["nvfp4", "mxfp4"], "wgrad.rotation": ["none", "rht16"]}
    found = labels(axes=axes, fixed={"*.g.rounding": "stochastic"})
    assert found == [f"{q}, gradients SR{r}" for q in ("nvfp4", "mxfp4") for r in ("", ", wgrad rht16")]


def test_a_field_of_a_part_varies_where_the_part_has_it():
    axes = {"*": ["mxfp4", "ue5m3"], "*.scale.zero": ["keep", "one"], "wgrad.rotation": ["none", "rht16"]}
    count = Count()
    recipes = list(Space(axes={**axes, "*.rotation.size": [64]}).recipes(count))
    assert [(r.fprop.x.scale.__struct_config__.tag, r.wgrad.rotation) for r in recipes[:3]] == [
        ("e8m0", None),
        ("e8m0", Hadamard(size=64)),
        ("ue5m3", None),
    ]
    assert (count.raw, count.merged) == (8, 2)


def test_equal_values_of_different_types_are_not_taken_for_each_other():
    axes = {"estimator.w.masked": [False, True], "precise.first": [0.0, 1.0], "precise.embedding": [True, False]}
    recipes = list(Space(axes=axes).recipes())
    assert len(recipes) == 4  # masking has no effect here
    for recipe in recipes:
        assert type(recipe.precise.first) is float
        assert type(recipe.precise.embedding) is bool
    assert recipe_from_dict(recipe_to_dict(recipes[-1])) == recipes[-1]


def test_every_field_of_every_record_of_a_recipe_has_a_path():
    def paths(type_, prefix: str):
        for part in (option for option in options(type_) if isinstance(option, type) and issubclass(option, Part)):
            for name, field in field_types(part).items():
                yield f"{prefix}{name}"
                yield from paths(field, f"{prefix}{name}.")

    found = list(paths(Recipe, ""))
    assert {"fprop.x.scale.zero", "dgrad.rotation.size", "estimator.w.element.k"} <= set(found)
    for path in found:
        parse_path(path, "test")


# --- joined spaces and designs -------------------------------------------------------------------------------------


def test_joined_spaces_follow_and_are_merged_where_they_repeat(tmp_path):
    (tmp_path / "other.toml").write_text('axes."*" = ["ue5m3", "mxfp4"]\n')
    (tmp_path / "all.toml").write_text(
        'join = ["other.toml", "shelf", { base = "bf16" }]\naxes."*" = ["nvfp4", "mxfp4"]\n'
        '[[forbid]]\nwhen = { "*.scale.format" = "ue5m3" }\nreason = "no"\n'
    )
    (tmp_path / "third.toml").write_text('base = "quartet"\n')
    count = Count()
    space = Space.load(tmp_path / "all.toml", {"shelf": tmp_path / "third.toml"}.get)
    assert [r.label() for r in space.recipes(count)] == ["nvfp4", "mxfp4", Recipe.named("quartet").label(), "bf16"]
    assert (count.raw, count.merged, count.rejected, count.left) == (6, 1, {"no": 1}, 4)


def test_a_space_of_joined_spaces_alone_has_no_product_of_its_own():
    assert labels(join=[{"base": "mxfp4"}]) == ["mxfp4"]
    assert labels(join=[{"base": "mxfp4"}], base="bf16") == ["bf16", "mxfp4"]


FORMATS = {"*.scale": ["e4m3", "ue5m3", "e5m2", "bf16"], "*.block": [16, 32, 64, 128], "*.range": ["full", "16/17"]}


def test_a_fraction_is_a_part_of_the_product():
    everything = set(Space(axes=FORMATS).recipes())
    assert len(everything) == 32
    for design, runs in (({"runs": 12}, 12), ({"resolution": 3}, 16), ({"runs": 99}, 32)):
        found = list(Space(axes=FORMATS, design={"kind": "fractional", **design}).recipes())
        assert len(found) == runs
        assert set(found) <= everything


def test_random_recipes_are_as_many_as_asked_for_whatever_rules_reject():
    rule = {"when": {"*.block": [16, 32]}, "reason": "because"}
    space = {"axes": FORMATS, "forbid": [rule]}
    found = list(Space(**space, design={"kind": "random", "runs": 10, "seed": 1}).recipes())
    assert len(found) == len(set(found)) == 10
    assert set(found) <= set(Space(**space).recipes())
    assert found != list(Space(**space, design={"kind": "random", "runs": 10, "seed": 2}).recipes())
    assert len(list(Space(**space, design={"kind": "random", "runs": 100}).recipes())) == 16


def test_one_at_a_time_is_the_base_and_each_change_alone():
    axes = {
        "*.block": [16, 32],
        "wgrad.rotation": ["rht16"],
        "*.scale.rule": {"values": ["even"], "when": {"*.scale.format": "e8m0"}},
    }
    assert labels(base="mxfp4", axes=axes, design="one-at-a-time") == [
        "mxfp4",
        "e2m1 1x16 e8m0-floor",
        "mxfp4, wgrad rht16",
        "mxfp4-even",
    ]


def test_a_recipe_is_built_from_levels_as_the_product_has_it():
    space = Space(axes={**FORMATS, "*.scale.zero": {"values": ["min"], "when": {"*.scale.format": "bf16"}}})
    built = [space.build(levels) for levels in itertools.product(range(4), range(4), range(2), range(1))]
    assert built == list(space.recipes())


def test_a_space_may_be_written_in_python_or_in_a_file():
    data = {
        "axes": {"*": ["nvfp4", {"like": "mxfp4", "block": 16}], "*.block": {"values": [16], "when": {"*.block": 32}}},
        "fixed": {"*.g.rounding": "stochastic"},
        "forbid": [{"when": {"*.block": 16}, "reason": "r"}],
        "lanes": {"lr": [0.1], "seeds": 2},
    }
    assert Space.from_dict(data) == Space(**data)
    assert Space(**data).lanes.seeds == [0, 1]
    assert Space(**data).axes["*"].texts == ["nvfp4", "like = mxfp4, block = 16"]


# --- in words ----------------------------------------------------------------------------------------------------


def test_axes_are_told_in_the_words_of_the_file_with_how_often_they_are_idle():
    axes = {
        "*": ["mxfp4", {"like": "nvfp4", "block": 32}],
        "*.scale.hybrid": [False, True],
        "*.scale.zero": {"values": ["min", "one"], "when": {"*.scale.format": ["e4m3", "ue5m3"]}},
        "*.block": [32],
    }
    space = Space(base="nvfp4", axes=axes, join=[{"base": "bf16", "axes": {"*.block": [16, 32]}}])
    hybrid = space.describe()[1].pop("idle")
    assert space.describe()[1].pop("idle") == hybrid == pytest.approx(0.5)  # all eight combinations are looked at
    assert [list(row.values()) for row in space.describe()] == [
        ["*", "mxfp4 | like = nvfp4, block = 32", "", 0.0],
        ["*.scale.hybrid", "false | true", "", 0.5],
        ["*.scale.zero", "min | one", "*.scale.format = e4m3 or ue5m3", 0.0],
        ["*.block", "32", "", None],
        ["*.block", "16 | 32", "", 1.0],
    ]


def test_a_rejected_recipe_is_told_as_an_example_of_its_rule():
    axes = {"fprop.w.scale.hybrid": [False, True], "estimator.w.element": ["ste", "dge", "sigmoid"]}
    forbid = [{"when": {"estimator.w.element": "sigmoid"}, "reason": "not this one"}]
    count = Count()
    list(Space(base="nvfp4", axes=axes, forbid=forbid).recipes(count))
    assert count.rejected == {"estimator-needs-one-grid": 2, "not this one": 1}
    assert count.faults == {
        "estimator-needs-one-grid": "estimator.w: found 'dge'; accepted: ste, none (fprop.w is hybrid)",
        "not this one": "not this one",
    }


@pytest.mark.parametrize("text", ["", "# summary = 'nothing yet'\n"])
def test_a_file_that_says_nothing_is_neither_space_nor_recipe(text, tmp_path):
    (tmp_path / "empty.toml").write_text(text)
    for load in (Space.load, load_recipe):
        with pytest.raises(
            ConfigError, match=r"empty.toml: found nothing; accepted: a TOML file with at least one key"
        ):
            load(str(tmp_path / "empty.toml"))
