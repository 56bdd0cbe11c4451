"""Places the rungs of successive halving, and replays what they would have saved and lost in a sweep without them.

With a share `keep` and n rungs, the rungs stand at the shares keep^n … keep of a task's steps, so that every stretch
between two rungs trains about as many lane-steps as the one before (Hyperband's brackets, 1603.06560). What goes on is
decided by tasks/rungs.py.

A finished sweep without rungs tells what rungs would have done: its final losses are the truth, and its stored training
curves stand for the held-out losses that rungs would have seen. `replay` does that offline. It takes the mean over the
last TAIL of the steps up to a rung: the loss of one batch says less, although it is the same batch for all lanes of a
seed (docs/log.md has the numbers). Of a search it tells what rungs would have done to its batches; a sampler that is
told what was dropped would have proposed other recipes, and of those nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pandas as pd

from fp4dse.dse import ConfigError
from fp4dse.results import Store, front, summarize
from fp4dse.results.stats.paired import OVERHEAD, SETTING
from fp4dse.results.stats.recipes.summary import SUMMARIZED
from fp4dse.results.stats.stages import screened
from fp4dse.tasks.job import Rung
from fp4dse.tasks.rungs import keep_lanes

TAIL = 0.5
"""Share of the steps up to a rung whose training losses are averaged."""


class Halving(msgspec.Struct, frozen=True):
    """`count` rungs, at each of which the share `keep` goes on."""

    count: int = 3
    keep: float = 0.5

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError("--rungs", self.count, "a whole number above 0")
        if not 0 < self.keep < 1:
            raise ConfigError("--keep", self.keep, "a share between 0 and 1")

    def rungs(self, steps: int) -> list[Rung]:
        """The rungs of a training of so many steps, in their order; those that fall on step 0 are left out."""
        at = dict.fromkeys(round(steps * self.keep**n) for n in range(self.count, 0, -1))
        return [Rung(step, self.keep) for step in at if step > 0]


class Replay(msgspec.Struct, frozen=True):
    """The effect that rungs would have had on one task's sweep.

    saved       share of the lane-steps that would not have been trained
    best_kept   share of populations whose best recipe goes on to the end
    front_kept  share of the recipes on the populations' fronts that do
    best_overall, regret    whether the sweep's best recipe does, and by how much (gap) the best that does is worse
    """

    task: str
    preset: str
    populations: int
    recipes: int
    lanes: int
    saved: float
    best_kept: float
    front_kept: float
    best_overall: bool
    regret: float


def replay(store: Store, halving: Halving) -> list[Replay]:
    """Apply rungs to the finished screened runs of a store, per setting; populations of one recipe say nothing and stay
    out.

    A population is what was trained together, by a sweep or as part of a batch of a search: the runs of one job, which
    share their time of writing. The loss at a rung is the mean of the stored training curve over the last TAIL of the
    steps up to it. ConfigError if there is nothing to replay.
    """
    more = ["run_id", "signature", "created_at", "steps", "diverged_step", OVERHEAD]
    runs = screened(store.runs([*dict.fromkeys([*SUMMARIZED, *more])]))
    runs = runs[runs["status"].isin(["done", "diverged"])].reset_index(drop=True)
    runs = runs.merge(store.curves(list(runs["run_id"])), on="run_id")
    found = [_replay_setting(part, halving) for _, part in runs.groupby(list(SETTING), sort=False)]
    if not any(found):
        accepted = "a store with a finished sweep or search without rungs, of several recipes a population"
        raise ConfigError("--replay", str(store.path), accepted)
    return [one for one in found if one]


def _replay_setting(runs: pd.DataFrame, halving: Halving) -> Replay | None:
    table = summarize(runs[SUMMARIZED]).set_index("config_id")
    gaps = table["gap"].where(np.isfinite(table["gap"]), np.inf)
    recipes = runs[~runs["config_id"].isin(runs["baseline_id"])]  # baselines have no rungs
    trained = possible = 0.0
    hits, on_front, kept_of_front, kept = [], 0, 0, set()
    for members in _populations(recipes):
        alive, steps = _survivors(members, halving)
        trained += steps
        possible += float(members["steps"].sum())
        names = members["config_id"].unique()
        at_best = members["lr"].eq(table["lr"][members["config_id"]].to_numpy())
        survivors = set(members["config_id"][alive & at_best])
        kept |= survivors
        gap, cost = gaps[names].to_numpy(), members.drop_duplicates("config_id")[OVERHEAD].to_numpy(float)
        if len(names) > 1 and np.isfinite(gap).any():
            hits.append(names[gap.argmin()] in survivors)
            best = names[front(cost, gap)]
            on_front += len(best)
            kept_of_front += len(survivors & set(best))
    if not hits:
        return None
    truth = gaps[recipes["config_id"].unique()]
    return Replay(
        task=str(runs["task"].iloc[0]),
        preset=str(runs["preset"].iloc[0]),
        populations=len(hits),
        recipes=len(truth),
        lanes=len(recipes),
        saved=float(1 - trained / possible),
        best_kept=float(np.mean(hits)),
        front_kept=kept_of_front / on_front if on_front else math.nan,
        best_overall=truth.idxmin() in kept,
        regret=float(truth[sorted(kept)].min() - truth.min()),
    )


def _populations(runs: pd.DataFrame) -> Iterator[pd.DataFrame]:
    jobs = runs.groupby(["signature", "created_at"], sort=False, dropna=False)
    yield from (members.reset_index(drop=True) for _, members in jobs)


def _survivors(runs: pd.DataFrame, halving: Halving) -> tuple[np.ndarray, float]:
    """The runs that go on to the end, bool [runs], and the steps that all of them together are trained."""
    total = int(runs["steps"].max())
    alive, steps, last = np.ones(len(runs), bool), 0.0, 0
    for rung in halving.rungs(total):
        steps += alive.sum() * (rung.step - last)
        last = rung.step
        here = runs[alive]
        curves = zip(here["curve_step"], here["curve_loss"], here["diverged_step"], strict=True)
        losses = [_loss_at(points, curve, diverged, rung.step) for points, curve, diverged in curves]
        overheads, seeds, lrs, recipes = (list(here[name]) for name in (OVERHEAD, "seed", "lr", "config_id"))
        stays = keep_lanes(losses, overheads, seeds, lrs, rung.keep, recipes)
        alive[np.flatnonzero(alive)] = stays
    return alive, steps + alive.sum() * (total - last)


def _loss_at(steps: np.ndarray, losses: np.ndarray, diverged_step: int | None, step: int) -> float | None:
    """The mean of a curve over the last TAIL of the steps up to `step`; None if the run diverged before."""
    recent = (steps <= step) & (steps > step * (1 - TAIL))
    diverged = diverged_step is not None and not pd.isna(diverged_step) and diverged_step <= step
    if diverged or not recent.any():
        return None
    return float(losses[recent].mean())
