"""Search instead of enumeration: Optuna proposes recipes of a space in batches, a sweep trains them, the store answers.

    ask a population's worth  ->  look up, or train together  ->  tell

A space is finite and samplers repeat themselves on it (TPE proposed 245 distinct of 600 on 2,592 recipes). So what a
sampler asks for again is answered at once and it is asked again, up to ASKS times for each place in the batch. If even
so nothing new comes, the recipes that it insists on are trained with further seeds, which is what repeating can mean;
and if it has no more wishes of that kind, the search is over.

Optuna's study lives in memory for one search. Samplers are seeded and the store remembers, so the same command after
an interruption meets the same answers and goes on where it was.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pandas as pd

from fp4dse.dse import ConfigError, Recipe, Space
from fp4dse.results import open_store, summarize
from fp4dse.results.paired import OVERHEAD, SETTING
from fp4dse.results.remote import Place, locate
from fp4dse.results.summary import SUMMARIZED
from fp4dse.sweeps.plan import JOB_LANES
from fp4dse.sweeps.rows import lane_id
from fp4dse.sweeps.setting import SEEDS, Setting, find_setting
from fp4dse.sweeps.sweep import SweepResult, run_sweep
from fp4dse.tasks.job import Lane

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "nsga2", "nsga3", "gp", "random")
OBJECTIVES = {"gap": "gap", "overhead": OVERHEAD, "loss": "val_loss", "bits": "bits"}
"""Objective -> column of the summary; all are to be small."""
ASKS = 20
SMALLEST_BATCH = 4
MOST_SEEDS = 30
"""A recipe is not trained with more, however often a sampler asks for it."""


class SearchResult(msgspec.Struct, frozen=True):
    """What a search did. `trials` = `trained` + `stored` + `replicates`; of these `diverged` and `failed` were told so.

    stored      recipes that the store could answer
    replicates  recipes that were trained again, with further seeds
    repeated    proposals that were known already; rejected: by a rule of the space. Both were asked again
    front       non-dominated recipes of those that were met: label, config_id, seeds and the objectives
    stopped     why there are fewer trials than asked for
    """

    store: str
    sampler: str
    trials: int
    trained: int
    stored: int
    replicates: int
    diverged: int
    failed: int
    repeated: int
    rejected: int
    front: list[dict[str, Any]]
    stopped: str | None
    interrupted: bool
    wall_s: float

    def facts(self) -> dict:
        """For scripts."""
        return msgspec.to_builtins(self)

    @property
    def exit_code(self) -> int:
        """130 if interrupted, 1 if recipes failed, else 0."""
        return 130 if self.interrupted else int(self.failed > 0)


def run_search(
    space: Space,
    *,
    sampler: str,
    trials: int,
    objectives: Sequence[str] = ("gap", "overhead"),
    task: tuple[str, ...] = ("regression", "small"),
    seeds: Sequence[int] | None = None,
    lrs: Sequence[float] | None = None,
    store: str | Path,
    device: str = "cpu",
    jobs: int | None = None,
    batch: int | None = None,
    sampler_seed: int = 0,
    budget_s: float | None = None,
    **more: Any,
) -> SearchResult:
    """Search the axes of a space for recipes with small objectives. Its design plays no part.

    sampler     one of SAMPLERS; there is no default, for none is right for all spaces
    trials      recipes to try, those that the store knows included
    objectives  of OBJECTIVES
    batch       recipes that are proposed and trained together; None: what fills the workers' populations
    more        further arguments of `run_sweep`: halving, progress, worker, …

    ConfigError on wrong input; what `run_sweep` raises.
    """
    begin = time.monotonic()
    _check(space, sampler, trials, objectives, batch)
    setting = find_setting([task], device, jobs)
    seeds = list(dict.fromkeys(seeds or space.lanes.seeds or SEEDS))
    lrs = lrs or space.lanes.lr

    def train(recipes: list[Recipe], seeds: Sequence[int]) -> SweepResult:
        left_s = None if budget_s is None else max(budget_s - (time.monotonic() - begin), 0.0)
        asked: dict[str, Any] = {"tasks": [task], "seeds": seeds, "lrs": lrs, "device": device, "jobs": jobs}
        return run_sweep(recipes, **asked, store=store, budget_s=left_s, **more)

    size = batch or batch_size(setting, len(seeds) * len(lrs or [0]))
    columns = [OBJECTIVES[name] for name in objectives]
    study = make_study(sampler, len(columns), size, sampler_seed)
    answers = _Answers(locate(store), setting, columns, lrs)
    search = _Search(space, study, train, answers, seeds)
    search.run(trials, size)
    return SearchResult(
        store=str(store),
        sampler=sampler,
        trials=search.trials,
        trained=search.trials - search.stored - search.replicates,
        stored=search.stored,
        replicates=search.replicates,
        diverged=search.diverged,
        failed=search.failed,
        repeated=search.repeated,
        rejected=search.rejected,
        front=answers.front(list(search.known), objectives),
        stopped=search.stopped,
        interrupted=search.interrupted,
        wall_s=time.monotonic() - begin,
    )


def batch_size(setting: Setting, lanes_per_recipe: int) -> int:
    """Recipes that fill the smallest good population of every worker."""
    fewest, _ = JOB_LANES[setting.machine.device]
    return max(SMALLEST_BATCH, len(setting.machine.slots) * fewest // lanes_per_recipe)


def make_study(sampler: str, objectives: int, batch: int, seed: int) -> optuna.Study:
    """A study in memory; all objectives are minimized. A generation of an evolutionary sampler is a batch."""
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
    if sampler == "gp":
        import torch

        torch.set_num_threads(1)  # its matrices are small: more threads only wait for each other
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.create_study(sampler=makers[sampler](), directions=["minimize"] * objectives)


def _check(space: Space, sampler: str, trials: int, objectives: Sequence[str], batch: int | None) -> None:
    if sampler not in SAMPLERS:
        raise ConfigError("--sampler", sampler, ", ".join(SAMPLERS))
    for name in objectives or [""]:
        if name not in OBJECTIVES:
            raise ConfigError("--objectives", name, f"some of {', '.join(OBJECTIVES)}, with commas")
    for name, value in (("--trials", trials), ("--batch", batch)):
        if value is not None and value < 1:
            raise ConfigError(name, value, "a whole number above 0")
    if not space.axes:
        raise ConfigError("space", space.name, "a space with axes; joined spaces have none of their own")


@dataclass
class _Search:
    """The loop of asking, training and telling. `known`: config_id -> the seeds that it was trained with. `wishes`:
    how often known recipes were proposed again, since the last time that such wishes were granted."""

    space: Space
    study: optuna.Study
    train: Callable[[list[Recipe], Sequence[int]], SweepResult]
    answers: _Answers
    seeds: list[int]
    known: dict[str, list[int]] = field(default_factory=dict)
    recipes: dict[str, Recipe] = field(default_factory=dict)
    wishes: Counter[str] = field(default_factory=Counter)
    pending: dict[str, list[optuna.Trial]] = field(default_factory=dict)
    trials: int = 0
    stored: int = 0
    replicates: int = 0
    diverged: int = 0
    failed: int = 0
    repeated: int = 0
    rejected: int = 0
    stopped: str | None = None
    interrupted: bool = False

    def run(self, trials: int, size: int) -> None:
        """Until there were so many trials, or there is a reason to stop."""
        while self.trials < trials and not self.stopped:
            wanted = min(size, trials - self.trials)
            self.propose(wanted)
            chosen = list(self.pending) or self.insisted_on(wanted)
            if not chosen:
                self.stopped = "the sampler proposes nothing new"
                return
            self.answer(chosen)

    def propose(self, size: int) -> None:
        """Ask for so many recipes that are new; tell at once what is rejected or known."""
        for _ in range(ASKS * size):
            if len(self.pending) == size:
                return
            trial = self.study.ask()
            levels = [
                axis.texts.index(trial.suggest_categorical(path, axis.texts)) for path, axis in self.space.axes.items()
            ]
            recipe = self.space.build(levels)
            config_id = recipe.config_id
            self.recipes[config_id] = recipe
            if self.space.broken(recipe):
                self.rejected += 1
                self.tell(trial, None)
            elif config_id in self.known:
                self.repeated += 1
                self.wishes[config_id] += 1
                self.tell(trial, self.answers.values.get(config_id))
            else:
                self.pending.setdefault(config_id, []).append(trial)

    def insisted_on(self, size: int) -> list[str]:
        """Of the known recipes that the sampler proposed again, most often first, those with the fewest seeds."""
        open_ = [config_id for config_id, _ in self.wishes.most_common() if len(self.known[config_id]) < MOST_SEEDS]
        fewest = min((len(self.known[config_id]) for config_id in open_), default=0)
        self.wishes.clear()
        return [config_id for config_id in open_ if len(self.known[config_id]) == fewest][:size]

    def answer(self, config_ids: list[str]) -> None:
        """Train what the store lacks of these recipes, all of which have had the same number of seeds; tell Optuna."""
        had = self.known.get(config_ids[0], [])
        seeds = [max(had) + 1 + i for i in range(len(self.seeds))] if had else self.seeds
        recipes = [self.recipes[config_id] for config_id in config_ids]
        stored = 0 if had else self.answers.stored(recipes, seeds)
        result = self.train(recipes, seeds)
        self.stopped, self.interrupted = result.stopped, result.interrupted
        states = self.answers.read()
        if result.stopped:  # what has no answer was not tried
            config_ids = [config_id for config_id in config_ids if config_id in states]
        for config_id in config_ids:
            self.known[config_id] = [*had, *seeds]
            self.diverged += states.get(config_id) == "diverged"
            self.failed += states.get(config_id) in (None, "failed")
            for trial in self.pending.pop(config_id, []):
                self.tell(trial, self.answers.values.get(config_id))
        self.trials += len(config_ids)
        self.stored += stored
        self.replicates += len(config_ids) if had else 0

    def tell(self, trial: optuna.Trial, values: list[float] | None) -> None:
        """Answer a proposal.

        What has no values (diverged, dropped at a rung, rejected by a rule) breaks a constraint, so that the sampler
        keeps away from it: of failed trials it would learn nothing, and propose them again and again."""
        known = list(self.answers.values.values()) or [[0.0] * len(self.answers.columns)]
        trial.set_constraint("has an answer", float(values is None))
        self.study.tell(trial, values or [max(column) for column in zip(*known, strict=True)])


@dataclass
class _Answers:
    """What the store knows about recipes in the setting of the search."""

    store: Place
    setting: Setting
    columns: list[str]
    lrs: Sequence[float] | None
    values: dict[str, list[float]] = field(default_factory=dict)
    table: pd.DataFrame = field(default_factory=pd.DataFrame)

    def read(self) -> dict[str, str]:
        """Read the store again: config_id -> `done`, or why there are no values."""
        (context,) = self.setting.contexts.values()
        runs = open_store(self.store).runs(SUMMARIZED)
        runs = runs[(runs[list(SETTING)] == [context[name] for name in SETTING]).all(axis="columns")]
        self.table = summarize(runs).set_index("config_id")
        pruned = set(runs["config_id"][runs["status"].eq("pruned")])  # the mean of the seeds that are left flatters
        self.values, states = {}, {}
        for config_id, row in self.table.iterrows():
            values = [float(row[column]) for column in self.columns]
            if config_id in pruned:
                states[str(config_id)] = "pruned"
            elif row["note"]:
                states[str(config_id)] = str(row["note"])
            elif all(map(math.isfinite, values)):
                states[str(config_id)] = "done"
                self.values[str(config_id)] = values
        return states

    def stored(self, recipes: Sequence[Recipe], seeds: Sequence[int]) -> int:
        """How many of the recipes the store has in full."""
        if not self.store.exists():
            return 0
        done = open_store(self.store).done()
        (task,), (context,) = self.setting.tasks, self.setting.contexts.values()
        lanes = [(lr, seed) for lr in self.lrs or [task.lr] for seed in seeds]
        return sum(all(lane_id(Lane(recipe, *lane), context) in done for lane in lanes) for recipe in recipes)

    def front(self, config_ids: list[str], objectives: Sequence[str]) -> list[dict[str, Any]]:
        """The non-dominated of these recipes, the best by the first objective first."""
        met = [config_id for config_id in config_ids if config_id in self.values]
        points = np.array([self.values[config_id] for config_id in met]).reshape(len(met), len(self.columns))
        no_worse = (points[:, None] <= points[None]).all(axis=2)
        beaten = np.any(no_worse & (points[:, None] < points[None]).any(axis=2), axis=0).tolist()
        chosen = sorted((i for i in range(len(met)) if not beaten[i]), key=lambda i: tuple(points[i]))
        return [
            {
                "label": self.table["label"][met[i]],
                "config_id": met[i],
                "seeds": int(self.table["seeds"][met[i]]),
                **dict(zip(objectives, self.values[met[i]], strict=True)),
            }
            for i in chosen
        ]
