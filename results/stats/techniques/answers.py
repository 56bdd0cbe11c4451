"""Answers to written questions (questions.py), from pairs of recipes. Whether a question is older than the rows that
answer it, the history of its file says.

An effect is the mean difference of log loss over all pairs of recipes that differ in it alone, each pair once, on the
same seeds, each loss less what the recipe's training side does to BF16 (`gap_matched`). It is of these pairs: other
recipes may have another. Its variance is that over seeds, held against what independent lanes of its own recipes would
give it, and pooled over all effects of a setting as far as they are alike in this. The interval is 95 % for all effects
of a question at once (Bonferroni); `own_low` and `own_high` are for one alone. The task that screens chooses among all
effects, and is read by the first; a later task is asked of effects that were told, and is read by the second
(`repeats`).

By `fp4dse bench statistics` intervals are 95 % on average over the effects of a setting (docs/results.md). Where the
recipes with a technique share noise within a seed, which few seeds cannot tell, those of this technique cover less.

It `helps` or `harms` where the interval lies on one side of zero, is `negligible` where it lies within the margin of
the file, and `open` otherwise. Then

    confirmed     on the task that screens it does what is claimed, and by its own interval on the first of the later
                  tasks that has such pairs, too
    refuted       on the task that screens it does the opposite, or is negligible
    not settled   anything else, with the reason

A claim that something `differs` is confirmed by a sign that is the same on both.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit

from fp4dse.dse import recipe_from_dict
from fp4dse.results.stats.estimates.intervals import CONFIDENCE, known_error
from fp4dse.results.stats.estimates.mean_of_pairs import mean_of_pairs, pooled_beside_lanes
from fp4dse.results.stats.estimates.spread import lane_variances
from fp4dse.results.stats.paired import SETTING, by_seed, rows_at_best_lr, stacked
from fp4dse.results.stats.techniques.questions import Question, Questions

NO_INTERVAL = "no interval"
"""In place of what an effect tells, where one seed says nothing of the spread."""
NO_PAIR = "no pair with a seed in common finished"
EVALUATIONS = ("quantized", "bf16")
"""The forward pass that held-out losses went through."""
Pairs = Mapping[tuple[str, str], Sequence[tuple[str, str]]]
"""Question (id) and effect (name) -> the config_ids of its pairs, the unchanged one first."""
COLUMNS = [*SETTING, "evaluation", "question", "effect", "pairs", "seeds", "difference", "low", "high"]
COLUMNS += ["own_low", "own_high", "diverges", "recovers", "tells", "repeats"]


def effects_of(runs: pd.DataFrame, questions: Questions) -> pd.DataFrame:
    """Each effect of each question, per SETTING and evaluation, that has a pair with a seed in common that both
    finished.

    Columns: SETTING, evaluation, question (id), effect (name), pairs (those of which both recipes have rows, also if
    they diverged or have no seed in common, and so no part in the mean), seeds, difference (mean log loss ratio, below
    0 where it helps), low, high, own_low, own_high (see the top; NaN with one seed), diverges, recovers (pairs of which
    the changed, or the unchanged recipe alone diverged), tells (helps, harms, negligible or open, by low and high),
    repeats (helps, harms or open, by own_low and own_high).
    """
    return effects_over(rows_at_best_lr(runs), pairs_of(runs, questions), questions.negligible)


def pairs_of(runs: pd.DataFrame, questions: Questions) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """The pairs of each effect among the recipes of some runs, as `effects_over` takes them."""
    first = runs.drop_duplicates("config_id").set_index("config_id")["recipe"]
    recipes = {name: recipe_from_dict(json.loads(text)).canonical() for name, text in first.items()}
    return {
        (question.id, effect.name): effect.pairs(recipes)
        for question in questions.questions
        for effect in question.effects
    }


def effects_over(rows: pd.DataFrame, pairs: Pairs, negligible: float) -> pd.DataFrame:
    """The lines of `effects_of` for pairs that are known. rows: of `rows_at_best_lr`; negligible: a log ratio."""
    parts = []
    matched = {"quantized": rows["gap_matched"], "bf16": rows["gap_bf16"] - (rows["gap"] - rows["gap_matched"])}
    for keys, part in rows.groupby(list(SETTING), observed=True, sort=False):
        for evaluation in EVALUATIONS:
            lines = _differences(part, matched[evaluation].loc[part.index], pairs)
            if len(lines):
                lines = _with_intervals(lines, negligible).assign(evaluation=evaluation)
                parts.append(lines.assign(**dict(zip(SETTING, keys, strict=True))))
    return stacked(parts, COLUMNS)


def _differences(part: pd.DataFrame, values: pd.Series, pairs: Pairs) -> pd.DataFrame:
    """A line for each effect that has a pair with a seed in common; values: of the rows, NaN where diverged."""
    ids, y = by_seed(part, values)
    diverged = part.groupby("config_id")["diverged"].any().reindex(ids).to_numpy(bool)
    lane, freedom = lane_variances(y)
    lines = []
    for (question, effect), names in pairs.items():
        at = rows_of_pairs(ids, names)
        d, blown = y[at[:, 1]] - y[at[:, 0]], diverged[at]
        some = np.isfinite(d).any(axis=1)
        if not some.any():
            continue
        used = at[some]
        lines.append(
            {
                "question": question,
                "effect": effect,
                "pairs": len(at),
                "seeds": int(np.isfinite(d).any(axis=0).sum()),
                **mean_of_pairs(d[some], lane[used], freedom[used]),
                "diverges": int((blown[:, 1] & ~blown[:, 0]).sum()),
                "recovers": int((blown[:, 0] & ~blown[:, 1]).sum()),
            }
        )
    return pd.DataFrame(lines)


def rows_of_pairs(ids: pd.Index, names: Sequence[tuple[str, str]]) -> NDArray[np.intp]:
    """[pairs, 2]: the places among config_ids of those pairs of which both are there."""
    at = ids.get_indexer(np.array(names, object).ravel()).reshape(-1, 2)
    return np.asarray(at[(at >= 0).all(axis=1)])


def _with_intervals(lines: pd.DataFrame, negligible: float) -> pd.DataFrame:
    """low, high, own_low, own_high, tells and repeats."""
    columns = (lines[name].to_numpy(float) for name in ("variance", "alone", "freedom", "lane_freedom"))
    variance, freedom = pooled_beside_lanes(*columns)
    middle = lines["difference"].to_numpy(float)
    error = np.where(freedom > 0, known_error(np.sqrt(variance), middle), np.nan)
    many = lines.groupby("question")["effect"].transform("count").to_numpy()

    def interval(count: NDArray[np.intp] | int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        half = stdtrit(np.maximum(freedom, 1), 1 - (1 - CONFIDENCE) / 2 / count) * error
        return middle - half, middle + half

    low, high = interval(many)
    own_low, own_high = interval(1)
    conditions = [(low > -negligible) & (high < negligible), high < 0, low > 0]
    tells = np.select(conditions, ["negligible", "helps", "harms"], "open")
    repeats = np.select([own_high < 0, own_low > 0], ["helps", "harms"], "open")
    return lines.assign(low=low, high=high, own_low=own_low, own_high=own_high, tells=tells, repeats=repeats)


def answers(effects: pd.DataFrame, questions: Questions) -> pd.DataFrame:
    """The answer to each effect of each question, by each evaluation, from lines of `effects_of`.

    Columns: question, effect, evaluation, answer (confirmed, refuted, not settled), why.
    """
    told, repeated = defaultdict[tuple[str, ...], set[str]](set), defaultdict[tuple[str, ...], set[str]](set)
    keys = zip(*(effects[name] for name in ("question", "effect", "evaluation", "task", "preset")), strict=True)
    says = effects["tells"].where(effects["low"].notna(), NO_INTERVAL)
    own = effects["repeats"].where(effects["own_low"].notna(), NO_INTERVAL)
    for (*of, task, preset), tells, repeats in zip(keys, says, own, strict=True):
        told[*of, f"{task}:{preset}"].add(tells)
        repeated[*of, f"{task}:{preset}"].add(repeats)
    lines = []
    for question in questions.questions:
        for effect in question.effects:
            for evaluation in EVALUATIONS:
                key = question.id, effect.name, evaluation
                later = next((name for name in questions.later if (*key, name) in repeated), "")
                screen, after = told.get((*key, questions.screen), set()), repeated.get((*key, later), set())
                answer, why = _answer(question, screen, after, later, questions)
                names = {"question": question.id, "effect": effect.name, "evaluation": evaluation}
                lines.append({**names, "answer": answer, "why": why})
    return pd.DataFrame(lines, columns=["question", "effect", "evaluation", "answer", "why"])


def _answer(question: Question, told: set[str], after: set[str], later: str, questions: Questions) -> tuple[str, str]:
    """The answer and why, by the rule at the top. told: `tells` on the task that screens; after: `repeats` on `later`,
    the later task that has pairs; each of all settings of the task, NO_INTERVAL where there is none, and empty where no
    pair has a seed that both finished."""
    if not told:
        return "not settled", f"{NO_PAIR} on {questions.screen}"
    if len(told) > 1:
        return "not settled", f"settings of {questions.screen} disagree"
    (tells,) = told
    if tells == NO_INTERVAL:
        return "not settled", f"the effect on {questions.screen} has no interval"
    if tells == "open":
        return "not settled", f"the interval on {questions.screen} holds zero"
    if tells == "negligible":
        return "refuted", f"negligible on {questions.screen}"
    if question.claim not in (tells, "differs"):
        return "refuted", f"it {tells} on {questions.screen}"
    if not after:
        return "not settled", f"it {tells} on {questions.screen}; {NO_PAIR} on {' or '.join(questions.later)}"
    if after == {NO_INTERVAL}:
        return "not settled", f"it {tells} on {questions.screen}; the effect on {later} has no interval"
    if after != {tells}:
        return "not settled", f"it {tells} on {questions.screen}, which {later} does not repeat"
    return "confirmed", f"it {tells} on {questions.screen} and on {later}"
