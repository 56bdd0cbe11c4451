"""The teacher of lanes that distil: the model that they start from, in BF16, which never moves.

Lanes of one seed start from the same weights and read the same batch, so their teacher's logits are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4dse.dse import Recipe
from fp4dse.dse.training import Distill
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks.backward import map_tensors, outputs
from fp4dse.tasks.distance import Taught
from fp4dse.tasks.task import Task


class Teacher:
    """The model of each seed that lanes have.

    distills: of each lane, None where it has no teacher; start: initial weights of all seeds, as in Problem.init;
    seed_index: int64 [L], which of them is a lane's, on the device.
    """

    def __init__(
        self, task: Task, distills: Sequence[Distill | None], start: Mapping[str, Tensor], seed_index: Tensor
    ) -> None:
        device = seed_index.device
        there, self.of_lane = torch.unique(seed_index, return_inverse=True)
        self.first = torch.tensor([self.of_lane.tolist().index(i) for i in range(len(there))], device=device)
        """A lane of each seed."""
        bf16, dtype = [Recipe.named("bf16")] * len(there), getattr(torch, task.dtype)
        numerics = LaneNumerics(bf16, there.tolist(), device, dtype=dtype)
        numerics.training = False
        self.task = task
        self.model = task.model({name: value[there.cpu()].to(device) for name, value in start.items()}, numerics)

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        self.weight = column([of.weight if of else 0.0 for of in distills])
        self.temperature = column([of.temperature if of else 1.0 for of in distills])

    @torch.no_grad()
    def taught(self, inputs: Any, targets: Any) -> tuple[Any, Taught]:
        """A batch with the teacher's logits for it."""
        assert self.task.logits is not None
        found = outputs(self.model, map_tensors(lambda x: x.index_select(0, self.first), inputs))
        logits = self.task.logits(found).index_select(0, self.of_lane)
        weight, temperature = (of.expand(-1, logits.shape[1]) for of in (self.weight, self.temperature))
        return inputs, Taught(targets, logits, weight, temperature)
