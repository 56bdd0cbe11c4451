"""Which numbers an operand can be, found by listing codes × scales, is what its formula says."""

import copy

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import QUANTIZERS, Quantizer, Recipe
from fp4dse.dse.exactness import (
    OPERAND_FORMATS,
    element_grid,
    format_grid,
    fp8_format,
    fp8_formats,
    grid,
    has_factor,
    holds,
    operand_format,
    operand_grid,
    product_format,
    significant_bits,
)
from fp4dse.dse.formats import ELEMENTS, SCALES
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import BF16, E4M3, E5M2, E8M0, FP32, UE4M4, UE5M3, TensorScale, scale_key
from tests.each import each

POWERS = [2.0**e for e in range(-127, 128)]
LISTED = [E8M0(), E4M3(), UE5M3(), UE5M3(max=61440), UE5M3(max=122880), E5M2(), UE4M4(), BF16()]

CLASSES = {
    "bf16": [(e, s) for e in ("e2m1", "e1m2", "e3m0", "int4") for s in LISTED[:-1]]
    + [("e5m2", E4M3()), ("e4m3", E8M0()), ("e5m2", E8M0())],
    "tf32": [(e, BF16()) for e in ("e2m1", "e1m2", "int4")],
    "fp32": [(e, FP32()) for e in ELEMENTS] + [(e, E4M3(convention="encode")) for e in ELEMENTS],
}
"""Format of the operand -> element × block scale, the table of docs/numerics.md and what lies beside it."""


def operands(q: Quantizer) -> np.ndarray:
    """Every element × block scale but zero, exact in float64."""
    magnitudes = ELEMENTS[q.element].magnitudes()
    powers = [power for power in POWERS if power * magnitudes[1] >= 2.0**-133]  # where E8M0 ends
    values = np.outer(magnitudes, powers if isinstance(q.scale, E8M0) else SCALES[scale_key(q.scale)].magnitudes())
    return np.unique(values[values > 0])


def lowest_bit(values: np.ndarray) -> np.ndarray:
    """Power of two of the last one bit."""
    fraction, exponent = np.frexp(values)
    whole = (fraction * 2.0**53).astype(np.int64)
    return exponent - 53 + np.frexp(whole & -whole)[1] - 1


def first_bit(values: np.ndarray) -> np.ndarray:
    return np.frexp(values)[1] - 1


@each("scale", LISTED)
@each("element", ELEMENTS)
def test_listing_codes_and_scales_proves_the_class(element, scale):
    q = Quantizer(element=element, scale=scale)
    values = operands(q)
    bits = first_bit(values) - lowest_bit(values) + 1
    assert significant_bits(q) == bits.max()
    for name, number in OPERAND_FORMATS.items():
        steps = np.ldexp(1.0, np.maximum(first_bit(values), number.emin) - number.mantissa)
        assert holds(number, operand_grid(q)) == (values % steps == 0).all(), name


def test_every_named_quantizer_has_its_class():
    fp32_scales = ("fp8", "fp8-e5m2", "luq", "int4-sawb", "radix4", "radix4-odd", "fp4-row")
    wider = dict.fromkeys(("none", "mbs-mxfp4", *fp32_scales), "fp32") | {"if4": "tf32"}
    assert {name: operand_format(q) for name, q in QUANTIZERS.items()} == dict.fromkeys(QUANTIZERS, "bf16") | wider


@pytest.mark.parametrize(("name", "members"), CLASSES.items(), ids=CLASSES)
def test_the_table_of_classes(name, members):
    for element, scale in members:
        assert operand_format(Quantizer(element=element, scale=scale)) == name, (element, scale)


def test_products_of_held_operands_are_exact_in_fp32():
    for number in OPERAND_FORMATS.values():
        assert 2 * (number.mantissa + 1) <= SCALES["fp32"].mantissa + 1
    assert operand_format(Quantizer(element="bf16")) == "bf16"


def test_a_quotient_by_the_scale_is_held_nowhere():
    encode = Quantizer(scale=E4M3(convention="encode"))
    assert significant_bits(encode) is None
    assert significant_bits(Quantizer(scale=E4M3(hybrid=True))) == significant_bits(Quantizer()) == 6


@given(st.lists(st.from_type(Quantizer), min_size=1, max_size=4))
def test_a_product_needs_what_its_most_demanding_operand_needs(quantizers):
    order = [*OPERAND_FORMATS, "fp32"]
    alone = [order.index(operand_format(q)) for q in quantizers]
    assert product_format(*quantizers) == order[max(alone)]
    valid = [q for q in quantizers if not quantizer_faults(q)]  # of two methods, a canonical one has the other first
    assert all(operand_format(q.canonical()) == operand_format(q) for q in valid)


@given(st.lists(st.integers(-1000, 1000).filter(bool), min_size=1), st.integers(-100, 100))
def test_the_grid_of_a_codebook_is_its_largest_odd_part_and_lowest_bit(numbers, power):
    found = grid([0.0, *(n * 2.0**power for n in numbers)])
    assert found.odd == max(abs(n) // (abs(n) & -abs(n)) for n in numbers)
    assert found.step == power + min((abs(n) & -abs(n)).bit_length() - 1 for n in numbers)


@pytest.mark.parametrize("number", [*ELEMENTS.values(), *(f for f in SCALES.values() if f.bits <= 16)])
def test_a_format_uses_all_its_mantissa_bits(number):
    """Which is what lets FP32 be described without listing it."""
    assert format_grid(number).odd == 2 ** (number.mantissa + 1) - 1
    assert format_grid(number).step == number.emin - number.mantissa


def later():
    """A quantizer of a codec that somebody has added elsewhere."""
    q = copy.copy(Quantizer.named("nvfp4"))
    msgspec.structs.force_setattr(q, "scaling", "later")
    return q


def test_of_a_codec_that_is_not_listed_no_format_is_known_to_hold_operands():
    assert later().codec == "later"
    assert (element_grid(later()), operand_format(later())) == (None, "fp32")


def test_fp8_units_take_e2m1_in_blocks_and_tiles_of_powers_of_two_and_fp8_of_a_tensor():
    formats = {name: fp8_format(q.canonical()) for name, q in QUANTIZERS.items()}
    in_blocks = {name for name in QUANTIZERS if name.startswith("mxfp4")}
    assert {name for name, found in formats.items() if found == "e5m2"} - in_blocks == {
        "fp8-e5m2-current",
        "fp8-e5m2-delayed",
    }
    assert {name for name, found in formats.items() if found == "e4m3"} == {"fp8-current", "fp8-delayed"}
    for element in set(ELEMENTS) - {"e2m1"}:
        assert fp8_format(Quantizer(element=element, scale=E8M0(), block=32)) is None


def test_of_two_operands_in_e5m2_one_is_in_e4m3():
    """The second, but where its elements fill E5M2."""
    mxfp4, e5m2, nvfp4 = (Quantizer.named(name) for name in ("mxfp4", "fp8-e5m2-current", "nvfp4"))
    assert fp8_formats([mxfp4], [mxfp4]) == ("e5m2", "e4m3")
    assert fp8_formats([mxfp4], [e5m2]) == ("e4m3", "e5m2")
    assert fp8_formats([e5m2], [mxfp4]) == ("e5m2", "e4m3")
    assert fp8_formats([Quantizer.named("fp8-current")], [mxfp4]) == ("e4m3", "e5m2")
    assert fp8_formats([e5m2], [e5m2]) is None
    assert fp8_formats([nvfp4], [mxfp4]) is None
    assert fp8_formats([mxfp4, nvfp4], [mxfp4]) is None


def test_lanes_whose_products_have_other_factors_are_not_of_one_structure():
    """Under FP8 units, which take other ways with them."""
    scaled = Quantizer(element="e2m1", scale=E8M0(), block=32, tensor_scale=TensorScale())
    recipes = [Recipe.uniform(q) for q in (Quantizer.named("mxfp4"), scaled)]
    assert [has_factor(recipe.fprop.x) for recipe in recipes] == [False, True]
    assert recipes[0].signature() == recipes[1].signature()
    first, second = (msgspec.structs.replace(recipe, gemm="fp8-exact").signature() for recipe in recipes)
    assert first != second
