"""Questions asked of drawn studies, beside what is true (question_scores.py).

The estimand of an effect is that of `effects_of`: the mean difference of the true gaps over all pairs of which both
recipes finished on some seed, each pair once. It is of these pairs, fixed as they are: where techniques interact and a
design is incomplete, the mean over all pairs of the space is another number.

Every study is the task that screens. The later task has the same recipes on fresh lanes in half of the studies; in the
others it is another study of its world, whose truth is its own, so that a true effect may have nothing to repeat. Both
evaluations are one here, as generated lanes have one loss; the first is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.bench.generated import KNOBS, crossing
from fp4dse.results.bench.studies import NOISE, Size, Study, drawn
from fp4dse.results.stats.paired import add_gap, by_seed, rows_at_best_lr
from fp4dse.results.stats.techniques.answers import Pairs, answers, effects_over
from fp4dse.results.stats.techniques.questions import Effect, Question, Questions

CLAIMS: tuple[Literal["helps", "harms", "differs"], ...] = ("helps", "harms", "differs")
"""Of questions, in turn."""
NEGLIGIBLE = NOISE / 2
"""A log ratio. With the .1 % of the study, no effect of these sizes would be negligible."""
ONE_PAIR = "one pair"
"""The question whose effects have a pair each."""
NOTHING = 1e-9
"""A true effect up to which there is none: sums of the same numbers differ by rounding."""


class Asked(NamedTuple):
    """The questions of a size's studies: records without paths, since drawn recipes have no fields, and their pairs."""

    questions: tuple[Question, ...]
    pairs: Pairs


class Answered(NamedTuple):
    """What the two tasks of a study say, beside what is true of them."""

    effects: pd.DataFrame
    """Lines of `effects_of` of both tasks, with `later`, True for one of them, and `truth`."""
    answers: pd.DataFrame
    """Lines of `answers` of effects that have a pair on the task that screens, with claim, tells, truth and truth_later, NaN
    where the later task has no pair."""


@cache
def asked_of(size: Size) -> Asked:
    """A question for each knob, its levels against the first one at each level of another knob; one about the first
    knob on top of everything; and ONE_PAIR, a single change to the recipe that has all knobs at their first levels."""
    knobs = size.larger
    codes = crossing(knobs)
    names = np.array([f"{i:016x}" for i in range(len(codes))], object)
    levels = [len(KNOBS[knob][1]) for knob in knobs]
    step = [int(np.prod(levels[axis + 1 :])) for axis in range(len(levels))]
    changes = [(axis, level) for axis in range(len(knobs)) for level in range(1, levels[axis])]
    alone = (codes > 0).sum(axis=1) == 0
    found: dict[str, dict[str, NDArray[np.bool_]]] = {ONE_PAIR: {}}
    of: dict[tuple[str, str], tuple[int, int]] = {}
    for axis, level in changes:
        name = f"{knobs[axis]} {level}"
        first = codes[:, axis] == 0
        found[ONE_PAIR][name] = first & alone
        of[ONE_PAIR, name] = axis, level
        if axis == 0:
            held = {name: first}
        else:
            held = {f"{name} ({other})": first & (codes[:, 0] == other) for other in range(levels[0])}
        found.setdefault(knobs[axis], {}).update(held)
        of |= dict.fromkeys(((knobs[axis], effect) for effect in held), (axis, level))
    questions = tuple(
        Question(name, name, CLAIMS[number % 3], tuple(Effect(effect, (), ()) for effect in effects))
        for number, (name, effects) in enumerate(found.items())
    )
    pairs = {}
    for (question, effect), (axis, level) in of.items():
        before = np.flatnonzero(found[question][effect])
        after = before + level * step[axis]
        pairs[question, effect] = list(zip(names[before].tolist(), names[after].tolist(), strict=True))
    return Asked(questions, pairs)


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
    effects = effects_over(both, asked.pairs, NEGLIGIBLE)
    told = dict(iter(effects.groupby("task")))
    found = []
    for i, of in enumerate(zip(studies, after, strict=True)):
        tasks = f"{i:06}", _later_name(i)
        lines = pd.concat([_with_truth(told[task], study, parts[task], asked) for task, study in zip(tasks, of, strict=True)])
        lines = lines.assign(later=lines["task"].eq(tasks[1]))
        found.append(Answered(lines, _answers(lines, asked)))
    return found


def _with_truth(lines: pd.DataFrame, study: Study, rows: pd.DataFrame, asked: Asked) -> pd.DataFrame:
    truth = true_effects(study, rows, asked.pairs)
    return lines.assign(truth=[truth[key] for key in zip(lines["question"], lines["effect"], strict=True)])


def _answers(lines: pd.DataFrame, asked: Asked) -> pd.DataFrame:
    first, second = ((lines["task"] + ":" + lines["preset"])[lines["later"].eq(of)].iloc[0] for of in (False, True))
    found = answers(lines, Questions(first, (second,), NEGLIGIBLE, asked.questions))
    key = ["question", "effect", "evaluation"]
    found["claim"] = found["question"].map({question.id: question.claim for question in asked.questions})
    found = found.merge(lines.loc[~lines["later"], [*key, "truth", "tells"]], on=key)
    return found.merge(lines.loc[lines["later"], [*key, "truth"]], on=key, how="left", suffixes=("", "_later"))


def _later_name(number: int) -> str:
    return f"{number:06} later"


def _later(study: Study) -> Study:
    """The later task of a study, see the top; by chance of its own, so that a study's lanes stay as they are."""
    [rng] = study.lanes.rng.spawn(1)
    if rng.random() < 0.5:
        return replace(study, lanes=replace(study.lanes, rng=rng, known=[]))
    return drawn(study.size, study.world, rng)


def true_effects(study: Study, rows: pd.DataFrame, pairs: Pairs) -> dict[tuple[str, str], float]:
    """The estimand of each effect that has a pair, see the top. rows: of the study, as for `effects_over`."""
    ids, y = by_seed(rows, rows["gap_matched"])
    row = {name: number for number, name in enumerate(ids)}
    known = {f"{number:016x}": gap for number, gap in zip(study.ids, study.gap, strict=True)}
    gap = np.array([known.get(name, np.nan) for name in ids])  # NaN of BF16, which is in no pair
    found = {}
    for key, names in pairs.items():
        at = np.array([(row[a], row[b]) for a, b in names if a in row and b in row], int).reshape(-1, 2)
        some = np.isfinite(y[at]).all(axis=1).any(axis=1)
        if some.any():
            found[key] = float((gap[at[some, 1]] - gap[at[some, 0]]).mean())
    return found

