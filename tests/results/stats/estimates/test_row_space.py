from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from fp4dse.results.stats.estimates.least_squares import fit, null_space, sum_to_zero
from fp4dse.results.stats.estimates.row_space import pairs_by_row_space, row_space


def study(seed: int, recipes: int = 80) -> tuple[list[np.ndarray], np.ndarray]:
    """Coded factors, some levels of which one or two recipes have, and all columns of their pairs."""
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(5):
        codes = rng.choice(9, recipes, p=rng.dirichlet([0.15] * 9))
        codes = np.unique(codes, return_inverse=True)[1]
        blocks.append(sum_to_zero(int(codes.max()) + 1)[codes])
    return blocks, np.hstack([(a[:, :, None] * b[:, None, :]).reshape(recipes, -1) for a, b in combinations(blocks, 2)])


@pytest.mark.parametrize("seed", range(6))
def test_the_coordinates_hold_all_that_the_columns_do(seed):
    blocks, columns = study(seed)
    found, basis = pairs_by_row_space(blocks)
    assert found.shape[1] == np.linalg.matrix_rank(columns)
    assert np.abs(found @ basis.T - columns).max(initial=0) < 1e-10
    assert np.abs(basis.T @ basis - np.eye(found.shape[1])).max(initial=0) < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_a_fit_in_coordinates_is_that_of_all_columns(seed):
    rng = np.random.default_rng([seed, 1])
    blocks, pairs = study(seed)
    first, weight, y = np.ones((80, 1)), rng.uniform(0.5, 1, 80), rng.normal(size=(80, 3))
    design = np.hstack([first, pairs])
    space = row_space(first, blocks, weight)
    ridge = np.append(0.0, np.full(design.shape[1] - 1, 1e-6))
    whole = fit(design, y, weight, ridge)
    short = fit(space.coordinates, y, weight, ridge[: space.coordinates.shape[1]])
    of = rng.normal(size=(9, design.shape[1])) * (rng.random(design.shape[1]) < 0.3)
    inside, _ = space.contrasts(of)
    near = {"rel": 1e-4, "abs": 1e-8}
    assert inside @ short.coefficients == pytest.approx(of @ whole.coefficients, **near)
    assert short.estimate(inside)[1] == pytest.approx(whole.estimate(of)[1], **near)
    some = slice(1, 1 + pairs.shape[1] // 3)
    columns = np.eye(design.shape[1])[some]
    assert short.rise(space.basis[some], 1e-6 * weight.sum()) == pytest.approx(whole.rise(columns), **near)


@pytest.mark.parametrize("seed", range(6))
def test_a_contrast_is_lost_if_and_only_if_it_is_not_one_of_rows(seed):
    rng = np.random.default_rng([seed, 2])
    blocks, pairs = study(seed)
    design, weight = np.hstack([np.ones((80, 1)), pairs]), np.ones(80)
    space = row_space(design[:, :1], blocks, weight)
    of_rows = rng.normal(size=(5, 80)) @ design
    assert not space.contrasts(of_rows)[1].any()
    beside = null_space(design, weight)
    assert beside.shape[1]
    assert space.contrasts(of_rows + 0.01 * beside[:, :1].T)[1].all()


def test_one_factor_has_no_pairs():
    space = row_space(np.ones((4, 1)), [np.ones((4, 1))], np.ones(4))
    assert space.coordinates.shape == (4, 1)
    assert space.basis.tolist() == [[1.0]]
