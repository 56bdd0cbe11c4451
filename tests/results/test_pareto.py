import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.results import front

VALUE = st.one_of(st.integers(0, 5).map(float), st.floats(allow_nan=True, allow_infinity=True))


def by_definition(points: list[tuple[float, float]]) -> list[bool]:
    def beats(a, b):
        return np.isfinite(a).all() and a[0] <= b[0] and a[1] <= b[1] and a != b

    return [bool(np.isfinite(p).all()) and not any(beats(q, p) for q in points) for p in points]


@given(st.lists(st.tuples(VALUE, VALUE), max_size=40))
def test_front_is_what_nothing_dominates(points):
    x, y = [p[0] for p in points], [p[1] for p in points]
    assert front(x, y).tolist() == by_definition(points)


def test_equal_points_stay_together():
    assert front([1, 1, 2], [3, 3, 3]).tolist() == [True, True, False]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_point_without_a_number_is_not_on_the_front_and_beats_nobody(bad):
    assert front([0, 1], [bad, 1]).tolist() == [False, True]
    assert front([bad, 1], [0, 1]).tolist() == [False, True]
