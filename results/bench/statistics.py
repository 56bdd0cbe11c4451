"""The answers of the statistics beside the truth of studies that were drawn: coverage, calibration, bias, power.

Every figure is a mean of scores (scores.py) over studies, with the standard error that comes from their number.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import pandas as pd

from fp4dse.results.bench.answers import answered
from fp4dse.results.bench.scores import Score, scored
from fp4dse.results.bench.studies import SIZES, WORLDS, Recorded, Study, drawn, recorded

TARGETS = {
    "interval of a recipe's gap covers": "0.93 … 0.97",
    "interval of the recommended recipe's gap covers": "0.93 … 0.97",
    "100 · (recommended recipe's gap - truth)": "0",
    "100 · (lowest of the screened gaps - truth)": "below 0",
    "100 · (confirmed best's gap - truth)": "0",
    "100 · (confirmed recommended recipe's gap - truth)": "0",
    "interval of the confirmed best's gap covers": "0.93 … 0.97",
    "interval of a main effect covers": "0.93 … 0.97",
    "interval of an interaction covers": "0.93 … 0.97",
    "interval of matched pairs covers": "0.93 … 0.97",
    "interval of a question's effect covers": "0.93 … 0.97",
    "interval of a question's effect of one pair covers": "0.93 … 0.97",
    "interval of a question's effect that shares noise within a seed covers": "0.93 … 0.97",
    "all intervals of a question cover": "≥ 0.93",
    "100 · (a question's effect - truth)": "0",
    "null effects of questions told by their own intervals": "≤ 0.05",
    "questions with a null effect told": "≤ 0.05",
    "`confirmed`: wrong": "≤ 0.05",
    "`refuted`: wrong": "≤ 0.05",
    "`negligible`: wrong": "≤ 0.05",
    "all intervals against the best cover": "≥ 0.93",
    "null studies with a `helps` or `harms`": "≤ 0.05",
    "null studies with an effect told": "≤ 0.05",
    "null studies with a rival told at equal cost": "≤ 0.05",
    "null studies with a neighbour told from the best": "≤ 0.05",
    "`lower`, `higher`: wrong": "≤ 0.05",
    "`same`: wrong": "≤ 0.05",
    "more_seeds decides": "≥ 0.80",
    "more_seeds of `compare` decides": "≥ 0.80",
}
LANES = 5_000
"""Of a batch of studies."""


def bench(
    sizes: Sequence[str], studies: int, seed: int = 0, runs: pd.DataFrame | None = None, jobs: int = 1
) -> Iterator[dict[str, Any]]:
    """studies, what, value, error (standard, of the simulation), target, drawn (studies that it is from): a line each.

    sizes: of SIZES. `studies` of each, the worlds in turn; one in seven is null. runs: of a real store, whose settings
    are resampled as often. jobs: processes that share the studies of a size; how many changes no line.
    """
    with ExitStack() as stack:
        each: Callable[..., Iterable[list[list[Score]]]] = map
        if jobs > 1:
            each = stack.enter_context(ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))).map
        for name in sizes:
            size = SIZES[name]
            batch = max(1, LANES // (size.recipes * size.seeds))
            parts = [range(first, min(first + batch, studies)) for first in range(0, studies, batch)]
            yield from summed(str(size), list(chain.from_iterable(each(partial(_scores, name, seed), parts))))
        if runs is not None:
            again = partial(_resampled_scores, [*recorded(runs)], seed)
            yield from summed("resampled × 3", list(chain.from_iterable(each(again, range(studies)))))


def _scores(name: str, seed: int, numbers: Sequence[int]) -> list[list[Score]]:
    """The scores of the studies of a size with these numbers, as one frame."""
    size = SIZES[name]
    rngs = [np.random.default_rng([seed, size.recipes, i]) for i in numbers]
    draws = (drawn(size, WORLDS[i % len(WORLDS)], rng) for i, rng in zip(numbers, rngs, strict=True))
    return scored_in_batches(draws, len(numbers))


def _resampled_scores(settings: Sequence[Recorded], seed: int, number: int) -> list[list[Score]]:
    """The scores of the studies of this number, one of each setting."""
    rng = np.random.default_rng([seed, number])
    return scored_in_batches([one.resampled(3, rng) for one in settings], 20)


def scored_in_batches(studies: Iterable[Study], batch: int) -> list[list[Score]]:
    """The scores of each study. Those of a batch are the settings of one frame, which saves most of the time."""
    found: list[list[Score]] = []
    waiting = iter(studies)
    while some := list(islice(waiting, batch)):
        found += [list(scored(study, answers)) for study, answers in zip(some, answered(some), strict=True)]
    return found


def summed(of: str, scores: Sequence[Sequence[Score]]) -> Iterator[dict[str, Any]]:
    """The lines of `bench` from the scores of studies: ratios of sums, with errors from study to study."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for study in scores:
        for what, total, count in study:
            if count:
                found[what].append((float(total), float(count)))
    for what in sorted(found, key=lambda what: (list(TARGETS).index(what) if what in TARGETS else 99, what)):
        total, count = np.array(found[what]).T
        value = float(total.sum() / count.sum())
        spread = math.sqrt(np.square(total - value * count).sum()) / count.sum()
        line = {"studies": of, "what": what, "value": round(value, 4), "error": round(spread, 4)}
        yield {**line, "target": TARGETS.get(what), "drawn": len(total)}
