"""A training from its first step to its results: reports, rungs at which lanes are dropped, checkpoints."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fp4dse.dse import ConfigError
from fp4dse.kernels import dispatch
from fp4dse.kernels.gemm import name_with_sums
from fp4dse.tasks.engine import checkpoint as files
from fp4dse.tasks.engine.evaluation import diverged_result, evaluate, final_results, pruned_result, rehearse
from fp4dse.tasks.engine.graphs import EAGER_STEPS
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.job import JobResult, Lane, LaneResult, Progress, Rung
from fp4dse.tasks.task import Task

KeepLanes = Callable[[list[float | None], list[float], list[int], list[float], float, list[str]], list[bool]]
"""(losses, overheads, seeds, learning rates, share to keep, config_ids) of the lanes -> which go on. Losses are means
over the last steps (loss_record.RUNG_TAIL), None where a lane has diverged."""


@dataclass(frozen=True)
class Pruning:
    """Rungs at which lanes are dropped: those that `keep_lanes` does not choose are evaluated and leave; the others
    train on as if nothing had happened. `overheads`, one a lane, are arguments of `keep_lanes` (zeros if empty)."""

    rungs: Sequence[Rung]
    keep_lanes: KeepLanes
    overheads: Sequence[float] = ()


class Stopped(Exception):
    """The training was asked to stop, and did after so many steps; the checkpoint, if one was asked for, is written."""


def train(
    task: Task,
    lanes: Sequence[Lane],
    device: str = "cpu",
    report: Callable[[Progress], None] = lambda _: None,
    every_s: float = 1.0,
    record: bool = False,
    *,
    pruning: Pruning | None = None,
    checkpoint: Path | None = None,
    save_every_s: float = 300.0,
    should_stop: Callable[[], bool] = lambda: False,
) -> JobResult:
    """Train the lanes, which must share their structural signature, and evaluate them on held-out data.

    `report` is called about every `every_s` seconds.

    record      whether to record what recorder.py names
    pruning     at which rungs lanes are dropped, and which ones
    checkpoint  a file that is written every `save_every_s` seconds, and from which training resumes if it exists.
                ConfigError if it belongs to another training
    should_stop asked before every step; when it says True, the checkpoint is written and Stopped is raised
    """
    started = time.monotonic()
    dispatch.refusals()  # of what this process computed before, such as a training that failed
    report(Progress("setup", 0, task.steps, [None] * len(lanes)))
    run = Run(task, lanes, device, pruning, checkpoint, record)
    report(Progress("first step", run.progress.done, task.steps, [None] * len(lanes)))
    ready = last = saved = time.monotonic()
    before, began = run.progress.train_s, run.progress.done

    def save() -> None:
        run.progress.train_s = before + time.monotonic() - ready
        run.save()

    while not run.over:
        if should_stop():
            save()
            raise Stopped(f"stopped after {run.progress.done} of {task.steps} steps")
        run.advance()
        if run.progress.done == began + EAGER_STEPS + 1 and not run.over:  # all that steps hold is there
            rehearse(run.population)
        now = time.monotonic()
        if now - last > every_s:
            last = now
            report(Progress("train", run.progress.done, task.steps, run.losses()))
        if checkpoint and now - saved > save_every_s and not run.over:
            save()
            saved = time.monotonic()
    report(Progress("evaluate", task.steps, task.steps, run.losses()))
    results = run.results()
    numerics = run.population.numerics
    gemms = [name_with_sums(name) for name in numerics.gemms.values()]
    return JobResult(
        lanes=results,
        train_s=before + time.monotonic() - ready,
        setup_s=ready - started,
        quantizer_backend=numerics.backend.name,
        gemm_backend=gemms[0] if len(set(gemms)) == 1 else " ".join(gemms),
        fallbacks=[
            *numerics.fallbacks,
            *dict.fromkeys(run.population.fallbacks),
            *dispatch.refusals(),
        ],
        peak_memory_bytes=_peak_memory(device),
        kept_bytes=run.population.kept_bytes,
    )


class Run:
    """A population in training, its progress, and the results of lanes that have left it."""

    def __init__(
        self,
        task: Task,
        lanes: Sequence[Lane],
        device: str,
        pruning: Pruning | None = None,
        checkpoint: Path | None = None,
        record: bool = False,
    ) -> None:
        self.task, self.lanes, self.checkpoint = task, lanes, checkpoint
        self.pruning = pruning or Pruning((), lambda losses, *_: [True] * len(losses))
        self.overheads = list(self.pruning.overheads) or [0.0] * len(lanes)
        if len(self.overheads) != len(lanes):
            raise ConfigError("overheads", len(self.overheads), f"one for each of the {len(lanes)} lanes, or none")
        for rung in self.pruning.rungs:
            if not 0 < rung.step < task.steps:
                raise ConfigError("rungs", rung.step, f"steps between 1 and {task.steps - 1}")
        self.rungs = {rung.step: rung for rung in self.pruning.rungs}
        self.progress = files.TrainingProgress(0, list(range(len(lanes))), {}, 0.0)
        state = None
        if checkpoint:
            self.identity = files.identity(task, lanes, device, self.pruning.rungs, record)
            if checkpoint.exists():
                self.progress, state = files.load(checkpoint, self.identity)
        members = [lanes[i] for i in self.progress.members]
        self.population = Population(task, members, device, record, list(self.rungs))
        if state is not None:
            self.population.load_state(state, self.progress.done)

    @property
    def over(self) -> bool:
        """True if there is nothing left to train."""
        return self.progress.done == self.task.steps or not self.progress.members

    def advance(self) -> None:
        """One step, and what is due after it."""
        self.population.train_step(self.progress.done)
        self.progress.done += 1
        done = self.progress.done
        if done in self.rungs:
            self._rung(self.rungs[done])
        elif self.population.record.recent.is_full(done):
            self.population.fetch(done)
            self._drop_diverged(done)

    def losses(self) -> list[float | None]:
        """Current training loss of each lane, None where it is dead or gone."""
        out: list[float | None] = [None] * len(self.lanes)
        if self.progress.done and self.progress.members:
            for i, loss in zip(self.progress.members, self.population.losses(self.progress.done - 1), strict=True):
                out[i] = loss
        return out

    def results(self) -> list[LaneResult]:
        """Results of all lanes, in the order in which they were given."""
        if self.progress.members:
            self.progress.outcomes |= dict(zip(self.progress.members, final_results(self.population), strict=True))
        return [self.progress.outcomes[i] for i in range(len(self.lanes))]

    def save(self) -> None:
        """Write the checkpoint, if there is to be one."""
        if self.checkpoint:
            state = self.population.state(self.progress.done)
            files.save(self.checkpoint, self.identity, self.progress, state)

    def _rung(self, rung: Rung) -> None:
        """Drop the diverged lanes, and of the others all but those that `keep_lanes` chooses."""
        population, members = self.population, self.progress.members
        population.fetch(rung.step)
        dead = self._dead()
        lanes = [self.lanes[i] for i in members]
        chosen = self.pruning.keep_lanes(
            [None if p in dead else loss for p, loss in enumerate(population.record.until(rung.step))],
            [self.overheads[i] for i in members],
            [lane.seed for lane in lanes],
            [lane.lr for lane in lanes],
            rung.keep,
            [lane.recipe.config_id for lane in lanes],
        )
        living = [p for p in range(len(members)) if p not in dead]
        stay = [p for p in living if chosen[p]]
        val_loss, metrics = evaluate(population)
        for p in living:
            if p not in stay:
                self.progress.outcomes[members[p]] = pruned_result(population, p, rung.step, val_loss, metrics)
        self._remove(stay, dead)

    def _drop_diverged(self, done: int) -> None:
        """Drop the diverged lanes if they are half of all lanes or more."""
        dead = self._dead() if done < self.task.steps else {}
        if 2 * len(dead) >= len(self.progress.members):
            self._remove([p for p in range(len(self.progress.members)) if p not in dead], dead)

    def _dead(self) -> dict[int, int]:
        """Positions of the lanes that have diverged, and the steps at which they did. Waits for the device."""
        return {p: at for p, at in enumerate(self.population.diverged.tolist()) if at >= 0}

    def _remove(self, stay: list[int], dead: dict[int, int]) -> None:
        members = self.progress.members
        for p, at in dead.items():
            self.progress.outcomes[members[p]] = diverged_result(self.population, p, at)
        if len(stay) == len(members):
            return
        self.progress.members = [members[p] for p in stay]
        if stay:
            self.population.keep(stay, self.progress.done)


def _peak_memory(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
