import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fp4dse.results import front
from fp4dse.results.stats.recipes.pareto import equal_costs, front_of_any, fronts, hypervolumes, places, rivals

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


@given(st.lists(st.tuples(VALUE, VALUE, VALUE, VALUE), max_size=20))
@example([(0.0, 0.0, 0.0, 1.0), (0.0, 0.0, 5e-324, 0.0)])  # costs that are made equal
def test_with_several_costs_only_who_is_dominated_under_each_is_off_the_front(points):
    *costs, y = np.array(points).reshape(len(points), 4).T
    each = [zip(equal_costs(x).tolist(), y.tolist(), strict=True) for x in costs]
    expected = np.any([by_definition(list(one)) for one in each], axis=0)
    assert front_of_any(costs, y).tolist() == np.broadcast_to(expected, len(points)).tolist()


def test_a_dearer_recipe_stays_on_the_front_if_it_is_cheaper_with_other_software():
    gap = [0.1, 0.2, 0.3]
    best, mid, worst = [0.4, 0.5, 0.6], [0.5, 0.6, 0.7], [0.8, 0.7, 0.9]
    assert front_of_any([mid], gap).tolist() == [True, False, False]
    assert front_of_any([mid, best, worst], gap).tolist() == [True, True, False]


@given(st.lists(st.tuples(VALUE, VALUE, VALUE), max_size=20))
@example([(0.0, 0.0, 0.0), (5e-324, 0.0, 0.0)])  # costs that are made equal
def test_many_draws_are_as_many_fronts(points):
    x, *ys = np.array(points).reshape(len(points), 3).T
    x, ys = equal_costs(x), np.array(ys)
    assert fronts(x, ys).tolist() == [front(x, y).tolist() for y in ys]


def test_points_that_tie_have_a_part_of_the_place_each_and_copies_are_one_point():
    costs, same = [[2, 2, 2, 1, np.nan, 2], [3, 3, 3, 1, 5, 4]], np.array([0, 1, 1, 2, 3, 4])
    on_front = np.array([[True, True, True, True, True, True], [False, True, True, False, False, True]])
    expected = [[1 / 2, 1 / 2, 1 / 2, 1, 1, 1], [0, 1, 1, 0, 0, 1]]  # the last costs more in the second scenario
    assert places(on_front, rivals(costs, same)).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_the_hypervolume_is_the_number_of_unit_squares_that_a_point_dominates(points):
    x, y = [float(p[0]) for p in points], [float(p[1]) for p in points]
    squares = sum(any(p[0] <= i and p[1] <= j for p in points) for i in range(7) for j in range(6))
    assert hypervolumes(x, np.array([y]), (7.0, 6.0)).tolist() == [squares]


def test_what_lies_beyond_the_reference_or_has_no_number_adds_no_area():
    area = hypervolumes([1, 2, 3, 9], [[0.5, 0.9, np.nan, 0.0], [np.inf, 2.0, 0.5, 0.0]], (4.0, 1.0))
    assert area.tolist() == [1.5, 0.5]
