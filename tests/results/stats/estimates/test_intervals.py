import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.results.stats.estimates.intervals import (
    BOOTSTRAP_FROM,
    half_width,
    holm,
    mean_interval,
    p_value,
    paired_interval,
    same_computation,
    untied_interval,
)

EXPERIMENTS = 4000
"""Coverage of 95 % is known to ±0.35 % (one standard error) from these."""


def coverage(values: np.ndarray, truth: float) -> float:
    found = mean_interval(values)
    return float((found["low"].le(truth) & found["high"].ge(truth)).mean())


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=8))
def test_interval_and_p_are_those_of_the_paired_t_test(d):
    d = np.round(np.array(d), 3) + np.arange(len(d)) * 0.01  # not all equal: scipy warns there
    truth = scipy.stats.ttest_rel(d, np.zeros(len(d)))
    interval = truth.confidence_interval(0.95)
    std = d.std(ddof=1)
    if std < 1e-9:
        return
    assert p_value(d[None])[0] == pytest.approx(truth.pvalue, abs=1e-9)
    assert half_width(np.array([std]), np.array([len(d)]))[0] == pytest.approx((interval.high - interval.low) / 2)
    found = mean_interval(d[None]).iloc[0]
    assert (found["low"], found["high"]) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("n", [2, 3, 5, 10, 29, 30, 60])
def test_intervals_cover_the_mean_of_a_normal_distribution(n):
    values = np.random.default_rng(n).normal(0.3, 2.0, (EXPERIMENTS, n))
    assert coverage(values, 0.3) == pytest.approx(0.95, abs=0.02)


def test_from_30_seeds_on_intervals_cover_the_mean_of_a_skewed_distribution():
    values = np.random.default_rng(1).gamma(2.0, 1.0, (EXPERIMENTS, 40))
    assert coverage(values, 2.0) == pytest.approx(0.95, abs=0.02)


def test_a_plain_percentile_bootstrap_would_not_do_at_three_seeds():
    values = np.random.default_rng(2).normal(size=(EXPERIMENTS, 3))
    means = values[:, np.random.default_rng(3).integers(0, 3, (500, 3))].mean(axis=2)
    low, high = np.quantile(means, [0.025, 0.975], axis=1)
    assert ((low <= 0) & (high >= 0)).mean() < 0.8
    assert coverage(values, 0.0) == pytest.approx(0.95, abs=0.02)


def test_the_bootstrap_has_the_width_of_the_t_interval_where_that_is_right():
    values = np.random.default_rng(4).normal(size=(200, BOOTSTRAP_FROM))
    found = mean_interval(values)
    t = 2 * half_width(values.std(axis=1, ddof=1), np.full(200, BOOTSTRAP_FROM))
    assert np.mean((found["high"] - found["low"]) / t) == pytest.approx(1, abs=0.02)


def test_holes_are_left_out_and_one_value_has_no_interval():
    found = mean_interval([[1.0, np.nan, 3.0], [2.0, np.nan, np.inf], [np.nan] * 3])
    assert found["n"].tolist() == [2, 1, 0]
    assert found["mean"].tolist() == pytest.approx([2.0, 2.0, np.nan], nan_ok=True)
    assert np.isnan(found["low"]).tolist() == [False, True, True]


def test_rows_do_not_depend_on_their_company():
    values = np.random.default_rng(5).normal(size=(3, 40))
    values[1, 35:] = np.nan
    both, alone = mean_interval(values), [mean_interval(row[None]).iloc[0] for row in values]
    pd.testing.assert_frame_equal(both, pd.DataFrame(alone).reset_index(drop=True), check_dtype=False)


def test_holm_is_its_definition():
    p = np.array([0.01, np.nan, 0.04, 0.03, 0.005])
    assert holm(p).tolist() == pytest.approx([0.03, np.nan, 0.06, 0.06, 0.02], nan_ok=True)
    assert holm([]).tolist() == []


def test_holm_claims_falsely_in_no_more_than_5_of_100_experiments():
    p = np.random.default_rng(6).random((2000, 20))
    assert np.mean([holm(row).min() < 0.05 for row in p]) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 2000)


def test_a_few_equal_values_have_neither_an_interval_nor_a_p():
    """Accuracies are counts: two or three seeds tie by chance, and know nothing of their spread."""
    ties = np.array([[0.0195, 0.0195, 0.0195], [0.43 - 0.41, 0.53 - 0.51, np.nan], [0.0, 0.0, 0.0]])
    found = mean_interval(ties)
    assert found["mean"].tolist() == pytest.approx([0.0195, 0.02, 0.0])
    assert found[["low", "high", "p"]].isna().all(axis=None)
    assert np.isnan(p_value(ties, shares=True)).all()
    many = mean_interval(np.full((1, BOOTSTRAP_FROM), 0.25)).iloc[0]
    assert many["low"] == many["high"] == 0.25
    assert many["p"] < 0.001


@pytest.mark.parametrize("n", [2, BOOTSTRAP_FROM - 1, BOOTSTRAP_FROM, 64])
def test_numbers_that_may_tie_by_definition_have_an_interval_only_where_they_do_not(n):
    apart = np.random.default_rng(n).normal(size=n)
    values = np.array([np.zeros(n), np.full(n, 0.25), apart])
    found = untied_interval(values)
    assert found["mean"].tolist() == pytest.approx([0.0, 0.25, apart.mean()])
    assert found.loc[:1, ["low", "high", "p"]].isna().all(axis=None)
    pd.testing.assert_frame_equal(found[2:], mean_interval(values)[2:])


def test_losses_that_are_equal_on_every_seed_are_the_same_computation_and_shares_only_from_30_seeds_on():
    d = np.array([[0.0, 0.0, np.nan], [0.0, np.nan, np.nan], [np.nan] * 3, [0.1, 0.1, 0.1], [0.0, 0.0, 0.1]])
    assert same_computation(d).tolist() == [True, False, False, False, False]
    found = paired_interval(d)
    assert found.loc[0, ["mean", "low", "high", "p"]].tolist() == [0.0, 0.0, 0.0, 1.0]
    pd.testing.assert_frame_equal(found[1:], mean_interval(d)[1:])
    pd.testing.assert_frame_equal(paired_interval(d, shares=True), mean_interval(d))
    assert paired_interval(d[[0, 0]], [True, False])["p"].tolist() == pytest.approx([np.nan, 1.0], nan_ok=True)
    many = np.zeros((1, BOOTSTRAP_FROM))
    assert same_computation(many, shares=True).all()
    assert not same_computation(many[:, 1:], shares=True).any()


@pytest.mark.parametrize("n", [3, 29, 30, 64])
def test_p_is_below_5_percent_where_the_interval_leaves_out_zero(n):
    rng = np.random.default_rng(n)
    values = np.round(
        rng.gamma(1.0, 1.0, (EXPERIMENTS, n)) - 1 + 2 / np.sqrt(n) * rng.choice([-1, 1], (EXPERIMENTS, 1)), 1
    )
    found = mean_interval(values)
    apart = found["low"].gt(0) | found["high"].lt(0)
    assert 0.2 < apart.mean() < 0.8
    assert found["p"].lt(0.05).eq(apart).all()


def test_p_of_many_seeds_is_that_of_the_t_test_where_that_is_right():
    values = np.random.default_rng(7).normal(0.2, 1.0, (500, 64))
    truth = scipy.stats.ttest_1samp(values, 0, axis=1).pvalue
    plain = truth > 0.005
    assert np.abs(p_value(values) / truth - 1)[plain].mean() < 0.15
    assert p_value(values + 3.0).max() < 1e-9
