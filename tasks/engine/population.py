"""The tensors of running lanes, and the step that changes them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.training import Coreset
from fp4dse.kernels import LaneNumerics, lane_mean
from fp4dse.kernels.memory import keep_freed_memory
from fp4dse.kernels.ops.max_abs import max_abs
from fp4dse.tasks.backward import backward, mean_of_parts
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.engine.batches import Batches, gather_samples
from fp4dse.tasks.engine.coresets import Coresets
from fp4dse.tasks.engine.graphs import Graphs
from fp4dse.tasks.engine.kept import keeping
from fp4dse.tasks.engine.loss_record import LossRecord
from fp4dse.tasks.engine.recorder import GRADIENT_NORM, Recorder, measure, recorded_steps
from fp4dse.tasks.engine.weight_errors import WeightErrors
from fp4dse.tasks.experience import check_rollout
from fp4dse.tasks.job import Lane, number
from fp4dse.tasks.optimizers import make_optimizer, ramped
from fp4dse.tasks.optimizers.osci_reset import OsciResets
from fp4dse.tasks.optimizers.oscillation import Oscillation
from fp4dse.tasks.optimizers.q_ramping import Look, QRampings
from fp4dse.tasks.own.one_by_one import SequentialNumerics
from fp4dse.tasks.task import Problem, Task
from fp4dse.tasks.teachable import check_distill
from fp4dse.tasks.teacher import Teacher


class Population:
    """One or more lanes of one task, trained in lock-step. `state` is all that a lane's further training depends on.

    record: whether to record what recorder.py names. rungs: see LossRecord.
    """

    def __init__(
        self, task: Task, lanes: Sequence[Lane], device: str, record: bool = False, rungs: Sequence[int] = ()
    ) -> None:
        self.task, self.device, self.records, self.rungs = task, device, record, rungs
        if torch.device(device).type == "cpu":
            keep_freed_memory()
        self.seeds = sorted({lane.seed for lane in lanes})
        problem = task.problem(self.seeds)
        data = {k: getattr(problem, k).to(device) for k in ("train_x", "train_y", "val_x", "val_y")}
        if task.rounds_inputs:
            if task.prepare or not data["train_x"].is_floating_point():
                raise ConfigError(
                    "rounds_inputs", True, "False, for a task that prepares its data or has whole numbers"
                )
            data["train_x"] = data["train_x"].to(getattr(torch, task.dtype))
        self.problem = Problem(**data, init={})
        self.batches: Batches | None = None
        if not task.rolls_out:
            self.batches = Batches(self.seeds, problem.train_x.shape[1], task.batch, task.steps, device)
            self.batches.prepare(0)
        self.fallbacks: list[str] = []
        self.kept_bytes: int | None = None
        """Of the first step's forward pass; None before it, and where lanes are computed one after the other."""
        init = task.pretrain(self.seeds, device) if task.pretrain else problem.init
        taught = (lane.recipe.training.distill or lane.recipe.training.coreset for lane in lanes)
        self.start = init if any(taught) else {}
        parameters = {name: value.to(device)[self._of_lane(lanes)] for name, value in init.items()}
        del problem, init  # of a large model each further copy counts
        self._build(lanes, parameters, [lane.seed for lane in lanes])

    def _of_lane(self, lanes: Sequence[Lane]) -> Tensor:
        return torch.tensor([self.seeds.index(lane.seed) for lane in lanes], device=self.device)

    def _build(self, lanes: Sequence[Lane], parameters: dict[str, Tensor], seeds: Sequence[int]) -> None:
        """parameters: emptied: the model has a dict of its own; seeds: of the quantizers' random bits, one a lane."""
        task, device = self.task, self.device
        self.lanes = list(lanes)
        self.shapes = {name: (value.shape[1:], value.dtype) for name, value in parameters.items()}
        self.seed_index = self._of_lane(lanes)
        shared = len(self.problem.train_x) == 1 and len(self.seeds) > 1
        self.data_index = torch.zeros_like(self.seed_index) if shared else self.seed_index
        self.first_rows = self.data_index[:, None] * self.problem.train_x.shape[1]
        recipes = [lane.recipe for lane in lanes]
        for recipe in recipes:
            check_rollout(recipe, task)
            check_distill(recipe, task)
        numerics = SequentialNumerics if task.one_by_one else LaneNumerics
        self.numerics = numerics(recipes, seeds, device, task.steps, dtype=getattr(torch, task.dtype))
        self.numerics.packed, self.numerics.recompute = task.packed, task.recompute
        self.numerics.swiglu8 = task.swiglu8
        self.draws = Draws(torch.tensor([lane.seed for lane in lanes], device=device), self.numerics.step)
        self.model = task.model(dict(parameters), self.numerics)
        parameters.clear()  # or they would be kept beside the optimizer's
        self.numerics.check_layers()
        self.fallbacks += getattr(self.model, "notes", [])
        self.optimizer = make_optimizer(self.model, lanes, task)
        self.experience = task.experience(self.model, self.numerics, self.draws) if task.experience else None
        self.fallbacks += self.experience.fallbacks if self.experience else ()
        self.teacher: Teacher | None = None
        """Of lanes that learn from one."""
        if any(recipe.training.distill for recipe in recipes):
            self.teacher = Teacher(task, [r.training.distill for r in recipes], self.start, self.seed_index)
        self.coresets = self._coresets([recipe.training.coreset for recipe in recipes])
        each = [*self.experience.recorded, *self.experience.observes, GRADIENT_NORM] if self.experience else ()
        self.recorder = Recorder(task.steps, each, len(lanes), device) if self.records else None
        self.oscillation = Oscillation(self.model, self.numerics, recorded_steps(task.steps) if self.recorder else ())
        self.weight_errors = WeightErrors(self.model, self.numerics) if self.recorder and task.rolls_out else None
        self.resets = OsciResets(self.model, self.numerics, [r.training.reset for r in recipes], task.steps)
        self.ramping = QRampings(self.model, self.numerics, [r.training.ramping for r in recipes], task)
        self.record = LossRecord(task.steps, len(lanes), device, self.rungs)
        self.alive = torch.ones(len(lanes), dtype=torch.bool, device=device)
        self.diverged = torch.full((len(lanes),), -1, dtype=torch.int64, device=device)
        captures = torch.device(device).type == "cuda" and not task.one_by_one  # what others wrote may not be captured
        self.graphs = Graphs(device) if captures else None

    def _coresets(self, wanted: Sequence[Coreset | None]) -> Coresets:
        """The coresets of the lanes, chosen beside a teacher of their own, so that no other lane has one."""
        chooses = any(of is not None and of.by == "acs" for of in wanted)
        teacher = Teacher(self.task, [None] * len(wanted), self.start, self.seed_index) if chooses else None
        seeds = [lane.seed for lane in self.lanes]
        return Coresets(self.task, wanted, self.problem, self.data_index, seeds, self.prepared, teacher)

    def state(self, done: int) -> dict[str, Tensor]:
        """Everything that later steps depend on, and the records of the first `done` steps: name -> tensor [L, …].

        Weights and buffers of the model (a persistent buffer has the lane axis first), state of the optimizer and of
        the quantizers, and which lanes are alive. The tensors are the population's own. Waits for the device.
        """
        self.fetch(done)
        parts = {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state(),
            "kept": self.numerics.state(),
            "record": self.record.state(),
            "recorded": self.recorder.state() if self.recorder else {},
            "oscillation": self.oscillation.state(),
            "resets": self.resets.watched.state(),
            "experience": self.experience.state() if self.experience else {},
            "first": self.weight_errors.state() if self.weight_errors else {},
            "coresets": self.coresets.state(),
            "lanes": {"alive": self.alive, "diverged": self.diverged},
        }
        return {f"{part}/{name}": value for part, of in parts.items() for name, value in of.items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor], done: int) -> None:
        """Take over a state that `state(done)` returned for the same lanes. Tensors may lie on any device."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, value in state.items():
            part, _, rest = name.partition("/")
            parts.setdefault(part, {})[rest] = value
        here = {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state()}
        here["lanes"] = {"alive": self.alive, "diverged": self.diverged}
        for part, tensors in here.items():
            theirs = parts.get(part, {})
            if tensors.keys() != theirs.keys():
                raise ValueError(f"{part}: found {sorted(theirs)}; accepted: {sorted(tensors)}")
            for name, tensor in tensors.items():
                tensor.copy_(theirs[name])
        self.numerics.load_state({name: value.to(self.device) for name, value in parts.get("kept", {}).items()})
        self.record.load_state(parts["record"], done)
        if self.recorder:
            self.recorder.load_state(parts.get("recorded", {}), done)
        if self.experience:
            self.experience.load_state(parts["experience"])
        if self.weight_errors:
            self.weight_errors.load_state(parts["first"])
        self.coresets.load_state(parts.get("coresets", {}))
        for part, watched in ("oscillation", self.oscillation), ("resets", self.resets.watched):
            watched.load_state({name: value.to(self.device) for name, value in parts.get(part, {}).items()})

    @torch.no_grad()
    def keep(self, positions: Sequence[int], done: int) -> None:
        """Go on with the lanes at these positions alone, after `done` steps. Their trajectories do not change."""
        if not positions:
            raise ValueError("positions: found none; accepted: one or more")
        chosen = torch.tensor(list(positions), device=self.device)
        state = {name: value[chosen.to(value.device)] for name, value in self.state(done).items()}
        del self.graphs, self.model, self.optimizer, self.numerics  # and their memory
        self._build_from(state, [self.lanes[i] for i in positions], done)

    @torch.no_grad()
    def copies(self, position: int, seeds: Sequence[int]) -> Population:
        """A population apart, each of whose lanes stands where the one at this position stands now, and takes the same
        batches. seeds: one a copy, of its quantizers' random bits; the lane keeps its own."""
        chosen, done = torch.full((len(seeds),), position, device=self.device), self.record.recent.fetched
        state = {name: value[chosen.to(value.device)] for name, value in self.state(done).items()}
        other = copy.copy(self)
        other.fallbacks = []
        other._build_from(state, [self.lanes[position]] * len(seeds), done, seeds)
        return other

    def _build_from(
        self, state: dict[str, Tensor], lanes: Sequence[Lane], done: int, seeds: Sequence[int] | None = None
    ) -> None:
        """Become these lanes in this state. seeds: of random bits, if not the lanes' own."""
        parameters = {
            name: torch.empty(len(lanes), *shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in self.shapes.items()
        }
        self._build(lanes, parameters, [lane.seed for lane in lanes] if seeds is None else seeds)
        needed = {f"optimizer/{name}" for name in self.optimizer.state()}  # lanes that are gone may have needed more
        kept = {name: value for name, value in state.items() if name in needed or not name.startswith("optimizer/")}
        self.load_state(kept, done)

    def batch_of(self, step: int) -> tuple[Any, Any]:
        """Inputs and targets of a step, at which quantizers now stand."""
        self._enter(step)
        return self._batch()

    def _enter(self, step: int) -> tuple[bool, frozenset[str]]:
        """Stand at a step: its batch, its random bits. Returns its phase."""
        if self.batches:
            self.batches.prepare(step)
        self.optimizer.prepare(step)
        self.numerics.step.fill_(step)
        self.numerics.measuring = self.numerics.measures(step)
        return self.numerics.measuring, self.numerics.phase(step)

    def train_step(self, step: int) -> None:
        """Step `step`; on a GPU, after the first few of a phase, by replaying the captured one."""
        self.ramping.apply(step, self._undone, self.optimizer.kept)
        phase = self._enter(step)
        if self.oscillation.watches(step) or self.resets.watched.watches(step):
            self.make_room()
        self.resets.apply(step)
        if self.experience and step % self.experience.every == 0:
            self._collect(phase)
        if self.coresets.is_due(step):
            self.make_room()
            as_held_out = partial(self.numerics.temporarily, training=False, evaluation="quantized")
            self.coresets.choose(step, as_held_out, self.model)
        moved = self.oscillation.observe(step)
        if self.recorder and step in self.recorder.steps:
            self.make_room()
            in_bf16 = self.experience.in_bf16() if self.experience else None
            measured = measure(self.task, self.model, self.numerics, self.optimizer, *self._batch(), in_bf16)
            measured |= self._of_experience() if self.experience else {}
            measured |= self.weight_errors.statistics() if self.weight_errors else {}
            self.recorder.add(step, measured | (self.oscillation.statistics(moved) if moved else {}))
        self._run(phase, self._step)

    def roll_out(self, step: int) -> None:
        """The rollout of a step that begins with one, and nothing else of it."""
        self._collect(self._enter(step))

    def _collect(self, phase: Hashable) -> None:
        assert self.experience
        self._run(("collect", phase), self.experience.collect)

    def _undone(self, steps: range, look: Look) -> None:
        """Train these steps without ramping and take them back. look: called before each step, and after the last one
        with the number of the next."""
        self.make_room()
        tensors = [*self.model.state_dict().values(), *self.optimizer.state().values()]
        tensors += [self.alive, self.diverged, self.record.recent.values]
        tensors += [self.recorder.recent.values] if self.recorder else []
        before, kept = [value.clone() for value in tensors], copy.deepcopy(self.numerics.state())
        ramped.restart(self.optimizer.kept)
        for step in steps:
            phase = self._enter(step)
            look(step)
            self._run(phase, self._step)
        self.numerics.step.fill_(steps.stop)
        look(steps.stop)
        for value, old in zip(tensors, before, strict=True):
            value.copy_(old)
        if kept or self.numerics.state():
            self.numerics.load_state(kept)
            if self.graphs:
                self.graphs.forget()  # they know the memory of what quantizers kept, which may have to be made again

    def _run(self, phase: Hashable, function: Callable[[], None]) -> None:
        """Call a function of the present phase; on a GPU, after the first few calls, by replaying the captured one."""
        self.optimizer.refresh()
        if self.graphs is None:
            function()
            return
        if (why_not := self.graphs.prepare(phase, function)) is not None:
            self.fallbacks.append(why_not)
            self.model.zero_grad()
        self.graphs.run(phase, function)

    def make_room(self) -> None:
        """Free the memory of captured steps if an eager step might not fit beside them."""
        if self.graphs:
            self.graphs.make_room()

    def _batch(self) -> tuple[Any, Any]:
        """Inputs and targets of the present step."""
        if self.experience:
            return self.experience.batch()
        assert self.batches
        rows = self.coresets.rows(self.batches(self.numerics.step)[self.seed_index])  # [L, B]
        rows = rows + self.first_rows
        batch = self.prepared(*(gather_samples(of, rows) for of in (self.problem.train_x, self.problem.train_y)))
        return self.teacher.taught(*batch) if self.teacher else batch

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Find out what the forward pass keeps for the backward pass, in the first step, which is never captured."""
        copies = [] if self.optimizer.copies is None else [self.optimizer.copies.values]
        with keeping([*self.model.parameters(), *copies]) as kept:
            yield
        self.kept_bytes = kept.bytes()

    def _step(self) -> None:
        step = self.numerics.step
        around = self._keeping() if self.kept_bytes is None else None
        seen: list[dict[str, Tensor]] = []
        observed = self.experience.observed if self.experience and self.recorder else None
        look = (lambda *of: seen.append(observed(*of))) if observed else None
        loss = backward(self.task, self.model, self.numerics, self.optimizer, *self._batch(), around, look)  # [L]
        gradient = self.optimizer.gradient()
        if observed:
            self._record(seen, gradient)
        largest = max_abs(gradient)
        finite = loss - loss == largest - largest  # zero where finite, else NaN, which equals nothing
        kept = finite  # a step that is left out for a smaller loss scale ends no lane
        if self.optimizer.scaling.moves:
            kept = finite | (torch.isfinite(loss) & self.optimizer.scaling.move(finite))
        torch.where(self.alive > kept, step, self.diverged, out=self.diverged)
        self.alive.logical_and_(kept)
        self.optimizer.step(gradient, self.alive & finite if kept is not finite else self.alive, step.view(1))
        self.record.write(step, self.experience.error if self.experience else loss)

    def _record(self, seen: Sequence[Mapping[str, Tensor]], gradient: Tensor) -> None:
        """Write down what the present step has: what was observed of each part of the batch, and of the samples."""
        assert self.recorder
        assert self.experience
        found = {name: mean_of_parts([of[name] for of in seen]) for name in self.experience.observes}
        found |= self.experience.recorded | {GRADIENT_NORM: self.optimizer.norm(gradient)}
        self.recorder.write(self.numerics.step, found)

    def fetch(self, done: int) -> None:
        """Take in what the first `done` steps wrote on the device. Waits for it."""
        self.record.fetch(done, self.diverged)
        if self.recorder:
            self.recorder.fetch(done)

    def _of_experience(self) -> dict[str, Tensor]:
        """Statistics of the present samples, and metrics of the first held-out data: name -> float64 [L]."""
        assert self.experience
        held_out = self.data_index, slice(0, self.task.eval_rows)
        out = self.experience.statistics()
        with self.numerics.temporarily(training=False, evaluation="quantized"):
            _, found = self.experience.examine(self.problem.val_x[held_out], self.problem.val_y[held_out])
        return out | {name: lane_mean(value).double() for name, value in found.items()}

    def prepared(self, x: Tensor, y: Tensor) -> tuple[Any, Any]:
        """A batch as the model and the loss take it."""
        return self.task.prepare(x, y, self.draws) if self.task.prepare else (x, y)

    def losses(self, step: int) -> list[float | None]:
        """Training losses of one of the last steps, None where the lane is dead. Waits for the device."""
        return [number(v) for v in torch.where(self.alive, self.record.now(step), torch.nan).tolist()]
