"""The gap of a recipe by parameters N and tokens D: its effective parameters and data, a power law, a critical size.

Effective parameters and data (Quartet, arXiv 2505.14669) are factors in the law of BF16's loss (loss_law.py):

    L_recipe(N, D) = E + A / (N · eff_n)^a + B / (D · eff_d)^b

Quartet gives eff_n to the forward pass and eff_d to the backward one. So a recipe that leaves one of them in BF16 has
one factor, the other is 1; a recipe that quantizes both has two. (Quartet's law has an exponent around both terms; here
it is 1.) The factors are fitted to paired gaps rather than to losses: gap = log(L_recipe / L_BF16) under the law. Both
recipes share the luck of a seed and the law's misfit at a preset, which thereby cancel. In u = eff_n^-a and v =
eff_d^-b that is linear least squares, weighted by the gaps' noise at each preset.

arXiv 2501.02423 has no factors, but a term that grows with the data and falls with the model, whose strength K stands
for the format:

    L_recipe(N, D) = E + A / N^a + B / D^b + K · D^b / N^a

From critical_tokens = (B · N^a / K)^(1 / 2b) on, more data make the loss higher.

The power law gap = c · N^p · (D / N)^q assumes nothing about BF16's loss.

All limits are over seeds (points.py), the law's share of the uncertainty included. That a law holds at other sizes is
not theirs to say: extrapolation.py holds it against a size that was left out. And limits are of a form that may be
true: where the luck of seeds leaves as large weighted squares in fewer than one draw of a hundred (p < 0.01) the form
is refuted. Its best fit stays, as a description, and has no limits. (Chi-square would refute too many: it takes few
seeds' variances for known, and leaves out the luck of BF16's seeds, which all gaps at a preset share.)
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd

from fp4dse.results.stats.estimates.curve_fits import Array, best_of_starts, fitted
from fp4dse.results.stats.paired import stacked
from fp4dse.results.stats.sizes.loss_law import REFERENCE, Law, fit_law, why_no_law
from fp4dse.results.stats.sizes.points import GROUP, Sizes, limits, sizes

FITTED = ["eff_n", "eff_d", "critical_tokens", "largest_gap", "size_exponent", "ratio_exponent"]
"""The columns of a recipe's fits, each with its limits."""

REFUTED = "{}: refuted by a misfit of {:.1f} standard errors, no limits"
"""The note on a form that gaps do not have."""
SIGNIFICANT = 0.01
"""The share of draws below which a misfit is more than luck."""


class Effective(NamedTuple):
    """Of one recipe: factors on the two terms of the law's excess, [R] each."""

    law: Law
    u: Array
    v: Array

    def factors(self) -> tuple[Array, Array]:
        """eff_n, eff_d; infinite where the term is gone."""
        with np.errstate(divide="ignore", over="ignore"):
            eff_n = np.where(self.u > 0, np.maximum(self.u, 0) ** (-1 / self.law.a), np.inf)
            eff_d = np.where(self.v > 0, np.maximum(self.v, 0) ** (-1 / self.law.b), np.inf)
        return eff_n, eff_d

    def gap(self, parameters: Array, tokens: Array, floor: Array) -> Array:
        """Predicted gaps [R, P]. floor: E at these points, as in Law."""
        first, second = self.law.terms(parameters, tokens)
        loss = floor + self.u[:, None] * first + self.v[:, None] * second
        return np.log(np.maximum(loss, 1e-9) / (floor + first + second))


class PowerLaw(NamedTuple):
    """Of one recipe: gap = c · (N / N0)^p · (D / N / 20)^q with the reference's N0, [R] each."""

    c: Array
    p: Array
    q: Array

    def gap(self, parameters: Array, tokens: Array) -> Array:
        """Predicted gaps [R, P]."""
        n, r = _logs(parameters, tokens)
        p, q = np.nan_to_num(self.p), np.nan_to_num(self.q)
        found: Array = self.c[:, None] * np.exp(p[:, None] * n + q[:, None] * r)
        return found


def scaling(runs: pd.DataFrame) -> pd.DataFrame:
    """Gaps by size, one line per task (with its data and revisions) and recipe, over all presets that it finished.

    Columns: task, dataset_digest, rev_quantizers, rev_engine, rev_task, config_id, label, presets (how many), seeds
    (fewest pairs at one of them), then six with their 95 % limits over seeds (`_low`, `_high`): eff_n, eff_d (effective
    parameters and data as Quartet, 2505.14669, defines them; 1 without limits where that pass is in BF16),
    critical_tokens (as 2501.02423 defines it, at the largest preset), largest_gap (the power law at the largest
    preset), size_exponent, ratio_exponent (p, q of gap = c · N^p · (D / N)^q; NaN if only one value was tried), then
    misfit_effective and misfit_power (root mean square of measured - fitted gap, in their standard errors) and note
    (why something is missing, else empty). Fits whose misfit is more than the luck of seeds (p < 0.01) have no limits.
    """
    limited = [f"{name}{end}" for name in FITTED for end in ("", "_low", "_high")]
    columns = [*GROUP, "config_id", "label", "presets", "seeds", *limited]
    columns += ["misfit_effective", "misfit_power", "note"]
    lines = []
    for points in sizes(runs):
        no_law = why_no_law(points)
        law = None if no_law else fit_law(points)
        for recipe, config_id in enumerate(points.recipes.config_id):
            line = dict(zip(GROUP, points.group, strict=True))
            line |= {"config_id": config_id, "label": points.recipes.label[recipe]}
            lines.append({**dict.fromkeys(limited, np.nan), **line, **_line(points, law, no_law, recipe)})
    return stacked([pd.DataFrame(lines)] if lines else [], columns)


def _line(points: Sizes, law: Law | None, no_law: str, recipe: int) -> dict[str, object]:
    seeds = points.recipes.seeds[recipe]
    here = seeds > 0
    values: dict[str, Array] = {}
    known = (np.isfinite(points.noise[recipe]) & (points.seeds > 1))[here]
    notes = [no_law, "" if known.all() else "one seed at a preset: no limits"]
    power, refuted = fit_power(points, recipe), set[str]()
    if power is None:
        notes.append("fewer than two presets")
    else:
        largest = power.gap(points.parameters[-1:], points.tokens[-1:])[:, 0]
        values |= {"largest_gap": largest, "size_exponent": power.p, "ratio_exponent": power.q}
    misfits: dict[str, float] = dict.fromkeys(["misfit_effective", "misfit_power"], np.nan)
    at = points.parameters, points.tokens
    if power is not None:
        fit = power.gap(*at)
        misfits["misfit_power"] = _misfit(points, recipe, fit[0])
        if known.all() and _refuted(points, recipe, fit):
            refuted |= {"largest_gap", "size_exponent", "ratio_exponent"}
            notes.append(REFUTED.format("power law", misfits["misfit_power"]))
    effective = None if law is None else fit_effective(points, law, recipe)
    if law is not None and effective is not None:
        eff_n, eff_d = effective.factors()
        free = _free(points, recipe)
        values |= {"eff_n": eff_n if free[0] else eff_n[:1], "eff_d": eff_d if free[1] else eff_d[:1]}
        values["critical_tokens"] = critical_tokens(points, law, recipe)
        fit = effective.gap(*at, law.floor)
        misfits["misfit_effective"] = _misfit(points, recipe, fit[0])
        if known.all() and _refuted(points, recipe, fit):
            refuted |= {"eff_n", "eff_d"}
            notes.append(REFUTED.format("effective parameters and data", misfits["misfit_effective"]))
    elif law is not None:
        notes.append("quantizes nothing" if not any(_free(points, recipe)) else "at fewer presets than factors")
    line: dict[str, object] = {"presets": points.tried(recipe), "seeds": int(seeds[here].min()) if here.any() else 0}
    for name, draws in values.items():
        line[name] = float(draws[0])
        if len(draws) > 1 and name not in refuted:
            line[f"{name}_low"], line[f"{name}_high"] = limits(draws[1:], known)
    return {**line, **misfits, "note": "; ".join(filter(None, notes))}


def fit_effective(points: Sizes, law: Law, recipe: int) -> Effective | None:
    """Factors of one recipe for each draw; None if it was tried at fewer presets than it has factors."""
    free = _free(points, recipe)
    here = points.recipes.seeds[recipe] > 0
    if points.tried(recipe) < sum(free) or not any(free):
        return None
    first, second = law.terms(points.parameters[here], points.tokens[here])
    floor = law.floor if law.floor.shape[1] == 1 else law.floor[:, here]
    loss = floor + first + second
    terms = np.stack([part for part, wanted in zip((first, second), free, strict=True) if wanted], axis=2)
    found = _linear(terms / loss[..., None], np.expm1(points.gap[recipe][:, here]), _weights(points, recipe)[here])
    one = np.ones(len(found))
    u = 1 + found[:, 0] if free[0] else one
    return Effective(law, u, 1 + found[:, -1] if free[1] else one)


def critical_tokens(points: Sizes, law: Law, recipe: int) -> Array:
    """Tokens from which on more of them make the loss higher, by the law of 2501.02423, at the largest preset; inf
    where its term is not above zero. [R]"""
    here = points.recipes.seeds[recipe] > 0
    first, second = law.terms(points.parameters[here], points.tokens[here])
    floor = law.floor if law.floor.shape[1] == 1 else law.floor[:, here]
    grown = (first / law.x[:, None]) * (law.y[:, None] / second)  # (D / D0)^b / (N / N0)^a
    strength = _linear(
        (grown / (floor + first + second))[..., None],
        np.expm1(points.gap[recipe][:, here]),
        _weights(points, recipe)[here],
    )[:, 0]
    n = np.log(points.parameters.max() / REFERENCE[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        log = (np.log(law.y) + law.a * n - np.log(np.maximum(strength, 0))) / (2 * law.b)
    found: Array = REFERENCE[1] * np.exp(np.minimum(log, 500))
    return found


def fit_power(points: Sizes, recipe: int) -> PowerLaw | None:
    """The power law of each draw; None with fewer than two presets. An exponent that nothing tells is NaN."""
    here = points.recipes.seeds[recipe] > 0
    tried = points.tried(recipe)
    if tried < 2:
        return None
    n, r = _logs(points.parameters[here], points.tokens[here])
    varies = [len(np.unique(n.round(3))) > 1, len(np.unique(r.round(1))) > 1]
    if sum(varies) + 1 > tried or (all(varies) and abs(np.corrcoef(n, r)[0, 1]) > 0.999):
        varies[1] = False
    logs = np.stack([part for part, wanted in zip((n, r), varies, strict=True) if wanted], axis=1)  # [P, K - 1]

    def curve(parameters: Array) -> tuple[Array, Array]:
        power = np.exp(np.clip(parameters[:, 1:] @ logs.T, -30, 30))
        value = parameters[:, :1] * power
        return value, np.concatenate([power[..., None], value[..., None] * logs], axis=2)

    measured = points.gap[recipe][:, here]
    size = max(float(np.abs(measured[0]).mean()), 1e-9)
    target, weight = measured / size, _weights(points, recipe)[here]
    weight = weight / weight.max()
    starts = [[sign, *at] for sign in (1.0, -1.0) for at in product((-0.5, 0.0, 0.5), repeat=logs.shape[1])]
    best = best_of_starts(curve, np.array(starts), target[0], weight)
    found, _ = fitted(curve, np.broadcast_to(best, (len(target), len(best))), target, weight)
    nothing = np.full(len(found), np.nan)
    exponents = iter(found[:, 1:].T)
    p, q = (next(exponents) if wanted else nothing for wanted in varies)
    return PowerLaw(size * found[:, 0], p, q)


def _free(points: Sizes, recipe: int) -> tuple[bool, bool]:
    """True where the recipe has a factor of parameters, of data."""
    return bool(points.recipes.forward[recipe]), bool(points.recipes.backward[recipe])


def _logs(parameters: Array, tokens: Array) -> tuple[Array, Array]:
    """log N and log D / N, 0 at the reference."""
    n = np.log(parameters / REFERENCE[0])
    return n, np.log(tokens / REFERENCE[1]) - n


def _weights(points: Sizes, recipe: int) -> Array:
    """1 / standard error of the recipe's mean gap [P]; 1 if no noise is known."""
    own = points.noise[recipe]
    known = np.isfinite(own) & (own > 0)
    noise = np.where(known, own, np.median(own[known]) if known.any() else 1.0)
    found: Array = np.sqrt(points.recipes.seeds[recipe]) / np.maximum(noise, 1e-3 * noise.max())
    return found


def _misfit(points: Sizes, recipe: int, fit: Array) -> float:
    here = points.recipes.seeds[recipe] > 0
    off = (points.gap[recipe][0] - fit) * _weights(points, recipe)
    return float(np.sqrt(np.mean(off[here] ** 2))) if np.isfinite(points.noise[recipe]).any() else np.nan


def _refuted(points: Sizes, recipe: int, fit: Array) -> bool:
    """True where gaps are farther from a fit than the luck of seeds takes them but in a few draws. fit: [R + 1, P]."""
    here = points.recipes.seeds[recipe] > 0
    off = ((points.gap[recipe] - fit) * _weights(points, recipe))[:, here]
    measured, by_luck = np.square(off[0]).sum(), np.square(off[1:] - off[0]).sum(axis=1)
    beyond_rounding = measured > here.sum()  # a fit with as many numbers as presets leaves nothing
    return bool(beyond_rounding and np.mean(by_luck >= measured) < SIGNIFICANT)


def _linear(design: Array, target: Array, weight: Array) -> Array:
    """Weighted least squares for each draw: design [R, P, K], target [R, P], weight [P] -> [R, K]."""
    found: Array = (np.linalg.pinv(design * weight[:, None]) @ (target * weight)[..., None])[..., 0]
    return found
