"""Fractions are balanced, regular ones have the strength that they promise, and all of them repeat themselves."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4dse.dse import ConfigError
from fp4dse.dse.space.design import balanced, regular, shuffled

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def is_valid(sizes, runs) -> bool:
    return all(len(run) == len(sizes) and all(0 <= x < n for x, n in zip(run, sizes, strict=True)) for run in runs)


@given(sizes=SIZES, runs=st.integers(1, 60), seed=st.integers(0, 3))
def test_every_level_occurs_equally_often_give_or_take_one(sizes, runs, seed):
    chosen = list(balanced(sizes, runs, seed))
    assert len(chosen) == min(runs, math.prod(sizes))
    assert is_valid(sizes, chosen)
    for axis, size in enumerate(sizes):
        often = Counter(run[axis] for run in chosen)
        assert max(often.values()) - min(often[level] for level in range(size)) <= 1


@given(sizes=SIZES, runs=st.integers(1, 60), seed=st.integers(0, 3))
def test_the_same_seed_gives_the_same_fraction(sizes, runs, seed):
    assert list(balanced(sizes, runs, seed)) == list(balanced(sizes, runs, seed))


def test_pairs_of_levels_occur_about_equally_often():
    """64 of 4096 combinations of four-level axes: each pair 4 times on average, and within half of that."""
    runs = list(balanced([4] * 6, 64))
    assert len(set(runs)) == 64
    for a, b in itertools.combinations(range(6), 2):
        often = Counter((run[a], run[b]) for run in runs)
        assert len(often) == 16
        assert set(often.values()) <= {2, 3, 4, 5, 6}


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1, max_size=5), resolution=st.sampled_from([3, 4, 5])
)
def test_any_axes_up_to_the_strength_see_every_combination_equally_often(sizes, resolution):
    runs = list(regular(sizes, resolution))
    assert is_valid(sizes, runs)
    assert len(set(runs)) == len(runs) <= math.prod(sizes)
    for axes in itertools.combinations(range(len(sizes)), min(resolution - 1, len(sizes))):
        often = Counter(tuple(run[axis] for axis in axes) for run in runs)
        assert len(often) == math.prod(sizes[axis] for axis in axes)
        assert len(set(often.values())) == 1


@pytest.mark.parametrize(
    ("sizes", "resolution", "runs"),
    [
        ([2] * 7, 3, 8),  # the 2^(7-4) design
        ([2] * 8, 4, 16),  # 2^(8-4)
        ([2] * 5, 5, 16),  # 2^(5-1)
        ([3] * 4, 3, 9),  # Taguchi's L9
        ([4] * 5, 3, 16),  # L16
        ([2] + [4] * 4, 3, 16),
        ([4] * 5 + [2] * 5, 3, 32),  # the paper's axes: 65,536 combinations
    ],
)
def test_known_fractions_are_found_at_their_known_size(sizes, resolution, runs):
    assert len(list(regular(sizes, resolution))) == runs


@given(sizes=SIZES, seed=st.integers(0, 3))
def test_shuffling_meets_every_combination_once(sizes, seed):
    runs = list(shuffled(sizes, seed))
    assert sorted(runs) == list(itertools.product(*map(range, sizes)))
    assert runs == list(shuffled(sizes, seed))


def test_shuffling_does_not_list_what_is_never_asked_for():
    assert len(list(itertools.islice(shuffled([10] * 30), 100))) == 100


def test_a_fraction_that_is_no_saving_is_refused():
    with pytest.raises(ConfigError, match="a number of runs"):
        next(regular([4096, 4096], 3))
