"""Rules for layers: where they apply, what they change, one spelling for all that mean the same, and clear errors."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import QUANTIZERS, ConfigError, Recipe, Space, recipe_files, recipe_from_dict, recipe_to_dict
from fp4dse.dse.layers.place import WORDS, Place, conv_role
from fp4dse.dse.layers.rule import CHANGES, LayerRule, check_places, idle_rules
from fp4dse.dse.reading.library import read_recipe_file, recipe_to_toml
from fp4dse.dse.stages import SLOTS, STAGES
from tests.each import each

BF16, NVFP4 = Recipe.named("bf16"), Recipe.named("nvfp4")
BLOCKS = 6
MODEL = [
    Place("embedding", name="embed"),
    *(
        Place(kind, block, BLOCKS, role, expert, f"block{block}.{role}")
        for block in range(BLOCKS)
        for kind, role, expert in (
            ("attention", "qkv", False),
            ("attention", "attention-out", False),
            ("mlp", "up", block > 3),
            ("mlp", "down", block > 3),
        )
    ),
    Place("head", name="head"),
]


def ruled(base, *rules, **more):
    data = recipe_to_dict(Recipe.named(base)) | more
    return recipe_from_dict({**data, "layers": list(rules)})


def meant(**where):
    rule = LayerRule(**where, fprop_x=QUANTIZERS["mxfp4"])
    return [place.name for place in MODEL if rule.matches(place)]


def of_blocks(blocks, roles=("qkv", "attention-out", "up", "down")):
    return [f"block{block}.{role}" for block in blocks for role in roles]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ({"kind": ("head",)}, ["head"]),
        ({"kind": ("embedding", "head")}, ["embed", "head"]),
        ({"kind": ("attention",)}, of_blocks(range(6), ("qkv", "attention-out"))),
        ({"kind": ("qkv", "down")}, of_blocks(range(6), ("qkv", "down"))),
        ({"kind": ("expert",)}, of_blocks((4, 5), ("up", "down"))),
        ({"name": "block?.up"}, of_blocks(range(6), ("up",))),
        ({"name": "h*"}, ["head"]),
        ({"first": 1}, of_blocks([0])),
        ({"last": 0.34}, of_blocks([4, 5])),
        ({"first": 1, "last": 1}, of_blocks([0, 5])),
        ({"blocks": "2:4"}, of_blocks([2, 3])),
        ({"blocks": "-1:"}, of_blocks([5])),
        ({"blocks": "3"}, of_blocks([3])),
        ({"blocks": "-2"}, of_blocks([4])),
        ({"blocks": ":"}, of_blocks(range(6))),
        ({"blocks": "3", "last": 1, "kind": ("up",)}, ["block3.up", "block5.up"]),
        ({"blocks": "9"}, []),
    ],
)
def test_a_rule_applies_where_all_its_conditions_hold(where, names):
    assert meant(**where) == names


def test_later_rules_hold_over_earlier_ones_and_what_none_names_is_the_recipes_own():
    recipe = ruled("nvfp4-sr-rht", {"kind": "mlp", "*": "mxfp4"}, {"last": 1, "wgrad": "bf16"})
    first, last = recipe.at(MODEL[3]), recipe.at(MODEL[-2])
    assert {first.slot(slot) for slot in SLOTS} == {QUANTIZERS["mxfp4"].canonical()}
    assert {last.slot(slot) for slot in SLOTS if "wgrad" not in slot} == {QUANTIZERS["mxfp4"].canonical()}
    assert last.wgrad.g.element == last.wgrad.x.element == "bf16"
    base = Recipe.named("nvfp4-sr-rht")
    assert first.rotation("wgrad") == base.rotation("wgrad") != None  # noqa: E711
    assert last.rotation("wgrad") is None  # nothing there is quantized
    assert recipe.at(MODEL[1]) == recipe.base == base.base  # attention of the first block


def test_precise_layers_are_bf16_before_rules_apply():
    recipe = ruled("nvfp4", {"kind": "head", "fprop": "mxfp8" if "mxfp8" in QUANTIZERS else "fp8"})
    head = recipe.at(MODEL[-1])
    assert not head.fprop.x.is_plain
    assert head.dgrad == BF16.dgrad
    assert recipe.at(MODEL[0]).is_plain  # the embedding, which is precise and not named


@pytest.mark.parametrize("kind", ["embedding", "head", "router", "attention"])
def test_bf16_for_whole_kinds_is_what_precise_is_short_for(kind):
    spelled = ruled("nvidia-nvfp4", {"kind": kind, "*": "bf16"})
    recipe = Recipe.named("nvidia-nvfp4")
    short = msgspec.structs.replace(recipe, precise=msgspec.structs.replace(recipe.precise, **{kind: True}))
    assert spelled.config_id == short.config_id
    assert spelled.canonical().layers == ()


def test_bf16_at_the_ends_is_what_precise_is_short_for():
    spelled = ruled("nvfp4", {"first": 2, "last": 0.1, "recipe": "bf16"})
    precise = msgspec.structs.replace(NVFP4.precise, first=2.0, last=0.1)
    assert spelled.config_id == msgspec.structs.replace(NVFP4, precise=precise).config_id


@pytest.mark.parametrize("first", [{"kind": "mlp"}, {"blocks": "0:"}, {"first": 1}])
def test_what_quantizes_a_layer_in_bf16_begins_without_rotation_in_every_spelling(first):
    """Rules that are folded into `precise`, and rules that are not, mean the same."""
    recipe = ruled("te-nvfp4", {**first, "*": "bf16"}, {"name": "block0.up", "*": "nvfp4"})
    assert recipe.wgrad.rotation is not None
    for place in MODEL:
        assert recipe.at(place) == recipe.canonical().at(place)
    (up,) = (place for place in MODEL if place.name == "block0.up")
    assert not recipe.at(up).is_plain
    assert recipe.at(up).wgrad.rotation is None


def test_only_leading_rules_are_folded():
    """Behind another rule, BF16 takes back what that one made of precise layers."""
    recipe = ruled("nvfp4", {"kind": "attention", "*": "mxfp4"}, {"kind": "attention", "blocks": "0", "*": "bf16"})
    assert len(recipe.canonical().layers) == 2
    assert recipe.at(MODEL[1]).is_plain
    assert not recipe.at(MODEL[5]).is_plain


def test_ids_of_recipes_without_rules_are_what_they_were():
    assert NVFP4.config_id == "9fd2de50b6aaddf5"
    assert "layers" not in recipe_to_dict(NVFP4)


def test_spellings_that_mean_the_same_share_an_id():
    a = ruled("nvfp4", {"kind": ["up", "qkv"], "*": "mxfp4"})
    b = ruled("nvfp4", {"kind": ["qkv", "up", "up"], **dict.fromkeys(SLOTS, "mxfp4")})
    assert a.config_id == b.config_id != NVFP4.config_id
    assert ruled("nvfp4", {"kind": "up", "*": "mxfp4"}).config_id != a.config_id


def test_a_change_of_a_field_is_of_the_recipes_own_quantizer():
    recipe = ruled("nvfp4-sr", {"kind": "mlp", "*.g.rounding": "nearest"})
    [rule] = recipe.layers
    assert rule.changes == ("dgrad_g", "wgrad_g")
    assert rule.dgrad_g == msgspec.structs.replace(recipe.dgrad.g, rounding=NVFP4.dgrad.g.rounding)


@given(st.data())
def test_rules_read_back_from_toml_and_json_and_canonical_forms_are_fixed_points(data):
    names = st.sampled_from(["mxfp4", "nvfp4-2d", "bf16", "fp8", "if4"])
    where = st.fixed_dictionaries(
        {"kind": st.lists(st.sampled_from(WORDS), min_size=1, max_size=3)},
        optional={
            "name": st.sampled_from(["block*", "h?ad"]),
            "last": st.sampled_from([1, 0.5]),
            "blocks": st.just("1:"),
        },
    )
    paths = st.sampled_from(["*", "forward", "wgrad", "backward.g", "dgrad.w"])
    what = st.just({"*": "bf16"}) | st.dictionaries(paths, names, min_size=1, max_size=2)
    more = st.fixed_dictionaries(
        {}, optional={"wgrad.rotation": st.sampled_from(["none", "rht16"]), "dgrad.source": st.just("forward")}
    )
    rules = data.draw(st.lists(st.tuples(where, what, more), min_size=1, max_size=3))
    try:
        recipe = ruled("nvidia-nvfp4", *({**w, **c, **m} for w, c, m in rules))
    except ConfigError:
        return  # contradicting
    assert recipe_from_dict(json.loads(json.dumps(recipe_to_dict(recipe)))) == recipe
    full = msgspec.json.decode(msgspec.json.encode(recipe.canonical()))
    assert recipe_from_dict(full).config_id == recipe.config_id
    canonical = recipe.canonical()
    assert canonical.canonical() == canonical
    for place in MODEL:
        assert canonical.at(place) == recipe.at(place) == recipe.at(place).canonical()
        assert recipe.at(place).layers == ()


def test_toml_reads_back(tmp_path):
    recipe = ruled(
        "nvidia-nvfp4",
        {"kind": ["up", "down"], "last": 2, "wgrad": "bf16", "wgrad.rotation": "none"},
        {"name": "block0.*", "estimator.w": {"element": "dge"}, "dgrad.source": "forward"},
    )
    file = tmp_path / "mine.toml"
    file.write_text(recipe_to_toml(recipe))
    assert read_recipe_file(file).recipe == recipe


def test_a_quantizer_without_a_name_reads_back_whole_whatever_the_recipe_has_there(tmp_path):
    recipe = ruled("wang-dge-occ", {"kind": "mlp", "*.g": {"like": "mxfp4", "rounding": "stochastic"}})
    file = tmp_path / "mine.toml"
    file.write_text(recipe_to_toml(recipe))
    assert read_recipe_file(file).recipe == recipe


@each("name", sorted(recipe_files().keys() - {"metis-factors"}))
def test_named_recipes_are_rules_as_they_are_recipes(name):
    named = Recipe.named(name)
    recipe = ruled("bf16", {"kind": "mlp", "recipe": name})
    for stage in STAGES:
        assert getattr(recipe.at(MODEL[3]), stage) == getattr(named.base, stage)
    assert recipe.is_plain is False
    assert recipe.at(MODEL[1]).is_plain


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        ({"*": "bf16"}, "recipe: layers[0].where: found nothing; accepted: one of kind, name, first, last, blocks"),
        ({"kind": "mlp"}, "recipe: layers[0].what: found nothing"),
        ({"kind": "ffn", "*": "bf16"}, "recipe: layers[0].kind: found 'ffn'; accepted: linear, embedding"),
        ({"blocks": "2-4", "*": "bf16"}, "recipe: layers[0].blocks: found '2-4'; accepted: a slice"),
        ({"name": 'a"b', "*": "bf16"}, "recipe: layers[0].name"),
        ({"kind": "mlp", "*": "nvfp5"}, "recipe: layers[0].*: found 'nvfp5'"),
        ({"kind": "mlp", "recipe": "nvfp5"}, "recipe: layers[0].recipe: found 'nvfp5'"),
        ({"kind": "mlp", "training.clip": 1.0}, "recipe: layers[0].training.clip: found 'training.clip'"),
        ({"kind": "mlp", "finish": "none"}, "recipe: layers[0].finish"),
        ({"kind": "mlp", "first": -1, "*": "bf16"}, "recipe: layers[0].first: found -1"),
        ({"kind": "mlp", "recipe": "metis-factors"}, "layers[0]: fprop.w.outliers: found 'factors'"),
        ({"last": 1.5, "*": "bf16"}, "recipe: layers[0].last: found 1.5; accepted: a whole number of blocks"),
        ({"kind": "mlp", "wgrad": "ms-eden"}, "layers[0]: wgrad.rotation"),
    ],
)
def test_errors_name_the_rule_the_field_and_what_is_accepted(rule, error):
    with pytest.raises(ConfigError) as raised:
        ruled("nvfp4", rule)
    assert error in str(raised.value)


def test_two_rules_that_say_two_things_of_the_same_layers_are_both_named():
    with pytest.raises(ConfigError) as raised:
        ruled("nvfp4", {"kind": "mlp", "wgrad": "bf16"}, {"kind": "mlp", "*": "mxfp4"})
    assert "layers[1]" in str(raised.value)
    assert "layers[0]" in str(raised.value)
    ruled("nvfp4", {"kind": "mlp", "wgrad": "bf16"}, {"kind": "mlp", "fprop": "mxfp4"})  # two things of two products


@pytest.mark.parametrize("kinds", [("mlp", "mlp", "mlp"), (["mlp"], ["mlp", "conv"], ["conv", "mlp"])])
def test_every_two_rules_of_the_same_layers_are_compared(kinds):
    """Not only with the first of them; kinds in another order are the same layers."""
    changes = {"wgrad.g": "bf16"}, {"dgrad.g": "mxfp8", "dgrad.w": "mxfp8"}, {"dgrad.g": "bf16"}
    with pytest.raises(ConfigError) as raised:
        ruled("nvfp4", *({"kind": kind, **change} for kind, change in zip(kinds, changes, strict=True)))
    assert "layers[2]" in str(raised.value)
    assert "layers[1]" in str(raised.value)


def test_a_rule_without_a_layer_or_without_an_effect_is_an_error():
    nowhere = check_places(ruled("nvfp4", {"name": "blok0.*", "*": "mxfp4"}).layers, MODEL)
    assert "layers[0]: found 'blok0.*'" in str(nowhere)
    assert "block0.qkv" in str(nowhere)
    undone = ruled("nvfp4", {"kind": "qkv", "wgrad": "bf16"}, {"kind": "attention", "*": "mxfp4"})
    assert "attention: mxfp4" in str(check_places(undone.layers, MODEL))
    fine = ruled("nvfp4", {"kind": "attention", "*": "mxfp4"}, {"kind": "qkv", "wgrad": "bf16"})
    assert check_places(fine.layers, MODEL) is None


def test_a_rule_for_a_kind_may_be_idle_in_a_model_without_it_if_it_is_used_in_another():
    """So that a recipe with FP8 attention may be tried on several models, of which one has none."""
    for where in ({"kind": "conv"}, {"kind": "attention", "last": 0.05}, {"last": 0.05}):
        rules = ruled("nvfp4", {**where, "*": "mxfp4"}).layers
        assert f"layers[0]: found '{rules[0].where()}'" in str(check_places(rules, MODEL))
        assert check_places(rules, MODEL, used_elsewhere=rules) is None
        assert idle_rules(rules, MODEL) == rules
    for where in ({"kind": "conv", "name": "c*"}, {"blocks": "7:9"}):
        rules = ruled("nvfp4", {**where, "*": "mxfp4"}).layers
        assert check_places(rules, MODEL, used_elsewhere=rules) is not None


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("blok0.*", "block0.*"),
        ("block?.qvk", "block?.qkv"),
        ("blok*.upp", "block*.up"),
        ("haed", "head"),
        ("block0.qkv", "block0.qkv"),  # meets a layer
        ("conv3.stem", None),
    ],
)
def test_a_slip_in_a_name_of_layers_is_asked_for(glob, meant):
    error = check_places(ruled("nvfp4", {"name": glob, "*": "mxfp4"}).layers, MODEL)
    if glob == meant:
        assert error is None
    else:
        assert ("did you mean" in str(error)) == (meant is not None)
        assert meant is None or f"did you mean {meant!r}?" in str(error)


def test_a_rule_is_an_axis_like_any_other():
    space = Space(
        "sparing",
        axes={
            "layers": [[], [{"kind": "attention", "*": "bf16"}], [{"kind": "mlp", "wgrad": "mxfp4"}]],
            "*.g.rounding": ["nearest", "stochastic"],
        },
    )
    recipes = list(space.recipes())
    assert len(recipes) == 6
    assert len({recipe.signature() for recipe in recipes if recipe.precise == NVFP4.precise}) == 1
    assert next(row["values"] for row in space.describe()) == "none | attention: bf16 | mlp: wgrad mxfp4"


def test_in_a_space_a_rule_names_whole_quantizers():
    with pytest.raises(ConfigError, match="a whole quantizer"):
        Space("s", axes={"layers": [[{"kind": "mlp", "*.rounding": "stochastic"}]]})


def test_labels_and_columns_say_the_rules():
    recipe = ruled(
        "nvfp4", {"kind": "mlp", "last": 2, "wgrad": "bf16"}, {"name": "block0.up", "fprop.rotation": "rht16"}
    )
    assert recipe.label() == "nvfp4, (mlp, last 2: wgrad bf16), (block0.up: fprop rht16)"
    assert recipe.columns()["layers"] == "mlp, last 2: wgrad bf16; block0.up: fprop rht16"
    assert NVFP4.columns()["layers"] == "none"


def test_rules_do_not_split_populations():
    assert ruled("nvfp4", {"kind": "mlp", "*": "mxfp4"}).signature() == NVFP4.signature()


def test_every_field_of_a_rule_is_one_of_a_recipe():
    for field in CHANGES:
        part, _, name = field.partition("_")
        assert hasattr(getattr(NVFP4, part), name)


def test_one_pixel_convolutions_are_a_kind_of_their_own_and_convolutions_still():
    rule = LayerRule(kind=("pointwise",), fprop_x=QUANTIZERS["mxfp4"])
    roles = {kernel: conv_role("conv", kernel) for kernel in ((1, 1), (3, 3), (1, 3))}
    assert roles == {(1, 1): "pointwise", (3, 3): "spatial", (1, 3): "spatial"}
    assert conv_role("embedding", (1, 1)) == conv_role("linear", ()) == ""
    assert [rule.matches(Place("conv", role=role)) for role in roles.values()] == [True, False, False]
    assert all(
        LayerRule(kind=("conv",), fprop_x=QUANTIZERS["mxfp4"]).matches(Place("conv", role=r)) for r in roles.values()
    )


def test_sun_has_eight_bits_in_first_and_last_layers_and_in_convolutions_of_one_pixel():
    recipe = Recipe.named("sun-4bit")
    eight = [Place("embedding"), Place("head"), Place("conv", 0, 2, "pointwise")]
    four = [Place("conv", 0, 2, "spatial"), Place("linear"), Place("mlp", role="up"), Place("attention", role="qkv")]
    assert {recipe.at(place).fprop.w.element for place in eight} == {"e4m3"}
    assert {recipe.at(place).wgrad.g.element for place in eight} == {"e5m2"}
    assert {recipe.at(place).fprop.w.element for place in four} == {"int4"}
    assert {recipe.at(place).wgrad.g.element for place in four} == {"radix4-odd"}
