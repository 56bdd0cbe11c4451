"""Megatron's file of formats per layer: what is written computes the recipe, what is read what the file computes."""

from fnmatch import fnmatchcase

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp4dse.dse import ConfigError, Recipe, recipe_from_dict, recipe_to_dict, recipe_to_toml
from fp4dse.dse.export import export
from fp4dse.dse.export.listed import of_layer
from fp4dse.dse.export.names import places
from fp4dse.dse.export.te import OLDER
from fp4dse.dse.export.te_quant import CONFIGS, PATTERNS, recipes
from fp4dse.dse.export.te_quant_reading import read_te_quant
from fp4dse.dse.reading.library import read_recipe_file
from tests.dse.export.megatron import NAMES, computes

BLOCKS = 8
NEMOTRON = """
configs:
  mxfp8: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: mxfp8}}
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
matchers:
  attn_qkv: {config: bf16, type: glob, pattern: "*.linear_qkv", enabled: true}
  attn_proj: {config: bf16, type: glob, pattern: "*.linear_proj", enabled: true}
  latent: {config: bf16, type: glob, pattern: "*mlp.fc[12]_latent_proj", enabled: true}
  mtp: {config: bf16, type: glob, pattern: "mtp.*", enabled: true}
  mamba: {config: mxfp8, type: glob, pattern: "*mixer.out_proj", enabled: true}
"""
"""The assignment of Nemotron 3 Super: layers and formats of Megatron-Bridge's perf_recipes/nemotronh/te_quant.cfg."""
ARGUMENTS = "--fp4-format e2m1 --fp4-recipe nvfp4 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0"

OTHERS = {
    "nvfp4": {"recipe": "te-nvfp4"},
    "bf16": {"*": "bf16"},
    "mxfp8": {"*": "mxfp8-rceil", "*.rotation": "none"},
    "fp8_hybrid": {"*": "fp8-current", "*.g": "fp8-e5m2-current", "*.rotation": "none"},
}


def ruled(base, *rules, **more):
    return recipe_from_dict({**recipe_to_dict(Recipe.named(base)), **more, "layers": list(rules)})


def written(recipe, blocks=BLOCKS):
    done = export(recipe, "te_quant", blocks)
    assert not done.cannot
    return done.settings.text


def check_same(text, recipe, base="nvfp4", first=0, last=0, over=places):
    """Every layer that Megatron quantizes computes under the file what it computes under the recipe."""
    for (leaf, block), place in over(BLOCKS).items():
        if leaf in NAMES:
            found = of_layer(computes(text, leaf, block, BLOCKS, base, first, last))
            assert found == of_layer(recipe.at(place)), (leaf, block)


PLACES = st.fixed_dictionaries(
    {"kind": st.lists(st.sampled_from(sorted(PATTERNS)), min_size=1, max_size=2, unique=True)},
    optional={"blocks": st.sampled_from(["2:4", "3", "-2:"]), "last": st.just(1)},
)


@given(
    st.lists(st.tuples(PLACES, st.sampled_from(sorted(OTHERS))), max_size=4),
    st.sampled_from([{}, {"attention": True}, {"last": 2}, {"attention": True, "last": 2}, {"first": 1}]),
    st.sampled_from(["te-nvfp4", "bf16"]),
)
@example([({"kind": ["attention"]}, "nvfp4")], {"attention": True, "last": 2}, "te-nvfp4")
@example([({"kind": ["attention"]}, "nvfp4")], {"first": 1}, "te-nvfp4")
@example([({"kind": ["attention"]}, "nvfp4")], {"attention": True}, "te-nvfp4")
@settings(deadline=None, max_examples=20)
def test_a_file_computes_the_recipe_and_reads_back_to_what_computes_the_same(rules, precise, base):
    try:
        recipe = ruled(base, *({**where, **OTHERS[what]} for where, what in rules), precise=precise)
    except ConfigError:
        return  # contradicting
    done = export(recipe, "te_quant", BLOCKS)
    if done.cannot:
        assert all(line.startswith("layers[") for line in done.cannot)
        return
    text, kept = done.settings.text, recipe.canonical().precise
    check_same(text, recipe, "bf16" if base == "bf16" else "nvfp4", int(kept.first), int(kept.last))
    back = read_te_quant(text, "mine.cfg").recipe
    check_same(text, back, "bf16" if base == "bf16" else "nvfp4", int(kept.first), int(kept.last))
    again = read_te_quant(written(back), "mine.cfg").recipe
    assert again.config_id == back.config_id


@pytest.mark.parametrize(
    ("base", "rules", "precise"),
    [
        ("te-nvfp4", [], {}),
        ("te-nvfp4", [], {"attention": True, "first": 2, "last": 4}),
        ("te-nvfp4", [{"kind": "mlp", "*": "mxfp8-rceil", "wgrad.rotation": "none"}], {"attention": True, "last": 2}),
        (
            "te-nvfp4",
            [{"kind": ["qkv", "down"], "blocks": "2:5", "*": "bf16"}, {"kind": "expert", "blocks": "1", "*": "bf16"}],
            {},
        ),
        (
            "te-nvfp4",
            [
                {"kind": "mlp", "*": "mxfp8-rceil", "wgrad.rotation": "none"},
                {"kind": "up", "blocks": "0:2", "*": "bf16"},
            ],
            {},
        ),
        ("bf16", [], {}),
    ],
)
def test_written_and_read_again_it_is_the_same_recipe(base, rules, precise):
    recipe = ruled(base, *rules, precise=precise)
    assert read_te_quant(written(recipe, None), "mine.cfg").recipe.config_id == recipe.config_id


def test_nemotron_3_super_is_the_same_recipe_but_for_what_does_not_exist_here():
    found = read_te_quant(NEMOTRON, "te_quant.cfg", f"{ARGUMENTS} --num-layers-at-end-in-bf16 14")
    absent = ("latent projections of experts", "layers of multi-token prediction", "Mamba's projections")
    assert [note.split("): ")[1] for note in found.notes] == [f"{layers} do not exist here" for layers in absent]
    shipped = Recipe.named("nemotron-3-super")
    for key, place in places(88).items():
        assert found.recipe.at(place) == shipped.at(place), key
    back = read_te_quant(written(shipped, 88), "mine.cfg").recipe
    assert back.precise.last == 14
    assert not back.layers


def test_without_arguments_the_base_is_assumed_and_said():
    found = read_te_quant(NEMOTRON, "te_quant.cfg")
    assert found.recipe.base == Recipe.named("te-nvfp4").base
    assert "NVFP4BlockScaling() is taken" in found.notes[0]
    hybrid = read_te_quant(NEMOTRON, "te_quant.cfg", "--fp8-format hybrid --fp8-recipe tensorwise")
    assert hybrid.recipe.base == recipes()["fp8_hybrid"].base


def test_a_recipe_that_was_read_is_a_file_that_reads_back(tmp_path):
    recipe = read_te_quant(NEMOTRON.replace("mixer.out_proj", "linear_fc2"), "te_quant.cfg").recipe
    file = tmp_path / "mine.toml"
    file.write_text(recipe_to_toml(recipe))
    assert read_recipe_file(file).recipe == recipe
    assert '"*" = "mxfp8-rceil"' in file.read_text()
    assert 'x = "nvfp4"' in file.read_text()


def test_the_first_matcher_holds_there_and_the_last_rule_here():
    text = NEMOTRON.replace('"*mixer.out_proj"', '"*"')
    recipe = read_te_quant(text, "te_quant.cfg").recipe
    assert [rule.where() for rule in recipe.layers] == ["attention+mlp", "qkv+attention-out"]
    check_same(text, recipe)


@pytest.mark.parametrize(
    ("matchers", "rules"),
    [
        (["mxfp8 *.self_attention.linear_*", "mxfp8 *.layers.2.*linear_qkv", "mxfp8 *.linear_fc2"], ["attention+down"]),
        (
            ["mxfp8 *.linear_qkv", "bf16 *.layers.2.*linear_qkv", "mxfp8 *.linear_fc2", "bf16 *.linear_fc1"],
            ["up", "qkv+down"],
        ),
        (["bf16 *.layers.2.*linear_fc1", "bf16 *.layers.2.*linear_proj"], ["attention-out+up, blocks 2"]),
        (["bf16 *.layers.[13].*linear_fc1", "bf16 *.layers.2.*linear_fc1"], ["up, blocks 1:4"]),
    ],
    ids=["between neighbours", "of another config between them", "kinds", "blocks"],
)
def test_what_is_left_out_does_not_keep_rules_apart_so_that_a_second_reading_finds_the_same(matchers, rules):
    table = "".join(
        f"  m{number}: {{config: {config}, type: glob, pattern: '{pattern}', enabled: true}}\n"
        for number, (config, pattern) in enumerate(map(str.split, matchers))
    )
    text = NEMOTRON[: NEMOTRON.index("matchers:")] + "matchers:\n" + table
    back = read_te_quant(text, "te_quant.cfg").recipe
    assert [rule.where() for rule in back.layers] == rules
    check_same(text, back)
    assert read_te_quant(written(back), "mine.cfg").recipe.config_id == back.config_id


def test_a_matcher_whose_layers_earlier_ones_hold_is_no_rule():
    text = NEMOTRON.replace("*mixer.out_proj", "*.linear_qkv")
    assert [rule.label() for rule in read_te_quant(text, "te_quant.cfg").recipe.layers] == ["qkv+attention-out: bf16"]
    check_same(text, read_te_quant(text, "te_quant.cfg").recipe)


def test_layers_in_bf16_blocks_stay_so_unless_they_say_otherwise():
    text = NEMOTRON.replace("mixer.out_proj", "linear_fc2")
    arguments = f"{ARGUMENTS} --num-layers-at-end-in-bf16 2"
    check_same(text, read_te_quant(text, "mine.cfg", arguments).recipe, last=2)
    over = text.replace("recipe: mxfp8}", "recipe: mxfp8, override_nonquantized_autocast: true}")
    check_same(over, read_te_quant(over, "mine.cfg", arguments).recipe, last=2)
    both = over + "  up: {config: nvfp4, type: glob, pattern: '*.linear_fc1', enabled: true}\n"
    both = both.replace(
        "matchers:",
        "  nvfp4: {transformer_engine_config_type: TEQuantizationParams, "
        "training_recipe: {fp4_quantization_recipe: nvfp4}}\nmatchers:",
    )
    with pytest.raises(ConfigError, match="override_nonquantized_autocast in all configs that quantize or in none"):
        read_te_quant(both, "mine.cfg", arguments)
    plain = read_te_quant(both, "mine.cfg", "")
    assert "up has no effect" in " ".join(plain.notes)
    check_same(both, plain.recipe, "bf16")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            "recipe: mxfp8}",
            "recipe: delayed}",
            "configs.mxfp8.training_recipe: found {'fp8_quantization_recipe': 'delayed'}",
        ),
        ("recipe: mxfp8}", "recipe: blockwise}", "accepted: nothing; fp4_quantization_recipe nvfp4"),
        ("recipe: mxfp8}", "recipe: mxfp8, override_quantized_autocast: false}", "it would have no effect"),
        ("TEQuantizationParams, training_recipe: {}", "QLinearParams, training_recipe: {}", "found 'QLinearParams'"),
        ("training_recipe: {}", "training: {}", "configs.bf16"),
        ('type: glob, pattern: "*.linear_qkv"', "type: regex, pattern: x", "matchers.attn_qkv.type: found 'regex'"),
        (
            'config: bf16, type: glob, pattern: "*.linear_qkv"',
            "config: fp6, type: glob, pattern: x",
            "found 'fp6'; accepted: mxfp8, bf16",
        ),
        (
            "*.linear_qkv",
            "*.linear_qvk",
            "matchers.attn_qkv.pattern: found '*.linear_qvk'; accepted: a glob on decoder.layers.N",
        ),
        ("*.linear_qkv", "*.experts.*fc1", "a glob that means whole kinds"),
        ("matchers:", "matchers: 3\nothers:", "matchers: found nothing"),
        ("configs:", "configs: [", "accepted: YAML with configs and matchers"),
    ],
)
def test_what_cannot_be_a_recipe_is_an_error_that_names_the_place(old, new, error):
    assert old in NEMOTRON
    with pytest.raises(ConfigError) as raised:
        read_te_quant(NEMOTRON.replace(old, new, 1), "te_quant.cfg")
    assert error in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            "--fp4-format e2m1",
            "--arguments: found '--fp4-format e2m1'; accepted: none; --fp4-format e2m1 --fp4-recipe nvfp4",
        ),
        ("--num-layers 4", "--arguments: found '--num-layers'; accepted: --fp4-format"),
        ("--fp4-format", "each with a value"),
        ("--num-layers-at-end-in-bf16=two", "--arguments: --num-layers-at-end-in-bf16: found 'two'"),
    ],
)
def test_arguments_that_mean_nothing_here_are_refused(arguments, error):
    with pytest.raises(ConfigError) as raised:
        read_te_quant(NEMOTRON, "te_quant.cfg", arguments)
    assert error in str(raised.value)


def test_megatrons_own_numbers_of_blocks_are_one_at_either_end():
    arguments = "--fp4-format=e2m1 --fp4-recipe=nvfp4 --first-last-layers-bf16"
    precise = read_te_quant("configs: {}\nmatchers: {}", "te_quant.cfg", arguments).recipe.precise
    assert (precise.first, precise.last) == (1, 1)


def test_what_is_off_or_of_no_use_in_a_recipe_is_noted():
    text = NEMOTRON.replace('"*.linear_qkv", enabled: true', '"*.linear_qkv", enabled: false')
    text = text.replace("recipe: mxfp8}", "recipe: mxfp8, fp8_param: true}, evaluation_recipe: {}")
    notes = read_te_quant(text, "te_quant.cfg").notes
    assert "attn_qkv is not enabled" in notes
    assert "configs.mxfp8.fp8_param is left out: a recipe says what training computes" in notes
    assert "configs.mxfp8.evaluation_recipe is left out: a recipe says what training computes" in notes


def test_every_config_is_one_of_transformer_engines_recipes():
    assert recipes().keys() == CONFIGS.keys()
    assert len({recipe.config_id for recipe in recipes().values()}) == len(CONFIGS)
    assert recipes()["nvfp4"].config_id == Recipe.named("te-nvfp4").config_id


@pytest.mark.parametrize("word", PATTERNS)
def test_a_pattern_fits_the_layers_that_have_its_word_and_no_others(word):
    for (leaf, block), place in places(2).items():
        if leaf in NAMES:
            assert fnmatchcase(NAMES[leaf].format(block), PATTERNS[word]) == (word in place.words)


def test_fp8_in_another_order_of_operations_is_written_with_a_note():
    older = export(ruled("te-nvfp4", {"kind": "mlp", "*": "fp8", "*.rotation": "none"}), "te_quant")
    exact = export(ruled("te-nvfp4", {"kind": "mlp", "*": "fp8-current", "*.rotation": "none"}), "te_quant")
    assert older.cannot == exact.cannot == []
    assert older.settings.text.replace("fp8,", "fp8-current,") == exact.settings.text
    assert set(older.settings.notes) - set(exact.settings.notes) == {OLDER}


def test_a_rule_in_some_blocks_is_a_glob_for_each():
    text = written(ruled("te-nvfp4", {"kind": "up", "last": 2, "*": "bf16"}))
    patterns = [of["pattern"] for of in yaml.safe_load(text)["matchers"].values()]
    assert patterns == ["*.layers.6.*linear_fc1", "*.layers.7.*linear_fc1"]
