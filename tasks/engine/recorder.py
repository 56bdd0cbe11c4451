"""Measurements that a training records on request, for each lane: what costs passes at log-spaced steps, what a
training that learns from its samples has anyway (Experience.each, and the norm of the gradient) at every step.

    gradient_norm, gradient_norm/LAYER   ‖g‖, g the gradient that the step uses (of LAYER's weight)
    gnr, gnr/LAYER                       ρ = ‖∇L‖ / (σ_q √d), the gradient-to-noise ratio of arXiv 2505.19115: σ_q is
                                         the root mean square, over d coordinates, of what the backward quantizers
                                         change of the gradient ∇L; the rule is not to quantize where ρ < √3
                                         (the report counts such steps)
    oscillation, oscillating             of weights, overall and of a layer: see oscillation.py
    clipped/SLOT, flushed/SLOT           shares of elements that are clipped, or become zero (counters.COUNTERS)
    gradient_error, gradient_error/BLOCK ‖g - g*‖ / ‖g*‖, g* the gradient by BF16 products in both passes, over all that
                                         is trained (of a block of the model); for tasks that learn from their samples

∇L comes from a second pass over the same batch, with the backward stages of the BF16 baseline, g* from a third. No pass
changes the state that is kept between steps, and all draw the same random bits as the step itself. Without a request
none of this is computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp4dse.dse import SHARED
from fp4dse.kernels import LaneNumerics, lane_sum
from fp4dse.tasks.backward import backward
from fp4dse.tasks.engine.recent import Recent
from fp4dse.tasks.job import number
from fp4dse.tasks.optimizers import LaneOptimizer
from fp4dse.tasks.optimizers.learned import Learned

if TYPE_CHECKING:
    from fp4dse.tasks.task import Task

LEAST_APART = 8
"""Steps between two that are recorded regularly, at least."""
BLOCK = re.compile(r"^blocks\.\d+(?=\.)")
"""The block in the name of a parameter."""
STEP = "step"
"""Name under which the steps stand, counted from one; with /NAME behind it, those of a NAME that has others."""
EACH = "each"
"""In a state, what is before the name of a series of every step."""
GRADIENT_NORM = "gradient_norm"


def recorded_steps(steps: int) -> set[int]:
    """Indices of the steps 1, 2, 4, 8 … and the last one."""
    return {min(2**n, steps) - 1 for n in range(steps.bit_length() + 1)}


def measure(
    task: Task,
    model: nn.Module,
    numerics: LaneNumerics,
    optimizer: LaneOptimizer,
    inputs: Any,
    targets: Any,
    in_bf16: tuple[Any, Any] | None = None,
) -> dict[str, Tensor]:
    """Name -> float64 [L], of a batch at the present step. in_bf16: inputs and targets of the same batch for a pass of
    BF16 products; None: gradient_error is left out."""
    numerics.forget_lost()
    with numerics.temporarily(training=False, counting=True):
        backward(task, model, numerics, optimizer, inputs, targets)
    used = _gradients(model, optimizer)
    lost = numerics.lost()
    numerics.forget_lost()
    with numerics.temporarily(training=False, precise_stages=numerics.precise_stages | set(SHARED)):
        backward(task, model, numerics, optimizer, inputs, targets)
    true = _gradients(model, optimizer)

    out: dict[str, Tensor] = {}
    squares = {name: (_square(g), _square(true[name]), _square(g - true[name])) for name, g in used.items()}
    totals = [_total(column, optimizer.learned) for column in zip(*squares.values(), strict=True)]
    layers = {name: m for name, m in model.named_modules() if hasattr(m, "place")}
    for name, (own, plain, noise) in {"": totals, **{name: squares[f"{name}.weight"] for name in layers}}.items():
        end = f"/{name}" if name else ""
        out[f"{GRADIENT_NORM}{end}"], out[f"gnr{end}"] = own.sqrt(), (plain / noise).sqrt()
    out |= {f"{key}/{slot}": share[key] for slot, share in lost.items() for key in ("clipped", "flushed")}
    if in_bf16 is not None:
        with numerics.temporarily(training=False, evaluation="bf16"):
            backward(task, model, numerics, optimizer, *in_bf16)
        out |= gradient_errors(used, _gradients(model, optimizer), optimizer.still)
    return out


def gradient_errors(used: dict[str, Tensor], plain: dict[str, Tensor], still: Tensor | None) -> dict[str, Tensor]:
    """`gradient_error` of all parameters and of each block, by name; NaN where the plain gradient is zero.

    used, plain: parameter name -> gradient [L, n]; still: true for what is not trained, bool [L, P], None: nothing is.
    """
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    masks = still.split([g.shape[1] for g in used.values()], 1) if still is not None else [None] * len(used)
    for (name, g), mask in zip(used.items(), masks, strict=True):
        true, error = plain[name], g - plain[name]
        if mask is not None:
            true, error = (torch.where(mask, 0.0, x) for x in (true, error))
        for part in ("", *BLOCK.findall(name)):  # one by one: a parameter of other lanes adds an exact zero
            before = sums.get(part, (torch.zeros_like(error[:, 0]),) * 2)
            sums[part] = before[0] + _square(error), before[1] + _square(true)
    of_part = {part: (error / true).sqrt() for part, (error, true) in sums.items()}
    return {f"gradient_error/{part}" if part else "gradient_error": value for part, value in of_part.items()}


def _gradients(model: nn.Module, optimizer: LaneOptimizer) -> dict[str, Tensor]:
    """Parameter name -> its gradient [L, n] without the loss scale, in float64; gradients are cleared."""
    flat = optimizer.gradient().double().split(optimizer.sizes, 1)
    return dict(zip([name for name, _ in model.named_parameters()], flat, strict=True))


def _total(of_parameters: Sequence[Tensor], learned: Learned) -> Tensor:
    """The sum [L] over all parameters, of numbers [L] each; what only some lanes learn is added last."""
    rest = [x for i, x in enumerate(of_parameters) if i not in learned.tensors]
    total = lane_sum(torch.stack(rest), 0)
    if learned.is_any:
        total = total + learned.total(torch.stack([of_parameters[i] for i in learned.tensors], dim=1))
    return total


def _square(x: Tensor) -> Tensor:
    return lane_sum(x * x, 1)


class Recorder:
    """Records of L lanes so far. `steps`: indices of the steps at which to measure.

    each: names of what a step writes itself; with any, also every twentieth of the steps is measured.
    """

    def __init__(
        self, steps: int, each: Sequence[str] = (), lanes: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.steps, self.each = recorded_steps(steps), list(each)
        if each:
            every = max(LEAST_APART, round(steps / 20))
            self.steps |= set(range(every - 1, steps, every))
        self.rows: list[tuple[int, dict[str, Tensor]]] = []
        self.recent = Recent((lanes, len(self.each)), device)
        self.series = torch.zeros(lanes, 0, len(self.each))
        """float32 [L, n, names]: of the last n of the steps that were fetched."""

    def add(self, step: int, measured: Mapping[str, Tensor]) -> None:
        """Take in what `measure` found at step index `step`, but for what steps write themselves."""
        self.rows.append((step, {name: value.cpu() for name, value in measured.items() if name not in self.each}))

    def write(self, step: Tensor, values: Mapping[str, Tensor]) -> None:
        """Remember what a step has, int64 scalar on the device: a number [L] for each name of `each`."""
        self.recent.write(step, torch.stack([values[name] for name in self.each], dim=1))

    def fetch(self, done: int) -> None:
        """Take in what was written until `done` steps were done. Waits."""
        if self.each and self.recent.fetched < done:
            self.series = torch.cat([self.series, self.recent.take(done).transpose(0, 1)], dim=1)

    def of_lane(self, lane: int, ended: int | None) -> dict[str, list[float | None]]:
        """Name -> values, one for each entry of `step/NAME`, or of `step` where there is none such; None where there is
        no number. ended: the step index at which the lane diverged; what was recorded after it is left out."""
        rows = [(step, row) for step, row in self.rows if ended is None or step < ended]
        names = [name for name in dict.fromkeys(name for _, row in rows for name in row) if name not in self.each]
        out: dict[str, list[float | None]] = {STEP: [float(step + 1) for step, _ in rows]}
        out |= {name: [number(row[name][lane].item()) if name in row else None for _, row in rows] for name in names}
        steps = range(self.recent.fetched - self.series.shape[1], self.recent.fetched)
        steps = range(steps.start, steps.stop if ended is None else max(steps.start, min(ended, steps.stop)))
        for n, name in enumerate(self.each):
            before = [(step, row[name][lane].item()) for step, row in rows if name in row]  # of an older version
            found = [*before, *zip(steps, self.series[lane, :, n].tolist(), strict=False)]
            out[name] = [number(value) for _, value in found]
            out[f"{STEP}/{name}"] = [float(step + 1) for step, _ in found]
        return out

    def state(self) -> dict[str, Tensor]:
        """All of it that was fetched as tensors [L, …], by step index and name."""
        out = {f"{step}/{name}": value for step, row in self.rows for name, value in row.items()}
        return out | {f"{EACH}/{name}": self.series[:, :, n] for n, name in enumerate(self.each)}

    def load_state(self, state: Mapping[str, Tensor], done: int) -> None:
        """Go on after `done` steps from what `state` returned, perhaps for fewer lanes. What an older version wrote has
        no series of every step: they begin here, behind what it measured."""
        rows: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            step, name = key.split("/", 1)
            if step != EACH:
                rows.setdefault(int(step), {})[name] = value.cpu()
        self.rows = sorted(rows.items())
        names = [f"{EACH}/{name}" for name in self.each]
        if names and names[0] in state:
            self.series = torch.stack([state[name].cpu() for name in names], dim=2)
        self.recent.fetched = done
