import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.results.stats.paired import numbered

VALUES = {
    "texts": ["a", "b", "c"],
    "numbers": [0.5, -1.0, 2.0],
    "gaps": ["x", None],
    "whole": [7, 3],
}


@given(st.lists(st.tuples(*map(st.sampled_from, VALUES.values())), max_size=30), st.booleans(), st.booleans())
def test_combinations_have_the_numbers_of_a_group_by(rows, sort, dropna):
    frame = pd.DataFrame(rows, columns=list(VALUES)).astype({"texts": "category"} if len(rows) % 2 else {})
    names = list(VALUES)
    expected = frame.groupby(names, sort=sort, dropna=dropna, observed=True).ngroup()
    pd.testing.assert_series_equal(numbered(frame, names, sort, dropna), expected, check_dtype=False)


def test_many_combinations_have_numbers_too():
    """More than 64 bits have room for, were all combinations to be there."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.integers(0, 300, (300, 9)).astype(str), columns=list("abcdefghi"))
    frame = pd.concat([frame, frame], ignore_index=True)
    assert numbered(frame, list(frame)).tolist() == frame.groupby(list(frame)).ngroup().tolist()
