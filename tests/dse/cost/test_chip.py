"""Chips and model shapes as data: complete, sourced, and readable from a file of one's own."""

import tomllib
from pathlib import Path

import msgspec
import pytest

import fp4dse.dse.cost as cost
from fp4dse.dse import ConfigError, Quantizer, Recipe
from fp4dse.dse.cost import chip_names, load_chip, load_model, model_names, overhead, work
from fp4dse.dse.cost.chip import UNITS, Number
from fp4dse.dse.cost.units import why_not_native
from fp4dse.dse.cost.work import Work
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.layers.rule import LayerRule
from fp4dse.dse.rounding import Stochastic

B300 = load_chip("b300")
FOLDER = Path(cost.__file__).parent
WORDS = ("data sheet", "white paper", "measured", "assumed", "chosen", "Programming Guide", "NVIDIA on", "verda.com on")


def numbers(data: object) -> list[Number]:
    if isinstance(data, Number):
        return [data]
    if isinstance(data, msgspec.Struct):
        data = msgspec.structs.asdict(data)
    return [n for part in data.values() for n in numbers(part)] if isinstance(data, dict) else []


@pytest.mark.parametrize("name", chip_names())
def test_every_number_of_a_chip_says_where_it_is_from(name):
    found = numbers(load_chip(name))
    assert len(found) >= 11
    for number in found:
        assert number.value > 0
        assert any(word in number.source for word in WORDS), number.source


@pytest.mark.parametrize("name", chip_names())
def test_narrower_units_are_never_slower(name):
    chip = load_chip(name)
    rates = [chip.flops(unit) for unit in UNITS if unit in chip.matrix]
    assert rates == sorted(rates, reverse=True)
    assert chip.flops("fp32") < rates[-1] or "fp32" in chip.matrix


def test_fp8_without_scales_of_blocks_reaches_more_where_that_was_measured():
    assert B300.flops("fp8", unscaled=True) == 0.63 * 4.5e15 > B300.flops("fp8")
    others = [unit for unit in B300.matrix if unit != "fp8"]
    assert [B300.flops(unit, unscaled=True) for unit in others] == [B300.flops(unit) for unit in others]
    assert load_chip("h100").flops("fp8", unscaled=True) == load_chip("h100").flops("fp8")


@pytest.mark.parametrize("name", chip_names())
def test_every_shipped_chip_says_how_much_memory_it_has(name):
    assert 10e9 < load_chip(name).capacity.value < 1e12


@pytest.mark.parametrize("name", ["rtx-5090", "rtx-5080", "rtx-pro-6000", "gb10"])
def test_chips_of_compute_capability_12_round_by_chance_in_software(name):
    chip, q = load_chip(name), Quantizer.named("nvfp4")
    drawn = msgspec.structs.replace(q, rounding=Stochastic())
    assert work.rounding(q, chip) == Work(convert=0.5)
    assert not work.takes_random_bits(drawn, chip)
    assert work.stochastic(drawn, chip).vector > 20 > work.stochastic(drawn, load_chip("b200")).vector
    assert work.takes_random_bits(drawn, load_chip("mi355x"))


def test_nvfp4_is_no_format_of_amds_and_mxfp4_is_one_of_every_chip_with_fp4_units():
    assert why_not_native(Quantizer.named("nvfp4"), load_chip("mi355x"))
    for name in chip_names():
        assert not load_chip(name).has_fp4 or why_not_native(Quantizer.named("mxfp4"), load_chip(name)) is None


@pytest.mark.parametrize("name", chip_names())
def test_what_a_chip_converts_or_takes_are_formats_that_there_are(name):
    chip = load_chip(name)
    known = {*ELEMENTS, "ue5m3", "ue4m4", *(f"{element} stochastic" for element in ELEMENTS)}
    assert set(chip.converts) <= known
    assert chip.native == ["any"] or all(len(entry.split()) == 3 for entry in chip.native)
    assert bool(chip.native) == chip.has_fp4


@pytest.mark.parametrize("name", model_names())
def test_parameters_are_those_of_the_layers_and_little_more(name):
    model = load_model(name)
    weights = sum(linear.count * linear.inputs * linear.outputs for linear in model.linears)
    embeddings = sum(linear.inputs * linear.outputs for linear in model.linears if linear.name == "head")
    if model.exchange:  # a GPU's part: dense layers on several, and 58 of 64 blocks with experts
        weights = sum(of.count * of.inputs * of.outputs for of in model.linears if of.expert)
        assert 58 / 64 <= model.parameters / weights <= 1
        return
    assert weights <= model.parameters * 1.001
    assert model.parameters <= (weights + embeddings) * 1.02
    assert model.source


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ({"kind": ("qkv",)}, 32),
        ({"kind": ("attention",)}, 64),
        ({"kind": ("up", "down")}, 64),
        ({"kind": ("head",)}, 1),
        ({"name": "block3.*"}, 4),
        ({"name": "block?.out"}, 10),
        ({"name": "head"}, 1),
        ({"kind": ("mlp",), "blocks": "-4:"}, 8),
    ],
    ids=str,
)
def test_rules_find_the_layers_of_a_shape_by_the_words_and_names_of_this_projects_decoder(where, count):
    rule, model = LayerRule(**where, fprop_x=Quantizer.named("nvfp4")), load_model("llama-8b")
    assert sum(rule.matches(place) for linear in model.linears for place in model.places(linear)) == count


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('pattern = "12"', 'pattern = "123"', "pattern has 3 letters, blocks is 2"),
        ('at = "2"', 'at = "3"', "second: count is 1, the blocks that it stands in are 0"),
        ('at = "2"', 'kind = "headed"', "kind"),
    ],
)
def test_a_model_whose_layers_have_no_place_is_refused(tmp_path, old, new, says):
    mine = tmp_path / "mine.toml"
    mine.write_text((FOLDER / "models" / "mlp.toml").read_text().replace(old, new))
    with pytest.raises(ConfigError, match=says):
        load_model(str(mine))


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"chip: found 'a100'; accepted: b200, .*h200, .*or a .toml file"):
        load_chip("a100")
    with pytest.raises(ConfigError, match=r"model: found 'gpt'; accepted: .*llama-1b"):
        load_model("gpt")


def test_a_chip_of_ones_own_is_a_file(tmp_path):
    text = (FOLDER / "chips" / "b200.toml").read_text()
    mine = tmp_path / "mine.toml"
    mine.write_text(text.replace("value = 9.0e15", "value = 18.0e15"))
    assert load_chip(str(mine)).name == "mine"
    assert overhead(Recipe.named("mxfp4"), chip=str(mine)) < overhead(Recipe.named("mxfp4"), chip="b200")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[launch]", "[lunch]", "lunch"),
        ("value = 2.0e-6", 'value = "fast"', "launch.value"),
        ("[matrix]", "[matrix", "mine.toml"),
        ('writes_apart = ["fp4"]', 'writes_apart = ["fp6"]', "writes_apart has fp6, but the matrix units are fp4, fp8"),
        ('either_axis = ["fp8"]', 'either_axis = ["int8"]', "either_axis has int8, but the matrix units are fp4, fp8"),
        ("[achieved.formats]\nfp8", "[achieved.formats]\nint8", "achieved.formats has int8"),
        ("[achieved.unscaled]\nfp8", "[achieved.unscaled]\nint8", "achieved.unscaled has int8"),
        ("fp8 = { value = 0.63,", "fp8 = { value = 1.63,", "achieved.unscaled.fp8 is 1.63, but is a share, 1 at most"),
        ("fp8 = { value = 0.6,", "fp8 = { value = 1.6,", "achieved.formats.fp8 is 1.6, but is a share, 1 at most"),
    ],
)
def test_a_wrong_file_is_answered_in_one_line_with_its_name(tmp_path, old, new, says):
    mine = tmp_path / "mine.toml"
    mine.write_text((FOLDER / "chips" / "b200.toml").read_text().replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_chip(str(mine))
    assert says in str(caught.value)
    assert str(mine) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*/*.toml")), ids=lambda file: file.stem)
def test_every_data_file_says_what_it_is(file):
    assert tomllib.loads(file.read_text())["summary"]
