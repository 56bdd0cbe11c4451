"""What people read of a ratio is the ratio, never a hundred times its logarithm."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.results.report.figures import ratio_ticks
from fp4dse.results.text.ratios import change, change_range, change_with_range, correlation


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.0, "+0.00 %"),
        (1.0062, "+0.62 %"),
        (1.443, "+44.3 %"),
        (0.54, "-46.0 %"),
        (1.85, "+85.0 %"),
        (2.0, "× 2.00"),
        (11.44, "× 11.4"),
        (0.03, "× 0.0300"),
        (12_345.0, "× 12,345"),
        (math.nan, "–"),
        (math.inf, "× ∞"),
    ],
)
def test_a_ratio_is_written_as_people_say_it(ratio, text):
    assert change(math.log(ratio)) == text


@given(st.floats(-20, 20))
def test_the_text_says_the_ratio_to_three_digits(log_ratio):
    text = change(log_ratio).replace(",", "")
    said = float(re.sub(r"[^0-9.e+-]", "", text))
    ratio = math.exp(log_ratio)
    told = said if text.startswith("×") else 1 + said / 100
    assert told == pytest.approx(ratio, rel=5.1e-3, abs=0)


def test_an_interval_has_the_unit_of_its_mean():
    assert change_with_range(0.002, 0.001, 0.003) == "+0.20 % (+0.10 to +0.30 %)"
    assert change_with_range(math.log(11), math.log(1.5), math.log(16)) == "× 11.0 (× 1.50 to 16.0)"
    assert change_range(0.1, math.nan, 0.2) == ""
    assert change_with_range(0.1, math.nan, math.nan) == "+10.5 %"


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.001, 1.1235, "+0.1 to +12.3 %"),
        (0.905, 1.0995, "-9.50 to +9.95 %"),
        (1.8353, 1.8361, "+83.53 to +83.61 %"),
        (1.5, 1.5, "+50.0 to +50.0 %"),
        (0.5, 1.003, "-50.0 to +0.3 %"),
    ],
)
def test_both_ends_of_an_interval_have_as_many_digits(low, high, text):
    assert change_range(0.05, math.log(low), math.log(high)) == text


def test_values_beyond_floats_are_infinite_not_an_error():
    assert change(1e9) == "× ∞"
    assert change_range(0.0, -1e9, 1e9) == "-100.0 to ∞ %"


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.955, 1.02, ["−4 %", "−3 %", "−2 %", "−1 %", "0 %", "+1 %", "+2 %"]),
        (1.72, 2.41, ["× 1.8", "× 1.9", "× 2", "× 2.1", "× 2.2", "× 2.3", "× 2.4"]),
        (0.9, 3.1, ["× 1", "× 1.5", "× 2", "× 2.5", "× 3"]),
        (0.9, 17.0, ["× 1", "× 2", "× 4", "× 8", "× 16"]),
    ],
)
def test_an_axis_of_ratios_has_several_round_ticks(low, high, texts):
    places, said = ratio_ticks(math.log(low), math.log(high))
    assert said == texts
    assert all(math.log(low) - 1e-9 <= place <= math.log(high) + 1e-9 for place in places)


def test_a_correlation_has_its_interval_where_there_is_one():
    assert correlation(0.493, -0.046, 0.847) == "0.49 (-0.05 to 0.85)"
    assert correlation(0.4, math.nan, math.nan) == "0.40"
    assert correlation(math.nan, math.nan, math.nan) == "–"
