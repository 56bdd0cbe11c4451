"""The contents of the cells of findings.md's tables, and the tables themselves in Markdown."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fp4dse.results.stats.estimates.intervals import paired_interval
from fp4dse.results.stats.estimates.rankings import spearman, spearman_interval
from fp4dse.results.stats.recipes.equal_time import FARTHEST
from fp4dse.results.text.ratios import change_with_range, correlation


def interval(gaps: np.ndarray) -> str:
    """The mean of gaps, one a seed, with its t interval."""
    line = paired_interval(gaps[None]).iloc[0]
    return change_with_range(line["mean"], line["low"], line["high"])


def gap(gap: float, low: float, high: float, seeds: int) -> str:
    """A gap with its 95 % interval and the seeds that it is from."""
    return f"{change_with_range(gap, low, high)}, {int(seeds)} seeds"


def time(time: float, low: float, high: float) -> str:
    """A time to BF16's loss, BF16 = 1, with its 95 % interval; empty if nothing tells it."""
    if np.isnan(time):
        return ""
    if np.isinf(time):
        return f"not with {1 / FARTHEST:g} times its tokens"
    return f"{time:.2f} ({low:.2f} or more)" if np.isinf(high) else f"{time:.2f} ({low:.2f} to {high:.2f})"


def spearman_words(a: ArrayLike, b: ArrayLike) -> str:
    """Spearman's correlation of two orders of recipes, with its 95 % interval over recipes where there are enough."""
    return correlation(float(spearman(a, b)), *spearman_interval(a, b))


def markdown(rows: list[dict[str, object]]) -> str:
    """The rows as a table, with the columns of all of them; in words where there are none."""
    if not rows:
        return "\nNothing was trained for this yet.\n\n"
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([str(row.get(name, "")) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
