"""The largest size as a test of the fits to the smaller ones (scaling.py): predicted gaps against measured ones.

`effective` predicts with effective parameters and data, `power` with the power law, and `nearest` with the gap at the
largest preset that was fitted, of several of one size the one nearest in tokens a parameter: what is to be beaten.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fp4dse.results.stats.estimates.curve_fits import Array
from fp4dse.results.stats.paired import stacked
from fp4dse.results.stats.sizes.loss_law import Law, fit_law, why_no_law
from fp4dse.results.stats.sizes.points import GROUP, Sizes, limits, sizes
from fp4dse.results.stats.sizes.scaling import fit_effective, fit_power

APART = 0.002
"""Gaps (natural logarithms) that count as different: 0.2 %."""


def extrapolation(runs: pd.DataFrame) -> pd.DataFrame:
    """Predictions for the presets of the most parameters from fits to all others, one line per task (with its data and
    revisions), preset, recipe and model (`effective`, `power`, `nearest`).

    Columns: task, dataset_digest, rev_quantizers, rev_engine, rev_task, preset, config_id, label, model, fitted
    (presets), predicted, measured (gaps), difference (measured - predicted) with its 95 % limits low, high over the
    seeds of both, error (the difference in units of half that interval: within ±1 the prediction holds), pairs (other
    recipes there whose measured gap is 0.2 % or more away), agree (how many of these are predicted on the right side).
    """
    columns = [*GROUP, "preset", "config_id", "label", "model", "fitted", "predicted", "measured", "difference"]
    columns += ["low", "high", "error", "pairs", "agree"]
    parts = []
    for points in sizes(runs):
        largest = points.parameters == points.parameters.max()
        if largest.all():
            continue
        fitted, held = points.at(~largest), points.at(largest)
        law = None if why_no_law(fitted) else fit_law(fitted)
        for at in range(len(held.presets)):
            for model in ("effective", "power", "nearest"):
                lines = [
                    _line(fitted, held, at, recipe, predicted)
                    for recipe in range(len(points.recipes.config_id))
                    if held.recipes.seeds[recipe, at]
                    and (predicted := _predicted(fitted, held, law, at, recipe, model)) is not None
                ]
                if lines:
                    frame = pd.DataFrame(lines).assign(**dict(zip(GROUP, points.group, strict=True)), model=model)
                    parts.append(_with_signs(frame))
    return stacked(parts, columns)


def _predicted(fitted: Sizes, held: Sizes, law: Law | None, at: int, recipe: int, model: str) -> Array | None:
    """Gaps of each draw [R + 1]; None where this model cannot be fitted, or tells nothing of another size."""
    where = held.parameters[[at]], held.tokens[[at]]
    if model == "nearest":
        tried = np.flatnonzero(fitted.recipes.seeds[recipe])
        if not len(tried):
            return None
        largest = tried[fitted.parameters[tried] == fitted.parameters[tried].max()]
        ratio = np.log(fitted.tokens[largest] / fitted.parameters[largest] * held.parameters[at] / held.tokens[at])
        nearest: Array = fitted.gap[recipe][:, largest[np.abs(ratio) == np.abs(ratio).min()]].mean(axis=1)
        return nearest
    if model == "power":
        power = fit_power(fitted, recipe)
        return None if power is None or np.isnan(power.p[0]) else power.gap(*where)[:, 0]
    found = None if law is None else fit_effective(fitted, law, recipe)
    if law is None or found is None:
        return None
    floor = law.floor if held.entropy is None else held.entropy[None, [at]]
    return found.gap(*where, floor)[:, 0]


def _line(fitted: Sizes, held: Sizes, at: int, recipe: int, predicted: Array) -> dict[str, object]:
    measured = held.gap[recipe][:, at]
    difference = measured - predicted
    here = fitted.recipes.seeds[recipe] > 0
    seeds = np.append(fitted.seeds[here], held.seeds[at])
    known = (seeds > 1) & np.isfinite([*fitted.noise[recipe, here], held.noise[recipe, at]])
    low, high = limits(difference[1:], known)
    return {
        "preset": held.presets[at],
        "config_id": held.recipes.config_id[recipe],
        "label": held.recipes.label[recipe],
        "fitted": fitted.tried(recipe),
        "predicted": predicted[0],
        "measured": measured[0],
        "difference": difference[0],
        "low": low,
        "high": high,
        "error": 2 * difference[0] / (high - low) if high > low else np.nan,
    }


def _with_signs(lines: pd.DataFrame) -> pd.DataFrame:
    """The lines of one preset and model with `pairs` and `agree`."""
    measured, predicted = (lines[name].to_numpy(float) for name in ("measured", "predicted"))
    true, said = (values[:, None] - values for values in (measured, predicted))
    told = np.abs(true) >= APART
    return lines.assign(pairs=told.sum(axis=1), agree=(told & (true * said > 0)).sum(axis=1))
