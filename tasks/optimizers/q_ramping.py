"""Q-Ramping (TetraJet, 2502.20853): weights that oscillate are updated less often, by more at a time.

    R_w     over the next 30 steps, which are trained as plain AdamW does and undone            (oscillation.py has R_w)
    n_w     = min(every, ⌊⌊R_w / alpha⌋ · beta + 1⌋)       steps between updates of a weight     (optimizers/ramped.py)

Before the first step, and then every so many. As in the released code, which does so once an epoch on batches of its
own; here they are those of the next steps. Weights that are not block-scaled are updated at every step, and so are all
others until 30 steps are left to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fp4dse.dse import ConfigError
from fp4dse.dse.oscillation import QRamping, Ramping
from fp4dse.kernels import LaneNumerics, QuantLinear
from fp4dse.tasks.optimizers.oscillation import WINDOW, Oscillation
from fp4dse.tasks.task import Task

Look = Callable[[int], None]


class QRampings:
    """The periods of all lanes' weights, by a ramping a lane or None.

    ConfigError where there are any, and the model has no layers of ours, or learns from samples of its own.
    """

    def __init__(self, model: nn.Module, numerics: LaneNumerics, rampings: Sequence[Ramping], task: Task) -> None:
        if any(rampings) and not any(isinstance(module, QuantLinear) for module in model.modules()):
            raise ConfigError("training.ramping", "q-ramping", "none, for plain torch modules")
        if any(rampings) and task.rolls_out:
            raise ConfigError("training.ramping", "q-ramping", f"none with {task.name}, whose steps cannot be undone")
        self.rampings = rampings
        starts = set().union(*(starts_of(ramping, task.steps) for ramping in rampings if ramping))
        self.watched = Oscillation(model, numerics, {start + WINDOW for start in starts})
        self.starts = {end - WINDOW for end in self.watched.ends}
        sizes = [p[0].numel() for p in model.parameters()]
        begins = dict(zip(map(id, model.parameters()), torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
        weights = [layer.weight for layer in self.watched.layers.values()]
        self.places = [slice(begin := begins[id(w)], begin + w[0].numel()) for w in weights]
        """Of each watched layer's weight in the flat tensor of the optimizer."""

    def apply(self, step: int, undone: Callable[[range, Look], None], kept: Mapping[str, Tensor]) -> None:
        """Find the periods anew before step `step`, if they are due then; to be called before every step.

        undone: trains steps as plain AdamW does, calls what it is given before each and after the last, and undoes all.
        kept: the optimizer's state, with `period` int32 [L, P].
        """
        if step not in self.starts:
            return
        found: list[Tensor] = []

        def look(at: int) -> None:
            if (moved := self.watched.observe(at)) is not None:
                found.append(moved.ratios())

        undone(range(step, step + WINDOW), look)
        for lane, ramping in enumerate(self.rampings):
            if ramping and step % ramping.every == 0:
                new = periods(found[0][lane], ramping)
                for place, period in zip(self.places, new.split([p.stop - p.start for p in self.places]), strict=True):
                    kept["period"][lane, place] = period


def starts_of(ramping: QRamping, steps: int) -> range:
    """The steps before which periods are found anew, of a training of so many."""
    return range(0, max(0, steps - WINDOW + 1), ramping.every)


def periods(ratios: Tensor, ramping: QRamping) -> Tensor:
    """Steps between updates of weights of such ratios, int32; one where a weight has none."""
    wanted = torch.floor(torch.floor(ratios / ramping.alpha) * ramping.beta + 1)
    return wanted.nan_to_num(1.0).clamp(1, ramping.every).to(torch.int32)
