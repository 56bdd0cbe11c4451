"""Formats of one's own: what a file may define, that names count for nothing, and that a recipe needs no file."""

from __future__ import annotations

import itertools
import json
import pickle
import tomllib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import (
    ConfigError,
    Quantizer,
    Recipe,
    Space,
    load_recipe,
    recipe_from_dict,
    recipe_to_dict,
    recipe_to_toml,
)
from fp4dse.dse.cost import load_chip, overhead, points
from fp4dse.dse.cost.units import notes
from fp4dse.dse.estimator import Estimator, Through
from fp4dse.dse.exactness import operand_format, operand_grid, product_format, significant_bits
from fp4dse.dse.export import export
from fp4dse.dse.formats import ELEMENTS, PLAIN, SCALES
from fp4dse.dse.own_formats import FloatElement, TableElement, element_format, fit, simplest
from fp4dse.dse.record import unlabelled
from fp4dse.dse.scale import E8M0, SCALE_NAMES, OwnScale, TensorScale, scale_bits, scale_grid, scale_key, scale_name
from fp4dse.sweeps.planning.plan import _with_baselines

replace = msgspec.structs.replace

NF4 = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.091, 0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1]
BODY = {
    "fprop": {"x": {"element": "mine"}, "w": "nvfp4"},
    "dgrad": {"g": "nvfp4", "w": "nvfp4"},
    "wgrad": {"g": "nvfp4", "x": {"like": "nvfp4", "scale": {"format": "fine", "zero": "min"}}},
}


def recipe(element: dict | None = None, scale: dict | None = None, name: str = "mine") -> Recipe:
    """A recipe of a file that defines an element, which it calls `name`, and a scale."""
    text = json.dumps(BODY).replace('"mine"', f'"{name}"')
    element, scale = element or {"values": NF4}, scale or {"exponent": 3, "mantissa": 4}
    return recipe_from_dict(json.loads(text) | {"elements": {name: element}, "scales": {"fine": scale}}, "my.toml")


# --- identity ----------------------------------------------------------------------------------------------------


def test_an_own_format_counts_by_its_numbers_and_not_by_its_name():
    one, other = recipe(name="mine"), recipe(name="yours")
    assert one.config_id == other.config_id
    assert unlabelled(one) == unlabelled(other)
    assert overhead(one) == overhead(other)
    assert one.signature() == other.signature()
    changed = recipe({"values": [*NF4[:-1], 1.001]})
    assert changed != one
    assert changed.config_id != one.config_id
    assert changed.label() != one.label()
    assert changed.columns()["fprop_x_element"] != one.columns()["fprop_x_element"]


@pytest.mark.parametrize("names", [("mine", "yours"), ("yours", "mine"), ("", "mine")])
def test_each_recipe_says_the_name_that_it_has_whichever_was_met_first(names):
    """What is remembered of one (canonical form, labels, columns) does not answer for the other."""
    for name in names:
        table = TableElement(values=(-1.0, 0.0, 0.3, 1.0), name=name)
        scale = OwnScale(mantissa=4, emin=-2, max=31.0, name=name)
        of = Recipe.uniform(Quantizer(element=table, scale=scale))
        said = [of.label(), of.canonical().label(), recipe_from_dict(recipe_to_dict(of)).label()]
        said += [
            of.columns()["fprop_x_element"],
            of.columns()["fprop_x_scale"],
            scale_key(of.canonical().fprop.x.scale),
        ]
        assert all(text.startswith(f"{name or 'lut'}-") for text in said), said
        assert f"[elements.{name or 'lut'}]" in recipe_to_toml(of)


def test_two_names_of_one_format_in_a_recipe_change_neither_its_cost_nor_its_population():
    """Equal tiles are encoded once, whatever each slot calls them."""

    def tiles(name: str) -> Quantizer:
        return Quantizer(element=TableElement(values=tuple(NF4), name=name), block="16x16")

    one = Recipe.uniform(tiles("mine"))
    both = replace(one, dgrad=replace(one.dgrad, w=tiles("yours")))
    assert one != both
    assert one.config_id == both.config_id
    assert overhead(one) == overhead(both)
    through = Estimator(w=Through(scale="exact"))
    assert replace(one, estimator=through).signature() == replace(both, estimator=through).signature()
    assert len(_with_baselines([one, both])) == 2  # and BF16


def test_ids_of_own_formats_are_for_ever():
    assert recipe().config_id == "32e29f3f714363e0"
    assert recipe({"exponent": 2, "mantissa": 2}, {"exponent": 6, "mantissa": 2}).config_id == "9cb34dcb72b14b7e"


def test_the_order_of_values_and_the_last_digits_of_a_double_count_for_nothing():
    assert recipe({"values": NF4[::-1]}).config_id == recipe().config_id
    assert recipe({"values": [value * (1 + 2**-40) for value in NF4]}).config_id == recipe().config_id


@pytest.mark.parametrize("name", [name for name in ELEMENTS if name not in ("s1p2", "radix4", "radix4-odd")])
def test_the_values_of_a_built_in_are_the_built_in(name):
    magnitudes = ELEMENTS[name].magnitudes()
    own = FloatElement(mantissa=ELEMENTS[name].mantissa, emin=ELEMENTS[name].emin, max=ELEMENTS[name].max)
    assert Quantizer(element=own).canonical().element == name
    if len(magnitudes) == 8:
        table = TableElement(values=(*(-value for value in magnitudes), *magnitudes))
        assert Quantizer(element=table).canonical() == Quantizer(element=name).canonical()


def test_hifloat4s_levels_are_no_element_of_other_scales():
    own = TableElement(values=tuple(n / 4 for n in range(-7, 8)))
    assert Recipe.uniform(Quantizer(element=own)).validate() == []


@pytest.mark.parametrize("name", ["e4m3", "ue5m3", "ue5m3-61440", "ue5m3-122880", "e5m2", "ue4m4"])
def test_the_numbers_of_a_built_in_scale_are_the_built_in(name):
    of = SCALES[name]
    own = OwnScale(mantissa=of.mantissa, emin=of.emin, max=of.max, zero="min", rounding="up")
    found = Quantizer(scale=own).canonical().scale
    assert scale_grid(found) == of
    assert scale_key(found) == name
    assert (found.zero, found.rounding) == ("min", "up")


@given(st.integers(0, 3), st.integers(-3, 3), st.data())
def test_a_float_format_has_one_spelling(mantissa, emin, data):
    """Every spelling of the same magnitudes, as a table or by other fields, is one element."""
    numbers = list(itertools.islice(magnitudes(mantissa, emin), 8))
    largest = data.draw(st.sampled_from(numbers[1:]))
    own = FloatElement(mantissa=mantissa, emin=emin, max=largest)
    values = element_format(own).magnitudes()
    assert values == numbers[: len(values)]
    table = TableElement(values=(*(-value for value in values), *values))
    assert simplest(own) == simplest(table)
    found = fit(values)
    assert found is None or found.magnitudes() == values


def magnitudes(mantissa: int, emin: int):
    """0, the subnormal numbers and the binades, one after the other."""
    step = 2.0 ** (emin - mantissa)
    yield from (n * step for n in range(1 << mantissa))
    for binade in itertools.count():
        yield from (((1 << mantissa) + n) * step * 2**binade for n in range(1 << mantissa))


# --- a recipe is complete ----------------------------------------------------------------------------------------


OWN_RECIPES = {
    "table": recipe(),
    "float": recipe({"exponent": 2, "mantissa": 2, "bias": 3, "max": 0.875}),
    "powers": recipe({"exponent": 2, "mantissa": 0, "bias": 2}, {"exponent": 4}),
}


@pytest.mark.parametrize("name", OWN_RECIPES)
def test_a_recipe_is_complete_without_its_file(name):
    of = OWN_RECIPES[name]
    for again in (
        recipe_from_dict(recipe_to_dict(of)),
        recipe_from_dict(json.loads(json.dumps(recipe_to_dict(of)))),
        recipe_from_dict(msgspec.json.decode(msgspec.json.encode(of))),
        msgspec.json.decode(msgspec.json.encode(of), type=Recipe),
        pickle.loads(pickle.dumps(of)),
    ):
        assert again == of
        assert again.label() == of.label()
        assert again.columns() == of.columns()


@pytest.mark.parametrize("name", OWN_RECIPES)
def test_toml_defines_what_it_names(name, tmp_path):
    of, file = OWN_RECIPES[name], tmp_path / "again.toml"
    file.write_text(recipe_to_toml(of))
    again = load_recipe(str(file))
    assert again == of
    assert again.label() == of.label()


def test_two_tables_that_are_called_alike_have_two_names_in_a_file(tmp_path):
    one, other = recipe(), recipe({"values": [-1, 0, 2]})
    both = replace(one, dgrad=replace(one.dgrad, w=other.fprop.x))
    text = recipe_to_toml(both)
    assert "[elements.mine]" in text
    assert "[elements.mine-2]" in text
    (tmp_path / "both.toml").write_text(text)
    assert load_recipe(str(tmp_path / "both.toml")).config_id == both.config_id


def test_a_format_that_is_called_like_a_built_in_has_another_name_in_a_file():
    of = Recipe.uniform(Quantizer(element=TableElement(values=(-1.0, 0.0, 0.3), name="e2m1")))
    assert recipe_from_dict(tomllib.loads(recipe_to_toml(of))).config_id == of.config_id


def test_labels_and_columns_name_the_format_and_tell_equal_names_apart():
    of = recipe()
    assert of.columns()["fprop_x_element"].startswith("mine-")
    assert of.columns()["wgrad_x_scale"].startswith("fine-")
    assert of.label().startswith("nvfp4, ")
    assert "fprop.x mine-" in of.label()
    unnamed = Quantizer(element=TableElement(values=(-1, 0, 2.75)))
    assert unnamed.label().startswith("lut-")


# --- files -------------------------------------------------------------------------------------------------------

SPACE = {
    "base": "nvfp4",
    "elements": {"mine": {"values": NF4}},
    "scales": {"fine": {"exponent": 3, "mantissa": 4}},
    "axes": {"*.element": ["e2m1", "mine"], "*.block": [8, 16, 256]},
}


def test_a_space_varies_own_elements_scales_and_blocks():
    space = Space.from_dict(SPACE | {"fixed": {"*.scale": "fine"}})
    recipes = list(space.recipes())
    assert len({r.config_id for r in recipes}) == len(recipes) == 6
    assert {r.fprop.x.block for r in recipes} == {8, 16, 256}
    assert {type(r.wgrad.g.scale) for r in recipes} == {OwnScale}
    assert next(row["values"] for row in space.describe()).startswith("e2m1 | mine-")


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ({"axes": {"*.scale": ["e4m3", "fine", {"format": "fine", "zero": "min"}]}}, 3),
        ({"axes": {"*": [{"element": "mine", "scale": "fine"}, "nvfp4"]}}, 2),
        ({"axes": {"*.element": {"values": ["mine", "e2m1"], "when": {"*.scale": "fine"}}}}, 1),
        ({"forbid": [{"when": {"*.element": "mine", "*.block": [8, 16]}, "reason": "so"}]}, 4),
        ({"require": [{"when": {"*.element": "mine"}, "then": {"*.block": 256}, "reason": "so"}]}, 4),
        ({"axes": {"estimator.w.element": ["ste", "dge"]}}, 2),
        ({"join": [{"axes": {"*.element": ["mine"], "*.block": [32]}}]}, 7),
    ],
)
def test_names_are_known_wherever_an_element_or_a_scale_may_stand(more, left):
    assert len(list(Space.from_dict(SPACE | more).recipes())) == left


def test_an_estimators_element_is_none_of_a_quantizer():
    """A derivative is called dge, and so may be an element."""
    axes = {"estimator.w": [{"element": "dge"}], "estimator.w.element": ["ste", "dge"], "*.element": ["dge"]}
    [recipe] = Space.from_dict({"base": "nvfp4", "elements": {"dge": {"values": [0, 1]}}, "axes": axes}).recipes()
    assert recipe.estimator == Estimator()  # which is all that a table takes
    assert recipe.fprop.w.element == TableElement(values=(0.0, 1.0), name="dge")


def test_equal_tables_of_joined_spaces_are_merged():
    other = {"base": "nvfp4", "elements": {"yours": {"values": NF4}}, "axes": {"*.element": ["yours"]}}
    assert len(list(Space.from_dict(SPACE | {"join": [other]}).recipes())) == 6


@pytest.mark.parametrize(("of", "left"), [("yours", 3), ("mine", 3), ("copy", 3)])
def test_a_condition_holds_for_equal_numbers_whatever_they_are_called(of, left):
    elements = SPACE["elements"] | {"yours": {"values": NF4[::-1]}, "copy": {"exponent": 2, "mantissa": 1}}
    forbid = [{"when": {"*.element": of}, "reason": "so"}]
    assert len(list(Space.from_dict(SPACE | {"elements": elements, "forbid": forbid}).recipes())) == left


ELEMENT_FAULTS = {
    "no table": (3, "mine", "3", "a table with values, or exponent"),
    "nothing": ({}, "mine", "nothing", "a table with values, or exponent"),
    "unknown field": ({"values": NF4, "zero": 1}, "mine.zero", "'zero'", "values, or exponent, mantissa, bias, max"),
    "both": ({"values": NF4, "exponent": 2}, "mine", "'values and exponent'", "values alone"),
    "no list": ({"values": 3}, "mine.values", "3", "a list of 2 to 16 numbers"),
    "one value": ({"values": [0]}, "mine.values", "'1 numbers'", "2 to 16"),
    "17 values": ({"values": list(range(17))}, "mine.values", "'17 numbers'", "2 to 16"),
    "no zero": ({"values": [-1, 1]}, "mine.values", "'no 0'", "0 among them: padding"),
    "twice": ({"values": [0, 0.1, 0.1]}, "mine.values", "'0.1 more than once'", "different numbers"),
    "0 twice": ({"values": [0, 0.0, 1]}, "mine.values", "'0 more than once'", "different numbers (0 and -0 are one)"),
    "equal as float32": ({"values": [0, 1, 1 + 1e-12]}, "mine.values", "'1 more than once'", "different numbers"),
    "infinite": ({"values": [0, float("inf")]}, "mine.values[1]", "inf", "a finite number"),
    "NaN": ({"values": [float("nan"), 0]}, "mine.values[0]", "nan", "a finite number"),
    "a text": ({"values": [0, "1"]}, "mine.values[1]", "'1'", "a finite number"),
    "true": ({"values": [0, True]}, "mine.values[1]", "True", "a finite number"),
    "tiny": ({"values": [0, 1e-30]}, "mine.values[1]", "1e-30", "0, or a magnitude from 2^-40 to 2^40"),
    "no exponent": ({"mantissa": 2}, "mine", "{'mantissa': 2}", "a table with values, or exponent"),
    "exponent 0": ({"exponent": 0}, "mine.exponent", "0", "a whole number from 1 to 7"),
    "too many bits": ({"exponent": 4, "mantissa": 4}, "mine.mantissa", "4", "a whole number from 0 to 3"),
    "bias": ({"exponent": 2, "mantissa": 1, "bias": 1.5}, "mine.bias", "1.5", "a whole number from -39 to 40"),
    "max off the grid": ({"exponent": 2, "mantissa": 1, "max": 5}, "mine.max", "5", "like 4 or 6"),
    "max too large": ({"exponent": 2, "mantissa": 1, "max": 8}, "mine.max", "8", "a number from 0.5 to 6"),
    "many powers": ({"exponent": 4}, "mine.max", "256.0", "at most 1 (without mantissa, 7 powers of two)"),
}


@pytest.mark.parametrize("name", ELEMENT_FAULTS)
def test_what_is_wrong_with_an_element_is_said_with_file_field_value_and_remedy(name):
    data, where, found, accepted = ELEMENT_FAULTS[name]
    with pytest.raises(ConfigError) as error:
        recipe_from_dict(BODY | {"elements": {"mine": data}, "scales": {"fine": {"exponent": 3}}}, "my.toml")
    assert str(error.value).startswith(f"my.toml: elements.{where}: found {found}; accepted: ")
    assert accepted in str(error.value)


SCALE_FAULTS = {
    "values": ({"values": [0, 1]}, "fine.values", "'values'", "exponent, mantissa, bias, max"),
    "wide": ({"exponent": 7, "mantissa": 10}, "fine.mantissa", "10", "a whole number from 0 to 9"),
    "beyond": ({"exponent": 7, "mantissa": 1, "bias": 0}, "fine.max", "2.55", "to 2^64"),
}


@pytest.mark.parametrize("name", SCALE_FAULTS)
def test_what_is_wrong_with_a_scale_is_said_likewise(name):
    data, where, found, accepted = SCALE_FAULTS[name]
    with pytest.raises(ConfigError) as error:
        recipe_from_dict(BODY | {"elements": {"mine": {"values": NF4}}, "scales": {"fine": data}}, "my.toml")
    assert str(error.value).startswith(f"my.toml: scales.{where}: found {found}")
    assert accepted in str(error.value)


@pytest.mark.parametrize(
    ("key", "name"), [("elements", name) for name in (*ELEMENTS, *PLAIN)] + [("scales", name) for name in SCALE_NAMES]
)
def test_a_built_in_name_cannot_be_taken(key, name):
    with pytest.raises(
        ConfigError, match=rf"^my.toml: {key}.{name}: found '{name}'; accepted: a name that is not built"
    ):
        recipe_from_dict(BODY | {key: {name: {"exponent": 2, "mantissa": 1}}}, "my.toml")


def test_names_are_letters_digits_and_dashes():
    with pytest.raises(ConfigError, match=r"my.toml: elements.a, b: found 'a, b'; accepted: a letter, then"):
        recipe_from_dict(BODY | {"elements": {"a, b": {"values": NF4}}}, "my.toml")
    with pytest.raises(ConfigError, match=r"my.toml: elements: found \[1\]; accepted: tables \[elements.NAME\]"):
        recipe_from_dict(BODY | {"elements": [1]}, "my.toml")


def test_a_name_that_nobody_defined_is_refused_with_what_there_is():
    with pytest.raises(
        ConfigError, match=r"fprop.x.element: found 'mine'; accepted: e2m1, .*, bf16, or a name that the"
    ):
        recipe_from_dict(BODY, "my.toml")
    with pytest.raises(ConfigError, match=r"axes.\*.scale\[0\]: found 'fine'; accepted: e8m0, .* \[scales.NAME\]"):
        Space.from_dict({"axes": {"*.scale": ["fine"]}})


def test_a_recipe_from_json_is_checked_like_a_file():
    data = recipe_to_dict(recipe())
    data["fprop"]["x"]["element"]["values"] = [1, 2]
    with pytest.raises(ConfigError, match=r"row: fprop.x.element.values: found 'no 0'"):
        recipe_from_dict(data, "row")


# --- rules, products, cost, export -------------------------------------------------------------------------------

TABLE = TableElement(values=(*NF4[:-2], 0.7, 1.0), name="nf4")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scaling": "split"}, "method: found 'table with split'"),
        ({"adapt": "razer"}, "method: found 'table with razer'"),
        ({"scale": E8M0(rule="even")}, "scale: found 'e8m0'; accepted: another scale (the rule even"),
        ({"scale": OwnScale(mantissa=4, emin=-2, max=31.0, name="fine"), "tensor_scale": TensorScale(target=32.0)},
         "tensor_scale.target: found 32.0; accepted: at most 31, the largest fine-"),
        ({"tensor_scale": TensorScale(over="segment"), "block": 256}, "tensor_scale.over: found 'segment'"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(changes, said):
    [(_, sentence), *_] = Recipe.uniform(Quantizer(element=TABLE, **changes)).validate()
    assert sentence.startswith(f"fprop.x.{said}")


def test_an_estimator_of_a_table_passes_straight():
    of = {"fprop": {"x": "nvfp4", "w": {"element": "mine"}}, "estimator": {"w": {"element": "dge"}}}
    with pytest.raises(ConfigError, match=r"estimator.w: found 'dge'; accepted: ste, none \(fprop.w is table\)"):
        recipe_from_dict(BODY | of | {"elements": {"mine": {"values": NF4}}, "scales": {"fine": {"exponent": 3}}})


def listed_bits(q: Quantizer) -> int:
    """Significant bits of the largest product of an element and a scale, by listing them all."""
    found = 1
    for element in element_format(q.element).magnitudes()[1:]:
        for scale in scale_grid(q.scale).magnitudes()[1:]:
            numerator = int((element * scale).as_integer_ratio()[0])
            found = max(found, (numerator // (numerator & -numerator)).bit_length())
    return found


@pytest.mark.parametrize(
    ("values", "scale", "product"),
    [
        (tuple(range(-8, 8)), OwnScale(mantissa=3, emin=-2, max=30.0), "bf16"),
        (tuple(range(16)), OwnScale(mantissa=3, emin=-2, max=30.0), "bf16"),
        ((-31, 0, 1, 29), OwnScale(mantissa=3, emin=-2, max=30.0), "tf32"),
        ((-0.75, 0, 2.5), OwnScale(mantissa=4, emin=-2, max=31.0), "bf16"),
        ((0, 513.0, 1.0), OwnScale(mantissa=4, emin=-2, max=31.0), "fp32"),
    ],
)
def test_the_product_that_holds_a_table_is_found_by_listing(values, scale, product):
    q = Quantizer(element=TableElement(values=values), scale=scale)
    assert operand_grid(q).odd.bit_length() >= listed_bits(q)
    assert significant_bits(q) >= listed_bits(q)
    assert operand_format(q) == product_format(q, Quantizer()) == product


def test_nf4_under_powers_of_two_keeps_its_24_bits():
    q = Quantizer(element=TableElement(values=tuple(NF4)), scale=E8M0())
    assert operand_format(q) == "fp32"
    few = TableElement(values=(-1.0, -0.6875, -0.5, 0.0, 0.375, 1.0))  # multiples of 1/16
    assert operand_format(Quantizer(element=few, scale=E8M0())) == "bf16"


def test_bits_are_those_of_the_codes():
    assert TableElement(values=(-1, 0, 2)).bits == 2
    assert TableElement(values=tuple(range(8))).bits == 3
    assert TABLE.bits == 4
    assert scale_bits(OwnScale(mantissa=4, emin=-2, max=31.0)) == 7
    assert (
        Quantizer(element=TABLE, block=8, scale=OwnScale(mantissa=4, emin=-2, max=31.0)).bits_per_element == 4 + 7 / 8
    )
    assert element_format(FloatElement(mantissa=2, emin=-2, max=28.0)).bits == 6


def test_the_cost_says_that_no_chip_has_it_and_how_it_is_priced():
    [line] = notes(Recipe.uniform(Quantizer(element=TABLE)), load_chip("b200"))
    assert line.startswith("all slots: nf4-")
    assert "is a format of your own, which no chip has; priced as if the FP4 unit took it, and rounded in" in line
    [line] = notes(Recipe.uniform(Quantizer(scale=OwnScale(mantissa=4, emin=-2, max=31.0))), load_chip("b200"))
    assert "is a scale of your own, which no chip has; priced as if" in line
    [line] = notes(Recipe.uniform(Quantizer(element=TABLE)), load_chip("h200"))
    assert line == "all slots: no FP4 unit; emulated, decoded with one rounding to FP32"
    assert points(Recipe.uniform(Quantizer(element=TABLE))) == points(Recipe.uniform(Quantizer(element="e1m2")))


@pytest.mark.parametrize("target", ["te", "torchao"])
def test_other_libraries_refuse_it_by_name(target):
    cannot = export(Recipe.uniform(Quantizer(element=TABLE, tensor_scale=TensorScale())), target).cannot
    assert any(line.startswith("element nf4-") and "(it has e2m1)" in line for line in cannot)
    text = export(recipe(), "json").settings.text
    assert recipe_from_dict(json.loads(text)) == recipe().canonical()


def test_names_of_scales_tell_own_variants_apart():
    own = OwnScale(mantissa=4, emin=-2, max=31.0, name="fine", zero="min", convention="encode")
    assert scale_name(own).startswith("fine-")
    assert scale_name(own).endswith("-zero-min-encode")
