"""The law of BF16's loss in parameters N and tokens D (Hoffmann et al., arXiv 2203.15556):

    L(N, D) = E + A / N^a + B / D^b

fitted by least squares of log L over all presets of a task. Where the task knows the entropy of its data (the
procedural language), E is that and no unknown. A and B are given as the two terms at a reference model, 10M parameters
and 20 tokens for each, because A and a alone are next to undetermined.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from fp4dse.results.stats.estimates.curve_fits import Array, best_of_starts, fitted
from fp4dse.results.stats.paired import stacked
from fp4dse.results.stats.sizes.points import GROUP, Sizes, limits, sizes

REFERENCE = (1e7, 2e8)
"""Parameters and tokens."""

LEAST_SIZES = 3
"""Numbers of parameters, and numbers of tokens, that a law needs."""

ONE_LINE = 0.9999
"""Correlation of log N and log D from which on they count as one number."""

KNOWN = ["floor", "parameters_term", "parameters_exponent", "tokens_term", "tokens_exponent"]
"""The columns of a law, each with its limits."""


class Law(NamedTuple):
    """Fits to R data sets; the first is to what was measured."""

    floor: Array
    """E, [R, 1] if fitted, [1, P] if known: the entropy at the points of the fit. For other points callers take it if
    it is fitted, and the entropy that is known of those if not."""
    x: Array
    """A / N^a at the reference [R]."""
    y: Array
    """B / D^b at the reference [R]."""
    a: Array
    b: Array

    def terms(self, parameters: Array, tokens: Array) -> tuple[Array, Array]:
        """A / N^a and B / D^b, [R, P] each. parameters, tokens: [P]."""
        n, d = np.log(parameters / REFERENCE[0]), np.log(tokens / REFERENCE[1])
        return self.x[:, None] * np.exp(-self.a[:, None] * n), self.y[:, None] * np.exp(-self.b[:, None] * d)


def why_no_law(points: Sizes) -> str:
    """Empty, or the reason why these points do not determine a law."""
    unknown = 5 - (points.entropy is not None)
    counts = [points.distinct, len(np.unique(points.parameters)), len(np.unique(points.tokens))]
    if counts[0] < unknown or min(counts[1:]) < LEAST_SIZES:
        wanted = f"{unknown} presets with {LEAST_SIZES} sizes and {LEAST_SIZES} numbers of tokens"
        return f"too few sizes for a law: it needs {wanted}; here {counts[0]}, {counts[1]} and {counts[2]}"
    if abs(np.corrcoef(np.log(points.parameters), np.log(points.tokens))[0, 1]) > ONE_LINE:
        return "all presets have the same tokens a parameter: its two terms cannot be told apart"
    return ""


def fit_law(points: Sizes) -> Law:
    """The law of each draw. ValueError if `why_no_law` has a reason."""
    if reason := why_no_law(points):
        raise ValueError(reason)
    n, d = np.log(points.parameters / REFERENCE[0]), np.log(points.tokens / REFERENCE[1])
    known = points.entropy

    def curve(parameters: Array) -> tuple[Array, Array]:
        x, y, a, b = np.exp(np.clip(parameters[:, :4], -30, 10)).T[:, :, None]
        first, second = x * np.exp(-a * n), y * np.exp(-b * d)
        floor = known if known is not None else np.exp(np.clip(parameters[:, 4:], -30, 10))
        value = floor + first + second
        slopes = [first, second, -first * a * n, -second * b * d]
        slopes += [] if known is not None else [np.broadcast_to(floor, first.shape)]
        return np.log(value), np.stack(slopes, axis=2) / value[..., None]

    least = points.loss[0].min()
    starts = []
    for share in (0.0,) if known is not None else (0.3, 0.6, 0.9):
        rest = least * (1 - share) if known is None else (points.loss[0] - known).mean()
        for a in (0.2, 0.4, 0.8):
            for b in (0.2, 0.4, 0.8):
                start = [max(rest, 1e-3) / 2, max(rest, 1e-3) / 2, a, b]
                starts.append(np.log([*start, *([] if known is not None else [share * least])]))
    weight = np.ones(len(n))
    target = np.log(points.loss)
    best = best_of_starts(curve, np.array(starts), target[0], weight)
    found, _ = fitted(curve, np.broadcast_to(best, (len(target), len(best))), target, weight)
    x, y, a, b = np.exp(np.clip(found[:, :4], -30, 10)).T
    floor = known[None] if known is not None else np.exp(np.clip(found[:, 4:], -30, 10))
    return Law(floor, x, y, a, b)


def loss_law(runs: pd.DataFrame) -> pd.DataFrame:
    """The law of BF16's loss, L = E + A / N^a + B / D^b (2203.15556), one line per task with its data and revisions.

    Columns: task, dataset_digest, rev_quantizers, rev_engine, rev_task, presets (how many), smallest, largest
    (parameters), then five with their 95 % limits over seeds (`_low`, `_high`): floor (E, in the unit of the loss;
    where the task knows the entropy of its data the mean of that over presets, of which each is fitted with its own,
    without limits), parameters_term (A / N^a at 10M parameters),
    parameters_exponent (a), tokens_term (B / D^b at 200M tokens), tokens_exponent (b); misfit (root mean square of
    log(loss / law)), note (why there is no law, else empty).
    """
    limited = [f"{name}{end}" for name in KNOWN for end in ("", "_low", "_high")]
    columns = [*GROUP, "presets", "smallest", "largest", *limited, "misfit", "note"]
    lines = []
    for points in sizes(runs):
        line = dict(zip(GROUP, points.group, strict=True)) | dict.fromkeys([*limited, "misfit"], np.nan)
        line |= {"presets": points.distinct, "smallest": points.parameters[0], "largest": points.parameters[-1]}
        line["note"] = why_no_law(points)
        if not line["note"]:
            line |= _law_line(points)
        lines.append(line)
    return stacked([pd.DataFrame(lines)] if lines else [], columns)


def _law_line(points: Sizes) -> dict[str, float]:
    law = fit_law(points)
    first, second = law.terms(points.parameters, points.tokens)
    ratio = np.log(points.loss[0] / (law.floor + first + second)[0])
    line = {"misfit": float(np.sqrt(np.mean(ratio**2)))}
    values = dict(zip(KNOWN, (law.floor.mean(axis=1), law.x, law.a, law.y, law.b), strict=True))
    for name, draws in values.items():
        line[name] = float(draws[0])
        if len(draws) > 1:
            line[f"{name}_low"], line[f"{name}_high"] = limits(draws[1:], points.seeds > 1)
    return line
