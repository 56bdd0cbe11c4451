"""Units of a model, quantized alone and spared alone: the rules say of every layer what was meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fp4dse.dse import ConfigError, Recipe, recipe_files, recipe_from_dict, recipe_to_dict
from fp4dse.dse.channels import Held
from fp4dse.dse.layers.exceptions import meeting
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.rule import LayerRule, check_places
from fp4dse.dse.layers.sensitivity import SCOPES, Grain, Unit, alone, ends, products, spared, units
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.stages import SLOTS, STAGES
from tests.each import each

BLOCKS = 4


def block(i):
    attention, mlp = Place("attention", i, BLOCKS), Place("mlp", i, BLOCKS)
    yield from (attention.within(role, f"block{i}.{role}") for role in ("qkv", "attention-out"))
    yield from (mlp.within(role, f"block{i}.{role}") for role in ("up", "down"))


MODEL = [
    Place("embedding", name="embed"),
    *(place for i in range(BLOCKS) for place in block(i)),
    Place(name="time"),
    Place("head", name="head"),
]
RULED = recipe_from_dict(
    {
        **recipe_to_dict(Recipe.named("nvfp4-sr")),
        "layers": [{"kind": "up", "last": 1, "*": "mxfp4"}, {"kind": "mlp", "blocks": "0", "wgrad": "bf16"}],
    }
)
NAMED = sorted(set(recipe_files()) - {"bf16", "luq-fnt", "metis-factors"})
CORE = {"attention": {"scores": {"q": "mxfp8", "k": "mxfp8"}}}
CORE_TOO = recipe_from_dict({**recipe_to_dict(Recipe.named("nvfp4")), **CORE})
recipes = st.sampled_from([RULED, CORE_TOO, *map(Recipe.named, NAMED)])
grains = st.builds(
    Grain,
    by=st.sampled_from(["kind", "role"]),
    parts=st.integers(0, 6),
    scopes=st.lists(st.sampled_from(list(SCOPES)), max_size=3, unique=True).map(
        lambda scopes: tuple(dict.fromkeys(["all", *scopes]))  # some recipes quantize no backward product
    ),
)


def quantized(recipe, place, stage):
    """The stage of a layer, None where it is plain. Whether channels held apart are so in the weight's gradient, too,
    says nothing of the forward product."""
    here = recipe.at(place)
    if all(q.is_plain for q in operands(here, stage)):
        return None
    found = getattr(here, stage)
    if stage == "fprop" and isinstance(found.channels, Held):
        found = replace(found, channels=replace(found.channels, wgrad=False))
    return found


def operands(recipe, stage):
    return [recipe.slot(slot) for slot in SLOTS if slot.startswith(f"{stage}.")]


@given(recipe=recipes, grain=grains, data=st.data())
def test_what_is_spared_is_bf16_and_what_is_alone_is_the_recipes(recipe, grain, data):
    found = units(recipe, MODEL, grain)
    chosen = data.draw(st.lists(st.sampled_from(found), min_size=1, max_size=3, unique=True))
    meant = products(chosen, MODEL, grain.by)
    out, only = spared(recipe, meant, MODEL), alone(recipe, meant, MODEL)
    for place in MODEL:
        for stage in STAGES:
            own = quantized(recipe, place, stage)
            is_meant = stage in meant.get(place, ())
            assert quantized(out, place, stage) == (None if is_meant else own)
            assert quantized(only, place, stage) == (own if is_meant else None)
    for made in (out, only):
        assert made.validate() == []
        assert check_places(made.layers, MODEL) is None
        assert made.training == recipe.canonical().training
    assert only.attention.is_plain
    assert only.is_baseline == (only.layers == ())


@each("name", NAMED)
def test_a_study_of_parts_of_the_blocks_is_two_populations(name):
    recipe = Recipe.named(name)
    within = [unit for unit in units(recipe, MODEL, Grain("role", 2, tuple(SCOPES))) if unit.part is not None]
    found = [products([unit], MODEL, "role") for unit in within]
    assert {spared(recipe, of, MODEL).signature() for of in found} == {recipe.signature()}
    assert len({alone(recipe, of, MODEL).signature() for of in found}) == 1


@given(grain=grains, recipe=recipes)
def test_units_of_a_scope_share_the_quantized_layers_out(grain, recipe):
    found = units(recipe, MODEL, grain)
    assert len(set(found)) == len(found)
    for scope in grain.scopes:
        for place in MODEL:
            of = [unit for unit in found if unit.scope == scope and unit.has(place, grain.by)]
            quantizes = any(quantized(recipe, place, stage) for stage in SCOPES[scope])
            assert len(of) == 1 if quantizes else len(of) <= 1


@given(st.lists(st.sampled_from(MODEL), unique=True))
def test_conditions_meet_exactly_the_layers(chosen):
    rules = [LayerRule(**where, fprop_x=Quantizer(element="bf16")) for where in meeting(chosen, MODEL)]
    assert [place for place in MODEL if any(rule.matches(place) for rule in rules)] == [
        place for place in MODEL if place in chosen
    ]


def test_blocks_are_cut_into_parts_that_differ_by_one_at_most():
    tall = [Place("mlp", i, 7, "up", name=f"block{i}.up") for i in range(7)]
    found = units(Recipe.named("nvfp4"), tall, Grain(parts=3))
    assert [sum(unit.has(place, "role") for place in tall) for unit in found] == [2, 3, 2]
    assert len(units(Recipe.named("nvfp4"), tall, Grain(parts=0))) == 7
    assert len(units(Recipe.named("nvfp4"), tall, Grain(parts=9))) == 7


def test_labels_are_words():
    assert Unit("mlp", 1, 3, "wgrad").label() == "mlp, part 2 of 3: wgrad"
    assert Unit("linear").label() == "linear"
    assert Unit("qkv", 0, 1).label() == "qkv"


def test_first_and_last_blocks_begin_with_the_end():
    tall = [Place("mlp", i, 10, name=f"block{i}") for i in range(10)]
    assert [place.block for place in ends([*tall, Place("head", name="head")])] == [9, 8, 7, 6, 0, 5, 4, 3, 2, 1]


def test_what_cannot_be_cut_is_an_error():
    for name in ("luq-fnt", "metis-factors"):
        with pytest.raises(ConfigError, match="layers apart need rules"):
            units(Recipe.named(name), MODEL, Grain())
    with pytest.raises(ConfigError, match="one that quantizes a layer of the model"):
        units(Recipe.named("bf16"), MODEL, Grain())
    with pytest.raises(ConfigError, match="scopes"):
        Grain(scopes=("fprop", "dgrd"))
    with pytest.raises(ConfigError, match="parts"):
        Grain(parts=-1)
    twins = [Place("mlp", 0, 1, name="a"), Place("mlp", 0, 1, "up", name="a")]
    with pytest.raises(ConfigError, match="layers that kind, role, block or name"):
        list(meeting(twins[:1], twins))
