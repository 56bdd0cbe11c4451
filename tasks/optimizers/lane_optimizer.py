"""The optimizer of a population: all parameters in one tensor [L, P], every number a column [L, 1].

The parameters of the model are views into that tensor, so a step is a dozen element-wise operations whatever the depth.
What changes from step to step (learning rate, bias corrections) is known before the first: a table of some thousand
steps lies on the device, from which a captured step reads its row, and is written anew when they are over.

Weight decay acts on the weights of products alone: the parameter `weight` of modules that have a `place`. Biases,
norms, positions and embedding tables do not decay.

Weights that products take in BF16 have a copy in it beside them, which a step makes anew, so that no forward pass
rounds them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fp4dse.dse import ConfigError
from fp4dse.dse.optimizer import SGD, AdamW, Muon, StableSPAM
from fp4dse.kernels.block_scales import BlockScales
from fp4dse.kernels.factors import Factors
from fp4dse.kernels.learned import ClipParameter
from fp4dse.kernels.ops.adamw import NUMBERS, pieces
from fp4dse.kernels.ops.adamw import adamw as adamw_step
from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.kernels.ops.rounded import keep_copy
from fp4dse.kernels.ops.rounded.copies import Copies
from fp4dse.tasks.optimizers import adamw, muon, ramped, sgd, stable_spam
from fp4dse.tasks.optimizers.gradients import Gradients, layers_with_whole_weights
from fp4dse.tasks.optimizers.hyperparameters import Numbers, Tensors, numbers_of, schedule_factor
from fp4dse.tasks.optimizers.learned import Learned
from fp4dse.tasks.optimizers.loss_scales import LossScales

if TYPE_CHECKING:
    from fp4dse.tasks.job import Lane
    from fp4dse.tasks.task import Task

KINDS: dict[type, ModuleType] = {AdamW: adamw, SGD: sgd, StableSPAM: stable_spam, Muon: muon}
"""Kind of optimizer -> the module with its STATE, columns, row and, but for AdamW, update."""
COUPLED = (SGD,)
"""Kinds whose weight decay is part of the gradient."""

ENDS = ("embedding", "head")
"""Kinds of places whose layers are not hidden."""

TABLE_STEPS = 4096
"""Steps whose numbers lie on the device."""


class LaneOptimizer:
    """Weights of all lanes and the state of their updates. Every tensor has the lane axis first.

    After construction the model's parameters are views into `flat` [L, P]. lr: float32 [L]; numbers: one a lane, of one
    kind of optimizer; lr_factors: what the learning rate is multiplied by at each step.
    """

    def __init__(
        self, model: nn.Module, lr: Tensor, numbers: Sequence[Numbers], lr_factors: Sequence[float], accumulate: int = 1
    ) -> None:
        if len({type(n.optimizer) for n in numbers}) != 1:
            raise ValueError("lanes of one population must share their kind of optimizer")
        device, lanes = lr.device, len(lr)
        self.kind, self.accumulate = type(numbers[0].optimizer), accumulate
        self.rule = KINDS[self.kind]
        self.parameters = list(model.parameters())
        self.sizes = [p[0].numel() for p in self.parameters]
        self.flat = torch.cat([p.detach().reshape(lanes, -1) for p in self.parameters], dim=1)
        for p, view in zip(self.parameters, self.flat.split(self.sizes, 1), strict=True):
            p.data = view.view(p.shape)
        self.copies = self._copies(model)
        """In BF16, of the weights that products take so; None where there are none."""
        self.gradients = Gradients(model, self.sizes, self.flat)
        self.tensors = Tensors(self.sizes, hidden_matrices(model))
        self.learned = Learned(model, self.tensors, device)
        only = torch.tensor([n.trains == "learned" for n in numbers])
        self.still = only.to(device)[:, None] & ~self._of_tensors(are_learned(model)) if only.any() else None
        """Parameters [L, P] that a lane does not train, in lanes that train what is learned beside the weights."""
        frozen = [n.trains == "none" for n in numbers]
        self.frozen = torch.tensor(frozen, device=device) if any(frozen) else None
        hidden = sum(math.prod(shape) for shape in self.tensors.matrices if shape)
        every = self.flat.shape[1]
        sizes = {"element": every, "tensor": len(self.sizes), "hidden": hidden, "other": every - hidden}
        self.per = dict(self.rule.STATE)
        """Name of what is kept -> per what it has a number."""
        self.kept = {name: torch.zeros(lanes, sizes[per], device=device) for name, per in self.per.items()}
        self.ramps = any(n.ramps for n in numbers)
        if self.ramps:
            of_ramps = ramped.state(self.flat)
            self.kept |= of_ramps
            self.per |= dict.fromkeys(of_ramps, "element")

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).to(torch.float32).to(device)[:, None]

        named = [self.rule.columns(n) for n in numbers]
        self.columns = {name: column([lane[name] for lane in named]) for name in named[0]}
        self.lr = lr[:, None]
        self.weight_decay = column([n.weight_decay for n in numbers])
        self.decaying = self._of_tensors(decays(model)) if any(n.weight_decay for n in numbers) else None
        """Parameters [P] that decay; None where no lane's do."""
        self.clip = column([n.clip for n in numbers]) if any(n.clip < math.inf for n in numbers) else None
        self.scaling = LossScales([n.loss_scale for n in numbers], [n.growth for n in numbers], device)

        self.distinct, self.lr_factors = list(dict.fromkeys(numbers)), lr_factors
        self.of_lane = torch.tensor([self.distinct.index(n) for n in numbers], device=device)
        some = len(self._rows(range(1))[0][0])
        self.table = torch.zeros(min(TABLE_STEPS, len(lr_factors)), some, len(self.distinct), device=device)
        self.first: int | None = None  # step of the table's first row
        self.prepare(0)

    def _copies(self, model: nn.Module) -> Copies | None:
        chosen, starts = [], itertools.accumulate(self.sizes, initial=0)
        for parameter, start, has_copy in zip(self.parameters, starts, taken_in_bf16(model), strict=False):
            keep_copy(parameter, None)  # of an optimizer before this one
            if has_copy:
                chosen.append((parameter, start))
        return Copies(chosen, self.flat.shape[1]) if chosen else None

    def _of_tensors(self, flags: Sequence[bool]) -> Tensor:
        """bool [P] of a flag for each tensor of parameters."""
        of_each = [torch.full((s,), f, device=self.flat.device) for s, f in zip(self.sizes, flags, strict=True)]
        return torch.cat(of_each)

    def prepare(self, step: int) -> None:
        """Make sure that the table holds the numbers of step `step`."""
        first = step - step % len(self.table)
        if first != self.first:
            self.first = first
            steps = range(first, min(first + len(self.table), len(self.lr_factors)))
            rows = torch.tensor(self._rows(steps), dtype=torch.float64).permute(1, 2, 0)  # [n, K, D]
            self.table[: len(steps)].copy_(rows.to(torch.float32))

    def _rows(self, steps: range) -> list[list[list[float]]]:
        """Factor of the learning rate, then the rule's numbers, of each kind of lane at each step: [D, n, K]."""
        return [[[self._lr_factor(step, n), *self.rule.row(step, n)] for step in steps] for n in self.distinct]

    def _lr_factor(self, step: int, n: Numbers) -> float:
        return schedule_factor(n.schedule, step, len(self.lr_factors)) if n.schedule else self.lr_factors[step]

    def refresh(self) -> None:
        """Make the copies of weights that were changed between steps anew; to be called before a captured step is
        replayed, which reads them as they are."""
        if self.copies is not None:
            self.copies.refresh()

    def gradient(self) -> Tensor:
        """The gradients as one tensor [L, P], with the loss scale taken out; they are cleared."""
        self.learned.take_note()
        out = self.gradients.take()
        return out if self.loss_scale is None else out / self.loss_scale[:, None]

    @property
    def loss_scale(self) -> Tensor | None:
        """Factors of the losses now, [L]; None where all are one and stay."""
        return self.scaling.scale

    def norm(self, gradient: Tensor) -> Tensor:
        """‖g‖ of each lane, float32 [L], of gradient [L, P]."""
        return sqrt(self.learned.square_sum(gradient))

    @torch.no_grad()
    def step(self, gradient: Tensor, alive: Tensor, at: Tensor) -> None:
        """One update of the lanes that are alive (bool [L]) and not frozen, by gradient [L, P], of `gradient()`; the
        others keep their bits.

        at: number of the step, int64 [1] on the device, so that a captured step reads it anew; `prepare` has seen it.
        """
        alive = alive if self.frozen is None else alive & ~self.frozen
        gradient = gradient if self.still is None else torch.where(self.still, 0.0, gradient)
        if not self.learned.is_any:
            self._step(gradient, alive, at)
            return
        kept = {name: (self.per[name], value) for name, value in self.kept.items()}
        before = self.learned.before(self.flat, kept)
        self._step(self.learned.with_decay(gradient, before[""]), alive, at)
        self.learned.after(self.flat, kept, before)

    def _step(self, gradient: Tensor, alive: Tensor, at: Tensor) -> None:
        """The same, as the optimizer alone has it."""
        lr_factor, *numbers = self.table.index_select(0, at % len(self.table))[0].index_select(1, self.of_lane)[
            :, :, None
        ]
        if self.clip is not None:
            norm = self.norm(gradient)[:, None]
            gradient = gradient * torch.where(norm > self.clip, self.clip / norm, 1.0)
        if self.kind is AdamW:
            self._adamw(gradient, alive, lr_factor, numbers)
            return
        for of in pieces(gradient):
            self._update(of, gradient[of], alive[of, None], lr_factor[of], [n[of] for n in numbers])
        if self.copies is not None:
            self.copies.refresh(changed=True)

    def _update(self, of: slice, gradient: Tensor, keep: Tensor, lr_factor: Tensor, numbers: Sequence[Tensor]) -> None:
        """The update of some lanes, which have all arguments but the first."""
        old = {name: value[of] for name, value in self.kept.items()}
        if self.kind in COUPLED:
            gradient = self._decayed(gradient, of)
        update, kept = self.rule.update(
            gradient, old, {name: value[of] for name, value in self.columns.items()}, numbers, self.tensors
        )
        if self.kind not in COUPLED:
            update = self._decayed(update, of)
        for name, value in kept.items():
            old[name].copy_(torch.where(keep, value, old[name]))
        flat = self.flat[of]
        flat.copy_(torch.where(keep, flat - self.lr[of] * lr_factor * update, flat))

    def _adamw(self, gradient: Tensor, alive: Tensor, lr_factor: Tensor, corrections: Sequence[Tensor]) -> None:
        """The whole update by one function, in place."""
        constants = (self.columns[name] for name in NUMBERS[1:6])
        numbers = torch.cat([self.lr * lr_factor, *constants, *corrections, self.weight_decay], dim=1)
        if self.ramps:
            ramped.adamw(self.flat, self.kept, gradient, alive, numbers, self.decaying, self.copies)
        else:
            momenta = self.kept["mean"], self.kept["square"]
            adamw_step(self.flat, *momenta, gradient, alive, numbers, self.decaying, self.copies)

    def _decayed(self, x: Tensor, of: slice) -> Tensor:
        """x of some lanes plus weight decay times the weight, where there is any."""
        if self.decaying is None:
            return x
        decay = self.weight_decay[of]
        return torch.where((decay > 0) & self.decaying, x + self.flat[of] * decay, x)

    def state(self) -> dict[str, Tensor]:
        """State of the updates: name -> the tensor itself, the lane axis first."""
        return self.kept | self.scaling.state()


def are_learned(model: nn.Module) -> list[bool]:
    """True for each of the model's parameters that is learned beside the weights, a clip, a factor or the scale of a
    block, in the order of `parameters()`."""
    factors = {id(of) for m in model.modules() if isinstance(m, Factors | BlockScales) for of in m.parameters()}
    return [isinstance(p, ClipParameter) or id(p) in factors for p in model.parameters()]


def decays(model: nn.Module) -> list[bool]:
    """True for each of the model's parameters that is the weight of a product, or a factor of it, in the order of
    `parameters()`."""
    products = {id(m.weight) for m in model.modules() if hasattr(m, "place")}
    products |= {id(of) for m in model.modules() if isinstance(m, Factors) for of in (m.u, m.v)}
    return [id(p) in products for p in model.parameters()]


def taken_in_bf16(model: nn.Module) -> list[bool]:
    """True for each of the model's parameters that is the weight of a product which takes it in BF16, in the order of
    `parameters()`."""
    layers = layers_with_whole_weights(model)
    found = {id(m.weight) for m in layers if m.numerics.common_dtype("w", m.layer, m.weight.dtype) == torch.bfloat16}
    return [id(p) in found for p in model.parameters()]


def hidden_matrices(model: nn.Module) -> list[tuple[int, int] | None]:
    """(outputs, inputs) for each of the model's parameters that is the weight of a hidden layer, in the order of
    `parameters()`: of a product that is neither the embedding nor the head. A convolution's is flattened."""
    products = [m for m in model.modules() if hasattr(m, "place")]
    hidden = {id(m.weight) for m in products if getattr(m.place, "kind", "") not in ENDS}
    return [(p.shape[1], p[0, 0].numel()) if id(p) in hidden and p.dim() > 2 else None for p in model.parameters()]


def make_optimizer(model: nn.Module, lanes: Sequence[Lane], task: Task) -> LaneOptimizer:
    """The optimizer of a population, by the recipes' training side and what it leaves to the task.

    ConfigError if the batch cannot be cut into the parts that the recipe asks for.
    """
    parts = max(lanes[0].recipe.training.accumulate, task.parts)
    if task.batch % parts:
        raise ConfigError("training.accumulate", parts, f"a divisor of the batch of {task.batch}")
    device = next(model.parameters()).device
    lr = torch.tensor([lane.lr for lane in lanes], dtype=torch.float32, device=device)
    numbers = [numbers_of(lane.recipe.training, task) for lane in lanes]
    return LaneOptimizer(model, lr, numbers, [task.lr_factor(step) for step in range(task.steps)], parts)
