"""Contrasts of a linear model: what was tried with what, and the intervals of what they say.

The variance of a contrast has two parts: that over seeds, held against the variance of independent lanes and pooled
over contrasts as far as these are alike (spread.shrunken), and that from combinations which were not tried. The second
is the model's misfit times the squares of the weights beyond those of a complete design, where the sum over recipes is
the sum over everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from fp4dse.results.stats.estimates.intervals import CONFIDENCE, adjusted, known_error
from fp4dse.results.stats.estimates.least_squares import Fit
from fp4dse.results.stats.estimates.spread import shrunken
from fp4dse.results.stats.factors import Factor

Lines = dict[str, Any]
"""Columns of a table: values, or the one of all lines. Of `level` there are as many as lines."""


class Term(NamedTuple):
    """A factor, or a pair of them, in the model: which columns of the design it has, and how its levels are coded."""

    factors: tuple[Factor, ...]
    present: tuple[NDArray[np.intp], ...]
    coding: tuple[NDArray[np.float64], ...]
    columns: slice


class Tried(NamedTuple):
    """The levels of the modelled factors that were tried with each other."""

    mains: list[Term]
    pairs: dict[tuple[str, str], Term]
    """Interactions in the model, by the names of the two factors."""
    met: dict[tuple[str, str], NDArray[np.bool_]]
    """[levels, levels] of each two factors by name, either one first: True where a recipe that finished has both."""
    cells: float
    """The number of combinations."""

    def support(self, term: Term, level: int, reference: int) -> Iterator[tuple[Term, NDArray[np.bool_]]]:
        """Each other factor, and at which of its levels both levels of `term`, places in `present`, were tried."""
        for other in self.mains:
            if other is not term:
                met = self.met[term.factors[0].name, other.factors[0].name]
                yield other, met[level] & met[reference]

    def between(self, term: Term, other: Term) -> tuple[Term | None, bool]:
        """Their interaction, and True if `term` comes first in it."""
        names = term.factors[0].name, other.factors[0].name
        found = self.pairs.get(names)
        return (found, True) if found else (self.pairs.get(names[::-1]), False)


def estimates(
    model: Fit, contrasts: NDArray[np.float64], cannot: NDArray[np.bool_], complete: NDArray[np.float64]
) -> Lines:
    """Values and the parts of their variance, columns for `with_intervals`; NaN where nothing can be told.

    contrasts: [m, p], of the coefficients; cannot, complete: [m].
    """
    told = contrasts[~cannot]
    parts = np.full((5, len(contrasts)), np.nan)
    parts[-1] = model.freedom
    parts[:, ~cannot] = told @ model.coefficients, *model.variances(told, complete[~cannot])
    names = ("effect", "seed_variance", "lane_variance", "misfit", "freedom")
    basis = "seeds" if model.by_seeds else "recipes"
    return {**dict(zip(names, parts, strict=True)), "misfit_freedom": model.misfit_freedom, "basis": basis}


def as_frame(tables: Sequence[Lines]) -> pd.DataFrame:
    """The lines of all tables, NaN where one lacks a column. One frame is made: a study has hundreds of tables."""
    columns = {}
    lengths = [len(lines["level"]) for lines in tables]
    for name in dict.fromkeys(chain.from_iterable(tables)):
        values = [np.asarray(lines.get(name, np.nan)) for lines in tables]
        values = [part.astype(object) if part.dtype.kind == "U" else part for part in values]
        often = [1 if part.ndim else length for part, length in zip(values, lengths, strict=True)]
        column = np.repeat(np.concatenate([*map(np.atleast_1d, values)]), np.repeat(often, [v.size for v in values]))
        null = column.dtype == object and any(value is None for value in column)
        columns[name] = pd.Series(column, dtype=object if null else None)
    return pd.DataFrame(columns)


def with_intervals(lines: pd.DataFrame, ranks: bool = False) -> pd.DataFrame:
    """Lines of `estimates` with error, freedom, low, high, p and q; see the top. ranks: effects are of ranks, which
    saturate where all recipes with a level are better than all without, in every seed: that is no tie by chance."""
    out = lines.copy()
    names = ["seed_variance", "lane_variance", "misfit", "freedom", "misfit_freedom"]
    out = out.assign(**{name: out[name].astype(float) if name in out else np.nan for name in names})
    variance, freedom = out["seed_variance"].to_numpy(copy=True), out["freedom"].to_numpy(copy=True)
    for kind in out["kind"].unique():
        usable = (out["kind"].eq(kind) & out["lane_variance"].gt(0) & out["basis"].eq("seeds")).to_numpy()
        if usable.sum() > 1:
            alone = out["lane_variance"].to_numpy()[usable]
            ratio, pooled = shrunken(variance[usable] / alone, freedom[usable])
            variance[usable], freedom[usable] = ratio * alone, pooled
    misfit = out["misfit"].to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.square(variance) / freedom + np.square(misfit) / out["misfit_freedom"].to_numpy()
        freedom = np.where(misfit > 0, np.square(variance + misfit) / parts, freedom)
        error = np.sqrt(variance + misfit)
        error = np.where(freedom > 0, error if ranks else known_error(error, out["effect"]), np.nan)
        half = stdtrit(np.maximum(freedom, 1), 0.5 + CONFIDENCE / 2) * error
        p = 2 * stdtr(np.maximum(freedom, 1), -np.abs(out["effect"].to_numpy(float) / error))
    effect = out["effect"].to_numpy(float)
    out = out.assign(error=error, freedom=freedom, low=effect - half, high=effect + half, p=p, q=adjusted(p))
    return out.drop(columns=["seed_variance", "lane_variance", "misfit", "misfit_freedom"])
