"""One sampler on one space: asks it for recipes and tells it what became of them. Knows nothing of training.

A space is finite and samplers repeat themselves on it (TPE proposed 245 distinct of 600 on 2,592 recipes). So a
proposal that is known is answered at once, one that is under way waits with the first of its kind, and what was
proposed again is kept as a wish: if nothing new comes, such recipes get further seeds, which is what repeating can
mean.

Optuna's study lives in memory for one search. Samplers are seeded and the store remembers, so the same command after
an interruption meets the same answers and goes on where it was.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fp4dse.dse import Recipe, Space

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "nsga2", "nsga3", "gp", "random")
MOST_OPEN = {"nsga2": 1, "nsga3": 1}
"""Batches of a study that are under way at a time, if not two: a generation needs the answers of the one before."""
MOST_SEEDS = 30
"""A recipe is not trained with more, however often a sampler asks for it."""


def make_study(sampler: str, objectives: int, batch: int, seed: int) -> optuna.Study:
    """A study in memory; what it is told is minimized. A generation of an evolutionary sampler is a batch."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = optuna.samplers
    makers: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
        "tpe": lambda: samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True),
        "nsga2": lambda: samplers.NSGAIISampler(seed=seed, population_size=max(batch, 2)),
        "nsga3": lambda: samplers.NSGAIIISampler(seed=seed, population_size=max(batch, 2)),
        "gp": lambda: samplers.GPSampler(seed=seed),
        "random": lambda: samplers.RandomSampler(seed=seed),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.create_study(sampler=makers[sampler](), directions=["minimize"] * objectives)


def _few_threads(study: optuna.Study) -> AbstractContextManager[None]:
    """One thread for a Gaussian process: its matrices are small, and more threads only wait for each other. No other
    sampler uses torch."""
    import optuna

    if not isinstance(study.sampler, optuna.samplers.GPSampler):
        return nullcontext()
    from fp4dse.tasks.threads import torch_threads

    return torch_threads(1)


@dataclass
class Proposals:
    """The proposals of a sampler. By config_id: `known`, the seeds that a recipe is trained with; `values`, its
    results; `proposed_again`, how often it was since seeds were last granted."""

    space: Space
    study: optuna.Study
    recipes: dict[str, Recipe] = field(default_factory=dict)
    known: dict[str, list[int]] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)
    proposed_again: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    rejected: int = 0
    _waiting: dict[str, list[optuna.Trial]] = field(default_factory=dict)

    def ask(self) -> str | None:
        """One proposal: the config_id if its recipe is new. What is rejected by a rule or known is answered here."""
        with _few_threads(self.study):
            trial = self.study.ask()
            axes = self.space.axes.items()
            recipe = self.space.build(
                [axis.texts.index(trial.suggest_categorical(path, axis.texts)) for path, axis in axes]
            )
        config_id = recipe.config_id
        self.recipes[config_id] = recipe
        if self.space.broken(recipe):
            self.rejected += 1
            self._answer(trial, None)
        elif config_id in self._waiting:
            self.repeated += 1
            self._waiting[config_id].append(trial)
        elif config_id in self.known:
            self.repeated += 1
            self.proposed_again[config_id] += 1
            self._answer(trial, self.values.get(config_id))
        else:
            self._waiting[config_id] = [trial]
            return config_id
        return None

    def most_repeated(self, size: int) -> list[str]:
        """Of the known recipes that the sampler proposed again, most often first, those with the fewest seeds."""
        again = [config_id for config_id, _ in self.proposed_again.most_common()]
        open_ = [config_id for config_id in again if len(self.known[config_id]) < MOST_SEEDS]
        fewest = min((len(self.known[config_id]) for config_id in open_), default=0)
        self.proposed_again.clear()
        return [config_id for config_id in open_ if len(self.known[config_id]) == fewest][:size]

    def tell(self, config_id: str, values: list[float] | None) -> None:
        """Take the values of a recipe; None: it has none, because it diverged, failed or was dropped at a rung."""
        self.values.pop(config_id, None)
        if values is not None:
            self.values[config_id] = values
        for trial in self._waiting.pop(config_id, []):
            self._answer(trial, values)

    def _answer(self, trial: optuna.Trial, values: list[float] | None) -> None:
        """Tell the sampler. A trial without values breaks a constraint, so that the sampler keeps away from it: from
        failed trials it would learn nothing, and would propose them again and again."""
        known = list(self.values.values()) or [[0.0] * len(self.study.directions)]
        trial.set_constraint("has an answer", float(values is None))
        self.study.tell(trial, values or [max(column) for column in zip(*known, strict=True)])
