"""At a rung the better share goes on: by fronts, at equal seed and learning rate, whole recipes at a time."""

import math

from hypothesis import given
from hypothesis import strategies as st

from fp4dse.tasks.rungs import front_numbers, keep_lanes, ranking

VALUES = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf])
POINTS = st.lists(st.tuples(VALUES, VALUES), max_size=12)


def naive_fronts(points: list[tuple[float, float]]) -> list[int]:
    """By peeling: what nothing that is left dominates is the next front."""
    numbers, left, front = [0] * len(points), set(range(len(points))), 0
    while left:
        beaten = {
            i
            for i in left
            for j in left
            if points[j][0] <= points[i][0] and points[j][1] <= points[i][1] and points[j] != points[i]
        }
        for i in left - beaten:
            numbers[i] = front
        left, front = beaten, front + 1
    return numbers


@given(points=POINTS)
def test_fronts_are_those_that_peeling_finds(points):
    assert front_numbers([x for x, _ in points], [y for _, y in points]) == naive_fronts(points)


@given(points=POINTS)
def test_nothing_ranks_before_what_dominates_it(points):
    order = ranking([x for x, _ in points], [y for _, y in points])
    assert sorted(order) == list(range(len(points)))
    place = {i: n for n, i in enumerate(order)}
    for i, (a, b) in enumerate(points):
        for j, (c, d) in enumerate(points):
            if (a <= c and b <= d) and (a, b) != (c, d):
                assert place[i] < place[j]


def test_half_of_each_seed_and_rate_goes_on():
    losses = [1.0, 2.0, 3.0, 4.0, 10.0, 9.0]
    assert keep_lanes(losses, [1] * 6, [0, 0, 0, 0, 1, 1], [0.1] * 6, 0.5) == [True, True, False, False, False, True]
    assert keep_lanes(losses, [1] * 6, [0] * 6, [0.1, 0.1, 0.2, 0.2, 0.3, 0.3], 0.5) == [True, False] * 2 + [
        False,
        True,
    ]


def test_a_cheap_lane_goes_on_with_a_higher_loss():
    assert keep_lanes([1.0, 1.1, 1.2, 5.0], [9, 9, 9, 1], [0] * 4, [0.1] * 4, 0.5) == [True, False, False, True]


def test_the_share_is_rounded_up_and_of_those_that_run():
    assert sum(keep_lanes([1.0, 2.0, 3.0], [1] * 3, [0] * 3, [0.1] * 3, 0.5)) == 2
    assert keep_lanes([1.0, None, None, None], [1] * 4, [0] * 4, [0.1] * 4, 0.5) == [True, False, False, False]
    assert keep_lanes([None], [1], [0], [0.1], 0.5) == [False]
    assert sum(keep_lanes([float(i) for i in range(10)], [1] * 10, [0] * 10, [0.1] * 10, 0.1)) == 1


LANES = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(0, 9)), st.integers(0, 3), st.integers(0, 2), st.sampled_from([0.1, 0.2])),
    max_size=20,
)


@given(lanes=LANES, keep=st.sampled_from([0.25, 0.5, 1.0]))
def test_every_seed_and_rate_keeps_its_share_and_no_diverged_lane(lanes, keep):
    losses, overheads, seeds, lrs = (list(column) for column in zip(*lanes, strict=True)) if lanes else ([], [], [], [])
    stays = keep_lanes(losses, overheads, seeds, lrs, keep)
    for group in set(zip(seeds, lrs, strict=True)):
        members = [i for i, where in enumerate(zip(seeds, lrs, strict=True)) if where == group]
        running = [i for i in members if losses[i] is not None]
        assert sum(stays[i] for i in members) == math.ceil(keep * len(running))
    assert not any(stay and loss is None for stay, loss in zip(stays, losses, strict=True))


def test_the_seeds_of_a_recipe_stay_or_go_together():
    """Seed 1 is harder for all; recipe b is better on average though not on seed 0."""
    losses, seeds, recipes = [1.0, 1.1, 9.0, 8.0], [0, 0, 1, 1], ["a", "b", "a", "b"]
    assert keep_lanes(losses, [1] * 4, seeds, [0.1] * 4, 0.5, recipes) == [False, True, False, True]
    assert keep_lanes(losses, [1] * 4, seeds, [0.1] * 4, 0.5) == [True, False, False, True]


def test_a_recipe_with_a_diverged_lane_ranks_last_and_its_dead_lane_stays_dead():
    losses, seeds, recipes = [1.0, 5.0, None, 5.0], [0, 0, 1, 1], ["a", "b", "a", "b"]
    assert keep_lanes(losses, [1] * 4, seeds, [0.1] * 4, 0.5, recipes) == [False, True, False, True]
    assert keep_lanes(losses, [1] * 4, seeds, [0.1] * 4, 1.0, recipes) == [True, True, False, True]


@given(lanes=LANES)
def test_keeping_all_keeps_all_that_run(lanes):
    losses, overheads, seeds, lrs = (list(column) for column in zip(*lanes, strict=True)) if lanes else ([], [], [], [])
    assert keep_lanes(losses, overheads, seeds, lrs, 1.0) == [loss is not None for loss in losses]
