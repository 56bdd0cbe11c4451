"""Rules for layers in other libraries: what is printed gives every layer the recipe that it has here, or says no."""

import math
from fnmatch import fnmatchcase

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4dse.dse import QUANTIZERS, ConfigError, Hadamard, Quantizer, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.export import export
from fp4dse.dse.export.listed import of_layer
from fp4dse.dse.export.modelopt import FORMATS
from fp4dse.dse.export.names import GLOBS, places, words_of
from fp4dse.dse.layers.place import WORDS
from fp4dse.dse.scale import TensorScale
from fp4dse.dse.stages import Dgrad, Fprop, Wgrad
from tests.dse.export import stubs

BLOCKS = 8
NAMES = {
    "embedding": ["model.embed_tokens"],
    "head": ["lm_head", "output_layer"],
    "router": ["model.layers.{}.mlp.gate", "decoder.layers.{}.mlp.router"],
    "qkv": [
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.v_proj",
        "decoder.layers.{}.self_attention.linear_qkv",
        "layers.{}.self_attention.layernorm_linear_qkv",
    ],
    "attention-out": [
        "model.layers.{}.self_attn.o_proj",
        "decoder.layers.{}.self_attention.linear_proj",
        "layers.{}.self_attention.proj",
    ],
    "up": ["model.layers.{}.mlp.gate_proj", "decoder.layers.{}.mlp.linear_fc1", "layers.{}.layernorm_mlp.fc1"],
    "down": ["model.layers.{}.mlp.down_proj", "decoder.layers.{}.mlp.linear_fc2", "layers.{}.layernorm_mlp.fc2"],
    "expert up": ["model.layers.{}.mlp.experts.3.up_proj", "decoder.layers.{}.mlp.experts.linear_fc1"],
    "expert down": ["model.layers.{}.mlp.experts.12.down_proj", "decoder.layers.{}.mlp.experts.linear_fc2"],
}
"""Leaf -> names that Hugging Face, Megatron and Transformer Engine give it."""

FORMATS_OF_RULES = [
    {"recipe": "te-nvfp4"},
    {"recipe": "bf16"},
    {"*": "mxfp8-rceil", "*.rotation": "none", "*.source": "master"},
    {"*": "fp8-current", "*.g": "fp8-e5m2-current", "*.rotation": "none"},
    {"wgrad": "bf16"},
    {"forward": "bf16"},
]


def ruled(base, *rules, **more):
    data = {"fprop": {}, **recipe_to_dict(Recipe.named(base)), **more}
    rules = [{path: value for path, value in rule.items() if path != "*.source"} for rule in rules]
    return recipe_from_dict({**data, "layers": rules})


def expected(recipe):
    """(leaf, block) -> the recipe of a layer."""
    return {key: of_layer(recipe.at(place)) for key, place in places(BLOCKS).items()}


def slots_of(made):
    """A stub's quantizer as (rows, columns, source, rotation of the columns)."""
    if isinstance(made, stubs.HybridQuantizer):
        rows, columns = slots_of(made.rows), slots_of(made.columns)
        return rows[0], columns[1], "forward" if made.source == "rowwise_dequantized" else "master", columns[3]
    turn = None
    if isinstance(made, stubs.IdentityQuantizer):
        q = Quantizer(element="bf16")
    elif isinstance(made, stubs.MXFP8Quantizer):
        q = QUANTIZERS["mxfp8-rceil" if made.dtype == "e4m3" else "mxfp8-e5m2-rceil"]
    elif isinstance(made, stubs.Float8CurrentScalingQuantizer):
        q = QUANTIZERS["fp8-current" if made.dtype == "e4m3" else "fp8-e5m2-current"]
    else:
        q = msgspec.structs.replace(
            QUANTIZERS["nvfp4-2d" if made.with_2d_quantization else "nvfp4"],
            rounding=QUANTIZERS["luq"].rounding if made.stochastic_rounding else QUANTIZERS["nvfp4"].rounding,
            adapt=f"4over6-{made.nvfp4_4over6_err_mode.lower()}" if made.nvfp4_use_4over6 else "none",
            tensor_scale=TensorScale(
                target=float(made.nvfp4_e4m3_max), over="row" if made.row_scaled_nvfp4 else "tensor"
            ),
        )
        assert made.with_rht == made.with_post_rht_amax
        turn = Hadamard(size=16, signs="fixed" if made.with_random_sign_mask else "none") if made.with_rht else None
    return q, q, "master", turn


def te_recipe(namespace, name, module_type="linear"):
    """The recipe of a layer of this name under the printed factory."""
    factory = namespace["recipe"].qfactory
    x, w, g = (
        slots_of(factory(stubs.QuantizerRole(module_type, tensor, name)))
        for tensor in ("input", "weight", "grad_output")
    )
    assert x[3] == g[3]
    assert w[3] is None
    made = Recipe(
        Fprop(x=x[0], w=w[0]), Dgrad(g=g[0], w=w[1], source=w[2]), Wgrad(g=g[1], x=x[1], source=x[2], rotation=g[3])
    )
    return of_layer(made)


def run_te(text, monkeypatch):
    stubs.install(monkeypatch)
    namespace: dict = {}
    exec(compile(text, "printed", "exec"), namespace)
    return namespace


def check_te(recipe, monkeypatch, blocks=BLOCKS):
    namespace = run_te(export(recipe, "te", blocks).settings.text, monkeypatch)
    for (leaf, block), of in expected(recipe).items():
        for name in NAMES[leaf]:
            assert te_recipe(namespace, name.format(block)) == of, name


RULES = st.lists(
    st.tuples(
        st.fixed_dictionaries(
            {},
            optional={
                "kind": st.lists(st.sampled_from(sorted(GLOBS)), min_size=1, max_size=2),
                "last": st.sampled_from([1, 0.25]),
                "blocks": st.sampled_from(["2:4", "3", ":", "-2:"]),
            },
        ).filter(bool),
        st.sampled_from(FORMATS_OF_RULES),
    ),
    max_size=3,
)
PRECISE = st.fixed_dictionaries({}, optional={"attention": st.just(True), "first": st.just(2), "last": st.just(0.25)})


@given(RULES, PRECISE, st.sampled_from(["te-nvfp4", "bf16", "te-mxfp8-nvfp4"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
def test_te_gives_every_layer_its_recipe_or_says_which_rule_it_cannot(monkeypatch, rules, precise, base):
    try:
        recipe = ruled(base, *({**where, **what} for where, what in rules), precise=precise)
    except ConfigError:
        return  # contradicting
    done = export(recipe, "te", BLOCKS)
    if not done.cannot and done.settings.text.startswith('"""'):
        check_te(recipe, monkeypatch)
    for line in done.cannot:
        assert line.startswith("layers["), line


@pytest.mark.parametrize(
    "name", ["nemotron-3-super", "rl-row-scaled", "te-mxfp8-nvfp4", "te-nvfp4-1d", "te-nvfp4-mxfp8"]
)
def test_recipes_made_of_quantizers_run_with_transformer_engines_signatures(name, monkeypatch):
    done = export(Recipe.named(name), "te", BLOCKS)
    assert not done.cannot
    assert "2.20" in done.settings.notes[0]
    check_te(Recipe.named(name), monkeypatch)


def test_a_partial_rule_becomes_as_many_entries_as_its_layers_differ(monkeypatch):
    recipe = ruled("te-nvfp4", {"kind": "mlp", "wgrad": "bf16"}, precise={"last": 2})
    assert not export(recipe, "te", BLOCKS).cannot
    check_te(recipe, monkeypatch)
    mixed = ruled(
        "te-nvfp4", {"kind": "expert", "*": "mxfp8-rceil", "*.rotation": "none"}, {"kind": "up", "dgrad": "bf16"}
    )
    [line] = export(mixed, "te", BLOCKS).cannot
    assert line.startswith("layers[1] up: dgrad bf16: what it leaves differs among its layers")


def test_a_layer_without_a_name_is_refused_where_names_matter(monkeypatch):
    namespace = run_te(export(Recipe.named("nemotron-3-super"), "te", 88).settings.text, monkeypatch)
    with pytest.raises(ValueError, match="name_layers"):
        te_recipe(namespace, "")
    assert isinstance(namespace["qfactory"](None), stubs.IdentityQuantizer)

    class Layer:
        name = None

        def get_quantizer_roles(self):
            """As Transformer Engine's modules have it."""

    class Model:
        layer = Layer()

        def named_modules(self):
            return [("", self), ("layers.0.mlp.fc1", self.layer)]

    namespace["name_layers"](Model())
    assert Model.layer.name == "layers.0.mlp.fc1"


def test_rules_about_the_end_need_the_number_of_blocks_and_others_do_not():
    end = ruled("te-nvfp4", {"last": 2, "*": "bf16"}, {"kind": "up", "blocks": "1:3", "recipe": "bf16"})
    for target in ("te", "torchao"):
        [line] = export(end, target).cannot
        assert line == "precise last 2: of how many blocks? --blocks says so"
    assert not export(end, "te", 4).cannot
    last = ruled("te-nvfp4", {"last": 1, "*": "mxfp8-rceil", "*.rotation": "none"})
    assert export(last, "te_quant").cannot[0].endswith("of how many blocks? --blocks says so")


@pytest.mark.parametrize(
    ("rule", "target", "line"),
    [
        ({"kind": "conv", "*": "bf16"}, "te", "layers[0] conv: bf16: layers of kind conv have no names"),
        ({"kind": "mlp", "*": "mxfp4"}, "te", "fprop.x mxfp4 (no quantizer of that kind)"),
        (
            {"kind": "mlp", "fprop": "bf16", "dgrad.w": "fp8"},
            "te",
            "dgrad of nvfp4 SR and fp8 (it has products of one format)",
        ),
        ({"kind": "mlp", "wgrad.rotation": "rht16"}, "te", "wgrad rotation rht16 (it has fixed16, hadamard16)"),
        ({"kind": "mlp", "estimator.w": {"element": "dge"}}, "te", "estimator"),
        ({"kind": "mlp", "*": "mxfp4"}, "torchao", "layers[0] mlp: mxfp4: "),
        ({"name": "block0.*", "*": "bf16"}, "te_quant", "layers[0] block0.*: bf16: a name of layers"),
        ({"kind": "head", "recipe": "te-nvfp4"}, "te_quant", "kind head (Megatron does not quantize it)"),
        ({"kind": "mlp", "*": "fp8"}, "modelopt", "backward element e4m3 (it has bf16)"),
    ],
)
def test_each_rule_that_cannot_be_said_is_listed_with_what_there_is(rule, target, line):
    done = export(ruled("te-nvfp4", rule), target, BLOCKS)
    assert any(line in one for one in done.cannot), done.cannot


def test_what_is_said_of_a_recipe_beside_its_layers_is_listed_too():
    recipe = ruled("te-nvfp4", {"kind": "mlp", "*": "bf16"}, training={"clip": 0.5}, finish={"share": 0.1})
    assert {line.split()[0] for line in export(recipe, "te", BLOCKS).cannot} == {"finish", "clip"}


def torchao_formats(recipe):
    """name -> the settings under which torchao converts a layer."""
    text = export(recipe, "torchao", BLOCKS).settings.text
    namespace: dict = {}
    exec(compile(text, "printed", "exec"), namespace)
    return namespace["setting"], text


def test_torchao_converts_each_layer_by_its_name():
    recipe = ruled(
        "te-nvfp4", {"kind": "mlp", "*": "mxfp8-rceil", "*.rotation": "none"}, {"last": 1, "kind": "down", "*": "bf16"}
    )
    assert not export(recipe, "torchao", BLOCKS).cannot
    setting, text = torchao_formats(recipe)
    bodies = {
        name: text.split(f"def convert_{name}(")[1].split("\ndef ")[0] for name in ("format0", "format1", "format2")
    }
    known = {"pass  #": Recipe.named("bf16"), "MXFP8TrainingOpConfig()": None, "nvfp4_linear": Recipe.named("te-nvfp4")}
    mxfp8 = Recipe.uniform(QUANTIZERS["mxfp8-rceil"])
    for (leaf, block), of in expected(recipe).items():
        for name in NAMES[leaf]:
            body = bodies[setting(name.format(block))]
            [found] = [words for words in known if words in body]
            assert of_layer(known[found] or mxfp8) == of, name


def test_torchao_filters_modules(monkeypatch):
    pytest.importorskip("torchao", "0.18")
    import torch

    recipe = ruled("bf16", {"kind": "up", "*": "mxfp8-rceil"})
    namespace: dict = {}
    exec(export(recipe, "torchao", BLOCKS).settings.text, namespace)
    converted = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.ModuleDict({"up_proj": torch.nn.Linear(32, 32)}) for _ in range(2)
            )
            self.lm_head = torch.nn.Linear(32, 32)

    monkeypatch.setattr(
        "torchao.quantization.quantize_",
        lambda model, config, filter_fn: converted.extend(n for n, m in model.named_modules() if filter_fn(m, n)),
    )
    namespace["convert"](Model())
    assert converted == ["layers.0.up_proj", "layers.1.up_proj"]


QAT = {"source": "forward"}


def modelopt_recipe(data, name):
    """The recipe of a layer: of the entries whose glob fits a quantizer, the last holds."""
    found = {}
    for which in ("weight_quantizer", "input_quantizer"):
        entries = [
            one for one in data["quantize"]["quant_cfg"] if fnmatchcase(f"{name}.{which}", one["quantizer_name"])
        ]
        last = entries[-1]
        formats = {str(yaml.safe_load("{" + text + "}")): of for of, text in FORMATS.items()}
        found[which] = QUANTIZERS[formats[str(last["cfg"])]] if last["enable"] else Quantizer(element="bf16")
    bf16 = Quantizer(element="bf16")
    return of_layer(
        Recipe(
            Fprop(x=found["input_quantizer"], w=found["weight_quantizer"]),
            Dgrad(g=bf16, w=bf16, source="forward"),
            Wgrad(g=bf16, x=bf16, source="forward"),
        )
    )


def test_modelopt_quantizes_each_layer_by_its_name():
    base = {
        "fprop": {"x": "nvfp4", "w": "nvfp4"},
        "dgrad": {"g": "bf16", "w": "bf16", **QAT},
        "wgrad": {"g": "bf16", "x": "bf16", **QAT},
        "precise": {"attention": True, "last": 2},
        "layers": [
            {"kind": "mlp", "fprop": "mxfp8-rceil", "backward": "bf16", "backward.source": "forward"},
            {"kind": "down", "blocks": "1", "fprop.x": "bf16"},
        ],
    }
    recipe = recipe_from_dict(base)
    done = export(recipe, "modelopt", BLOCKS)
    assert not done.cannot
    data = yaml.safe_load(done.settings.text)
    assert data["metadata"]["recipe_type"] == "ptq"
    for (leaf, block), of in expected(recipe).items():
        for name in NAMES[leaf]:
            assert modelopt_recipe(data, name.format(block)) == of, name


def test_words_mean_the_leaves_that_places_have_and_no_others():
    for word in GLOBS:
        leaves = [leaf for leaf, place in ((key[0], place) for key, place in places(1).items()) if word in place.words]
        assert words_of(leaves) == (word,) or math.prod(len(words_of([leaf]) or ()) for leaf in leaves)
    assert set(GLOBS) <= set(WORDS)
    assert words_of(["expert up"]) is None


@pytest.mark.parametrize("leaf", NAMES)
def test_globs_tell_layers_apart_in_all_three_libraries(leaf):
    """A name has the words of its place, and no other that has globs."""
    [place] = {place for (found, block), place in places(1).items() if found == leaf}
    for name in NAMES[leaf]:
        words = {word for word, globs in GLOBS.items() if any(fnmatchcase(name.format(0), glob) for glob in globs)}
        assert words == place.words & GLOBS.keys(), name


def test_blocks_are_a_number_of_them():
    with pytest.raises(ConfigError, match="--blocks: found 0; accepted: a number from 1 on"):
        export(Recipe.named("nvfp4"), "te", 0)
