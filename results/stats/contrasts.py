"""Contrasts of a linear model: what was tried with what, and the intervals of what they say.

The variance of a contrast has two parts: that over seeds, held against the variance of independent lanes and pooled
over contrasts as far as these are alike (spread.shrunken), and that from combinations which were not tried. The second
is the model's misfit times the squares of the weights beyond those of a complete design, where the sum over recipes is
the sum over everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from fp4dse.results.stats.factors import Factor
from fp4dse.results.stats.intervals import CONFIDENCE, adjusted
from fp4dse.results.stats.least_squares import Fit
from fp4dse.results.stats.spread import shrunken


class Term(NamedTuple):
    """A factor, or a pair of them, in the model: which columns of the design it has, and how its levels are coded."""

    factors: tuple[Factor, ...]
    present: tuple[NDArray[np.intp], ...]
    coding: tuple[NDArray[np.float64], ...]
    block: NDArray[np.float64]
    columns: slice


class Tried(NamedTuple):
    """The levels of the modelled factors that were tried with each other."""

    mains: list[Term]
    pairs: list[Term]
    """Interactions in the model."""
    codes: list[NDArray[np.intp]]
    """[recipes] of each of `mains`, those that finished."""

    def cells(self) -> float:
        """The number of combinations."""
        return float(np.prod([len(term.present[0]) for term in self.mains]))

    def support(self, term: Term, level: int, reference: int) -> Iterator[tuple[Term, NDArray[np.bool_]]]:
        """Each other factor, and at which of its levels both levels of `term` were tried."""
        mine = next(codes for main, codes in zip(self.mains, self.codes, strict=True) if main is term)
        for other, codes in zip(self.mains, self.codes, strict=True):
            if other is not term:
                with_, without = (np.isin(other.present[0], codes[mine == code]) for code in (level, reference))
                yield other, with_ & without

    def between(self, term: Term, other: Term) -> tuple[Term | None, bool]:
        """Their interaction, and True if `term` comes first in it."""
        names = {f.name for f in (*term.factors, *other.factors)}
        found = next((pair for pair in self.pairs if {f.name for f in pair.factors} == names), None)
        return found, found is not None and found.factors[0].name == term.factors[0].name


def estimates(
    model: Fit, contrasts: NDArray[np.float64], cannot: NDArray[np.bool_], complete: NDArray[np.float64]
) -> pd.DataFrame:
    """Values and the parts of their variance, for `with_intervals`; NaN where nothing can be told."""
    parts = (contrasts @ model.coefficients, *model.variances(contrasts, complete))
    names = ("effect", "seed_variance", "lane_variance", "misfit")
    columns = {name: np.where(cannot, np.nan, part) for name, part in zip(names, parts, strict=True)}
    out = pd.DataFrame({**columns, "freedom": model.freedom, "misfit_freedom": model.misfit_freedom})
    return out.assign(basis="seeds" if model.by_seeds else "recipes")


def with_intervals(lines: pd.DataFrame) -> pd.DataFrame:
    """Lines of `estimates` with error, freedom, low, high, p and q; see the top."""
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
        error = np.where(freedom > 0, np.sqrt(variance + misfit), np.nan)
        half = stdtrit(np.maximum(freedom, 1), 0.5 + CONFIDENCE / 2) * error
        p = 2 * stdtr(np.maximum(freedom, 1), -np.abs(out["effect"].to_numpy(float) / error))
    effect = out["effect"].to_numpy(float)
    out = out.assign(error=error, freedom=freedom, low=effect - half, high=effect + half, p=p, q=adjusted(p))
    return out.drop(columns=["seed_variance", "lane_variance", "misfit", "misfit_freedom"])
