"""The answers of the statistics about studies that were drawn.

Nothing is asked but the public functions and what the report says, so that one method is held against the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from fp4dse.results.bench.questions import Answered, answered_questions
from fp4dse.results.bench.studies import Study
from fp4dse.results.stats.learning_rates import learning_rates
from fp4dse.results.stats.paired import DERIVED, add_gap, rows_at_best_lr
from fp4dse.results.stats.recipes.candidates import candidates
from fp4dse.results.stats.recipes.confirmed import confirmed
from fp4dse.results.stats.recipes.equivalence import against
from fp4dse.results.stats.recipes.front_chance import front_chance
from fp4dse.results.stats.recipes.ranked import with_chance
from fp4dse.results.stats.recipes.recommendation import verdicts_from
from fp4dse.results.stats.recipes.summary import summarize
from fp4dse.results.stats.recipes.verdict import Verdict
from fp4dse.results.stats.stages import CONFIRM, STAGE
from fp4dse.results.stats.techniques.effects import effects
from fp4dse.results.stats.techniques.marginal import marginal

FRESH_SEEDS = 10
"""Of each candidate, as `fp4dse confirm` has them."""


class Answers(NamedTuple):
    """The answers of the statistics about one study: lines of the functions of that name."""

    rows: pd.DataFrame
    summarize: pd.DataFrame
    front_chance: pd.DataFrame
    against: pd.DataFrame
    effects: pd.DataFrame
    marginal: pd.DataFrame
    confirmed: pd.DataFrame
    verdict: Verdict
    questions: Answered | None
    """None of studies that are drawn from real rows."""


def answered(studies: Sequence[Study]) -> list[Answers]:
    """The answers to each of some studies of one size, whose candidates are confirmed."""
    runs = with_fresh_seeds(studies)
    rows = rows_at_best_lr(runs)
    recipes, chance, versus = summarize(rows), front_chance(rows), against(rows)
    new = confirmed(runs)
    verdicts = verdicts_from(rows, with_chance(recipes, chance), learning_rates(runs), new)
    frames = [rows, recipes, chance, versus, effects(rows), marginal(rows), new]
    split = [dict(iter(frame.groupby("task"))) for frame in frames]
    by_task = {verdict.setting[0]: verdict for verdict in verdicts}
    asked = answered_questions(studies, rows)
    found = []
    for i in range(len(studies)):
        parts = [part.get(f"{i:06}", frame.iloc[:0]) for part, frame in zip(split, frames, strict=True)]
        found.append(Answers._make([*parts, by_task[f"{i:06}"], asked[i]]))
    return found


def with_fresh_seeds(studies: Sequence[Study]) -> pd.DataFrame:
    """The runs of studies of one size, and of their candidates and BF16 those of FRESH_SEEDS seeds more."""
    everything = [study.runs(f"{i:06}", FRESH_SEEDS) for i, study in enumerate(studies)]
    runs = add_gap(pd.concat(everything, ignore_index=True))
    new = runs["seed"].ge(studies[0].size.seeds)
    near = pd.MultiIndex.from_frame(candidates(runs[~new])[["task", "config_id"]])
    kept = runs["is_baseline"] | pd.MultiIndex.from_frame(runs[["task", "config_id"]]).isin(near)
    runs = runs.assign(**{STAGE: new.map({True: CONFIRM, False: None})})
    return runs[~new | kept].drop(columns=DERIVED).reset_index(drop=True)
