"""Trains the candidates of a store again with fresh seeds, so that the luckiest of many is not taken for the best.

Candidates are those of results/stats/recipes/candidates.py, from screened rows alone; each stands at the learning
rate that its screened seeds chose, and BF16 at its own. Fresh seeds are the first from FIRST_SEED on that were not
screened, so the same command goes on where it was stopped, and more seeds are added to those that there are. Its rows
say `confirm` in the column `stage`; confirmed.py says what follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

import msgspec
import pandas as pd

from fp4dse.dse import ConfigError, Recipe, recipe_from_dict
from fp4dse.dse.program.terminal import duration
from fp4dse.results import Store, summarize
from fp4dse.results.stats.recipes.candidates import REACH, candidates
from fp4dse.results.stats.recipes.confirmed import LEAST_SEEDS
from fp4dse.results.stats.recipes.summary import SUMMARIZED
from fp4dse.results.stats.stages import CONFIRM, screened
from fp4dse.results.text.ratios import counted
from fp4dse.sweeps.jobs.rows import KIND, SHARED
from fp4dse.sweeps.planning.plan import Rates
from fp4dse.sweeps.planning.setting import Setting, Tasks, find_setting
from fp4dse.sweeps.sweep import SweepResult, run_sweep
from fp4dse.tasks import TaskFacts, find_facts

FIRST_SEED = 100
"""Others have smaller numbers in sweeps, and larger ones in the tuning of presets (tasks/tuned)."""
SEEDS = 10
_READ = [*dict.fromkeys([*SUMMARIZED, "device", "lane_s"])]
_LANE = ["task", "preset", "config_id", "lr"]


class Candidate(msgspec.Struct, frozen=True):
    """A recipe to confirm on a task. `behind`: standard errors behind the front; `left`: lanes that are not stored;
    `seconds`: of a worker, that these take by the recipe's own screened lanes."""

    task: str
    preset: str
    label: str
    config_id: str
    lr: float
    behind: float
    left: int
    seconds: float


class ConfirmPlan(msgspec.Struct, frozen=True):
    """The candidates of a store and what they take. `taken`: those that fit, nearest to the front first."""

    tasks: Tasks
    recipes: dict[str, Recipe]
    """By config_id."""
    screened: dict[str, int]
    """Task -> recipes that were."""
    same_bits: int
    """Recipes that are no candidates because one that costs no more trained to the same bits."""
    candidates: list[Candidate]
    taken: list[Candidate]
    baseline_lrs: dict[tuple[str, str, str], float]
    """By task, preset and config_id."""
    baseline_left: int
    baseline_seconds: float
    seeds: list[int]
    workers: int

    @property
    def lanes(self) -> int:
        """Lanes to train."""
        return self.baseline_left + sum(one.left for one in self.taken)

    @property
    def seconds(self) -> float:
        """With all workers busy."""
        return (self.baseline_seconds + sum(one.seconds for one in self.taken)) / self.workers

    @property
    def rates(self) -> Rates:
        """The learning rate of each recipe on each task where it is taken, and BF16's."""
        known = {(one.task, one.preset, one.config_id): one.lr for one in self.taken}
        known |= self.baseline_lrs

        def rates(task: TaskFacts, recipe: Recipe) -> Sequence[float]:
            lr = known.get((task.name, task.preset, recipe.config_id))
            return [] if lr is None else [lr]

        return rates

    def facts(self) -> dict[str, Any]:
        """For people and scripts."""
        return {
            "recipes": self.screened,
            "candidates": self._candidates(),
            "same_bits": self.same_bits,
            "taken": len(self.taken),
            "seeds": self.seeds,
            "to_train": self.lanes,
            "estimated_time": duration(self.seconds),
            "nearest_first": [f"{one.task}:{one.preset} {one.label}" for one in self.taken],
        }

    def sentences(self) -> str:
        """The number of candidates, what they cost, and how many of them the budget has room for, for people."""
        numbers = (f"{number} of {self.screened[task]} of {task}" for task, number in self._candidates().items())
        says = (
            f"candidates: {', '.join(numbers)}; no recipe that costs no more is better than one of them by more than "
        )
        says += f"{REACH:g} standard errors"
        says += f" ({counted(self.same_bits, 'other')} trained to the same bits)" if self.same_bits else ""
        says += f"\n{counted(len(self.seeds), 'fresh seed')} each, and BF16: {counted(self.lanes, 'lane')} to train"
        says += f", about {duration(self.seconds)} by what such lanes took, longer where fewer of them train together"
        says += f" ({counted(self.workers, 'worker')})"
        if len(self.taken) < len(self.candidates):
            says += f"\nthe budget has room for the {len(self.taken)} nearest to the front; the same command goes on"
        return says

    def _candidates(self) -> dict[str, int]:
        return dict(Counter(f"{one.task}:{one.preset}" for one in self.candidates))


def check_seeds(seeds: int, option: str = "--seeds") -> None:
    """ConfigError if fresh seeds are too few."""
    if seeds < LEAST_SEEDS:
        accepted = f"{LEAST_SEEDS} or more: half of them choose the best, the other half say how good it is"
        raise ConfigError(option, seeds, accepted)


def plan_confirm(
    store: Store,
    *,
    tasks: Tasks | None = None,
    seeds: int = SEEDS,
    device: str = "cpu",
    jobs: int | None = None,
    executor: str = "local",
    budget_s: float | None = None,
) -> ConfirmPlan:
    """Find the candidates of a store that can be trained here as they were screened, and what that takes.

    tasks      as get_task is asked, with the data; None: all that the store has of this device
    seeds      fresh ones a recipe
    budget_s   only as many candidates as fit are taken, one at least

    ConfigError if the tasks cannot be made again as they were, or if no recipe has two seeds.
    """
    check_seeds(seeds)
    runs = store.runs(_READ)
    asked = tasks or _tasks_of(runs, store, device)
    setting = find_setting(asked, device, jobs, executor == "local", store.cost)
    setting.learn_classes(store)
    runs = screened(runs).reset_index(drop=True)
    here = pd.concat([_trained_here(runs, *of, setting) for of in setting.contexts])
    near = candidates(here).drop_duplicates(["task", "preset", "config_id"])  # of several kinds of cards
    if near.empty:
        raise ConfigError(
            "--store", str(store.path), "one with recipes of two seeds or more: they have standard errors"
        )
    lines = summarize(here)
    tried = lines[lines["points"].gt(0)]
    compared = set(lines.loc[lines["config_id"].isin(near["config_id"]), "baseline_id"].dropna())
    bases = lines[lines["is_baseline"] | lines["config_id"].isin(compared)]
    bases = bases.merge(near[["task", "preset"]].drop_duplicates())
    fresh_seeds = list(islice((seed for seed in count(FIRST_SEED) if seed not in set(here["seed"])), seeds))
    texts = store.recipe_texts(list(near["config_id"].unique()))
    whole = ConfirmPlan(
        tasks=asked,
        recipes={config_id: recipe_from_dict(msgspec.json.decode(text)) for config_id, text in texts.items()},
        screened=(tried["task"] + ":" + tried["preset"]).value_counts().to_dict(),
        same_bits=int(near["same_bits"].sum()),
        candidates=_listed(near),
        taken=_listed(near),
        baseline_lrs={tuple(line): lr for *line, lr in bases[_LANE].itertuples(index=False)},
        baseline_left=0,
        baseline_seconds=0.0,
        seeds=fresh_seeds,
        workers=len(setting.machine.slots),
    )
    return _priced(whole, here, setting, store.done(), budget_s)


def run_confirm(store: Store, planned: ConfirmPlan, **limits: Any) -> SweepResult:
    """Train what the store lacks of a plan. limits: the arguments of `run_sweep` that do not say what is trained."""
    recipes = [planned.recipes[one.config_id] for one in planned.taken]
    seeds, rates = planned.seeds, planned.rates
    return run_sweep(
        recipes, tasks=planned.tasks, seeds=seeds, lrs=rates, store=str(store.path), stage=CONFIRM, **limits
    )


def _tasks_of(runs: pd.DataFrame, store: Store, device: str) -> Tasks:
    """The tasks that the store has rows of on this device."""
    there = runs.loc[runs["device"].eq(device), ["task", "preset"]].drop_duplicates()
    if there.empty:
        devices = ", ".join(sorted(runs["device"].dropna().unique())) or "one that the store has rows of"
        raise ConfigError("--device", device, f"{devices}: what {store.path} was trained on")
    found = list(there.itertuples(index=False, name=None))
    for of in found:
        try:
            find_facts(*of)
        except ConfigError as error:
            accepted = f"the task as it was swept, a task of your own as FILE.py:NAME ({error})"
            raise ConfigError("--task", ":".join(of), accepted) from None
    return found


def _trained_here(runs: pd.DataFrame, task: str, preset: str, setting: Setting) -> pd.DataFrame:
    """The rows of a task whose losses may be compared with those that would be trained here. ConfigError if there are
    none, with the first column that differs."""
    context = setting.contexts[task, preset]
    rows = runs[runs["task"].eq(task) & runs["preset"].eq(preset)]
    if rows.empty:
        held = ", ".join(sorted(set(runs["task"] + ":" + runs["preset"])))
        raise ConfigError("--task", f"{task}:{preset}", f"a task that the store has rows of: {held}")
    for name in SHARED[2:]:
        same = rows[rows[name].eq(context[name])]
        if same.empty:
            theirs = ", ".join(sorted(set(rows[name].astype(str))))
            fix = "--data and --from as in the sweep" if name == "dataset_digest" else "a sweep by this version first"
            raise ConfigError(f"{task}:{preset}, {name}", context[name], f"that of the rows, {theirs}: {fix}")
        rows = same
    kinds = [tuple(str({**context, **kind}[name]) for name in KIND) for kind in setting.classes]
    found = rows[[kind in kinds for kind in rows[[*KIND]].itertuples(index=False, name=None)]]
    if found.empty:
        theirs = ", ".join(sorted({" with ".join(kind) for kind in rows[[*KIND]].itertuples(index=False, name=None)}))
        ours = ", ".join(" with ".join(kind) for kind in kinds)
        accepted = f"what it was screened on, {theirs}; or a sweep here first"
        raise ConfigError(f"{task}:{preset}, machine", ours, accepted)
    return found


def _listed(near: pd.DataFrame) -> list[Candidate]:
    lines = near.sort_values(["behind", "gap"], kind="stable")
    names = ["task", "preset", "label", "config_id", "lr", "behind"]
    return [Candidate(**line, left=0, seconds=0.0) for line in lines[names].to_dict("records")]


def _priced(
    whole: ConfirmPlan, rows: pd.DataFrame, setting: Setting, stored: set[str], budget_s: float | None
) -> ConfirmPlan:
    """The plan with what is left of each candidate and what that takes; `taken` are those that there is room for."""
    planned = setting.plan(list(whole.recipes.values()), whole.seeds, whole.rates, stored)
    lanes = ((job.task, job.preset, lane.recipe.config_id) for job in planned.jobs for lane in job.lanes)
    left = Counter(lanes)
    finished = rows[rows["lane_s"].notna()]
    took = finished.groupby(["task", "preset", "config_id"])["lane_s"].mean().to_dict()
    usual = finished.groupby(["task", "preset"])["lane_s"].median().to_dict()

    def seconds(task: str, preset: str, config_id: str) -> float:
        each = took.get((task, preset, config_id), usual.get((task, preset), 0.0))
        return float(left[task, preset, config_id] * each)

    everyone: list[Candidate] = []
    taken: list[Candidate] = []
    bases = list(whole.baseline_lrs)
    spent = baseline_s = sum(seconds(*of) for of in bases)
    for one in whole.candidates:
        of = one.task, one.preset, one.config_id
        everyone.append(msgspec.structs.replace(one, left=left[of], seconds=seconds(*of)))
        spent += everyone[-1].seconds
        if not taken or budget_s is None or spent <= budget_s * whole.workers:
            taken.append(everyone[-1])
    return msgspec.structs.replace(
        whole,
        candidates=everyone,
        taken=taken,
        baseline_left=sum(left[of] for of in bases),
        baseline_seconds=baseline_s,
    )
