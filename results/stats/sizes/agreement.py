"""Does the order of recipes in a small task agree with a published table (results/published)?

Within each group of a table, because schemes that quantize one pass alone rank before all others anywhere. The figure
that counts is the share of pairs at least 0.2 % apart in the table that the task orders alike; Spearman's correlation
stands beside it. Two schemes that are the same recipe here count as one with their mean gap.

How much to expect is a simulation: a proxy whose true gaps are the table's, stretched to the spread that is seen here,
measured with the standard errors that are seen here, against a table with its own error. A proxy need not be worse than
that to fall short of 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from fp4dse.dse.agreement import AGREES
from fp4dse.results.published import Table, tables
from fp4dse.results.stats.estimates.intervals import CONFIDENCE, paired_interval
from fp4dse.results.stats.estimates.rankings import Array, signs, spearman
from fp4dse.results.stats.estimates.spread import spread_over_seeds
from fp4dse.results.stats.levels import are_shares
from fp4dse.results.stats.paired import SETTING, by_seed, rows_at_best_lr, stacked
from fp4dse.results.stats.sizes.points import RESAMPLES

APART = 0.2
"""% of loss that two published gaps differ by if their order counts."""
HIGH = 0.9
"""Spearman's correlation that `ceiling_reaches` is about."""


class Ranked(NamedTuple):
    """One group of one table in one setting: S recipes that both have."""

    table: str
    group: str
    config_id: list[str]
    published: Array
    """[S] in %."""
    gaps: Array
    """[S, seeds] in %, NaN where there is none."""
    expressible: int
    """Recipes of the group, tried or not."""


def agreement(runs: pd.DataFrame) -> pd.DataFrame:
    """The agreement of each setting's order of recipes with published tables, one line per setting, table and group of
    its schemes.

    Columns: SETTING, published (the table), group, recipes (that both have), missing (that could be trained, and have
    no gap here), pairs (0.2 % or more apart in the table), agree (share of them in the same order), agree_low,
    agree_high, spearman, spearman_low, spearman_high (95 % limits of what these would be without the noise of seeds;
    NaN with one seed or two recipes), ceiling_agree, ceiling_spearman (what a perfect proxy would have on average,
    given the errors here and in the table), ceiling_reaches (how often its Spearman is 0.9 or more), error (mean
    standard error of a gap here), lane_s (seconds of the device for one recipe, all its rates and seeds), cheapest (the
    least of these, among the settings that have most recipes of the group and agree on 95 % of the pairs). Settings
    with fewer than two recipes of a group have no line.
    """
    columns = [*SETTING, "published", "group", "recipes", "missing", "pairs", "agree", "agree_low", "agree_high"]
    columns += ["spearman", "spearman_low", "spearman_high", "ceiling_agree", "ceiling_spearman", "ceiling_reaches"]
    columns += ["error", "lane_s", "cheapest"]
    lines = []
    for setting, rows, everything in _settings(runs):
        seconds = everything.groupby("config_id")["lane_s"].sum()
        for ranked in _ranked(rows):
            if len(ranked.config_id) > 1:
                line = dict(zip(SETTING, setting, strict=True)) | compared(ranked, tables()[ranked.table].error)
                lines.append({**line, "lane_s": float(seconds.reindex(ranked.config_id).mean())})
    if not lines:
        return stacked([], columns)
    out = pd.DataFrame(lines)
    of_group = out.groupby(["published", "group"])
    able = out["agree"].ge(AGREES) & out["recipes"].eq(of_group["recipes"].transform("max"))
    least = out["lane_s"].where(able).groupby([out["published"], out["group"]]).transform("min")
    return stacked([out.assign(cheapest=able & out["lane_s"].eq(least))], columns)


def agreement_with_fewer_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """Agreement of every choice of n of the seeds that all recipes of a group have, one line per setting, table, group
    and n, up to all of them.

    Columns: SETTING, published, group, seeds (n), agree (mean over the choices of the share of pairs in the table's
    order), agree_least (the least of them), spearman (mean).
    """
    columns = [*SETTING, "published", "group", "seeds", "agree", "agree_least", "spearman"]
    lines = []
    for setting, rows, _ in _settings(runs):
        for ranked in _ranked(rows):
            shared = ranked.gaps[:, np.isfinite(ranked.gaps).all(axis=0)]
            pairs = int(signs(ranked.published, ranked.published, APART)[0])
            for seeds in range(1, shared.shape[1] + 1) if pairs else ():
                chosen = np.array(list(combinations(range(shared.shape[1]), seeds)))
                means = shared[:, chosen].mean(axis=2).T  # [choices, S]
                agree = signs(ranked.published, means, APART)[1] / pairs
                line: dict[str, object] = {"published": ranked.table, "group": ranked.group, "seeds": seeds}
                line |= {"agree": agree.mean(), "agree_least": agree.min()}
                line |= {"spearman": float(spearman(ranked.published, means).mean())}
                lines.append({**dict(zip(SETTING, setting, strict=True)), **line})
    return stacked([pd.DataFrame(lines)] if lines else [], columns)


def published(runs: pd.DataFrame) -> pd.DataFrame:
    """Published gaps beside those of the same recipes here, one line per setting, table and scheme that has a gap.

    Columns: SETTING, published (the table), group, scheme, config_id, label, published_gap, gap (both natural
    logarithms), gap_low, gap_high (95 %), pairs, differs (what the recipe does otherwise than the source).
    """
    columns = [*SETTING, "published", "group", "scheme", "config_id", "label", "published_gap", "gap"]
    columns += ["gap_low", "gap_high", "pairs", "differs"]
    lines = []
    for setting, rows, _ in _settings(runs):
        ids, gaps = by_seed(rows, rows["gap"])
        found = paired_interval(gaps, are_shares(rows).any()).set_index(ids)
        labels = rows.drop_duplicates("config_id").set_index("config_id")["recipe_label"]
        for name, table in tables().items():
            for scheme, figure in table.gaps().items():
                one = table.schemes[scheme]
                if one.recipe in found.index and found.loc[one.recipe, "n"]:
                    here = found.loc[one.recipe]
                    line: dict[str, object] = {
                        "published": name,
                        "group": one.group,
                        "scheme": scheme,
                        "config_id": one.recipe,
                    }
                    line |= {"label": labels[one.recipe], "published_gap": figure / 100, "gap": here["mean"]}
                    line |= {"gap_low": here["low"], "gap_high": here["high"], "pairs": int(here["n"])}
                    lines.append({**dict(zip(SETTING, setting, strict=True)), **line, "differs": one.differs})
    return stacked([pd.DataFrame(lines)] if lines else [], columns)


def _settings(runs: pd.DataFrame) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame, pd.DataFrame]]:
    """Setting, the rows of recipes with a gap at all of their seeds, and all rows."""
    if runs.empty:
        return
    rows = rows_at_best_lr(runs)
    finite = np.isfinite(rows["gap"].astype(float)) | rows["gap"].isna()
    rows = rows[finite.groupby([rows["setting"], rows["config_id"]]).transform("all") & rows["gap"].notna()]
    everything = dict(iter(runs.groupby(list(SETTING))))
    for setting, part in rows.groupby(list(SETTING), sort=False):
        yield setting, part[~part["is_baseline"].astype(bool)], everything[setting]


def _ranked(rows: pd.DataFrame) -> Iterator[Ranked]:
    ids, gaps = by_seed(rows, rows["gap"])
    places = {config_id: place for place, config_id in enumerate(ids)}
    for name, table in tables().items():
        for group in table.groups():
            figures = recipe_gaps(table, group)
            tried = [config_id for config_id in figures if config_id in places]
            matrix = 100 * gaps[[places[config_id] for config_id in tried]]
            truth = np.array([figures[config_id] for config_id in tried])
            yield Ranked(name, group, tried, truth, matrix, len(figures))


def recipe_gaps(table: Table, group: str) -> dict[str, float]:
    """config_id -> published gap in % of a group's schemes in the primary column, the mean where several have it."""
    found: dict[str, list[float]] = {}
    for name, figure in table.gaps().items():
        scheme = table.schemes[name]
        if scheme.group == group and scheme.recipe is not None and np.isfinite(figure):
            found.setdefault(scheme.recipe, []).append(figure)
    return {config_id: float(np.mean(figures)) for config_id, figures in found.items()}


def compared(ranked: Ranked, table_error: float = 0.0, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, object]:
    """The figures of one line of `agreement`. table_error: standard deviation of a published figure, in %."""
    truth, spread = ranked.published, spread_over_seeds(ranked.gaps)
    pairs, alike = signs(truth, spread.mean, APART)
    line: dict[str, object] = {"published": ranked.table, "group": ranked.group, "recipes": len(truth)}
    line |= {"missing": ranked.expressible - len(truth), "pairs": int(pairs)}
    line |= {"agree": alike / pairs if pairs else np.nan, "spearman": float(spearman(truth, spread.mean))}
    error = float(np.sqrt(np.mean(spread.error**2)))
    known = np.isfinite(error) and len(truth) > 2
    draws = true_gaps(truth, spread.mean, error if known else 0.0, resamples, seed)
    for name, drawn in (
        ("agree", signs(truth, draws, APART)[1] / max(int(pairs), 1)),
        ("spearman", spearman(truth, draws)),
    ):
        low, high = np.quantile(drawn, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
        line[f"{name}_low"], line[f"{name}_high"] = (float(low), float(high)) if known and pairs else (np.nan, np.nan)
    variance = max(float(np.var(spread.mean, ddof=1)) - error**2, 0.0)
    stretch = float(np.sqrt(variance / np.var(truth, ddof=1))) if np.var(truth) else 0.0
    top = ceiling(truth, error, table_error, stretch, seed=seed) if np.isfinite(error) else (np.nan,) * 3
    line |= dict(zip(("ceiling_agree", "ceiling_spearman", "ceiling_reaches"), top, strict=True))
    return {**line, "error": error / 100}


def ceiling(
    truth: ArrayLike, error: float, table_error: float = 0.0, stretch: float = 1.0, draws: int = 4000, seed: int = 0
) -> tuple[float, float, float]:
    """A proxy whose true gaps are `stretch` times the published ones: share of pairs in the same order (NaN without a
    pair that is apart), Spearman's correlation, means over draws, and how often that is 0.9 or more.

    truth: [S] in %; error: standard deviation of the proxy's measured gap, table_error: of a published one, in %.
    """
    rng, truth = np.random.default_rng(seed), np.asarray(truth, float)
    proxy = stretch * truth + error * rng.normal(size=(draws, len(truth)))
    table = truth + table_error * rng.normal(size=(draws, len(truth)))
    pairs, alike = signs(table, proxy, APART)
    rank = spearman(table, proxy)
    share = float(alike.sum() / pairs.sum()) if pairs.any() else np.nan
    return share, float(rank.mean()), float((rank >= HIGH - 1e-9).mean())


def true_gaps(published: Array, mean: Array, error: float, draws: int, seed: int) -> Array:
    """Gaps [draws, S] without the noise of seeds, as far as S measured means and their standard error tell.

    Measured means spread around the line through the published ones for two reasons, noise and a task that is
    different. The share of noise is taken off (as in shrinkage.py, with the line for the linear model), and both the
    line and the shares are drawn with what so few recipes tell of them. Draws around the means themselves would be
    noise on top of noise, and rank worse than the truth.
    """
    rng = np.random.default_rng(seed)
    x, freedom = published - published.mean(), max(len(published) - 2, 1)
    square = max(float(x @ x), 1e-300)
    slope = float(x @ mean) / square
    rest = float(np.square(mean - mean.mean() - slope * x).sum()) / freedom
    spread = rest * freedom / rng.chisquare(freedom, (draws, 1))
    own = np.where(spread > error**2, 1 - error**2 / np.maximum(spread, 1e-300), 0.0)
    line = mean.mean() + (slope + np.sqrt(spread / square) * rng.normal(size=(draws, 1))) * x
    found: Array = line + own * (mean - line) + np.sqrt(own) * error * rng.normal(size=(draws, len(x)))
    return found
