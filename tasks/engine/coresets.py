"""Coresets: a lane reads a share of the training samples, chosen several times (ACS, 2306.07215), or drawn once.

    score = (1 - a) · ‖p_q - y‖₂ + a · ‖p_q - p_16‖₂          a = (1 - cos(π t / T)) / 2, t of T steps

p_q are the probabilities of the lane's model, as held-out data go through it, p_16 those of the model that training
starts from, in BF16, and y is one at the label; the distances of a sample's tokens are averaged. The samples with the
largest scores are taken. At first those count that the model gets wrong, later those that quantization moves.

The authors take as many of every class; texts have no classes. A lane without a coreset reads on as if others had none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4dse.dse.training import Coreset
from fp4dse.kernels import lane_sum
from fp4dse.kernels.ops.philox import STREAMS, random32
from fp4dse.tasks.backward import outputs
from fp4dse.tasks.task import Problem, Task
from fp4dse.tasks.teacher import Teacher

DRAWN = (1 << 31) - 1
"""The epoch whose order random coresets are the first of: no training has so many."""


class Coresets:
    """The coresets of lanes, one or None a lane. problem: its samples on the device; data_index: int64 [L], which of
    its data is a lane's; prepared: (x, y) -> inputs and targets of samples; teacher: of the lanes' starts."""

    def __init__(
        self,
        task: Task,
        wanted: Sequence[Coreset | None],
        problem: Problem,
        data_index: Tensor,
        seeds: Sequence[int],
        prepared: Callable[[Tensor, Tensor], tuple[Any, Any]],
        teacher: Teacher | None,
    ) -> None:
        self.task, self.problem, self.data_index = task, problem, data_index
        self.wanted, self.prepared, self.teacher = list(wanted), prepared, teacher
        self.is_any = any(wanted)
        if not self.is_any:
            return
        device, n = data_index.device, problem.train_x.shape[1]
        every = torch.arange(n, device=device).repeat(len(wanted), 1)
        self.sizes = torch.tensor([n if of is None else of.count(n) for of in wanted], device=device)[:, None]
        self.chosen = every
        """The samples of each lane, the first `sizes` of each row: int64 [L, n]."""
        for lane, of in enumerate(wanted):
            if of is not None:
                draws = random32(torch.tensor([seeds[lane]], device=device), STREAMS["order"], DRAWN, 0, n)[0]
                self.chosen[lane] = torch.argsort(draws, stable=True)
        steps = task.steps
        self.steps: dict[int, list[int]] = {}
        """Step -> the lanes that choose anew before it."""
        for lane, of in enumerate(wanted):
            for number in range(of.selections if of is not None and of.by == "acs" else 0):
                self.steps.setdefault(number * steps // (of.selections if of else 1), []).append(lane)

    def rows(self, rows: Tensor) -> Tensor:
        """The samples that lanes read in a step, int64 [L, B]. rows: those that they would read of all samples."""
        return self.chosen.gather(1, rows % self.sizes) if self.is_any else rows

    def is_due(self, step: int) -> bool:
        """True if a lane chooses anew before this step."""
        return self.is_any and step in self.steps

    @torch.no_grad()
    def choose(self, step: int, evaluating: Callable[[], Any], model: torch.nn.Module) -> None:
        """Choose anew in the lanes that do before this step, by the model as it is. evaluating: numerics' context."""
        share = (1 - math.cos(math.pi * step / self.task.steps)) / 2
        parts = []
        for first in range(0, self.problem.train_x.shape[1], self.task.eval_rows):
            at = self.data_index, slice(first, first + self.task.eval_rows)
            inputs, targets = self.prepared(self.problem.train_x[at], self.problem.train_y[at])
            with evaluating():
                found = outputs(model, inputs)
            parts.append(self._scores(inputs, found, targets, share))
        order = torch.argsort(torch.cat(parts, dim=1), dim=1, descending=True, stable=True)
        for lane in self.steps[step]:
            self.chosen[lane] = order[lane]

    def _scores(self, inputs: Any, found: Any, targets: Tensor, share: float) -> Tensor:
        """float32 [L, B]."""
        assert self.task.logits is not None
        assert self.teacher is not None
        p = torch.softmax(self.task.logits(found), dim=-1)
        of_label = p.gather(-1, targets[..., None])[..., 0]
        from_label = (lane_sum(p * p, -1) - 2 * of_label + 1).clamp(min=0).sqrt()
        away = p - torch.softmax(self.teacher.taught(inputs, targets)[1].logits, dim=-1)
        score = (1 - share) * from_label + share * lane_sum(away * away, -1).sqrt()
        flat = score.flatten(2)
        return lane_sum(flat, 2) * (1.0 / flat.shape[2])

    def state(self) -> dict[str, Tensor]:
        """The chosen samples; empty where all lanes read all."""
        return {"chosen": self.chosen} if self.is_any else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a copy."""
        if self.is_any:
            self.chosen.copy_(state["chosen"])
