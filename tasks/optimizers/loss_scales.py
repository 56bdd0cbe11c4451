"""Loss scales, one a lane: what stays, and what follows the gradients (dynamic loss scaling, arXiv 1710.03740).

    gradients are not finite            scale <- scale / 2, down to one; the step is left out
    finite in `growth` steps in a row   scale <- scale · 2, where FP32 holds that

The factors are those of torch.amp.GradScaler and of the simulator of arXiv 2509.17791, whose growth is 2000 steps from
a scale of 1024. At a scale of one there is nothing left to halve: gradients that are not finite then are a divergence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LEAST = 1.0
"""No scale is halved from here."""


class LossScales:
    """The scales of all lanes. growth: steps, one number a lane, 0 for a scale that stays.

    scale   float32 [L]; None where all are one and stay
    """

    def __init__(self, scales: Sequence[float], growth: Sequence[int], device: torch.device) -> None:
        self.moves = any(growth)
        some = self.moves or any(scale != 1 for scale in scales)
        self.scale = torch.tensor(scales, dtype=torch.float64).to(device, torch.float32) if some else None
        self.growth = torch.tensor(growth, device=device)
        self.good = torch.zeros_like(self.growth)  # steps in a row with finite gradients

    def move(self, finite: Tensor) -> Tensor:
        """Follow the gradients of a step, finite or not, bool [L]. Returns bool [L]: whose scale was halved."""
        if self.scale is None or not self.moves:
            return torch.zeros_like(finite)
        halved = ~finite & (self.growth > 0) & (self.scale > LEAST)
        good = torch.where(finite, self.good + 1, 0)
        doubled = (self.growth > 0) & (good == self.growth)
        larger = torch.where(doubled & torch.isfinite(self.scale * 2), self.scale * 2, self.scale)
        self.scale.copy_(torch.where(halved, (self.scale / 2).clamp(min=LEAST), larger))
        self.good.copy_(torch.where(doubled, 0, good))
        return halved

    def state(self) -> dict[str, Tensor]:
        """Scales that move and their counts: name -> the tensor itself [L]."""
        return {"loss_scale": self.scale, "good_steps": self.good} if self.moves and self.scale is not None else {}
