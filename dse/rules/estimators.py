"""Rules about gradient estimators: the quantizers that a gradient can pass through in other ways than straight."""

from __future__ import annotations

from collections.abc import Iterator

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.estimator import Through
from fp4dse.dse.outliers import outlier_words
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.rounding import rounding_name, samples_of
from fp4dse.dse.scale import FloatScale, One
from fp4dse.dse.stages import STAGES

ONE_GRID = ("block", "exact", "radix4", "split", "macro", "quest", "sawb", "softmax")
"""Codecs whose elements, relative to their scale, lie on the grid of one element format."""


def _passages(r: Recipe) -> Iterator[tuple[str, Through, Quantizer]]:
    """The forward operands whose gradient does not pass straight through, with their estimators and quantizers."""
    for operand in STAGES["fprop"]:
        if (through := getattr(r.estimator, operand)) != Through():
            yield operand, through, r.slot(f"fprop.{operand}")


def grid_fault(r: Recipe) -> ConfigError | None:
    """A surrogate is a function of the position on one grid, relative to the scale that elements are made with."""
    for operand, through, q in _passages(r):
        if q.codec not in ONE_GRID:
            return ConfigError(f"estimator.{operand}", through.label(), f"ste, none (fprop.{operand} is {q.codec})")
        if isinstance(q.scale, FloatScale) and q.scale.hybrid:
            return ConfigError(f"estimator.{operand}", through.label(), f"ste, none (fprop.{operand} is hybrid)")
    return None


def outliers_fault(r: Recipe) -> ConfigError | None:
    """With a second quantizer, a clamp, a mean or several samples the operand is no function of one position."""
    for operand, through, q in _passages(r):
        if samples_of(q.rounding) > 1:
            found = f"ste, none (fprop.{operand} has rounding {rounding_name(q.rounding)})"
            return ConfigError(f"estimator.{operand}", through.label(), found)
        if q.outliers is not None:
            return ConfigError(
                f"estimator.{operand}",
                through.label(),
                f"ste, none (fprop.{operand} has outliers {outlier_words(q.outliers)})",
            )
    return None


def scale_gradient_fault(r: Recipe) -> ConfigError | None:
    """Only a scale that follows from the block maximum alone, hard or soft, has a gradient that is defined."""
    for operand, through, q in _passages(r):
        method = q.codec if q.codec != "block" else q.adapt
        method = "of scale one" if isinstance(q.scale, One) else method
        accepted = ("none", "softmax-diagonal", "softmax") if method == "softmax" else ("none",)
        if method != "none" and through.scale not in accepted:
            found = f"{', '.join(accepted)} (fprop.{operand} is {method})"
            return ConfigError(f"estimator.{operand}.scale", through.scale, found)
    return None
