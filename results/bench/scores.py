"""Scores: the answers about a study held against its truth. Means of them over studies are figures (statistics.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from fp4dse.results.bench.answers import Answers
from fp4dse.results.bench.generated import KNOBS
from fp4dse.results.bench.question_scores import scores_of_questions
from fp4dse.results.bench.studies import Study
from fp4dse.results.report.technique_findings import standing
from fp4dse.results.stats.recipes.equal_cost import matched
from fp4dse.results.stats.recipes.equivalence import against, compare
from fp4dse.results.stats.recipes.pareto import front
from fp4dse.results.stats.recipes.verdict import Verdict
from fp4dse.results.stats.techniques.marginal import neighbours

Score = tuple[str, float, float]
"""The name of what is measured, its sum over the lines of a study, and how many lines."""

MOST_SEEDS = 100
"""Above which a promise of `more_seeds` is not tried."""
PAIRS = 5
"""Whose promise by `compare` is tried."""
BF16_COST = 1.0
"""Of studies: it beats what costs as much and is no better."""
APART = ("lower", "higher")
"""Verdicts that tell two recipes apart."""
TOLD = "q"
"""The column of `effects` that says which of them are told from nothing, below 0.05."""


def scored(study: Study, said: Answers) -> Iterator[Score]:
    """Scores of what is reported of a study, held against its truth."""
    if said.questions:
        yield from scores_of_questions(said.questions)
    if study.world == "null":
        yield from _null(said)
        yield from _confirmed(study, said)
        return
    lines = said.summarize
    lines = lines[~lines["is_baseline"] & np.isfinite(lines["gap"].astype(float))]
    truth = study.gap[study.rows(lines["config_id"])]
    yield "interval of a recipe's gap covers", *_covered(lines, "gap_low", "gap_high", truth)
    yield from scores_of_front(study, said.front_chance)
    yield from _verdict(study, said.verdict)
    yield from _confirmed(study, said)
    yield from _against(study, said.against)
    yield from scores_of_compare(study, said.rows)
    if study.world != "real":
        yield from _effects(study, said)


def _covered(lines: pd.DataFrame, low: str, high: str, truth: np.ndarray) -> tuple[float, float]:
    bounds = lines[[low, high]].to_numpy(float)
    known = np.isfinite(bounds).all(axis=1) & np.isfinite(truth)
    slack = 1e-9  # bit-equal recipes have an interval without width
    inside = (bounds[:, 0] - slack <= truth) & (truth <= bounds[:, 1] + slack)
    return float(inside[known].sum()), float(known.sum())


def _null(said: Answers) -> Iterator[Score]:
    helps = standing(said.marginal).isin(["helps", "harms"]).any()
    yield "null studies with a `helps` or `harms`", float(helps), 1
    yield "null studies with an effect told", float(said.effects[TOLD].lt(0.05).any()), 1
    versus = said.against[said.against["label"].ne("bf16")]
    yield "null studies with a recipe told from the best", float(versus["verdict"].isin(APART).any()), 1
    yield "null studies with a rival told at equal cost", float(matched(said.rows)["verdict"].isin(APART).any()), 1
    near = neighbours(said.rows, versus["reference"].iloc[0])
    yield "null studies with a neighbour told from the best", float(near["verdict"].isin(APART).any()), 1


def scores_of_front(study: Study, lines: pd.DataFrame) -> Iterator[Score]:
    """Scores of the front and of p_front. lines: of `front_chance`, of this study."""
    rows = study.rows(lines["config_id"])
    truth = front(study.cost[rows], study.gap[rows], BF16_COST)
    chosen = lines["on_front"].to_numpy(bool)
    yield "front: precision", float((truth & chosen).sum()), float(chosen.sum())
    yield "front: recall", float((truth & chosen).sum()), float(truth.sum())
    p, place = lines["p_front"].to_numpy(float), study.places(rows, truth)
    for tenth in range(10):
        here = (p >= tenth / 10) & ((p < (tenth + 1) / 10) | (tenth == 9))
        here &= p > 0
        name = f"p_front {tenth / 10:.1f} … {(tenth + 1) / 10:.1f}"
        yield f"{name}: truth - p_front", float((place[here] - p[here]).sum()), float(here.sum())


def _verdict(study: Study, found: Verdict) -> Iterator[Score]:
    if found.config_id is None:
        return
    [row] = study.rows(pd.Series([found.config_id]))
    truth = study.gap[row]
    yield "100 · (recommended recipe's gap - truth)", 100 * (found.gap - truth), 1
    covers = found.gap_low <= truth <= found.gap_high
    yield "interval of the recommended recipe's gap covers", float(covers), 1
    lowest = study.at_time[study.may_be_named].min()
    yield "100 · (recommended recipe at equal time - lowest truth)", 100 * (study.at_time[row] - lowest), 1


def _confirmed(study: Study, said: Answers) -> Iterator[Score]:
    """The lowest mean of the screened rows, and the best that fresh seeds chose, on seeds that did not choose; both of
    recipes that may be named."""
    lines = said.front_chance.sort_values("gap", kind="stable")
    rows = study.rows(lines["config_id"])
    truth, may_be_named = study.gap[rows], study.may_be_named[rows]
    if not may_be_named.any():
        return
    first, lowest = truth[may_be_named][0], truth[may_be_named].min()
    screened = float(lines["gap"][may_be_named].iloc[0])
    yield "100 · (lowest of the screened gaps - truth)", 100 * (screened - first), 1
    yield "100 · (truth of the lowest screened - lowest truth)", 100 * (first - lowest), 1
    new = said.confirmed
    yield "candidates", float(len(new)), 1
    near = set(_points(study, new["config_id"]))
    costs = study.cost[rows]
    of_front = set(_points(study, lines["config_id"][front(costs, truth, BF16_COST)]))
    yield "true front: among the candidates", float(len(of_front & near)), float(len(of_front))
    for name, called in (("best", "best"), ("recommended", "recommended recipe")):
        chosen = new[new[name]]
        if chosen.empty:
            continue
        [line] = chosen.to_dict("records")
        [true] = study.gap[study.rows(chosen["config_id"])]
        yield f"100 · (confirmed {called}'s gap - truth)", 100 * (line["estimate"] - true), 1
        if name == "best":
            yield "interval of the confirmed best's gap covers", float(line["low"] <= true <= line["high"]), 1
            yield "100 · (truth of the confirmed best - lowest truth)", 100 * (true - lowest), 1


def _points(study: Study, config_ids: pd.Series) -> list[tuple[float, float]]:
    """Cost and true gap: recipes that train to the same bits at one cost are one point."""
    places = study.rows(config_ids)
    return list(zip(study.cost[places].tolist(), study.gap[places].tolist(), strict=True))


def _against(study: Study, versus: pd.DataFrame) -> Iterator[Score]:
    if versus.empty:
        return
    reference = versus["reference"].iloc[0]
    lines = versus[versus["label"].ne("bf16") & versus["difference"].notna()]
    truth = study.gap[study.rows(lines["config_id"])] - study.gap[study.rows(pd.Series([reference]))]
    covered, told = _covered(lines, "low", "high", truth)
    yield "interval against the best covers", covered, told
    yield "all intervals against the best cover", float(covered == told), 1
    verdict = lines["verdict"].to_numpy()
    higher, lower, same = (verdict == word for word in ("higher", "lower", "same"))
    wrong = (higher & (truth <= 0)) | (lower & (truth >= 0))
    yield "`lower`, `higher`: wrong", float(wrong.sum()), float((higher | lower).sum())
    margin = lines["margin"].to_numpy(float)
    yield "`same`: wrong", float((same & (np.abs(truth) > margin)).sum()), float(same.sum())
    yield "decided", float((verdict != "open").sum()), float(len(lines))
    open_ = lines[lines["verdict"].eq("open")].sort_values("difference")
    more = open_["more_seeds"].astype(float)
    yield "open with more_seeds in reach (100)", float(more.le(MOST_SEEDS).sum()), float(len(open_))
    if more.le(MOST_SEEDS).any() and len(study.gap) < 2000:
        line = open_[more.le(MOST_SEEDS)].iloc[0]
        later = against(study.runs("later", int(line["more_seeds"])), reference)
        verdict = later.loc[later["config_id"].eq(line["config_id"]), "verdict"].iloc[0]
        if verdict != "diverged":
            yield "more_seeds decides", float(verdict != "open"), 1


def scores_of_compare(study: Study, rows: pd.DataFrame) -> Iterator[Score]:
    """The promises of `compare` of PAIRS pairs of recipes that nothing was chosen by."""
    if len(study.gap) >= 2000:
        return
    promises = {}
    ids = sorted(rows["config_id"][rows["points"].gt(0)].unique())
    for a, b in zip(ids[: 2 * PAIRS : 2], ids[1 : 2 * PAIRS : 2], strict=False):  # an odd last one has no neighbour
        more = compare(rows, a, b)["more_seeds"].iloc[0]
        if more <= MOST_SEEDS:
            promises[a, b] = int(more)
    runs = study.runs("later", max(promises.values(), default=0))
    for (a, b), more in promises.items():
        later = compare(runs[runs["seed"].lt(study.size.seeds + more)], a, b).iloc[0]
        if not later["diverged_a"] + later["diverged_b"]:
            yield "more_seeds of `compare` decides", float(np.isnan(later["more_seeds"])), 1


def _effects(study: Study, said: Answers) -> Iterator[Score]:
    codes = {name: {_text(v): i for i, v in enumerate(KNOBS[name][1])} for name in study.knobs}
    lines, pairs = said.effects, said.marginal
    mains = lines[lines["kind"].eq("main") & lines["level"].ne(lines["reference"]) & lines["factor"].isin(study.knobs)]
    truth = np.array([_contrast(study, study.everything, codes, line) for line in mains.to_dict("records")])
    yield "interval of a main effect covers", *_covered(mains, "low", "high", truth)
    claimed = mains[TOLD].lt(0.05).to_numpy()
    wrong = claimed & (mains["effect"].to_numpy(float) * truth <= 0)
    yield "main effects that are told: wrong sign or none", float(wrong.sum()), float(claimed.sum())
    yield "main effects above the noise of a lane: told", *_power(truth, claimed)
    if study.world != "holes":
        yield "interval of an interaction covers", *_interactions(study, lines, codes)
    finished = np.full(study.everything.shape, np.nan)
    lanes = said.rows[said.rows["points"].gt(0)]
    diverged = lanes["diverged"].groupby(lanes["config_id"]).any()
    kept = study.rows(pd.Series(diverged.index[~diverged]))
    finished[tuple(study.codes[kept].T)] = study.gap[kept]
    pairs = pairs[pairs["factor"].isin(study.knobs)]
    truth = np.array([_contrast(study, finished, codes, line) for line in pairs.to_dict("records")])
    yield "interval of matched pairs covers", *_covered(pairs, "low", "high", truth)
    words = standing(pairs)
    right = np.where(words.eq("helps"), truth < 0, truth > 0)
    called = words.isin(["helps", "harms"]).to_numpy()
    yield "`helps`, `harms`: wrong", float((~right[called]).sum()), float(called.sum())


def _power(truth: np.ndarray, claimed: np.ndarray) -> tuple[float, float]:
    large = np.abs(truth) > 0.01
    return float((claimed & large).sum()), float(large.sum())


def _contrast(study: Study, gaps: np.ndarray, codes: dict[str, dict[str, int]], line: dict[str, Any]) -> float:
    """The mean difference between a level and its reference over all combinations that have both."""
    levels = codes[line["factor"]]
    if line["level"] not in levels or line["reference"] not in levels:
        return math.nan
    axis = study.knobs.index(line["factor"])
    difference = gaps.take(levels[line["level"]], axis) - gaps.take(levels[line["reference"]], axis)
    return float(np.nanmean(difference)) if np.isfinite(difference).any() else math.nan


def _interactions(study: Study, lines: pd.DataFrame, codes: dict[str, dict[str, int]]) -> tuple[float, float]:
    pairs = lines[lines["kind"].eq("interaction") & lines["factor"].isin(study.knobs)]
    pairs = pairs[pairs["with_factor"].isin(study.knobs)]
    covered = told = 0.0
    for (factor, with_factor), cells in pairs.groupby(["factor", "with_factor"], sort=False):
        axes = study.knobs.index(factor), study.knobs.index(with_factor)
        gaps = np.moveaxis(study.everything, axes, (0, 1))
        sums = np.nansum(gaps, axis=tuple(range(2, gaps.ndim)))
        table = sums / np.isfinite(gaps).sum(axis=tuple(range(2, gaps.ndim)))
        table = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
        levels = cells["level"].map(codes[factor]), cells["with_level"].map(codes[with_factor])
        known = (levels[0].notna() & levels[1].notna()).to_numpy()
        truth = np.full(len(cells), np.nan)
        truth[known] = table[levels[0][known].astype(int), levels[1][known].astype(int)]
        hits = _covered(cells, "low", "high", truth)
        covered, told = covered + hits[0], told + hits[1]
    return covered, told


def _text(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
