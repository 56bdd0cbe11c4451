"""The worth of tokens to BF16, from its own training: the margin of equivalence of each setting.

By default it is what 2 % more tokens, or samples, would be worth to BF16 in the setting:

    margin = log L(D) - log L(1.02 · D)

With a law of BF16's loss over sizes (loss_law.py) L is that law. Where the revisions of a setting have too few sizes
for one it is that of the newest other revision of engine or quantizers, of the same task, task revision and data, for
sizes and tokens within those that it was fitted to: BF16 has no quantizers, and what tokens are worth hardly depends on
the engine. Without any law it follows from BF16's training curve, mean over seeds, from a quarter of the steps on:

    margin = log 1.02 · -slope · min(1, training loss / held-out loss)          slope = d log L / d log step

The last factor is for data that are read several times: there the training loss is lower, and falls faster, than the
held-out loss that is compared. A run that is under way is not one that was planned shorter, so the figure is rough: 0.3
to 1.0 of what longer runs say on five small presets of regression, vision and language (docs/log.md has them), and 2.1
to 4.2 times what the law says on language:0.4M, 1M, 10M, 10M-long and 30M (docs/study/store). Where neither tells
anything it is MARGIN, and `margin_of` says that this is assumed, and why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.stats.levels import are_shares, log_or_nan
from fp4dse.results.stats.paired import MARGINS, NEEDED, SETTING, numbered, rows_at_best_lr
from fp4dse.results.stats.recipes.margins import (
    ASSUMED,
    BY_CURVE,
    BY_LAW,
    FROM,
    MARGIN,
    MORE,
    OF_POINTS,
    Margin,
    margin_of,
)
from fp4dse.results.stats.sizes.loss_law import Law, fit_law, why_no_law
from fp4dse.results.stats.sizes.points import GROUP, Sizes, sizes

FEWEST = 6
"""Points of a curve there."""
SURE = 3.0
"""Standard errors by which the slope must be below zero."""
CURVE = ["curve_step", "curve_loss"]
MARGINS_READ = [*NEEDED, "recipe_label", "parameters", "tokens", *CURVE]
"""The columns of BF16's rows that margins are from."""


def margins(runs: pd.DataFrame) -> pd.DataFrame:
    """The margin of equivalence of each setting.

    Columns: SETTING, margin (as gaps: a log ratio, or a share), margin_of (what it is from: the law of BF16's loss over
    sizes, with the revisions that it was fitted at if they are others, the slope of its training curve, or `assumed`
    with the reason).
    """
    out = runs[[*SETTING, *[name for name in MARGINS if name in runs]]].drop_duplicates(list(SETTING))
    if MARGINS[0] not in out:
        found = margin_of(out)
        out = out.assign(margin=found.value, margin_of=found.of)
    return out.sort_values(list(SETTING), ignore_index=True)


def with_margins(runs: pd.DataFrame, bases: pd.DataFrame) -> pd.DataFrame:
    """The runs with MARGINS. bases: MARGINS_READ of plain BF16's rows, all of them."""
    found = _by_setting(bases[bases["is_baseline"].astype(bool)])
    setting = numbered(runs, SETTING, sort=False)
    first = runs.loc[~setting.duplicated(), list(SETTING)].itertuples(index=False, name=None)
    unknown = Margin(MARGIN, f"{ASSUMED}: BF16 did not finish here")
    each = [found.get(tuple(keys), unknown) for keys in first]
    values, sources = (np.array([getattr(one, name) for one in each], dtype) for name, dtype in _TYPES)
    return runs.assign(margin=values[setting], margin_of=sources[setting])


_TYPES = (("value", float), ("of", object))


def _by_setting(bases: pd.DataFrame) -> dict[tuple[Any, ...], Margin]:
    """Setting -> its margin, where BF16 finished. bases: MARGINS_READ of plain BF16's rows."""
    beside_itself = {"baseline_loss": bases["val_loss"], "gap": 0.0, "gap_bf16": 0.0, "gap_matched": 0.0}
    rows = rows_at_best_lr(bases.assign(**beside_itself))
    rows = rows[rows["loss"].notna()]
    laws = _by_law(rows)
    out = {}
    for keys, part in rows.groupby(list(SETTING), sort=False):
        of_law = (*(part[name].iloc[0] for name in GROUP), part["preset"].iloc[0])
        out[tuple(keys)] = laws.get(of_law) or _by_curve(part)
    return out


def _by_law(rows: pd.DataFrame) -> dict[tuple[Any, ...], Margin]:
    """Values of GROUP and preset -> margin, where a law of the loss says it: the group's own, or another revision's."""
    groups = list(sizes(rows, resamples=1))
    laws = [(points, fit_law(points)) for points in groups if not why_no_law(points)]
    laws.sort(key=lambda one: [_named(one[0])[name] for name in _REVISIONS])
    out: dict[tuple[Any, ...], Margin] = {}
    for points in groups:
        usable = [one for one in laws if _same_data(one[0], points)]
        for fitted, law in sorted(usable, key=lambda one: one[0] is points):  # the last counts: its own
            pairs = zip(points.presets, _worth(law, fitted, points), strict=True)
            of = BY_LAW + _fitted_at(fitted, points)
            out |= {(*points.group, preset): Margin(float(one), of) for preset, one in pairs if one > 0}
    return out


_REVISIONS = {"rev_engine": "engine revision", "rev_quantizers": "quantizer revision"}
"""Columns by which groups with one law may differ."""


def _named(points: Sizes) -> dict[str, Any]:
    return dict(zip(GROUP, points.group, strict=True))


def _same_data(fitted: Sizes, points: Sizes) -> bool:
    """True if a law of the first, above its entropy where that is known, is one of the other."""
    one, other = _named(fitted), _named(points)
    same = all(one[name] == other[name] for name in GROUP if name not in _REVISIONS)
    return same and (fitted.entropy is None or points.entropy is not None)


def _fitted_at(fitted: Sizes, points: Sizes) -> str:
    """The revisions that a law is from, where it is of other ones than the points."""
    one, other = _named(fitted), _named(points)
    others = [f"{words} {one[name]}" for name, words in _REVISIONS.items() if one[name] != other[name]]
    return f", fitted at {' and '.join(others)}" if others else ""


def _worth(law: Law, fitted: Sizes, points: Sizes) -> NDArray[np.float64]:
    """Log ratios [P] that MORE tokens lower the loss by; NaN for points beyond those that were fitted."""
    floor = law.floor[0] if fitted.entropy is None else points.entropy
    now, later = (
        np.sum(law.terms(points.parameters, tokens), axis=0)[0] + floor
        for tokens in (points.tokens, points.tokens * (1 + MORE))
    )
    within = [
        (of >= known.min()) & (of <= known.max())
        for of, known in ((points.parameters, fitted.parameters), (points.tokens, fitted.tokens))
    ]
    found: NDArray[np.float64] = np.where(np.all(within, axis=0), np.log(now / later), np.nan)
    return found


def _by_curve(part: pd.DataFrame) -> Margin:
    """From the training curves of the seeds of one setting; OF_POINTS where losses are shares."""
    if are_shares(part).any():
        return OF_POINTS
    known = part[part[CURVE[0]].str.len().gt(0)]
    steps, losses = (known[name].tolist() for name in CURVE)
    held_out = math.exp(log_or_nan(part["loss"]).mean())
    found = worth_by_curve(steps, losses, held_out) if steps else "is not stored"
    if isinstance(found, str):
        return Margin(MARGIN, f"{ASSUMED}: BF16's training curve {found}")
    return Margin(found, BY_CURVE)


def worth_by_curve(
    steps: Sequence[NDArray[np.int_]], losses: Sequence[NDArray[np.float64]], held_out: float
) -> float | str:
    """The worth of MORE tokens at the end of some training curves, one a seed, as a log ratio; or why they do not tell
    it, as the end of a sentence that begins with the curve. held_out: the loss that is compared, mean over seeds."""
    long = pd.DataFrame({"step": np.concatenate(steps), "loss": np.concatenate(losses)})
    last = long["step"].max()
    long = long[long["step"].ge(FROM * last)]
    if not (long["loss"].gt(0).all() and held_out > 0):
        return "has losses that are not positive"
    mean = np.log(long["loss"].astype(float)).groupby(long["step"]).mean()
    if len(mean) < FEWEST:
        return "has too few points from a quarter of the steps on"
    x = np.log(mean.index.to_numpy(float))
    centred, y = x - x.mean(), mean.to_numpy() - mean.mean()
    slope = float(centred @ y / (centred @ centred))
    error = math.sqrt(float(np.square(y - slope * centred).sum() / (len(x) - 2) / (centred @ centred)))
    if slope >= -SURE * error:
        return "does not fall clearly at its end"
    end = math.exp(mean.mean() + slope * centred[-1])
    return -slope * math.log1p(MORE) * min(1.0, end / held_out)
