"""Loss and time are exchanged at the rate at which tokens lower BF16's loss, and not at all where nobody knows it."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from fp4dse.dse.cost import OVERHEAD_OF
from fp4dse.results.stats.paired import rows_at_best_lr
from fp4dse.results.stats.recipes.equal_time import FARTHEST, at_equal_time, ranking, slope_of, time_to_quality
from fp4dse.results.stats.recipes.margins import ASSUMED, BY_CURVE, BY_LAW, MORE, Margin
from fp4dse.results.stats.recipes.summary import summarize

SLOPE = 0.05
LAW = Margin(SLOPE * math.log1p(MORE), BY_LAW)


def trained(tokens: float, gap: float = 0.0) -> float:
    """A loss that falls by a power of the tokens."""
    return math.exp(gap) * 7 * tokens**-SLOPE


@given(st.floats(-0.03, 0.06), st.floats(0.4, 1.2))
def test_the_time_is_that_after_which_the_recipe_has_bf16s_loss(gap, overhead):
    tokens = brentq(lambda t: trained(t, gap) - trained(1e6), 1e5, 1e7, xtol=1e-3)
    found = time_to_quality(gap, gap - 0.01, gap + 0.005, overhead, LAW)
    assert found.mean == pytest.approx(overhead * tokens / 1e6, rel=1e-6)
    assert found.low < found.mean < found.high


@given(st.floats(-0.03, 0.06), st.floats(0.4, 1.2))
def test_a_lower_loss_at_equal_time_is_less_time_to_bf16s_loss(gap, overhead):
    at_time = trained(1e6 / overhead, gap) / trained(1e6)
    assert (at_time < 1) == (time_to_quality(gap, gap, gap, overhead, LAW).mean < 1)


def test_of_a_gap_beyond_what_bf16_lost_with_a_quarter_of_its_tokens_no_time_is_told():
    far = -SLOPE * math.log(FARTHEST)
    assert FARTHEST == 0.25
    near, beyond = (time_to_quality(far + by, far + by, far + by, 0.5, LAW).mean for by in (-1e-6, 1e-6))
    assert near == pytest.approx(2.0, rel=1e-4)
    assert beyond == math.inf
    ahead, further = (time_to_quality(gap, gap, gap, 0.5, LAW).mean for gap in (-far, -5 * far))
    assert (ahead, further) == (pytest.approx(0.5 * FARTHEST), pytest.approx(0.5 * FARTHEST))


def test_recipes_out_of_reach_stand_behind_and_where_all_are_gaps_rank():
    gap, overhead = pd.Series([0.01, 0.08, 0.0]), pd.Series([0.9, 0.2, np.nan])
    rank, slope = ranking(gap, overhead, SLOPE)
    assert slope == SLOPE
    np.testing.assert_allclose(rank, [0.01 + SLOPE * math.log(0.9), np.inf, 0.0])  # an unknown overhead is BF16's
    for far in (gap + 0.08, gap):
        rank, slope = ranking(far, overhead, SLOPE if far is not gap else math.nan)
        assert rank.equals(far)
        assert math.isnan(slope)


def test_what_nobody_knows_of_tokens_is_worth_no_time():
    assert slope_of(Margin(0.001, BY_CURVE)) == pytest.approx(0.001 / math.log(1.02))
    assert slope_of(Margin(0.001, f"{BY_LAW}, fitted at engine revision 3")) > 0
    for of in (f"{ASSUMED}: these rows hold nothing of BF16's curve", "given"):
        assert math.isnan(slope_of(Margin(0.005, of)))
        assert all(math.isnan(value) for value in time_to_quality(0.01, 0.0, 0.02, 0.5, Margin(0.005, of))[:3])
    assert time_to_quality(0.01, 0.0, 0.02, 0.5, Margin(0.005, BY_CURVE)).rough
    assert not time_to_quality(0.01, 0.0, 0.02, 0.5, LAW).rough


def worth(rows: pd.DataFrame, slope: float) -> pd.Series:
    return pd.Series(slope, rows["setting"].unique())


@pytest.fixture
def rows(runs) -> pd.DataFrame:
    frame = runs(bf16=[0.5, 0.51], nvfp4=[0.52, 0.53], mxfp4=[0.53, 0.54])
    costs = {"bf16": 1.0, "nvfp4": 0.8, "mxfp4": 0.6}
    return rows_at_best_lr(frame.assign(overhead=frame["recipe_name"].map(costs), margin=LAW.value, margin_of=LAW.of))


def test_rows_at_equal_time_have_the_loss_of_the_tokens_that_their_time_is_worth(rows):
    moved = at_equal_time(rows, worth(rows, SLOPE))
    expected = rows["loss"] * rows["overhead"] ** SLOPE
    np.testing.assert_allclose(moved["loss"], expected)
    np.testing.assert_allclose(moved["gap"], np.log(expected / rows["baseline_loss"]))
    assert moved["loss"].lt(rows["loss"]).equals(~rows["is_baseline"])


def test_rows_stay_as_they_are_where_the_slope_or_the_overhead_is_not_known(rows):
    np.testing.assert_array_equal(at_equal_time(rows, worth(rows, np.nan))["gap"], rows["gap"])
    np.testing.assert_array_equal(at_equal_time(rows.assign(overhead=np.nan), worth(rows, SLOPE))["gap"], rows["gap"])
    np.testing.assert_array_equal(at_equal_time(rows.drop(columns="overhead"), worth(rows, SLOPE))["gap"], rows["gap"])


def test_an_overhead_of_an_older_cost_model_is_worth_nothing_and_a_recipe_has_one(rows):
    older = rows["recipe_name"].eq("mxfp4")
    of, _, newest = OVERHEAD_OF.rpartition(" ")
    dated = rows.assign(overhead_of=[f"{of} {int(newest) - old}" for old in older])
    unmoved = at_equal_time(dated, worth(rows, SLOPE))["gap"].eq(rows["gap"])
    assert unmoved.equals(older | rows["is_baseline"])
    once = older & rows["seed"].eq(rows["seed"].min())
    mixed = at_equal_time(dated.assign(overhead_of=[f"{of} {int(newest) - old}" for old in once]), worth(rows, SLOPE))
    moved = (mixed["gap"] - rows["gap"])[older]
    assert moved.to_numpy() == pytest.approx(SLOPE * math.log(0.6))


def test_each_line_of_the_summary_has_its_time(rows):
    lines = summarize(rows).set_index("name")
    for name in ("nvfp4", "mxfp4"):
        line = lines.loc[name]
        time = time_to_quality(line["gap"], line["gap_low"], line["gap_high"], line["overhead"], LAW)
        told = line[["time_to_quality", "time_to_quality_low", "time_to_quality_high"]]
        np.testing.assert_allclose(told.astype(float), time[:3])
    assert lines.loc["bf16", "time_to_quality"] == 1
    assert summarize(rows.drop(columns=["margin", "margin_of"]))["time_to_quality"].isna().all()
