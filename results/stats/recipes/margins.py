"""The margin of equivalence: how close two losses must be to count as the same, from BF16's own training.

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
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse import ConfigError
from fp4dse.results.stats.levels import POINTS, are_shares, log_or_nan
from fp4dse.results.stats.paired import MARGINS, NEEDED, SETTING, numbered, rows_at_best_lr
from fp4dse.results.stats.sizes.loss_law import Law, fit_law, why_no_law
from fp4dse.results.stats.sizes.points import GROUP, Sizes, sizes
from fp4dse.results.text.ratios import noun, size

POINTS_MARGIN = 0.007
"""Of losses that are shares: 0.7 points of accuracy, which 2605.20402 has between BF16 and its best FP4."""
LARGEST_SHARE = 0.1
"""A margin for shares beyond this is one in points, by mistake: 10 points are no equivalence."""
MARGIN = 0.005
"""Where nothing is known of BF16's training, as a log ratio: losses within half a percent."""
MORE = 0.02
"""Share of tokens that a margin is worth."""
FROM = 0.25
"""Share of the steps from which on the curve counts: before that it is steeper than at its end."""
FEWEST = 6
"""Points of a curve there."""
SURE = 3.0
"""Standard errors by which the slope must be below zero."""
CURVE = ["curve_step", "curve_loss"]
MARGINS_READ = [*NEEDED, "recipe_label", "parameters", "tokens", *CURVE]
"""The columns of BF16's rows that margins are from."""

BY_LAW = "by the law of its loss over sizes"
BY_CURVE = "by the slope of its training curve, from a quarter of the steps on"
ASSUMED = "assumed"


class Margin(NamedTuple):
    """A margin and what it is from."""

    value: float
    """A log ratio above 0, or a share."""
    of: str
    """BY_LAW, with the revisions of the fit if they are others, BY_CURVE, `given`, or `assumed: …` with the reason."""

    def sentence(self) -> str:
        """For people; without a full stop."""
        says = f"{noun(many=True)} within {margin_text(self.value)} count as the same"
        if self.of.startswith(ASSUMED) or self.of == "given":
            return f"{says}, which is {self.of}"
        return f"{says}: what {100 * MORE:g} % more tokens, or samples, are worth to BF16, {self.of}"


OF_POINTS = Margin(POINTS_MARGIN, f"{ASSUMED}, as between BF16 and FP4 in arXiv 2605.20402")


def margin_text(margin: float) -> str:
    """`±0.5 %`, `±0.7 points`. margin: a log ratio, or a share."""
    return f"±{size(margin)}"


def read_margin(text: str) -> tuple[float, str]:
    """A margin as gaps are, and its unit, `points`, `%` or none; of `0.7 points`, `0.5 %`, `0.005`.

    ConfigError, of `--margin`, unless it is a finite number above 0."""
    found = re.fullmatch(r"\s*(\S+?)\s*(points|%)?\s*", text)
    try:
        value = float(found[1]) if found else math.nan
    except ValueError:
        value = math.nan
    if found is None or not 0 < value < math.inf:
        shown = text if math.isnan(value) else value
        accepted = "a log ratio above 0, such as 0.005 for half a percent; with a unit: '0.5 %', '0.7 points'"
        raise ConfigError("--margin", shown, accepted)
    return (value / 100, found[2]) if found[2] else (value, "")


def check_unit(unit: str, rows: pd.DataFrame) -> None:
    """ConfigError, of `--margin`, if these rows are not compared in the unit of `read_margin`."""
    shares = are_shares(rows)
    if unit == POINTS and not shares.all():
        raise ConfigError("--margin", unit, f"% with {_tasks(rows[~shares])}, whose losses are compared as ratios")
    if unit == "%" and shares.any():
        raise ConfigError("--margin", unit, f"points with {_tasks(rows[shares])}, whose gaps are in points of accuracy")


def _tasks(rows: pd.DataFrame) -> str:
    return ", ".join(sorted(set(rows["task"].astype(str) + ":" + rows["preset"].astype(str))))


def margin_of(rows: pd.DataFrame, given: float | None = None) -> Margin:
    """The margin of one setting. rows: of it, from a store with MARGINS; given: instead of theirs.

    ConfigError if 10 points of accuracy or more are given as a share."""
    if given is not None:
        if given > LARGEST_SHARE and are_shares(rows).any():
            raise ConfigError("margin", given, f"a share of problems up to {LARGEST_SHARE}: 0.007 is 0.7 points")
        return Margin(given, "given")
    if MARGINS[0] not in rows or rows.empty:
        if are_shares(rows).any():
            return OF_POINTS
        return Margin(MARGIN, f"{ASSUMED}: these rows hold nothing of BF16's curve")
    return Margin(float(rows[MARGINS[0]].iloc[0]), str(rows[MARGINS[1]].iloc[0]))


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
