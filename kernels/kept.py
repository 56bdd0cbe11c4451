"""What a slot keeps from step to step, the lane axis first: tensor maxima, and moving averages of weights.

It lives in one dict of tensors. A value takes the place of the last one in its memory, so that a captured graph reads
it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.rounding import Ema

EMA_STEPS = 10
"""Steps after which a moving average takes part in rounding."""


class Keys(NamedTuple):
    """What random numbers and state are keyed by, and what else holds for a use of a slot.

    seeds: int64 [L]; step: int64 scalar on the device; training: whether state moves on; length: of the contraction,
    without the zeros that pad it (None: there are none); counting: whether to count what is lost; measuring: whether
    some held maximum may be due in this step (Maxima.due); part: of the batch.
    """

    seeds: Tensor
    step: Tensor
    layer: int
    training: bool
    length: int | None = None
    counting: bool = False
    measuring: bool = True
    part: int = 0


class Maxima:
    """Which tensor maximum each lane's tensor scale follows: the current, the previous step's, or one that is held."""

    def __init__(self, quantizers: Sequence[Quantizer], device: torch.device) -> None:
        scales = [q.tensor_scale for q in quantizers]
        self.has_state = any(s is not None and s.amax != "current" for s in scales)

        def column(values: list) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        self.previous = column([s is not None and s.amax == "previous" for s in scales])
        self.current = column([s is None or s.amax == "current" for s in scales])
        steps = [1 if s is None else max(1, round(s.steps)) for s in scales]
        self.steps = column(steps)
        self.always = any(s is None or s.amax != "held" for s in scales)
        self.periods = set(steps)

    def due(self, step: int) -> bool:
        """Whether some lane looks at its tensor in this step."""
        return self.has_state and (self.always or any(step % period == 0 for period in self.periods))

    def __call__(self, state: dict[str, Tensor], key: str, take: Callable[[], Tensor], keys: Keys) -> Tensor:
        """The maxima to scale by, [L, 1]; `take` returns the current ones, and is called only where some lane needs
        them. A step that is no training changes nothing."""
        old = state.get(key)
        if old is not None and not self.always and not (keys.training and keys.measuring):
            return old
        current = take()
        if old is None:  # the first step has no past
            used = current
        else:
            refresh = self.current | (~self.previous & (keys.step % self.steps == 0)) if keys.training else self.current
            used = torch.where(refresh, current, old)
        if keys.training:
            keep(state, key, torch.where(self.previous, current, used))
        return used


class Average:
    """The moving averages of a weight, for lanes that round towards them."""

    def __init__(self, quantizers: Sequence[Quantizer], device: torch.device) -> None:
        betas = [q.rounding.beta if isinstance(q.rounding, Ema) else 0.0 for q in quantizers]
        self.betas = torch.tensor(betas, device=device)[:, None, None] if any(betas) else None

    def __call__(self, state: dict[str, Tensor], w: Tensor, keys: Keys) -> Tensor:
        """The average of w [L, R, C] after this step's weight is taken in; NaN while it is too young."""
        assert self.betas is not None
        key = f"average {keys.layer}"
        average = state.get(key)
        if average is None:
            average = w.clone()
        elif keys.training:
            average = average * self.betas + w * (1 - self.betas)
        if keys.training:
            keep(state, key, average)
        return torch.where(keys.step >= EMA_STEPS, average, torch.nan)


def keep(state: dict[str, Tensor], key: str, value: Tensor) -> None:
    """Remember a value in the place of the last one: in its memory, which a captured graph reads."""
    if key in state:
        state[key].copy_(value)
    else:
        state[key] = value.clone()


class Keeping(Protocol):
    """What keeps tensors from step to step: a slot."""

    state: dict[str, Tensor]
    counts: dict[str, Tensor]


def kept_state(slots: Mapping[str, Keeping]) -> dict[str, Tensor]:
    """All that slots keep and have counted, by slot and key: the tensors themselves, the lane axis first."""
    return {
        f"{kind}/{name}/{key}": value
        for name, slot in slots.items()
        for kind, of in (("state", slot.state), ("counts", slot.counts))
        for key, value in of.items()
    }


def load_kept(slots: Mapping[str, Keeping], kept: Mapping[str, Tensor]) -> None:
    """Replace what slots keep by what `kept_state` returned, on their device."""
    for slot in slots.values():
        slot.state.clear()
        slot.counts.clear()
    for path, value in kept.items():
        kind, name, key = path.split("/", 2)
        of = slots[name].state if kind == "state" else slots[name].counts
        of[key] = value.clone()
