"""The channels that a layer treats apart, chosen in its forward product and kept for what follows.

The weight's gradient has the channels of the forward product before it, and held-out data those chosen last.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp4dse.dse.channels import Corrected, Held
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.quant.operand.state import found, store

KIND = "channels"
"""Of what is carried."""


class Choice:
    """The order of every layer's channels (spec/channels.py), of lanes that choose alike.

    state  tensors carried from step to step, those of the slot of x: `channels LAYER`, int64 [L, K]
    """

    def __init__(self, channels: Held | Corrected, state: dict[str, Tensor]) -> None:
        self.channels, self.state = channels, state
        self.untrained: dict[int, Tensor] = {}
        """Layer -> the order of its last forward product, before there is a state."""

    def of_forward(self, find: Callable[[], Tensor], use: Use) -> Tensor:
        """The order [L, K] for a forward product: chosen anew by `find` where that is due. State changes in training
        alone."""
        steps = int(self.channels.steps)
        order = found(self.state, KIND, use)
        if order is None:
            order = self.untrained[use.layer] = find()
        elif use.training:
            new = find()
            order = new if steps == 1 else torch.where(use.step % steps == 0, new, order)
        if use.training:
            self.untrained.pop(use.layer, None)
            store(self.state, KIND, order, use)
        return order

    def last(self, find: Callable[[], Tensor], use: Use) -> Tensor:
        """The order of the last forward product; before there was one, that which `find` finds."""
        order = self.state.get(f"{KIND} {use.layer}", self.untrained.get(use.layer))
        return find() if order is None else order
