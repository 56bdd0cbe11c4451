"""Scores of answers to questions, of their intervals and of what is told, held against the truth (questions.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from fp4dse.results.bench.questions import NEGLIGIBLE, ONE_PAIR, Answered
from fp4dse.results.stats.techniques.answers import EVALUATIONS

NOTHING = 1e-9
"""A true effect up to which there is none: sums of the same numbers differ by rounding."""
SIDES = {"helps": -1, "harms": 1}
"""The sign of the effect that is told or claimed; `differs` has that of the truth."""

Score = tuple[str, float, float]
"""As in scores.py."""


def scores_of_questions(said: Answered) -> Iterator[Score]:
    """Scores of one evaluation; generated lanes have the same loss in both."""
    lines, found = (of[of["evaluation"].eq(EVALUATIONS[0])].reset_index(drop=True) for of in said)
    truth, known = lines["truth"].to_numpy(float), lines["low"].notna().to_numpy()
    own = _inside(lines["own_low"], truth, lines["own_high"])
    yield "interval of a question's effect covers", *_share(own, known)
    yield "interval of a question's effect of one pair covers", *_share(own, known & lines["question"].eq(ONE_PAIR))
    shares = lines["shares"].to_numpy(bool)
    yield "interval of a question's effect that shares noise within a seed covers", *_share(own, known & shares)
    yield "100 · (a question's effect - truth)", *_share(100 * (lines["difference"] - truth), known)
    together = pd.Series(_inside(lines["low"], truth, lines["high"]))
    yield "all intervals of a question cover", *_share(_any(~together, lines, known) == 0, True)
    null = known & (np.abs(truth) <= NOTHING)
    yield "null effects of questions told by their own intervals", *_share(lines["repeats"].ne("open"), null)
    yield "questions with a null effect told", *_share(_any(lines["tells"].isin(SIDES), lines, null), True)
    yield "`negligible`: wrong", *_share(np.abs(truth) > NEGLIGIBLE, lines["tells"].eq("negligible"))
    yield from _of_answers(found)


def _of_answers(found: pd.DataFrame) -> Iterator[Score]:
    """`confirmed` is wrong where not both tasks have a true effect of the side that was told, and `refuted` where the
    task that screens has one of the side that is claimed that is not negligible. To be true of both tasks, as power
    counts claims, effects are not negligible either."""
    truths = found[["truth", "truth_later"]].to_numpy(float)
    sides = np.where(np.abs(truths) > NOTHING, np.sign(truths), 0)
    told = found["tells"].map(SIDES).to_numpy(float)
    claimed = found["claim"].map(SIDES).fillna(pd.Series(sides[:, 0])).to_numpy(float)
    true = (sides == claimed[:, None]) & (np.abs(truths) > NEGLIGIBLE)
    confirmed, refuted = (found["answer"].eq(word).to_numpy() for word in ("confirmed", "refuted"))
    wrong = (sides != told[:, None]).any(axis=1)
    yield "`confirmed`: wrong", *_share(wrong, confirmed)
    yield "`refuted`: wrong", *_share(true[:, 0], refuted)
    yield "claims that are true of both tasks: confirmed", *_share(confirmed & ~wrong, true.all(axis=1))
    yield "answers: confirmed or refuted", *_share(confirmed | refuted, True)


def _inside(low: pd.Series, truth: NDArray[np.float64], high: pd.Series) -> NDArray[np.bool_]:
    """An interval without width has what is equal up to rounding."""
    return np.asarray((low.to_numpy(float) - NOTHING <= truth) & (truth <= high.to_numpy(float) + NOTHING))


def _any(hits: ArrayLike, lines: pd.DataFrame, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """For each question of each task with one of some lines: True if one of these is hit."""
    of = lines[among]
    hit = pd.Series(np.asarray(hits)[among], of.index)
    return np.asarray(hit.groupby([of["task"], of["question"]]).any(), bool)


def _share(hits: ArrayLike, among: ArrayLike) -> tuple[float, float]:
    """The sum of some of the hits (or sizes), and how many these are."""
    hits = np.asarray(hits, float)
    among = np.broadcast_to(np.asarray(among, bool), hits.shape)
    return float(hits[among].sum()), float(among.sum())
