"""OsciReset (TetraJet-v2, 2510.27527): weights that oscillate are set to what the forward quantizer makes of them.

    at the end of a window of 50 steps          W <- Q(W)  where  R_w >= threshold           (oscillation.py has R_w)

A weight that hops over a threshold of the grid is put into the middle of its bin, from where it has a way to go before
it hops again. The first window begins after a share `start` of the steps, and then one every so many. A reset comes
between two steps; the optimizer keeps its momenta. Lanes without one, and weights that are not block-scaled, are left
as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fp4dse.dse import ConfigError
from fp4dse.dse.oscillation import OsciReset, Reset
from fp4dse.kernels import LaneNumerics, QuantLinear
from fp4dse.tasks.optimizers.oscillation import Oscillation

WINDOW = 50
"""Steps of a window (2510.27527)."""


class OsciResets:
    """The resets of all lanes, one or None each, of a training of so many steps.

    ConfigError where there are any and the model has no layers of ours: a plain torch module.
    """

    def __init__(self, model: nn.Module, numerics: LaneNumerics, resets: Sequence[Reset], steps: int) -> None:
        if any(resets) and not any(isinstance(module, QuantLinear) for module in model.modules()):
            raise ConfigError("training.reset", "osci-reset", "none, for plain torch modules")
        ends = [set(ends_of(reset, steps)) if reset else set() for reset in resets]
        self.watched = Oscillation(model, numerics, set().union(*ends), WINDOW)
        thresholds = [reset.threshold if reset else math.inf for reset in resets]
        self.thresholds: dict[int, Tensor] = {}
        """End of a window -> the ratio from which on a lane's weights are reset [L, 1]; inf where no window of the
        lane ends then."""
        for end in self.watched.ends:
            here = [threshold if end in of else math.inf for threshold, of in zip(thresholds, ends, strict=True)]
            self.thresholds[end] = torch.tensor(here, device=numerics.step.device)[:, None]

    @torch.no_grad()
    def apply(self, step: int) -> None:
        """Reset what oscillated, if a window ends before step `step`; to be called before every step."""
        if (moved := self.watched.observe(step)) is None:
            return
        ratios = moved.ratios()
        resets = (ratios >= self.thresholds[step]) & ratios.isfinite()
        weights = [layer.weight for layer in self.watched.layers.values()]
        sizes = [weight[0].numel() for weight in weights]
        for weight, chosen, last in zip(weights, resets.split(sizes, 1), moved.last.split(sizes, 1), strict=True):
            weight.copy_(torch.where(chosen.view_as(weight), last.view_as(weight), weight))


def ends_of(reset: OsciReset, steps: int) -> range:
    """The steps before which windows end, of a training of so many."""
    return range(math.ceil(reset.start * steps) + WINDOW, steps, reset.every)
