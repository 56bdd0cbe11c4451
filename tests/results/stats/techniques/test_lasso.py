import numpy as np
import pytest
from sklearn.linear_model import LassoCV

from fp4dse.results import stability
from fp4dse.results.bench.generated import generated
from fp4dse.results.stats.techniques.lasso import lasso_cv

SR, RHT, SCALE = "*.g.rounding", "wgrad.rotation", "*.scale"


@pytest.mark.parametrize("seed", range(4))
def test_the_lasso_is_that_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(203, 7)) + rng.normal(size=7)
    y = 3 + x @ np.array([1.0, -0.5, 0.2, 0, 0, 0, 0.05]) + rng.normal(size=203)
    theirs = LassoCV(cv=5, tol=1e-6).fit(x, y).coef_
    assert lasso_cv(x, y).tolist() == pytest.approx(theirs.tolist(), abs=2e-3)


@pytest.mark.parametrize("seed", range(3))
def test_levels_that_make_up_others_have_the_fit_of_scikit_learn(seed):
    """One-hot levels add up to one in each factor: their coefficients are not unique, what they explain is."""
    rng = np.random.default_rng(seed)
    codes = np.stack([rng.integers(0, levels, 150) for levels in (2, 3, 2, 4)], axis=1)
    x = np.hstack([np.eye(codes[:, i].max() + 1)[codes[:, i]] for i in range(4)])
    y = x @ rng.normal(size=x.shape[1]) + rng.normal(size=150)
    found, theirs = lasso_cv(x, y), LassoCV(cv=5, tol=1e-8, max_iter=100_000).fit(x, y).coef_
    assert (x - x.mean(axis=0)) @ found == pytest.approx((x - x.mean(axis=0)) @ theirs, abs=1e-3)
    assert np.abs(found).sum() == pytest.approx(np.abs(theirs).sum(), rel=1e-3)
    assert (found[1], found[6]) == (0, 0)  # what is the opposite of the level before it


def test_nothing_is_selected_where_there_is_nothing():
    assert lasso_cv(np.eye(20), np.ones(20)).tolist() == [0.0] * 20


def test_planted_techniques_are_picked_and_the_others_are_not():
    runs = generated(
        (SCALE, "*.tensor_scale", SR, "forward.rounding", RHT, "dgrad.rotation"),
        truth=lambda codes: 0.5 - 0.3 * codes[SR] - 0.2 * (codes[RHT] > 0) + 0.1 * (codes[SCALE] == 1),
        noise=0.05,
    )
    found = stability(runs, subsamples=30)
    assert found["factor"].head(3).tolist() == [SR, RHT, SCALE]
    assert found["selected"].head(3).tolist() == [1.0, 1.0, 1.0]
    assert found["coefficient"].abs().iloc[3:].max() < 0.02
    assert found["low"].le(found["coefficient"]).all()


def test_too_few_recipes_have_no_stability():
    assert stability(generated((SR, RHT))).empty
