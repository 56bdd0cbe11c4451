"""What is said of a setting does not depend on which other settings stand in the same frame."""

import numpy as np
import pandas as pd
import pytest

from fp4dse.results import compare
from fp4dse.results.bench.generated import as_runs, crossing
from fp4dse.results.stats.paired import SETTING
from fp4dse.results.stats.recipes.recommendation import verdicts
from fp4dse.results.stats.techniques.marginal import neighbours
from fp4dse.results.views import VIEWS

KNOBS = ("*.g.rounding", "wgrad.rotation", "dgrad.rotation", "forward.rounding", "*.scale")
ALL = crossing(KNOBS)
ACROSS = {"pooled", "loss_law", "scaling", "extrapolation", "agreement", "published"}
"""Views of several settings together."""


def one_setting(rng: np.random.Generator, count: int, confounded: bool, **columns: object) -> pd.DataFrame:
    """Runs of some recipes on three seeds. confounded: stochastic gradients stand only beside a rotation of dgrad, and
    forward operands are never stochastic, so that there are two factors fewer than knobs."""
    able = (ALL[:, 0] == ALL[:, 2]) & (ALL[:, 3] == 0) if confounded else np.ones(len(ALL), bool)
    rows = np.sort(rng.choice(np.flatnonzero(able), count, replace=False))
    codes = ALL[rows]
    gaps = np.append(0.1 + codes @ np.array([-0.02, 0.01, 0.004, 0.03, 0.0]), 0.0)
    losses = 0.5 * np.exp(gaps[:, None] + rng.normal(0, 0.02, 3) + rng.normal(0, 0.01, (count + 1, 3)))
    overhead = 0.3 + 0.1 * rng.integers(0, 7, count + 1)
    return as_runs(KNOBS, codes, losses, overhead, ids=np.append(rows, len(ALL))).assign(**columns)


def two_settings(seed: int, **other: object) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A setting alone, and the same rows among those of another one, with some of its recipes and others. other: what
    the other setting has in columns of SETTING."""
    rng = np.random.default_rng(seed)
    alone = one_setting(rng, 13, confounded=True)  # a model wants 12, and 14 with the factors of all
    both = pd.concat([one_setting(rng, 30, confounded=False, **other), alone], ignore_index=True)
    return alone, both


def of_setting(frame: pd.DataFrame, alone: pd.DataFrame) -> pd.DataFrame:
    """The lines of the setting of `alone`."""
    first = alone[list(SETTING)].iloc[0]
    return frame[frame[list(SETTING)].eq(first).all(axis=1)].reset_index(drop=True)


@pytest.mark.parametrize("view", [name for name in VIEWS if name not in ACROSS])
@pytest.mark.parametrize(("seed", "other"), [(0, {"task": "other"}), (1, {"preset": "other"}), (2, {"rev_engine": 2})])
def test_a_view_says_the_same_of_a_setting_whatever_else_is_in_the_store(view, seed, other):
    alone, both = two_settings(seed, **other)
    expected, found = VIEWS[view](alone), of_setting(VIEWS[view](both), alone)
    pd.testing.assert_frame_equal(found, expected, check_dtype=False, check_categorical=False, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seed", range(2))
def test_verdicts_pairs_and_neighbours_are_of_their_setting_alone(seed):
    alone, both = two_settings(seed, task="other")
    [expected] = verdicts(alone)
    assert repr(expected) in map(repr, verdicts(both))
    a, b = alone["config_id"].unique()[:2]
    for ask in (lambda runs: compare(runs, a, b), lambda runs: neighbours(runs, a)):
        found = of_setting(ask(both), alone)
        pd.testing.assert_frame_equal(found, ask(alone), check_dtype=False, rtol=1e-12, atol=1e-15)
