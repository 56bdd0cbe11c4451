"""Questions asked of drawn studies, beside what is true (question_scores.py).

The estimand of an effect is that of `effects_of`: the mean difference of the true gaps over all pairs of which both
recipes finished on some seed, each pair once. It is of these pairs, fixed as they are: where techniques interact and a
design is incomplete, the mean over all pairs of the space is another number.

Every study is the task that screens. The later task has the same recipes on fresh lanes in half of the studies; in the
others it is another study of its world, whose truth is its own, so that a true effect may have nothing to repeat. Both
evaluations are one here, as generated lanes have one loss; the first is scored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from fp4dse.results.bench.generated import KNOBS, crossing
from fp4dse.results.bench.studies import NOISE, Size, Study, drawn
from fp4dse.results.stats.paired import add_gap, by_seed, rows_at_best_lr
from fp4dse.results.stats.techniques.answers import Pairs, answers, effects_over, rows_of_pairs
from fp4dse.results.stats.techniques.questions import Effect, Question, Questions

CLAIMS: tuple[Literal["helps", "harms", "differs"], ...] = ("helps", "harms", "differs")
"""Of questions, in turn."""
NEGLIGIBLE = NOISE / 2
"""A log ratio. With the .1 % of the study, no effect of these sizes would be negligible."""
ONE_PAIR = "one pair"
"""The question whose effects have a pair each."""


class Asked(NamedTuple):
    """The questions of a size's studies: records without paths, since drawn recipes have no fields, and their pairs."""

    questions: tuple[Question, ...]
    pairs: Pairs


class Answered(NamedTuple):
    """Effects and answers of the two tasks of a study, beside what is true of them."""

    effects: pd.DataFrame
    """Lines of `effects_of` of both tasks, with `later` (True of one of them), `truth`, and `shares`, True where all
    recipes with the technique share noise within a seed."""
    answers: pd.DataFrame
    """Lines of `answers` of effects that have a pair on the task that screens, with claim, tells, truth and
    truth_later, NaN where the later task has no pair."""


@cache
def asked_of(size: Size) -> Asked:
    """A question for each knob, its levels against the first one at each level of the first knob (of this one, on top
    of everything at once); and ONE_PAIR, a single change to the recipe that has all knobs at their first levels."""
    knobs, codes = size.larger, crossing(size.larger)
    names = [f"{i:016x}" for i in range(len(codes))]
    levels = [len(KNOBS[knob][1]) for knob in knobs]
    plain = (codes == 0).all(axis=1)
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for axis, knob in enumerate(knobs):
        first, next_level = codes[:, axis] == 0, math.prod(levels[axis + 1 :])
        for level in range(1, levels[axis]):
            name = f"{knob} {level}"
            asked = {(ONE_PAIR, name): plain}
            if axis:
                asked |= {(knob, f"{name} ({of})"): first & (codes[:, 0] == of) for of in range(levels[0])}
            else:
                asked[knob, name] = first
            for key, before in asked.items():
                pairs[key] = [(names[i], names[i + level * next_level]) for i in np.flatnonzero(before)]
    effects: dict[str, list[Effect]] = {}
    for question, effect in pairs:
        effects.setdefault(question, []).append(Effect(effect, (), ()))
    questions = (Question(name, name, CLAIMS[i % 3], tuple(of)) for i, (name, of) in enumerate(effects.items()))
    return Asked(tuple(questions), pairs)


def answered_questions(studies: Sequence[Study], rows: pd.DataFrame) -> list[Answered | None]:
    """The answers to the questions of each study; None of one that is drawn from real rows, whose techniques have no
    truth. rows: of `rows_at_best_lr`, of all of these studies, the tasks named by their numbers."""
    if not studies[0].size.larger:
        return [None] * len(studies)
    asked = asked_of(studies[0].size)
    after = [_later(study) for study in studies]
    new = pd.concat([study.runs(_later_name(i)) for i, study in enumerate(after)], ignore_index=True)
    both = pd.concat([rows, rows_at_best_lr(add_gap(new))], ignore_index=True)
    parts = dict(iter(both.groupby("task")))
    told = dict(iter(effects_over(both, asked.pairs, NEGLIGIBLE).groupby("task")))
    found: list[Answered | None] = []
    for i, (study, later) in enumerate(zip(studies, after, strict=True)):
        of = {f"{i:06}": study, _later_name(i): later}
        lines = [_with_truth(told[task], one, parts[task], asked) for task, one in of.items()]
        effects = pd.concat([part.assign(later=bool(number)) for number, part in enumerate(lines)])
        found.append(Answered(effects, _answers(effects, asked)))
    return found


def _later_name(number: int) -> str:
    return f"{number:06} later"


def _with_truth(lines: pd.DataFrame, study: Study, rows: pd.DataFrame, asked: Asked) -> pd.DataFrame:
    truth = true_effects(study, rows, asked.pairs)
    noisy = study.size.larger[: study.lanes.techniques.shape[1]]
    keys = zip(lines["question"], lines["effect"], strict=True)
    return lines.assign(truth=[truth[key] for key in keys], shares=lines["question"].isin(noisy))


def _answers(lines: pd.DataFrame, asked: Asked) -> pd.DataFrame:
    first, second = ((lines["task"] + ":" + lines["preset"])[lines["later"].eq(of)].iloc[0] for of in (False, True))
    found = answers(lines, Questions(first, (second,), NEGLIGIBLE, asked.questions))
    key = ["question", "effect", "evaluation"]
    found["claim"] = found["question"].map({question.id: question.claim for question in asked.questions})
    found = found.merge(lines.loc[~lines["later"], [*key, "truth", "tells"]], on=key)
    return found.merge(lines.loc[lines["later"], [*key, "truth"]], on=key, how="left", suffixes=("", "_later"))


def _later(study: Study) -> Study:
    """The later task of a study, see the top; by chance of its own, so that a study's lanes stay as they are."""
    [rng] = study.lanes.rng.spawn(1)
    if rng.random() < 0.5:
        return replace(study, lanes=replace(study.lanes, rng=rng, known=[]))
    return drawn(study.size, study.world, rng)


def true_effects(study: Study, rows: pd.DataFrame, pairs: Pairs) -> dict[tuple[str, str], float]:
    """The estimand of each effect that has a pair, see the top. rows: of the study, as for `effects_over`."""
    ids, y = by_seed(rows, rows["gap_matched"])
    known = {f"{number:016x}": gap for number, gap in zip(study.ids, study.gap, strict=True)}
    gap = np.array([known.get(name, np.nan) for name in ids])  # NaN of BF16, which is in no pair
    found = {}
    for key, names in pairs.items():
        at = rows_of_pairs(ids, names)
        some = np.isfinite(y[at[:, 1]] - y[at[:, 0]]).any(axis=1)
        if some.any():
            found[key] = float((gap[at[some, 1]] - gap[at[some, 0]]).mean())
    return found
