"""The update of what quantizers learn (kernels/learned.py), around that of an optimizer of any kind.

gradient  <- gradient + decay · alpha                   before all else: the decay is a term of the loss
alpha     <- max(alpha + (rate - 1) · its step, 2^-100)  after it: a learning rate of its own
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fp4dse.kernels.learned import LEAST, PREFIX, Clips


class Learned:
    """The places of learned numbers in the flat tensor of the optimizer, int64 [n], and their decays and rates
    [L, n]. only: a lane each, True where nothing else is trained."""

    def __init__(self, model: nn.Module, sizes: Sequence[int], device: torch.device, only: Sequence[bool]) -> None:
        begins = dict(zip(map(id, model.parameters()), torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
        found: dict[int, Clips] = {}
        for module in model.modules():
            clips: dict[str, Clips] = getattr(module, "clips", {})
            for operand, of_lanes in clips.items():
                found[begins[id(module.get_parameter(PREFIX + operand))]] = of_lanes

        def numbers(field: str, without: float) -> Tensor:
            rows = [[getattr(clip, field, without) for clip in of_lanes] for of_lanes in found.values()]
            return torch.tensor(rows, device=device).mT.contiguous()

        self.places = torch.tensor(list(found), dtype=torch.int64, device=device)
        self.is_any = bool(found)
        self.only = torch.tensor(only, device=device)[:, None] if any(only) else None
        if found:
            self.decay, self.rate = numbers("decay", 0.0), numbers("rate", 1.0)

    def of(self, flat: Tensor) -> Tensor:
        """The learned numbers among all [L, P]: a copy [L, n]."""
        return flat.index_select(1, self.places)

    def alone(self, gradient: Tensor) -> Tensor:
        """The gradient [L, P], zero outside the learned numbers in lanes that train nothing else."""
        if self.only is None:
            return gradient
        kept = torch.zeros_like(gradient).index_copy(1, self.places, self.of(gradient))
        return torch.where(self.only, kept, gradient)

    def with_decay(self, gradient: Tensor, flat: Tensor) -> Tensor:
        """The gradient [L, P] with the decays' terms."""
        return gradient.index_add(1, self.places, self.decay * self.of(flat))

    def moved(self, flat: Tensor, before: Tensor) -> None:
        """Lengthen the steps that the optimizer made from `before`, in place."""
        now = self.of(flat)
        own = torch.where(self.rate == 1, now, before + self.rate * (now - before))
        flat.index_copy_(1, self.places, own.clamp(min=LEAST))
