"""The grids are those of the standards, and the E8M0 rules are exact."""

import math
from fractions import Fraction
from typing import get_args

import gfloat
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import Quantizer
from fp4dse.dse.formats import E8M0_RULES, ELEMENTS, PLAIN, SCALES, FloatFormat, e8m0_rule
from fp4dse.dse.own_formats import FloatElement, TableElement
from fp4dse.dse.record import field_types, options
from tests.each import each

FORMATS = {**ELEMENTS, **SCALES}


def codes_of(dtype) -> list[float]:
    """Every finite non-negative value of a small ml_dtypes format, in the order of its codes."""
    half = np.arange(2 ** (ml_dtypes.finfo(dtype).bits - 1), dtype=np.uint8).view(dtype).astype(float)
    return half[np.isfinite(half)].tolist()


def test_e2m1_has_the_eight_magnitudes_of_the_standard():
    assert ELEMENTS["e2m1"].magnitudes() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert ELEMENTS["e2m1"].magnitudes() == codes_of(ml_dtypes.float4_e2m1fn)


def test_e4m3_is_the_ofp8_format():
    assert SCALES["e4m3"].magnitudes() == codes_of(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("name", "magnitudes"),
    [
        ("e1m2", [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]),
        ("e3m0", [0, 0.25, 0.5, 1, 2, 4, 8, 16]),
        ("int4", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_other_four_bit_elements_have_eight_magnitudes(name, magnitudes):
    assert ELEMENTS[name].magnitudes() == magnitudes


def test_e5m2_is_the_ofp8_format():
    assert ELEMENTS["e5m2"].magnitudes() == SCALES["e5m2"].magnitudes() == codes_of(ml_dtypes.float8_e5m2)


def test_the_codebooks_of_ue5m3_differ_at_the_top_alone():
    reserved, hardware, finite = (SCALES[n].magnitudes() for n in ("ue5m3-61440", "ue5m3", "ue5m3-122880"))
    assert (len(reserved), len(hardware), len(finite)) == (248, 255, 256)
    assert finite[:248] == hardware[:248] == reserved
    assert reserved[1] == 2.0**-17


def test_ue5m3_has_every_code_but_0xff():
    ue5m3 = gfloat.FormatInfo(
        "ue5m3",
        8,
        4,
        bias=15,
        is_signed=False,
        domain=gfloat.Domain.Finite,
        has_nz=False,
        num_high_nans=1,
        has_subnormals=True,
        is_twos_complement=False,
    )
    assert SCALES["ue5m3"].magnitudes() == [gfloat.decode_float(ue5m3, code).fval for code in range(255)]
    assert math.isnan(gfloat.decode_float(ue5m3, 255).fval)


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].bits <= 16])
def test_magnitudes_ascend_from_zero_to_max(name):
    values = FORMATS[name].magnitudes()
    assert values[0] == 0
    assert values[-1] == FORMATS[name].max
    assert values == sorted(set(values))
    assert 2.0 ** FORMATS[name].emin in values
    assert 2.0 ** FORMATS[name].emax <= values[-1] < 2.0 ** (FORMATS[name].emax + 1)


# --- E8M0 rules --------------------------------------------------------------------------------------------------

TOPS = ELEMENTS  # E3M0 has a power of two on top, E1M2 and INT4 all ones


def exponent_by_bits(amax: np.float32, rule: str, element: FloatFormat) -> int:
    """As a kernel takes it: an integer added to the bits, the exponent field, less the element's own exponent."""
    carry, offset = e8m0_rule(rule, element)
    return (int(amax.view(np.int32)) + carry >> 23) - 127 - offset


def exponent_by_definition(amax: np.float32, rule: str, element: FloatFormat) -> int:
    """In exact arithmetic, from the sentence that defines the rule."""
    x, top, two = Fraction(float(amax)), Fraction(element.max), Fraction(2)
    half_step = two ** (element.emax - element.mantissa - 1)
    fits = {  # the exponent is the smallest one that fits
        "floor": lambda e: x < two ** (e + 1 + element.emax),
        "ceil": lambda e: x <= two ** (e + element.emax),
        "rceil": lambda e: x <= top * two**e,
        "even": lambda e: x < (top + half_step) * two**e,
        "nearest": lambda e: x * x < top * top * two ** (2 * e + 1),
        "encode": lambda e: two**element.emax / x >= 3 * two ** (-e - 2),  # not nearer to 2^(-e - 1)
    }[rule]
    e = math.frexp(amax)[1] - element.emax - 4  # below the exponent that comes out
    assert not fits(e)
    while not fits(e):
        e += 1
    return e


@each("element", TOPS.values())
@each("rule", E8M0_RULES)
@each("exponent", [-100, -1, 0, 1, 100])
@each("ulps", [-1, 0, 1])
def test_e8m0_rules_are_exact_around_every_boundary(rule, element, exponent, ulps):
    edge = element.max + 2.0 ** (element.emax - element.mantissa - 1)
    for boundary in (element.max, 2.0**element.emax, edge, element.max * 2**0.5, 2.0**element.emax * 4 / 3):
        at = np.float32(boundary * 2.0**exponent)
        amax = (at.view(np.int32) + np.int32(ulps)).view(np.float32)
        assert exponent_by_bits(amax, rule, element) == exponent_by_definition(amax, rule, element)


@given(
    amax=st.floats(min_value=2.0**-126, width=32, allow_infinity=False),
    rule=st.sampled_from(list(E8M0_RULES)),
    element=st.sampled_from(list(TOPS.values())),
)
def test_e8m0_rules_are_exact_for_every_normal_maximum(amax, rule, element):
    x = np.float32(amax)
    assert exponent_by_bits(x, rule, element) == exponent_by_definition(x, rule, element)


def test_rceil_clips_nothing_and_floor_may():
    """Worked values of arXiv 2502.20853 and of the OCP standard: scaled maximum of a block, largest element 6."""
    scaled = {
        rule: [
            amax / 2.0 ** exponent_by_bits(np.float32(amax), rule, ELEMENTS["e2m1"])
            for amax in (5.0, 6.0, 6.5, 7.5, 8.0)
        ]
        for rule in ("floor", "rceil")
    }
    assert scaled == {"floor": [5.0, 6.0, 6.5, 7.5, 4.0], "rceil": [5.0, 6.0, 3.25, 3.75, 4.0]}


def test_every_format_with_a_record_may_stand_in_a_recipe():
    names, *own = options(field_types(Quantizer)["element"])
    assert set(get_args(names)) == {*ELEMENTS, *PLAIN}
    assert own == [TableElement, FloatElement]
