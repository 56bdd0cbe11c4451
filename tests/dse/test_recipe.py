"""One recipe, one id, however it is written; and its words, columns and signature say the same."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fp4dse.dse import QUANTIZERS, SHARED, SLOTS, STAGES, ConfigError, Hadamard, Quantizer, Recipe, recipe_files
from fp4dse.dse.estimator import STE, Through
from fp4dse.dse.exactness import fp8_format, has_factor, product_format
from fp4dse.dse.rounding import Nearest, Stochastic, samples_of
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import BF16, E4M3, E8M0, FP32, One, TensorScale, scale_key
from fp4dse.dse.stages import ROTATION_NAMES, Dgrad, Fprop, Wgrad
from tests.each import each

replace = msgspec.structs.replace

IDS = {
    "alto-mxfp4": "ee449e1df91b1287",
    "amd-mxfp4": "3e319edf410ff8e0",
    "arcquant": "8a2b9e75c96440f5",
    "averis": "afbe2c7760f2be27",
    "bf16": "dcabd31f7251d4dd",
    "chon": "7e15f3a08721e44f",
    "four-over-six": "907349e54cc789c6",
    "fp4-all-the-way": "27a6bb0c337d4331",
    "hif4-ascend": "95767809f345e105",
    "hopper-moe-fp4": "6e5e700e080802c2",
    "luq": "ca19ef560608bf20",
    "luq-fnt": "e34a086af79c2320",
    "luq-smp": "b73c57a7eb9ed2f2",
    "metis": "3eb1cb689b3ed2af",
    "metis-factors": "e5063c7f9732212c",
    "mixfp4": "cc98edc15263a2a2",
    "mxfp4": "a740e70ed3ccc2fa",
    "mxfp4-ascend": "ab296cd9f4a3fcaa",
    "mxfp4-sr-rht": "66ca00ece65e0769",
    "mxfp4-tiles": "e076b1215f3710fc",
    "mxfp4-tiles-qkv8": "26865670239d4f1c",
    "nemotron-3-super": "2f2f807bd9dff11b",
    "nvfp4": "9fd2de50b6aaddf5",
    "nvfp4-muon": "f9f8bebdbc261f31",
    "nvfp4-sr": "76ad2ed4a00025cd",
    "nvfp4-sr-rht": "91b423faf96c3139",
    "nvfp4-stable-spam": "3fa26b2bbf1ddf3d",
    "nvidia-nvfp4": "4c65746199992497",
    "nvidia-nvfp4-finish": "9b169e565ce6d0ee",
    "pact": "23583edb706eae90",
    "primus-turbo": "84e49f5c5ab9bbe9",
    "quartet": "7a9b689a482f8d00",
    "quartet2": "897217e8dfea9f8d",
    "rl-row-scaled": "f2bb596cee0b7b5d",
    "sun-4bit": "dc5057279674d396",
    "sun-radix4": "f9c6e115daca881c",
    "sun-radix4-gradscale": "016351aba3d409d0",
    "te-mxfp8-nvfp4": "9e97b4eb5fa070ba",
    "te-nvfp4": "f5c205df9f12e440",
    "te-nvfp4-1d": "4081a282d6192d45",
    "te-nvfp4-mxfp8": "2a17431457f2435d",
    "tetrajet": "e07c0e64971c9f4f",
    "tetrajet-qema": "a18544b3140051b6",
    "tetrajet-qramping": "e990e23c21bd8352",
    "tetrajet2": "cbd5eed885c01051",
    "tetrajet2-outcontrol": "2052b4342b8fe6a1",
    "tetrajet2-reset": "b928454db046aef6",
    "tseng-mxfp4": "1bf3c6fd14f77ac4",
    "ue5m3-graphcore": "e7a473ddca7fb3d8",
    "ue5m3-sr": "28c1a441ff051161",
    "ufp4": "49ef11c502e82610",
    "wang-dge-occ": "f6c9c72f1a54df87",
    "zhou-mixed": "66982f4287155d5a",
}
"""Stores are keyed by these: a recipe may be added, but what is here changes only with what its file says."""


@st.composite
def pairs(draw) -> tuple[Recipe, Recipe]:
    """Two recipes that differ in one place at most, so that equal, equivalent and different ones are all drawn."""
    a = draw(st.from_type(Recipe))
    if draw(st.booleans()):
        field = draw(st.sampled_from(["precise", "finish", "gemm", "training"]))
        return a, replace(a, **{field: getattr(draw(st.from_type(Recipe)), field)})
    stage = draw(st.sampled_from(list(STAGES)))
    part = getattr(a, stage)
    attribute = draw(st.sampled_from([*STAGES[stage], "rotation"]))
    if attribute == "rotation":
        new = draw(st.none() | st.from_type(Hadamard))
    else:
        other, field = draw(st.from_type(Quantizer)), draw(st.sampled_from(Quantizer.__struct_fields__))
        new = replace(getattr(part, attribute), **{field: getattr(other, field)})
    return a, replace(a, **{stage: replace(part, **{attribute: new})})


@each("name", IDS)
def test_ids_of_shipped_recipes_are_for_ever(name):
    assert Recipe.named(name).config_id == IDS[name]


def test_every_shipped_recipe_has_its_id_pinned():
    assert set(IDS) == set(recipe_files())
    assert len(set(IDS.values())) == len(IDS)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"recipe: found 'nvfp5'; accepted: alto-mxfp4, amd-mxfp4, arcquant, averis, bf16, .*ue5m3-sr"
    ):
        Recipe.named("nvfp5")


@given(recipe=st.from_type(Recipe))
def test_canonical_is_idempotent(recipe):
    assert recipe.canonical().canonical() == recipe.canonical()


@given(recipe=st.from_type(Recipe))
def test_the_canonical_spelling_keeps_the_id(recipe):
    assert recipe.canonical().config_id == recipe.config_id


@given(pair=pairs())
def test_ids_labels_and_columns_are_equal_exactly_if_the_canonical_forms_are(pair):
    a, b = pair
    same = a.canonical() == b.canonical()
    assert (a.config_id == b.config_id) == same
    assert (a.label() == b.label()) == same
    assert (a.columns() == b.columns()) == same


@given(recipe=st.from_type(Recipe))
def test_an_id_does_not_depend_on_how_the_record_was_made(recipe):
    """Read from JSON every object is new; ids that compare defaults by identity would differ."""
    again = msgspec.json.decode(msgspec.json.encode(recipe), type=Recipe)
    assert again.config_id == recipe.config_id


def test_equivalent_spellings_have_one_id():
    nvfp4 = Recipe.named("nvfp4")
    spelled_out = Quantizer(block=16, tensor_scale=TensorScale(target=448), rounding=Nearest(), range="full")
    assert Recipe.uniform(spelled_out).config_id == nvfp4.config_id
    bf16 = Recipe.named("bf16")
    noisy = Recipe.uniform(Quantizer(element="bf16", block=32, rounding=Stochastic()))
    assert replace(noisy, wgrad=replace(noisy.wgrad, rotation=Hadamard(size=16))).config_id == bf16.config_id


def test_the_shipped_bf16_is_what_recipes_are_compared_with():
    """The baseline is made in code, so that it needs no file."""
    assert Recipe.named("bf16") == Recipe.named("nvfp4").baseline()


def test_a_rotation_counts_where_one_operand_is_quantized():
    half = Recipe.named("bf16")
    half = replace(half, wgrad=Wgrad(g=QUANTIZERS["nvfp4"], x=QUANTIZERS["bf16"]))
    turned = replace(half, wgrad=replace(half.wgrad, rotation=Hadamard(size=16)))
    assert turned.config_id != half.config_id


def test_uniform_has_one_quantizer_in_six_slots():
    assert len(SLOTS) == 6
    recipe = Recipe.uniform(QUANTIZERS["mxfp4"])
    assert recipe == Recipe.named("mxfp4")
    assert {recipe.slot(slot) for slot in SLOTS} == {QUANTIZERS["mxfp4"]}
    assert [recipe.rotation(stage) for stage in STAGES] == [None, None, None]


# --- rules -------------------------------------------------------------------------------------------------------


def with_target(scale_name: str, target: float) -> Recipe:
    q = replace(QUANTIZERS[scale_name], tensor_scale=TensorScale(target=target))
    return replace(Recipe.named("nvfp4"), dgrad=Dgrad(g=q, w=QUANTIZERS["nvfp4"]))


@pytest.mark.parametrize(
    ("q", "target"), [("nvfp4", 448.0), ("ue5m3", 449.0), ("ue5m3", 114688.0), ("mxfp4", 1e6), ("bf16", 1e6)]
)
def test_a_target_within_the_scale_format_is_valid(q, target):
    assert with_target(q, target).validate() == []


@pytest.mark.parametrize(("q", "target", "largest"), [("nvfp4", 449.0, "448"), ("ue5m3", 114689.0, "114688")])
def test_a_target_above_the_scale_format_is_forbidden(q, target, largest):
    [(rule, sentence)] = with_target(q, target).validate()
    assert rule == "target-above-scale-format"
    assert sentence.startswith(f"dgrad.g.tensor_scale.target: found {target}; accepted: at most {largest}")


@pytest.mark.parametrize(
    ("scale", "target", "accepted"),
    [
        (FP32(), 1e38, "at most 1.41784e+37"),
        (E8M0(rule="rceil"), 1e38, "at most 1.41784e+37"),
        (BF16(convention="encode"), 1e-38, "at least 7.05297e-38"),
    ],
)
def test_a_target_that_makes_the_largest_element_infinite_is_forbidden(scale, target, accepted):
    q = Quantizer(block=32, scale=scale, tensor_scale=TensorScale(target=target))
    [(rule, error)] = quantizer_faults(q)
    assert rule == "target-above-scale-format"
    assert str(error).startswith(f"tensor_scale.target: found {target}; accepted: {accepted}")


@each("name", IDS)
def test_shipped_recipes_are_valid(name):
    assert Recipe.named(name).validate() == []


# --- words, columns, signature -----------------------------------------------------------------------------------


def changed(name: str, *slots: str, rotations: dict[str, str] | None = None, **fields) -> Recipe:
    recipe = Recipe.named(name)
    for slot in slots:
        stage, operand = slot.split(".")
        part = getattr(recipe, stage)
        recipe = replace(recipe, **{stage: replace(part, **{operand: replace(getattr(part, operand), **fields)})})
    for stage, rotation in (rotations or {}).items():
        recipe = replace(recipe, **{stage: replace(getattr(recipe, stage), rotation=ROTATION_NAMES[rotation])})
    return recipe


LABELS = {
    "bf16": Recipe.named("bf16"),
    "nvfp4": Recipe.named("nvfp4"),
    "nvfp4, gradients 16/17 SR, wgrad rht16": Recipe.named("nvfp4-sr-rht"),
    "mxfp4-rceil, gradients SR, wgrad rht32": Recipe.named("mxfp4-sr-rht"),
    "mxfp4, SR": changed("mxfp4", *SLOTS, rounding=Stochastic()),
    "mxfp4, forward and gradients SR": changed(
        "mxfp4", "fprop.x", "fprop.w", "dgrad.g", "wgrad.g", rounding=Stochastic()
    ),
    "mxfp4, wgrad.x SR": changed("mxfp4", "wgrad.x", rounding=Stochastic()),
    "nvfp4, forward bf16": replace(Recipe.named("nvfp4"), fprop=Fprop(x=QUANTIZERS["bf16"], w=QUANTIZERS["bf16"])),
    "mxfp4, fprop hadamard64, wgrad rht16": changed("mxfp4", rotations={"fprop": "hadamard64", "wgrad": "rht16"}),
}


@pytest.mark.parametrize(("label", "recipe"), LABELS.items(), ids=LABELS)
def test_labels_can_be_read(label, recipe):
    assert recipe.label() == label


COLUMN_TYPES = {
    "element": {str},
    "block": {str, type(None)},
    "scale": {str, type(None)},
    "tensor_scale": {float, type(None)},
    "rounding": {str, type(None)},
    "range": {str, type(None)},
    "adapt": {str, type(None)},
    "tensor_amax": {str, type(None)},
    "scaling": {str, type(None)},
    "arithmetic": {str, type(None)},
    "outliers": {str, type(None)},
    "rotation": {str},
    "source": {str},
    "channels": {str},
    "estimator": {str},
    "precise": {str},
    "layers": {str},
    "attention": {str},
    "finish": {str},
    "gemm": {str},
    "optimizer": {str},
    "schedule": {str},
    "reset": {str},
    "ramping": {str},
    "rollout": {str},
    "noise": {str},
    "distill": {str},
    "trains": {str},
    "replay": {str},
    "coreset": {str},
    "inject": {str},
    "number": {float, type(None)},
    "steps": {int, type(None)},
    "accumulate": {int},
}


@given(recipe=st.from_type(Recipe))
def test_every_axis_has_its_typed_column(recipe):
    columns = recipe.columns()
    expected = {f"{slot.replace('.', '_')}_{field}" for slot in SLOTS for field in Quantizer.__struct_fields__}
    expected |= {f"{slot.replace('.', '_')}_tensor_amax" for slot in SLOTS}
    of_recipe = {f"{stage}_rotation": "rotation" for stage in STAGES} | {
        f"{stage}_source": "source" for stage in SHARED
    }
    of_recipe |= {"fprop_channels": "channels"}
    of_recipe |= {"estimator_x": "estimator", "estimator_w": "estimator"}
    words = ("precise", "layers", "attention", "finish", "gemm", "optimizer", "accumulate", "schedule", "reset")
    of_recipe |= {
        name: name
        for name in (*words, "ramping", "rollout", "noise", "distill", "trains", "replay", "coreset", "inject")
    }
    of_recipe |= dict.fromkeys(("weight_decay", "beta1", "beta2", "clip", "loss_scale", "tis", "kl"), "number")
    of_recipe |= {"loss_scale_growth": "steps"}
    assert set(columns) == expected | set(of_recipe)
    for name, value in columns.items():
        assert type(value) in COLUMN_TYPES[of_recipe.get(name) or name.split("_", 2)[2]]


def test_columns_of_a_plain_operand_hold_no_block_scale():
    columns = Recipe.named("bf16").columns()
    assert {name: value for name, value in columns.items() if name.startswith("fprop_x")} == {
        "fprop_x_element": "bf16",
        "fprop_x_block": None,
        "fprop_x_scale": None,
        "fprop_x_tensor_scale": None,
        "fprop_x_rounding": None,
        "fprop_x_range": None,
        "fprop_x_adapt": None,
        "fprop_x_tensor_amax": None,
        "fprop_x_scaling": None,
        "fprop_x_arithmetic": None,
        "fprop_x_outliers": None,
    }


def test_columns_read_as_a_person_would_ask():
    columns = Recipe.named("nvfp4-sr-rht").columns()
    assert columns["wgrad_g_scale"] == "e4m3"
    assert columns["wgrad_g_tensor_scale"] == 448.0
    assert columns["wgrad_g_rounding"] == "stochastic"
    assert (columns["fprop_rotation"], columns["wgrad_rotation"]) == ("none", "rht16")


UNLIKE_IN_FP8 = tuple(replace(changed("mxfp4", "fprop.x", range=name), gemm="fp8-exact") for name in ("3/4", "full"))
"""Their fprop.x differs in range alone, and so in whether its products in FP8 have a factor."""


@given(pair=pairs())
@example(pair=UNLIKE_IN_FP8)
def test_recipes_share_a_signature_exactly_if_their_structure_agrees(pair):
    def structure(recipe):
        """All that a signature may tell apart, said here a second time."""
        r = recipe.canonical()
        slots = [None if r.slot(slot).is_plain else layout(r.slot(slot)) for slot in SLOTS]
        products = [product_format(*(r.slot(f"{stage}.{o}") for o in STAGES[stage])) for stage in STAGES]
        in_fp8 = [(fp8_format(r.slot(slot)), has_factor(r.slot(slot))) for slot in SLOTS if r.gemm == "fp8-exact"]
        of_stages = [r.rotation(stage) for stage in STAGES], [r.source(stage) for stage in SHARED]
        passages = [(getattr(r.estimator, x), r.slot(f"fprop.{x}")) for x in STAGES["fprop"]]
        passages = [
            (through, q.element, through.scale_rounding != STE() and stored(q.scale)) for through, q in passages
        ]
        around = r.precise, r.finish, r.gemm, type(r.training.optimizer), r.training.accumulate, r.fprop.channels
        bf16, ends = Quantizer(element="bf16"), r.finish.stages_but_weights if r.finish else ()
        around = *around, [product_format(bf16, r.slot(f"{stage}.w")) for stage in ends]
        keeps = [q for q in (r.fprop.x, r.fprop.w) if q.tensor_scale and q.tensor_scale.amax != "current"]
        changes = keeps or type(r.fprop.w.rounding).__name__ == "Ema" or r.layers or r.finish
        around = *around, bool(r.training.rollout and changes)
        return slots, products, in_fp8, of_stages, [p if p[0] != Through() else None for p in passages], around

    def stored(scale):
        return scale_key(scale), getattr(scale, "convention", "")

    def layout(q):
        many = isinstance(q.scale, One) and q.factors_over in ("segment", "tile")
        return q.block, q.codec, q.factors_over, many, type(q.outliers), samples_of(q.rounding)

    a, b = pair
    assert (a.signature() == b.signature()) == (structure(a) == structure(b))


def test_formats_scales_and_roundings_share_a_signature():
    """They are numbers that a lane reads, not shapes."""
    names = ["nvfp4", "nvfp4-sr", "ue5m3-sr"]
    assert len({Recipe.named(name).signature() for name in names}) == 1
    assert Recipe.named("mxfp4").signature() != Recipe.named("nvfp4").signature()
    assert Recipe.named("nvfp4-sr-rht").signature() != Recipe.named("nvfp4-sr").signature()


@pytest.mark.parametrize(("scale", "product"), [(E4M3(), "bf16"), (BF16(), "tf32"), (FP32(), "fp32")])
def test_operands_that_need_another_gemm_have_another_signature(scale, product):
    """On a GPU a lane's bits would else depend on what its neighbours need."""
    fine = Recipe.named("nvfp4")
    assert fine.signature().products == ("bf16", "bf16", "bf16")
    coarse = replace(fine, wgrad=Wgrad(g=QUANTIZERS["nvfp4"], x=replace(QUANTIZERS["nvfp4"], scale=scale)))
    assert coarse.signature().products == ("bf16", "bf16", product)
