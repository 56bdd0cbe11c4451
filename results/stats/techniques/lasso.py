"""The paper's stability selection (arXiv 2509.17791): which techniques does a sparse linear model keep picking?

The levels of all factors, one-hot, explain the recipes' mean log losses. A lasso whose penalty is chosen by five-fold
cross-validation is fitted to 100 random 70 % subsamples of the recipes; a level counts as stable by the share of them
in which its coefficient is not zero. Interactions, seeds and diverged recipes are not seen by it: `effects` is the
answer, this is the comparison with what was published.

A lasso needs of its data only sums of products, and those of the folds add up: each path is that of a square root of
the sums, as many rows as there are levels, whatever the number of recipes.
"""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from fp4dse.results.stats.paired import SETTING, stacked
from fp4dse.results.stats.techniques.factor_tables import factor_tables

SUBSAMPLES = 100
SHARE = 0.7
FOLDS = 5
PENALTIES = 100
SMALLEST = 1e-3
"""The last penalty of a path, as a share of the one above which nothing is selected."""
ATTEMPTS = 3
"""To follow a path to its end, before it is descended to."""
JITTER = 1e-9
"""Of the largest target."""
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

    The same as scikit-learn's LassoCV(cv=5), but that of columns which are equal or opposite the first has the
    coefficient and the others have none. What rounding leaves of a zero is zero.
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
        errors += ((fold @ model) * model).sum(axis=0) / fold[0, 0]
    found = _path(total, penalties[: errors.argmin() + 1])[:, -1]
    return np.where(np.abs(found) > 1e-9 * np.abs(found).max(initial=0.0), found, 0.0)


def _centred(sums: Array) -> Array:
    """Sums of products of (x, y) around their means."""
    return np.asarray(sums[1:, 1:] - np.outer(sums[0, 1:], sums[0, 1:]) / sums[0, 0])


def _path(sums: Array, penalties: Array) -> Array:
    """Lasso coefficients [p, penalties], falling, from the sums of products of (1, x, y).

    They are straight lines between the penalties at which a coefficient enters or leaves, which least angles find
    (Efron et al. 2004). Of levels that were tried alike several enter at once, where least angles may lose their way;
    targets moved by a billionth part set them apart. Where that does not help either, coordinate descent does.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import lars_path_gram

    products = _centred(sums)
    gram, target = products[:-1, :-1], products[:-1, -1]
    kept = _distinct(gram)
    gram, target = np.ascontiguousarray(gram[np.ix_(kept, kept)]), target[kept]
    out, rng = np.zeros((len(sums) - 2, len(penalties))), np.random.default_rng(0)
    for _ in range(ATTEMPTS):
        moved = target + JITTER * np.abs(target).max() * rng.standard_normal(len(target))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # what it gave up is seen from where it ended
            count, least = int(sums[0, 0]), penalties[-1]
            knots, _, values = lars_path_gram(moved, gram, n_samples=count, alpha_min=least, method="lasso")
        if knots[-1] <= penalties[-1] * (1 + 1e-6):
            where = np.interp(penalties, knots[::-1], np.arange(len(knots))[::-1])
            before = np.minimum(where.astype(int), len(knots) - 2)
            out[kept] = values[:, before] + (where - before) * (values[:, before + 1] - values[:, before])
            return out
    out[kept] = _descended(gram, target, penalties * sums[0, 0])
    return out


def _distinct(gram: Array) -> NDArray[np.intp]:
    """The columns that differ, without those that are equal or opposite to one before them."""
    size = np.sqrt(np.diag(gram).clip(0))
    varied = np.flatnonzero(size > 1e-9 * size.max(initial=0.0))
    alike = np.abs(gram[np.ix_(varied, varied)]) > (1 - 1e-9) * np.outer(size[varied], size[varied])
    return np.asarray(varied[alike.argmax(axis=1) == np.arange(len(varied))])


def _descended(gram: Array, target: Array, penalties: Array) -> Array:
    """Coefficients [p, penalties] by coordinate descent; penalties: of sums of squares."""
    from sklearn.linear_model import lasso_path

    slack = 1e-10 * np.trace(gram)  # the levels of a factor add up to one, so a root needs some
    root = np.linalg.cholesky(gram + slack * np.eye(len(gram)), upper=True)
    seen = solve_triangular(root, target, trans="T")
    path: Array = lasso_path(np.asfortranarray(root), seen, alphas=penalties / len(root), tol=1e-6, max_iter=10_000)[1]
    return path
