"""A quantizer has one canonical spelling, a label that tells it apart, and names that mean what papers mean."""

import itertools
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import QUANTIZERS, ConfigError, Quantizer
from fp4dse.dse.formats import E8M0_RULES, PLAIN, SCALES
from fp4dse.dse.outliers import Clamp, LowRank, Mean, Residual
from fp4dse.dse.record import field_types, options
from fp4dse.dse.rounding import Ema, Stochastic
from fp4dse.dse.scale import (
    DEFAULT_TARGET,
    E4M3,
    E8M0,
    UE5M3,
    One,
    OwnScale,
    Scale,
    TensorScale,
    default_target,
    scale_key,
    scale_name,
)
from tests.each import each

replace = msgspec.structs.replace


def test_every_name_in_the_records_has_its_format():
    scales = {option.__struct_config__.tag for option in options(field_types(Quantizer)["scale"])}
    built_in = {"e8m0", "e6m2", "one", *(name.split("-")[0] for name in SCALES)}
    assert built_in == set(DEFAULT_TARGET)
    assert scales == built_in | {"own"}
    assert {scale_key(UE5M3(max=largest)) for largest in (114688, 61440, 122880)} <= set(SCALES)
    assert typing.get_args(field_types(E8M0)["rule"]) == tuple(E8M0_RULES)


@given(q=st.from_type(Quantizer))
def test_canonical_is_idempotent(q):
    assert q.canonical().canonical() == q.canonical()


@given(q=st.from_type(Quantizer), other=st.from_type(Quantizer))
def test_nothing_but_the_element_matters_without_a_block_scale(q, other):
    for element in PLAIN:
        assert replace(q, element=element).canonical() == replace(other, element=element).canonical()


@given(q=st.from_type(Quantizer))
def test_a_tensor_scale_without_target_takes_its_formats_own(q):
    encode = getattr(q.scale, "convention", None) == "encode"
    own = default_target(q.scale)
    if encode and not q.is_plain:
        own = q.scaled_to.max
    own = TensorScale(target=own)
    assert replace(q, tensor_scale=TensorScale()).canonical() == replace(q, tensor_scale=own).canonical()


@pytest.mark.parametrize(
    ("emin", "largest", "target"), [(30, 2.0**33, 2.0**30), (-2, 30.0, 30.0), (-10, 2.0**12, 448.0)]
)
def test_an_own_scales_target_is_one_of_its_normal_numbers(emin, largest, target):
    """Below them the largest block's scale would round to zero, and every block be lost."""
    scale = OwnScale(mantissa=4, emin=emin, max=largest)
    assert default_target(scale) == target


def test_the_range_has_no_effect_under_a_power_of_two_scale():
    assert replace(QUANTIZERS["mxfp4"], range="16/17").canonical() == QUANTIZERS["mxfp4"].canonical()
    assert replace(QUANTIZERS["nvfp4"], range="16/17").canonical() != QUANTIZERS["nvfp4"].canonical()


EFFECTIVE = [
    {"block": 32},
    {"scale": E8M0()},
    {"scale": E8M0(rule="rceil")},
    {"scale": E4M3(zero="one")},
    {"scale": UE5M3()},
    {"scale": UE5M3(zero="keep")},
    {"tensor_scale": None},
    {"tensor_scale": TensorScale(target=256.0)},
    {"rounding": Stochastic()},
    {"range": "16/17"},
    {"range": "aligned"},
    {"adapt": "if4"},
    {"adapt": "razer"},
    {"scaling": "split"},
    {"arithmetic": "exact"},
    {"outliers": Residual()},
    {"outliers": Clamp()},
    {"outliers": Clamp(compensate=False)},
    {"outliers": Mean()},
    {"outliers": LowRank()},
    {"outliers": LowRank(rank=4)},
    {"outliers": LowRank(iterations=1)},
    {"outliers": LowRank(vectors="fp32")},
    {"rounding": Ema()},
    {"rounding": Ema(beta=0.9)},
    {"scale": E4M3(rounding="stochastic")},
    {"tensor_scale": TensorScale(amax="previous")},
    {"tensor_scale": TensorScale(amax="held")},
    {"tensor_scale": TensorScale(amax="held", steps=10.0)},
    {"tensor_scale": TensorScale(amax="history")},
    {"tensor_scale": TensorScale(amax="history", steps=10.0)},
    {"tensor_scale": TensorScale(over="row")},
    {"scale": One()},
    {"scale": One(), "tensor_scale": TensorScale(over="row")},
    {"scale": One(), "tensor_scale": TensorScale(over="segment")},
    {"scale": One(), "tensor_scale": TensorScale(over="tile"), "block": "128x128"},
    {"element": "bf16"},
    {"element": "none"},
]


def test_what_changes_the_computation_changes_the_canonical_form_and_the_label():
    quantizers = [QUANTIZERS["nvfp4"], *(replace(QUANTIZERS["nvfp4"], **change) for change in EFFECTIVE)]
    assert len({q.canonical() for q in quantizers}) == len(quantizers)
    assert len({q.label() for q in quantizers}) == len(quantizers)


@given(a=st.from_type(Quantizer), b=st.from_type(Quantizer))
def test_labels_tell_quantizers_apart(a, b):
    assert (a.label() == b.label()) == (a.canonical() == b.canonical())


@each("name", QUANTIZERS)
def test_a_named_quantizer_is_found_by_name_and_says_its_name(name):
    assert Quantizer.named(name) is QUANTIZERS[name]
    assert Quantizer.named(name).label() == name


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"quantizer: found 'nvfp5'; accepted: none, bf16, mxfp4, .*nvfp4"):
        Quantizer.named("nvfp5")


LABELS = {
    "nvfp4 SR": Quantizer(tensor_scale=TensorScale(), rounding=Stochastic()),
    "nvfp4 16/17 SR": Quantizer(tensor_scale=TensorScale(), rounding=Stochastic(), range="16/17"),
    "e2m1 1x16 e8m0-rceil": Quantizer(scale=E8M0(rule="rceil")),
    "e2m1 1x32 ue5m3-zero-keep T2048 SR": Quantizer(
        block=32, scale=UE5M3(zero="keep"), tensor_scale=TensorScale(target=2048.0), rounding=Stochastic()
    ),
}


@pytest.mark.parametrize(("label", "q"), LABELS.items(), ids=LABELS)
def test_labels_can_be_read(label, q):
    assert q.label() == label


def test_scale_names_say_what_is_not_the_formats_own():
    scales = (E8M0(), E8M0(rule="rceil"), E4M3(), E4M3(zero="one"), UE5M3(), UE5M3(zero="keep"))
    assert [scale_name(s) for s in scales] == [
        "e8m0-floor",
        "e8m0-rceil",
        "e4m3",
        "e4m3-zero-one",
        "ue5m3",
        "ue5m3-zero-keep",
    ]
    released = E4M3(zero="min", rounding="up", convention="encode", hybrid=True)
    assert scale_name(released) == "e4m3-encode-up-hybrid"


def test_scales_that_differ_have_different_names():
    scales = []
    numbers = {"mantissa": [3], "emin": [-2, -3], "max": [15.0], "name": ["mine"]}
    for kind in typing.get_args(Scale):
        values = {name: typing.get_args(type_) or [False, True] for name, type_ in field_types(kind).items()}
        values |= numbers if kind is OwnScale else {}
        scales += [kind(**dict(zip(values, chosen, strict=True))) for chosen in itertools.product(*values.values())]
    assert len({scale_name(scale) for scale in scales}) == len(scales) > 100


def test_the_block_maximum_is_mapped_to_the_largest_element_or_to_16_17_of_it():
    assert QUANTIZERS["nvfp4"].val_max == 6
    assert QUANTIZERS["nvfp4-1716"].val_max == 6 * 16 / 17


@pytest.mark.parametrize(
    ("name", "bits"),
    [("mxfp4", 4.25), ("nvfp4", 4.5), ("ue5m3-t448", 4.5), ("hif4", 4.5), ("amxfp4", 4.5), ("bf16", 16), ("none", 32)],
)
def test_bits_are_those_of_the_element_and_its_share_of_the_block_scale(name, bits):
    assert QUANTIZERS[name].bits_per_element == bits
