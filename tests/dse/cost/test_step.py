"""The modelled step: what makes it longer or shorter, and by which part of it."""

import itertools
import math
from collections import Counter

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fp4dse.dse import ConfigError, Quantizer, Recipe, recipe_files
from fp4dse.dse.attention import Attention, Scores
from fp4dse.dse.channels import Corrected, Held
from fp4dse.dse.cost import (
    ENDS,
    Cost,
    CostTarget,
    chip_names,
    load_chip,
    load_model,
    model_names,
    overhead,
    report,
    scenarios,
    step_cost,
)
from fp4dse.dse.cost.at_place import recipe_at
from fp4dse.dse.cost.report import time_to_quality, tokens_to_spare
from fp4dse.dse.cost.step import CORE, OVERHEAD_OF, PARTS, REST, UNMODELLED, estimator_work, layers_by_recipe
from fp4dse.dse.cost.units import NOT_TAKEN, notes, product_unit
from fp4dse.dse.cost.work import Work
from fp4dse.dse.estimator import RELAXATION_NAMES, Estimator, Through
from fp4dse.dse.exactness import fp8_formats
from fp4dse.dse.layers.precision import Finish, Precise
from fp4dse.dse.layers.rule import QUANTIZERS, LayerRule
from fp4dse.dse.outliers import OUTLIER_NAMES, LowRank
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.rules import faults
from fp4dse.dse.scale import E8M0, FP32, TENSOR_SCALE_NAMES
from fp4dse.dse.stages import Hadamard
from tests.each import each

B200, H200, GENERIC = (load_chip(name) for name in ("b200", "h200", "generic"))
LLAMA, MLP, VIT = (load_model(name) for name in ("llama-1b", "mlp", "vit-b"))
NOWHERE = Precise(embedding=False, head=False, router=False)
ULP = 1 + 1e-12
"""What is free under a pass that waits for memory is added in another order, and may make the sum less by an ulp."""


@st.composite
def recipes(draw) -> Recipe:
    """Valid recipes: three stages and an estimator, each from any of the shipped ones."""
    names = st.sampled_from(list(recipe_files()))
    parts = {part: getattr(Recipe.named(draw(names)), part) for part in ("fprop", "dgrad", "wgrad", "estimator")}
    recipe = Recipe(**parts)
    assume(not list(faults(recipe)))
    return recipe


def of_layers(cost: Cost) -> float:
    """Seconds that layers with weights take."""
    return cost.total - sum(cost.seconds[name] for name in (CORE, REST, UNMODELLED))


def changed(name: str, stage: str, **fields) -> Recipe:
    recipe = Recipe.named(name)
    return msgspec.structs.replace(recipe, **{stage: msgspec.structs.replace(getattr(recipe, stage), **fields)})


@each("chip", chip_names())
@each("model", model_names())
def test_bf16_is_one(model, chip):
    assert overhead(Recipe.named("bf16"), model, chip) == 1


@each("chip", chip_names())
@each("name", recipe_files())
def test_every_shipped_recipe_has_a_finite_price_on_every_chip(name, chip):
    assert 0.3 < overhead(Recipe.named(name), chip=chip) < 100


@given(recipes(), st.sampled_from(chip_names()))
@settings(max_examples=60)
def test_the_price_is_that_of_the_canonical_recipe_and_the_sum_of_its_parts(recipe, chip):
    assert overhead(recipe, chip=chip) == overhead(recipe.canonical(), chip=chip)
    cost = step_cost(recipe, LLAMA, load_chip(chip))
    bf16 = step_cost(Recipe.named("bf16"), LLAMA, load_chip(chip))
    assert math.isclose(cost.total / bf16.total, overhead(recipe, "llama-1b", chip))
    assert cost.seconds[UNMODELLED] == bf16.seconds[UNMODELLED]
    assert tuple(cost.seconds) == PARTS
    assert min(cost.seconds.values()) >= 0
    assert cost.seconds["rest"] == bf16.seconds["rest"]


def test_a_learned_clip_saves_the_maximum_and_costs_a_pass_over_the_gradient():
    pact = Recipe.named("pact")
    x = msgspec.structs.replace(pact.fprop.x, outliers=None)
    without = msgspec.structs.replace(pact, fprop=msgspec.structs.replace(pact.fprop, x=x))
    one, other = (step_cost(of, LLAMA, B200).seconds for of in (pact, without))
    assert one["tensor maximum"] < other["tensor maximum"]
    assert one["estimator"] > other["estimator"] == 0


@given(recipes(), st.sampled_from(["quantize", "outliers", "rotation", "estimator"]), st.data())
@settings(max_examples=60)
def test_a_technique_more_never_makes_a_step_faster(recipe, kind, data):
    before = overhead(recipe)
    if kind == "estimator":
        element = RELAXATION_NAMES[data.draw(st.sampled_from(list(RELAXATION_NAMES)))]
        plain = msgspec.structs.replace(recipe, estimator=Estimator())
        more = msgspec.structs.replace(recipe, estimator=Estimator(x=Through(element=element)))
        assert overhead(plain) <= overhead(more) * ULP
    elif kind == "rotation":
        plain = msgspec.structs.replace(recipe, wgrad=msgspec.structs.replace(recipe.wgrad, rotation=None))
        turned = msgspec.structs.replace(recipe.wgrad, rotation=Hadamard(size=64))
        assert overhead(plain) <= overhead(msgspec.structs.replace(recipe, wgrad=turned)) * ULP
    elif not recipe.wgrad.g.is_plain:
        change = {"rounding": Stochastic()} if kind == "quantize" else {"outliers": OUTLIER_NAMES["residual"]}
        plainest = {"rounding": Quantizer().rounding} if kind == "quantize" else {"outliers": None}
        less = _gradient(recipe, plainest)
        assert overhead(less) <= overhead(_gradient(recipe, change)) * ULP
    assert before == overhead(recipe)


def _gradient(recipe: Recipe, change: dict) -> Recipe:
    g = msgspec.structs.replace(recipe.wgrad.g, **change)
    return msgspec.structs.replace(recipe, wgrad=msgspec.structs.replace(recipe.wgrad, g=g))


def test_each_technique_of_nvidias_recipe_shows_in_its_own_part():
    names = ("mxfp4", "nvfp4", "nvfp4-sr", "nvfp4-sr-rht")
    parts = ("quantize", "tensor maximum", "stochastic rounding", "rotation")
    costs = [step_cost(Recipe.named(name), LLAMA, B200).seconds for name in names]
    for i, cost in enumerate(costs):
        assert [cost[part] > 0 for part in parts] == [j <= i for j in range(len(parts))]


def test_held_maxima_are_nearly_free():
    held = TENSOR_SCALE_NAMES["held"]
    q = msgspec.structs.replace(Quantizer.named("nvfp4"), tensor_scale=held)
    current, plain = Recipe.named("nvfp4"), Recipe.uniform(Quantizer.named("e4m3-b16"))
    assert overhead(Recipe.uniform(q)) - overhead(plain) < (overhead(current) - overhead(plain)) / 40


def test_a_gradient_passes_through_a_rotated_operand_rotated():
    plain = msgspec.structs.replace(Recipe.named("mxfp4"), estimator=Recipe.named("quartet").estimator)
    fprop = msgspec.structs.replace(plain.fprop, rotation=Hadamard(size=64))
    through = plain.estimator.x
    assert estimator_work("x", fprop, through) == estimator_work("x", plain.fprop, through) + Work(vector=2 * 9)


def test_a_product_takes_the_slower_unit_of_its_operands():
    fp4, fp8, bf16 = (Quantizer.named(name) for name in ("nvfp4", "fp8", "bf16"))
    assert product_unit(fp4, fp4, B200) == "fp4"
    assert product_unit(fp4, fp8, B200) == "fp8"
    assert product_unit(fp4, bf16, B200) == "bf16"
    assert product_unit(fp4, fp4, H200) == "bf16"
    assert product_unit(Quantizer.named("if4"), fp4, H200) == "tf32"
    assert product_unit(fp8, fp8, H200) == "fp8"


def test_a_residual_doubles_the_products_it_is_in():
    q = msgspec.structs.replace(Quantizer.named("mxfp4"), outliers=OUTLIER_NAMES["residual"])
    plain = step_cost(Recipe.named("mxfp4"), VIT, B200).seconds
    one = step_cost(changed("mxfp4", "fprop", x=q), VIT, B200).seconds
    assert one["outliers"] > plain["products"] / 3 * 0.9
    assert one["products"] == plain["products"]
    two = step_cost(changed("mxfp4", "fprop", x=q, w=q), VIT, B200).seconds
    assert two["outliers"] > 2.5 * one["outliers"]


def test_a_mean_is_a_pass_and_products_with_a_vector():
    """Little beside the second large product and encoding of a residual, and twice for two operands."""
    mean, residual = (
        msgspec.structs.replace(Quantizer.named("nvfp4"), outliers=OUTLIER_NAMES[name]) for name in ("mean", "residual")
    )
    plain = step_cost(Recipe.named("nvfp4"), LLAMA, B200).seconds
    one, other = (step_cost(changed("nvfp4", "fprop", x=q), LLAMA, B200).seconds for q in (mean, residual))
    assert one["products"] == plain["products"]
    assert 0 < one["outliers"] < 0.3 * other["outliers"]
    both = step_cost(changed("nvfp4", "wgrad", x=mean, g=mean), LLAMA, B200).seconds
    assert both["outliers"] > 1.5 * one["outliers"]


def test_components_cost_products_with_few_columns():
    """More with each iteration and component, and for an operand of the weight's gradient, too."""
    plain = step_cost(Recipe.named("nvfp4"), LLAMA, B200).seconds
    costs = {}
    for name, found in {"1": LowRank(iterations=1), "2": LowRank(), "64": LowRank(rank=64)}.items():
        q = msgspec.structs.replace(Quantizer.named("nvfp4"), outliers=found)
        costs[name] = step_cost(changed("nvfp4", "fprop", x=q), LLAMA, B200).seconds
        assert costs[name]["products"] == plain["products"]
    assert 0 < costs["1"]["outliers"] < costs["2"]["outliers"] < costs["64"]["outliers"]
    assert costs["2"]["outliers"] < plain["products"]
    both = step_cost(changed("nvfp4", "wgrad", x=q, g=q), LLAMA, B200).seconds
    assert both["outliers"] > 1.5 * costs["64"]["outliers"]


def test_factors_within_a_product_are_work_of_the_vector_units():
    macro = step_cost(Recipe.uniform(Quantizer.named("mbs-mxfp4")), LLAMA, B200).seconds
    assert macro["scales"] > 0.5 * macro["products"]


def test_chips_without_fp4_units_emulate_and_say_so():
    for name in ("h100", "h200"):
        assert overhead(Recipe.named("nvfp4"), chip=name) > 1
        [line] = notes(Recipe.named("nvfp4"), load_chip(name))
        assert line == "all slots: no FP4 unit; emulated, decoded exactly to BF16"
    assert notes(Recipe.named("ufp4"), H200) == [
        "all slots: no FP4 unit; emulated, decoded with one rounding to FP32"  # an FP32 scale for every 16
    ]
    assert notes(MXFP8, H200) == ["all slots: no FP8 unit that scales blocks of 32; emulated, decoded exactly to BF16"]


def uniform(**fields) -> Recipe:
    return Recipe.uniform(Quantizer(**fields))


MXFP8 = uniform(element="e4m3", block=32, scale=E8M0())
FP8_128 = uniform(element="e4m3", block=128, scale=FP32())
FP8_ROWS = uniform(element="e4m3", block="row", scale=FP32())


@pytest.mark.parametrize("chip", [load_chip("h100"), H200], ids=["h100", "h200"])
@pytest.mark.parametrize(
    ("recipe", "unit"),
    [
        (MXFP8, "bf16"),
        (uniform(element="e5m2", block=32, scale=E8M0()), "bf16"),
        (FP8_128, "fp8"),
        (uniform(element="e4m3", block=256, scale=E8M0()), "fp8"),
        (uniform(element="e4m3", block=64, scale=FP32()), "fp32"),
        (FP8_ROWS, "fp8"),
        (Recipe.uniform(Quantizer.named("fp8-e5m2")), "fp8"),
        (Recipe.uniform(Quantizer.named("fp4-row")), "bf16"),
        (Recipe.uniform(Quantizer.named("luq")), "bf16"),
        (uniform(block=128, scale=FP32()), "bf16"),
        (uniform(block=128, scale=FP32(), scaling="split"), "fp32"),  # two scales to a block
        (Recipe.named("tetrajet2"), "bf16"),  # a factor for 128 elements above E4M3 scales
        (Recipe.named("mxfp4"), "bf16"),
        (Recipe.named("ufp4"), "fp32"),
    ],
    ids=lambda value: value.label() if isinstance(value, Recipe) else "",
)
def test_hopper_scales_rows_tensors_and_128_after_the_product_and_decodes_smaller_blocks(recipe, unit, chip):
    assert product_unit(recipe.fprop.x.canonical(), recipe.fprop.w.canonical(), chip) == unit


def test_on_hopper_fp8_by_128_costs_as_fp8_does_and_mxfp8_as_bf16_products_of_decoded_operands():
    everywhere = [
        msgspec.structs.replace(r, precise=NOWHERE) for r in (FP8_ROWS, FP8_128, MXFP8, Recipe.named("mxfp4"))
    ]
    rows, blocks, mx, mxfp4 = (step_cost(r, LLAMA, H200).seconds for r in everywhere)
    bf16 = step_cost(Recipe.named("bf16"), LLAMA, H200).seconds["products"]
    assert blocks["products"] < 1.02 * rows["products"] < 0.7 * bf16
    assert blocks["scales"] == 0 == rows["scales"]  # the vector units are done before the product is
    assert mx["products"] == mxfp4["products"] == pytest.approx(bf16)
    slower = msgspec.structs.replace(H200, vector=msgspec.structs.replace(H200.vector, value=1e12))
    assert (
        step_cost(FP8_128, LLAMA, slower).seconds["scales"] > 0 == step_cost(FP8_ROWS, LLAMA, slower).seconds["scales"]
    )


def test_products_on_fp8_units_are_cheaper_where_there_is_no_fp4_unit_and_nothing_elsewhere():
    exact = Recipe.named("mxfp4")
    fp8, rounded = (msgspec.structs.replace(exact, gemm=gemm) for gemm in ("fp8-exact", "bf16-rounded"))
    for chip in ("h100", "h200"):
        assert overhead(fp8, chip=chip) < 0.8 * overhead(exact, chip=chip)
        assert overhead(rounded, chip=chip) == overhead(exact, chip=chip)
        assert notes(fp8, load_chip(chip)) == ["all slots: no FP4 unit; emulated, decoded exactly to FP8"]
    for chip in ("b200", "gb200", "generic"):
        assert overhead(fp8, chip=chip) == overhead(exact, chip=chip)
    uneven = msgspec.structs.replace(Recipe.named("ufp4"), gemm="bf16-rounded")
    assert overhead(uneven, chip="h200") < 1.3 < overhead(Recipe.named("ufp4"), chip="h200")


def test_of_products_on_fp8_units_those_are_priced_that_kernels_take_there():
    """One definition, of pairs: exactness.fp8_formats. What they do not take is priced as without `fp8-exact`."""
    operands = [Quantizer.named(name).canonical() for name in OF_FEW_BITS]
    taken = {(a, b) for a in operands for b in operands if fp8_formats([a], [b])}
    assert 4 <= len(taken) < len(operands) ** 2 / 2
    for a, b in itertools.product(operands, repeat=2):
        unit = product_unit(a, b, H200, "fp8-exact")
        assert unit == ("fp8" if (a, b) in taken else product_unit(a, b, H200)), (a.label(), b.label())


def test_mxfp4_beside_fp8_with_factors_of_tiles_takes_bf16_products_with_fp8_exact_as_without():
    exact = Recipe.named("hopper-moe-fp4")
    fp8 = msgspec.structs.replace(exact, gemm="fp8-exact")
    for chip in ("h100", "h200", "gb200"):
        assert overhead(fp8, chip=chip) == overhead(exact, chip=chip)
    assert notes(fp8, H200) == [*notes(exact, H200), f"all slots: {NOT_TAKEN}"]
    assert notes(fp8, B200) == notes(exact, B200)


@pytest.mark.parametrize("channels", [Held(), Corrected()])
def test_channels_apart_leave_fp8_exact_exact(channels):
    mxfp4 = Recipe.named("mxfp4")
    exact = msgspec.structs.replace(mxfp4, fprop=msgspec.structs.replace(mxfp4.fprop, channels=channels))
    fp8 = msgspec.structs.replace(exact, gemm="fp8-exact")
    assert overhead(fp8, chip="h100") == overhead(exact, chip="h100")
    assert overhead(msgspec.structs.replace(mxfp4, gemm="fp8-exact"), chip="h100") < 0.9 * overhead(mxfp4, chip="h100")


def test_attention_cores_stay_exact_with_fp8_exact():
    mxfp4 = Quantizer.named("mxfp4")
    exact = msgspec.structs.replace(Recipe.named("mxfp4"), attention=Attention(scores=Scores(q=mxfp4, k=mxfp4)))
    fp8 = msgspec.structs.replace(exact, gemm="fp8-exact")
    assert step_cost(fp8, LLAMA, H200).seconds[CORE] == step_cost(exact, LLAMA, H200).seconds[CORE]
    assert "attention core: no FP4 unit; emulated, decoded exactly to BF16" in notes(fp8, H200)


OF_FEW_BITS = ("mxfp4", "mxfp4-2d", "mxfp8", "fp8-current", "fp8-e5m2-current", "fp8-row", "fp8-1x128", "fp8-128x128")


def test_decoded_for_fp8_units_an_operand_has_a_byte_an_element():
    fp8 = msgspec.structs.replace(Recipe.named("mxfp4"), gemm="fp8-exact")
    rows = report.operations(fp8, H200)
    assert {row["write"] for row in rows if row["technique"] == "quantize"} == {1}
    assert {row["convert"] for row in rows if row["technique"] == "quantize"} == {0.5}


@given(recipes(), st.sampled_from(["h100", "h200"]))
@settings(max_examples=60)
def test_a_choice_of_products_never_makes_hopper_slower(recipe, chip):
    rounded = msgspec.structs.replace(recipe, gemm="bf16-rounded")
    assert overhead(rounded, chip=chip) <= overhead(recipe, chip=chip) * ULP


def ruled(base: str, *rules: LayerRule, **more) -> Recipe:
    return msgspec.structs.replace(Recipe.named(base), layers=rules, **more)


def everywhere(where: dict, quantizer: str) -> LayerRule:
    """A rule that makes all operands of the layers that are meant those of another format."""
    q = Quantizer.named(quantizer)
    return LayerRule(**where, **dict.fromkeys(QUANTIZERS, q), **dict.fromkeys(ROTATIONS, "none"))


ROTATIONS = ("fprop_rotation", "dgrad_rotation", "wgrad_rotation")
RULED = {
    "attention in MXFP4": ruled("nvfp4", everywhere({"kind": ("attention",)}, "mxfp4")),
    "last blocks FP8": ruled("nvfp4-sr-rht", everywhere({"last": 4}, "fp8"), precise=Precise(last=2)),
    "head too": ruled("mxfp4", everywhere({"kind": ("head",)}, "nvfp4")),
    "by role and name": ruled(
        "mxfp4", everywhere({"kind": ("qkv",)}, "nvfp4"), everywhere({"name": "block1?.up"}, "bf16")
    ),
    "one product": ruled(
        "nvfp4", LayerRule(blocks="2:9", wgrad_g=Quantizer.named("bf16"), wgrad_x=Quantizer.named("bf16"))
    ),
    "of BF16": ruled("bf16", everywhere({"kind": ("mlp",)}, "mxfp4")),
    "with a finish": ruled("nvfp4", everywhere({"first": 3}, "fp8"), finish=Finish(share=0.2)),
}


@pytest.mark.parametrize("recipe", RULED.values(), ids=RULED)
@pytest.mark.parametrize("model", ["llama-1b", "nemotron-h-8b", "vit-b"])
def test_a_step_of_a_recipe_with_rules_is_the_sum_of_its_layers_each_as_its_own_recipe(recipe, model):
    model = load_model(model)
    expected = 0.0
    for linear in model.linears:
        for place in model.places(linear):
            alone = msgspec.structs.replace(linear, count=1, at="", kind="linear", role="")
            layer = msgspec.structs.replace(model, linears=[alone], blocks=1, pattern="")
            expected += of_layers(step_cost(msgspec.structs.replace(recipe.at(place), precise=NOWHERE), layer, B200))
    cost = step_cost(recipe, model, B200)
    assert of_layers(cost) == pytest.approx(expected)
    bf16 = step_cost(Recipe.named("bf16"), model, B200)
    assert cost.total / bf16.total == pytest.approx(overhead(recipe, model.name, "b200"))


def test_a_rule_changes_the_price_of_the_layers_that_it_means_alone():
    plain, more = Recipe.named("nvfp4"), RULED["attention in MXFP4"]
    before, after = (step_cost(r, LLAMA, B200).seconds for r in (plain, more))
    assert after["tensor maximum"] < before["tensor maximum"]
    none = ruled("nvfp4", everywhere({"name": "no such layer"}, "mxfp4"))
    assert overhead(none) == pytest.approx(overhead(plain))
    assert (
        "no such layer: llama-1b has no such layers; the rule costs nothing here"
        in report.summary(none, LLAMA, B200)["notes"]
    )


def test_layers_that_a_rule_makes_bf16_are_kept_and_those_it_quantizes_are_not():
    kept = ruled("nvfp4", everywhere({"kind": ("attention",)}, "bf16"))
    facts, rows = report.summary(kept, LLAMA, B200), report.split(kept, LLAMA, B200)
    assert facts["precise_layers"] == 2 * 24 + 1
    assert overhead(kept) == pytest.approx(
        overhead(msgspec.structs.replace(Recipe.named("nvfp4"), precise=Precise(attention=True)))
    )
    assert sum(row["us"] for row in rows) == pytest.approx(facts["step_us"])
    assert sum(row["bf16_us"] for row in rows) == pytest.approx(facts["bf16_step_us"])
    assert report.summary(RULED["head too"], LLAMA, B200)["precise_layers"] == 0


def test_notes_say_what_a_rule_brings_in():
    recipe = ruled("mxfp4", LayerRule(kind=("head",), fprop_x=Quantizer.named("hif4")))
    assert notes(recipe, B200)[0].startswith("head: fprop.x: codec hif4 is not native")


def test_a_price_asks_one_function_what_a_layer_computes_as():
    recipe = msgspec.structs.replace(Recipe.named("nvidia-nvfp4"), precise=Precise(first=2, last=1, attention=True))
    found: dict[str, int] = {}
    for linear in LLAMA.linears:
        for place in LLAMA.places(linear):
            label = recipe_at(recipe, place).label()
            found[label] = found.get(label, 0) + 1
    parts = layers_by_recipe(recipe, LLAMA)
    assert {r.label(): sum(linear.count for linear in part.linears) for r, part in parts} == found
    assert len(found) == 2


@pytest.mark.parametrize(
    ("name", "native"),
    [
        ("mxfp4", True),
        ("nvfp4", True),
        ("nvidia-nvfp4", True),
        ("mxfp4-tiles", True),
        ("zhou-mixed", True),  # one scale a row, applied to the product
        ("ue5m3-sr", False),
        ("hif4-ascend", False),
        ("luq", False),
        ("ufp4", False),
    ],
)
def test_formats_that_blackwell_does_not_take_are_named(name, native):
    assert (not notes(Recipe.named(name), B200)) == native
    assert not notes(Recipe.named(name), GENERIC)


@each("model", model_names())
@each(
    "precise",
    [Precise(), Precise(head=False), Precise(attention=True), Precise(first=1, last=0.25), Precise(last=1000)],
)
def test_a_step_is_the_sum_of_its_layers_each_in_bf16_or_quantized_as_its_place_says(model, precise):
    model, recipe = load_model(model), msgspec.structs.replace(Recipe.named("nvidia-nvfp4"), precise=precise)
    everywhere = msgspec.structs.replace(recipe, precise=NOWHERE)
    expected = 0.0
    for linear in model.linears:
        alone = msgspec.structs.replace(linear, count=1, at="", kind="linear")
        layer = msgspec.structs.replace(model, linears=[alone], blocks=1, pattern="")
        places = Counter(precise.why(place) is None for place in model.places(linear))
        for is_quantized, count in places.items():
            computed = everywhere if is_quantized else Recipe.named("bf16")
            expected += count * of_layers(step_cost(computed, layer, B200))
    assert of_layers(step_cost(recipe, model, B200)) == pytest.approx(expected)


def test_places_are_those_of_the_architecture():
    hybrid = load_model("nemotron-h-8b")
    blocks = {linear.name: [place.block for place in hybrid.places(linear)] for linear in hybrid.linears}
    assert blocks["qkv"] == blocks["attention out"] == [7, 18, 29, 40]
    assert blocks["mamba in"][:5] == [0, 2, 4, 6, 9]
    assert sorted([*blocks["mamba in"], *blocks["up"], *blocks["qkv"]]) == list(range(52))
    assert blocks["head"] == [None]
    assert [place.block for linear in MLP.linears for place in MLP.places(linear)] == [0, 1]


def test_what_a_recipe_keeps_precise_costs_as_bf16_does():
    recipe, bf16 = Recipe.named("nvfp4"), step_cost(Recipe.named("bf16"), LLAMA, B200).total
    none, half, all_ = (
        step_cost(msgspec.structs.replace(recipe, precise=Precise(last=blocks)), LLAMA, B200).total
        for blocks in (0, 12, 24)
    )
    assert half == pytest.approx((none + bf16) / 2)
    assert all_ == pytest.approx(bf16)
    without_head = msgspec.structs.replace(recipe, precise=Precise(head=False))
    assert step_cost(without_head, LLAMA, B200).total < none


def test_a_plain_recipe_keeps_nothing_precise_as_in_training():
    halves = Recipe.uniform(Quantizer.named("none"))
    kept = msgspec.structs.replace(halves, precise=Precise(first=8))
    assert overhead(kept) == overhead(halves) == overhead(kept.canonical())


@pytest.mark.parametrize(
    ("what", "stages"),
    [("forward", ["fprop"]), ("backward", ["dgrad", "wgrad"]), ("all", ["fprop", "dgrad", "wgrad"])],
)
def test_the_last_steps_count_by_their_share(what, stages):
    recipe, bf16 = Recipe.named("nvfp4-sr-rht"), Recipe.named("bf16")
    end = msgspec.structs.replace(recipe, **{stage: getattr(bf16, stage) for stage in stages})
    finished = msgspec.structs.replace(recipe, finish=Finish(share=0.25, what=what))
    assert overhead(finished) == pytest.approx(0.75 * overhead(recipe) + 0.25 * overhead(end))


def test_fine_tuning_is_priced_with_its_weights():
    recipe = Recipe.named("luq")
    plain = Recipe.named("bf16").fprop.x
    end = msgspec.structs.replace(
        recipe,
        fprop=msgspec.structs.replace(recipe.fprop, x=plain),
        dgrad=msgspec.structs.replace(recipe.dgrad, g=plain),
        wgrad=Recipe.named("bf16").wgrad,
    )
    finished = msgspec.structs.replace(recipe, finish=Finish(share=0.25, what="all-but-weights"))
    assert overhead(finished) == pytest.approx(0.75 * overhead(recipe) + 0.25 * overhead(end))


def test_launches_are_what_tiny_models_pay():
    assert overhead(Recipe.named("mxfp4"), "mlp") > 1
    faster = msgspec.structs.replace(B200, launch=msgspec.structs.replace(B200.launch, value=1e-12))
    slow, fast = (step_cost(Recipe.named("mxfp4"), MLP, chip).total for chip in (B200, faster))
    assert fast < slow / 20


def test_what_is_done_to_weights_is_shared_by_the_micro_batches():
    many = msgspec.structs.replace(LLAMA, micro_batches=64)
    recipe = changed("bf16", "fprop", w=Quantizer.named("nvfp4"))
    few, more = (step_cost(recipe, model, B200).seconds["quantize"] for model in (LLAMA, many))
    assert more == pytest.approx(few / 8)


def test_the_default_axis_names_its_model_and_chip():
    recipe = Recipe.named("nvfp4")
    assert overhead(recipe) == overhead(recipe, "llama-8b", "gb200") == overhead(recipe, scenario="mid")
    assert OVERHEAD_OF.startswith("llama-8b on gb200, revision ")


@given(recipes(), st.sampled_from(chip_names()), st.sampled_from(list(scenarios())))
@settings(max_examples=60)
def test_a_scenario_adds_its_unmodelled_share_of_bf16_to_every_recipe(recipe, chip, scenario):
    bf16, mine = (step_cost(r, LLAMA, load_chip(chip), scenario).seconds for r in (Recipe.named("bf16"), recipe))
    modelled = sum(bf16.values()) - bf16[UNMODELLED]
    assert bf16[UNMODELLED] == pytest.approx(scenarios()[scenario].rest.value * modelled)
    assert mine[UNMODELLED] == bf16[UNMODELLED]


@each("name", recipe_files())
def test_worse_software_never_makes_a_recipe_faster_beside_bf16_and_the_figure_is_between(name):
    recipe, target = Recipe.named(name), CostTarget()
    best, worst = target.band(recipe)
    if target.overhead(recipe) < 1:
        assert best <= target.overhead(recipe) <= worst
    assert (best, worst) == tuple(overhead(recipe, scenario=end) for end in ENDS)
    if name == "bf16":
        assert best == worst == 1


def test_the_step_by_scenario_is_that_of_the_cost_command():
    recipe = Recipe.named("te-nvfp4")
    rows = report.by_scenario(recipe, LLAMA, B200)
    facts = report.summary(recipe, LLAMA, B200)
    assert [row["overhead"] for row in rows] == [facts["overhead_low"], facts["overhead"], facts["overhead_high"]]
    assert all(row["step_us"] / row["bf16_us"] == pytest.approx(row["overhead"], rel=1e-12) for row in rows)


def test_fp4_products_write_their_output_afterwards_and_others_meanwhile():
    """A short contraction is where that shows."""
    fp4, fp8 = (Recipe.uniform(Quantizer.named(name)) for name in ("e4m3-b16", "fp8"))
    at_once = msgspec.structs.replace(B200, writes_apart=[])
    times = {r.label(): [step_cost(r, VIT, chip).seconds["products"] for chip in (B200, at_once)] for r in (fp4, fp8)}
    assert times[fp4.label()][0] > 1.1 * times[fp4.label()][1]
    assert times[fp8.label()][0] == times[fp8.label()][1]


def test_time_to_quality_weighs_tokens_against_speed():
    assert time_to_quality(0.5, 0.1) == pytest.approx(1.1 / 2)  # twice the throughput, a tenth more tokens
    assert time_to_quality(0.5, tokens_to_spare(0.5)) == 1
    with pytest.raises(ConfigError, match="extra-tokens"):
        time_to_quality(0.5, -1)


def test_the_table_of_a_recipe_adds_up():
    recipe = Recipe.named("quartet2")
    facts, rows = report.summary(recipe, LLAMA, B200, 0.2), report.split(recipe, LLAMA, B200)
    there = overhead(recipe, "llama-1b", "b200")
    assert sum(row["us"] for row in rows) == pytest.approx(facts["step_us"])
    assert sum(row["bf16_us"] for row in rows) == pytest.approx(facts["bf16_step_us"])
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert facts["overhead"] == pytest.approx(there)
    assert facts["time_to_quality"] == pytest.approx(1.2 * there)
    assert facts["over_plain_fp4"] == pytest.approx(there / overhead(Recipe.named("mxfp4"), "llama-1b", "b200"))
    inputs = LLAMA.tokens * 24 * (2048 + 2048 + 2048 + 5456)
    head = LLAMA.tokens * 2048  # precise: 16 bits
    assert facts["activation_mib"] == pytest.approx((inputs * 4.5 + head * 16) / 8 / 2**20)


@pytest.mark.parametrize("head", [True, False])
def test_layers_that_stay_in_bf16_are_a_part_of_their_own_and_cost_the_same_there(head):
    recipe = msgspec.structs.replace(Recipe.named("nvidia-nvfp4"), precise=Precise(head=head, first=2, last=3))
    facts, rows = report.summary(recipe, LLAMA, B200), report.split(recipe, LLAMA, B200)
    of = {row["part"]: row for row in rows}
    assert of["layers in BF16"]["us"] == pytest.approx(of["layers in BF16"]["bf16_us"])
    everywhere = msgspec.structs.replace(recipe, precise=NOWHERE)
    assert of["layers in BF16"]["us"] > 0
    assert of["products"]["us"] < 1e6 * step_cost(everywhere, LLAMA, B200).seconds["products"]
    assert sum(row["plain_fp4_us"] for row in rows) == pytest.approx(facts["step_us"] / facts["over_plain_fp4"])
    assert sum(row["bf16_us"] for row in rows) == pytest.approx(facts["bf16_step_us"])
    assert "layers in BF16" not in {row["part"] for row in report.split(Recipe.named("bf16"), LLAMA, B200)}


def test_of_what_nvidias_recipe_adds_the_layers_in_bf16_are_the_most():
    rows = report.split(Recipe.named("nvidia-nvfp4"), LLAMA, B200)
    added = {row["part"]: row["us"] - row["plain_fp4_us"] for row in rows}
    assert max(added, key=added.__getitem__) == "layers in BF16"


@pytest.mark.parametrize(("element", "chip"), [("int4", B200), ("e1m2", B200)])
def test_an_element_that_no_instruction_converts_to_is_said_to_be_rounded_otherwise(element, chip):
    lines = notes(Recipe.uniform(msgspec.structs.replace(Quantizer.named("nvfp4"), element=element)), chip)
    assert f"all slots: no instruction converts to {element}; priced as rounded by vector instructions" in lines
    assert any("priced as if the FP4 unit took it" in line for line in lines)


def test_operations_stand_once_for_each_slot_and_technique():
    rows = report.operations(Recipe.named("quartet2"), B200)
    keys = [(row["slot"], row["technique"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert ("fprop.x", "encodings") in keys
    assert ("wgrad.x", "copies of the forward") in keys
    assert not report.operations(Recipe.named("bf16"), B200)
