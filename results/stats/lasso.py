"""The paper's stability selection (arXiv 2509.17791): which techniques does a sparse linear model keep picking?

The levels of all factors, one-hot, explain the recipes' mean log losses. A lasso whose penalty is chosen by five-fold
cross-validation is fitted to 100 random 70 % subsamples of the recipes; a level counts as stable by the share of them
in which its coefficient is not zero. Interactions, seeds and diverged recipes are not seen by it: `effects` is the
answer, this is the comparison with what was published.

A lasso needs of its data only sums of products, and those of the folds add up: each path is that of a square root of
the sums, as many rows as there are levels, whatever the number of recipes.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from fp4dse.results.stats.effects import factor_tables
from fp4dse.results.stats.paired import SETTING, stacked

SUBSAMPLES = 100
SHARE = 0.7
FOLDS = 5
PENALTIES = 100
SMALLEST = 1e-3
"""The last penalty of a path, as a share of the one above which nothing is selected."""
COLUMNS = [*SETTING, "factor", "level", "selected", "coefficient", "low", "high", "recipes"]
Array = NDArray[np.float64]


def stability(runs: pd.DataFrame, subsamples: int = SUBSAMPLES, share: float = SHARE, seed: int = 0) -> pd.DataFrame:
    """One line per SETTING, factor and level, most often selected first.

    Columns: SETTING, factor, level, selected (share of subsamples), coefficient (mean; log loss beside the other
    levels, below 0 where it helps), low, high (2.5 and 97.5 percentiles over subsamples: how much it depends on the
    recipes tried, not on seeds), recipes (that finished). Settings with fewer than ten finished recipes have none.
    """
    parts = []
    for keys, table in factor_tables(runs):
        finished = np.isfinite(table.y).any(axis=1)
        count = int(finished.sum())
        levels = [(f, i) for f in table.factors for i in np.unique(f.codes[finished])]
        if count < 2 * FOLDS or not levels:
            continue
        y = table.y[finished]
        whole = y[np.isfinite(y).all(axis=1)]
        y = np.nanmean(y - whole.mean(axis=0) if len(whole) else y, axis=1)
        x = np.stack([f.codes[finished] == i for f, i in levels], axis=1).astype(float)
        rng = np.random.default_rng(seed)
        size = max(int(share * count), 2 * FOLDS)
        drawn = [rng.permutation(count)[:size] for _ in range(subsamples)]
        coefficients = np.array([lasso_cv(x[rows], y[rows]) for rows in drawn])
        low, high = np.quantile(coefficients, [0.025, 0.975], axis=0)
        out = pd.DataFrame({"factor": [f.name for f, _ in levels], "level": [f.levels[i] for f, i in levels]})
        out = out.assign(selected=(coefficients != 0).mean(axis=0), coefficient=coefficients.mean(axis=0))
        parts.append(out.assign(low=low, high=high, recipes=count, **dict(zip(SETTING, keys, strict=True))))
    out = stacked(parts, COLUMNS)
    order = out.assign(most=-out["selected"].astype(float), size=-out["coefficient"].astype(float).abs())
    return out.loc[order.sort_values([*SETTING, "most", "size"]).index].reset_index(drop=True)


def lasso_cv(x: Array, y: Array) -> Array:
    """Coefficients [p] of the lasso of y [n] on x [n, p] with the penalty of the least five-fold error.

    The same as scikit-learn's LassoCV(cv=5). What rounding leaves of a zero is zero.
    """
    rows = np.hstack([np.ones((len(y), 1)), x, y[:, None]])
    folds = [part.T @ part for part in np.array_split(rows, FOLDS)]  # [p + 2, p + 2] each: 1, x, y
    total = np.sum(folds, axis=0)
    most = np.abs(_centred(total)[:-1, -1]).max() / len(y)
    scale = np.sqrt(total[-1, -1] / len(y))
    if most <= 1e-12 * scale:
        return np.zeros(x.shape[1])
    penalties = most * np.geomspace(1, SMALLEST, PENALTIES)
    errors = np.zeros(PENALTIES)
    for fold in folds:
        rest = total - fold
        path = _path(rest, penalties)  # [p, penalties]
        intercept = (rest[0, -1] - rest[0, 1:-1] @ path) / rest[0, 0]
        model = np.vstack([-intercept, -path, np.ones(PENALTIES)])  # y - intercept - x · path
        errors += np.einsum("ik,ij,jk->k", model, fold, model) / fold[0, 0]
    found = _path(total, penalties[: errors.argmin() + 1])[:, -1]
    return np.where(np.abs(found) > 1e-9 * np.abs(found).max(initial=0.0), found, 0.0)


def _centred(sums: Array) -> Array:
    """Sums of products of (x, y) around their means."""
    return np.asarray(sums[1:, 1:] - np.outer(sums[0, 1:], sums[0, 1:]) / sums[0, 0])


def _path(sums: Array, penalties: Array) -> Array:
    """Lasso coefficients [p, penalties] from the sums of products of (1, x, y)."""
    from sklearn.linear_model import lasso_path

    products = _centred(sums)
    slack = 1e-10 * np.trace(products[:-1, :-1])  # the levels of a factor add up to one, so a root needs some
    root = np.linalg.cholesky(products[:-1, :-1] + slack * np.eye(len(products) - 1), upper=True)
    target = solve_triangular(root, products[:-1, -1], trans="T")
    alphas = penalties * sums[0, 0] / len(root)
    path: Array = lasso_path(np.asfortranarray(root), target, alphas=alphas, tol=1e-6, max_iter=10_000)[1]
    return path
