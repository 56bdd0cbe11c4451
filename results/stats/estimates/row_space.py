"""The columns of a linear model by what its recipes tell of them: an orthonormal basis of the row space.

A pair of factors of a and b levels has (a - 1)(b - 1) columns. Named recipes bring levels that one or two recipes have,
and 29 factors then have 10,000 columns, of which 3,600 recipes determine 900. Least squares that holds coefficients
near zero knows nothing beside the row space: along all other directions they are zero. So the columns X of the pairs
are replaced by coordinates L of the recipes in a basis V of as many directions as there are,

    X = L Vᵀ      VᵀV = 1      L: [recipes, rank]      V: [columns, rank]

and X is never made. L is the Cholesky factor with pivoting of the kernel X Xᵀ, whose entries are those of the factors:

    Σ_{a<b} K_a K_b = ((Σ_a K_a)² - Σ_a K_a²) / 2      K_a = X_a X_aᵀ, entry by entry
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag, lapack, solve_triangular

from fp4dse.results.stats.estimates.least_squares import null_space

Array = NDArray[np.float64]
_AT_ONCE = 64
_NOTHING = 1e-10
"""Of the largest square: what is left of a recipe's row that others explain."""
_FAR = 1e-6
"""Length from which on a direction is one that nothing is known of."""


class RowSpace(NamedTuple):
    """A design in coordinates: design[recipes, columns] = coordinates · basisᵀ."""

    coordinates: Array
    """[recipes, rank]"""
    basis: Array
    """[columns, rank], its columns orthonormal."""
    untold: Array
    """[rank, any]: directions of the coordinates that the recipes tell nothing about."""

    def contrasts(self, of_columns: Array, start: int = 0) -> tuple[Array, NDArray[np.bool_]]:
        """Contrasts [m, any] of the columns from `start` on as contrasts [m, rank] of the coordinates; and for each if
        it is of anything that the recipes tell nothing about."""
        some = np.flatnonzero(of_columns.any(axis=0))
        part, basis = of_columns[:, some], self.basis[start + some]
        out = part @ basis
        lost = np.abs(part - out @ basis.T).max(axis=1, initial=0.0) > _FAR
        return out, lost | (np.abs(out @ self.untold).max(axis=1, initial=0.0) > _FAR)


def row_space(first: Array, blocks: Sequence[Array], weight: Array) -> RowSpace:
    """The row space of the columns `first` [recipes, any], which stay as they are, and of the products of all pairs of
    `blocks` [recipes, any] each, pair by pair. weight: [recipes]."""
    coordinates, basis = pairs_by_row_space(blocks) if len(blocks) > 1 else (first[:, :0], np.zeros((0, 0)))
    coordinates = np.hstack([first, coordinates])
    return RowSpace(coordinates, block_diag(np.eye(first.shape[1]), basis), null_space(coordinates, weight))


def pairs_by_row_space(blocks: Sequence[Array]) -> tuple[Array, Array]:
    """L [recipes, rank] and V [columns, rank] of the products of all pairs of blocks [recipes, any]; see the top."""
    factor, pivots = _cholesky(blocks)
    rows = [
        (a[pivots, :, None] * b[pivots, None, :]).reshape(len(pivots), a.shape[1] * b.shape[1])
        for a, b in combinations(blocks, 2)
    ]
    basis = solve_triangular(factor[pivots], np.hstack(rows), lower=True, overwrite_b=True)
    exact, rest = np.linalg.qr(basis.T)  # rounding left it orthonormal to eight digits or so
    return factor @ rest.T, exact


def _cholesky(blocks: Sequence[Array]) -> tuple[Array, NDArray[np.intp]]:
    """The factor [recipes, rank] of the kernel of all pairs, and the recipes it was found from, in its order."""
    recipes = len(blocks[0])
    left = _of_pairs([np.square(block).sum(axis=1) for block in blocks])
    least = _NOTHING * left.max(initial=0.0)
    factor, pivots = np.empty((recipes, 0)), np.empty(0, np.intp)
    while (left > least).any():
        rows = np.argsort(-left, kind="stable")[:_AT_ONCE]
        kernel = _of_pairs([block[rows] @ block.T for block in blocks]) - factor[rows] @ factor.T
        root, order, rank, _ = lapack.dpstrf(kernel[:, rows], tol=least, lower=1)
        new = order[:rank] - 1
        more = solve_triangular(root[:rank, :rank], kernel[new], lower=True).T
        factor, pivots = np.hstack([factor, more]), np.append(pivots, rows[new])
        left = left - np.square(more).sum(axis=1)
        left[rows] = 0.0  # the others of these rows follow from the new ones
    return factor, pivots


def _of_pairs(kernels: Sequence[Array]) -> Array:
    """Σ_{a<b} K_a K_b, entry by entry."""
    total, squares = np.zeros_like(kernels[0]), np.zeros_like(kernels[0])
    for kernel in kernels:
        total += kernel
        squares += np.square(kernel)
    return (np.square(total) - squares) / 2
