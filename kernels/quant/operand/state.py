"""State that a slot carries from one training step to the next: tensor maxima, and moving averages of weights.

It is a dict of tensors, the lane axis first. A new value is written into the memory of the old one, because a captured
CUDA graph reads it there.

A maximum that is not finite is never kept: where a loss scale moves, the step that has it is left out, and the next
step is to find what the one before had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.rounding import Ema
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.quant.spec.feedback import fed_back, power_above

EMA_STEPS = 10
"""Steps before a moving average takes part in rounding."""


class Maxima:
    """The tensor maxima that tensor scales follow: the current ones, those of the previous step, held ones, which are
    taken anew every so many steps, the largest of so many steps before, or powers of two with feedback. Lanes may
    differ in it. What is not finite leaves what is kept as it is; before there is any, zero: a factor of one."""

    def __init__(self, quantizers: Sequence[Quantizer], device: torch.device) -> None:
        scales = [q.tensor_scale for q in quantizers]
        self.has_factor = any(s is not None for s in scales)
        self.has_state = any(s is not None and s.amax != "current" for s in scales)

        def column(values: list[bool] | list[int]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        self.not_previous = column([s is None or s.amax != "previous" for s in scales])
        self.current = column([s is None or s.amax == "current" for s in scales])
        steps = [1 if s is None else max(1, round(s.steps)) for s in scales]
        self.steps = column(steps)
        anew = [1 if s is None or s.amax in ("current", "previous") else n for s, n in zip(scales, steps, strict=True)]
        self.anew = column(anew)
        """Steps after which a maximum is taken into the state."""
        self.history = column([s is not None and s.amax == "history" for s in scales])
        self.longest = max([n for s, n in zip(scales, steps, strict=True) if s and s.amax == "history"], default=0)
        fed_back = [s is not None and s.amax == "feedback" for s in scales]
        self.feedback = column(fed_back) if any(fed_back) else None
        self.always = any(s is None or s.amax != "held" for s in scales)
        self.periods = set(steps)

    def due(self, step: int) -> bool:
        """True if the state depends on the maxima of this step's tensor in some lane."""
        return self.has_state and (self.always or any(step % period == 0 for period in self.periods))

    def __call__(self, state: dict[str, Tensor], take: Callable[[], Tensor], use: Use) -> Tensor | None:
        """The maxima to scale by, [L]; None where they are the current ones in every lane. `take` returns these, and is
        called only where some lane needs them. State changes in training alone."""
        if use.clip is not None:
            return use.clip if self.has_factor else None
        if not self.has_state:
            return None
        key = f"amax {use.layer} {use.term}"
        old = found(state, key, use)
        if old is not None and not self.always and not (use.training and use.measuring):
            return old[:, 0]
        current = take()[:, None]
        taken = (use.step % self.anew == 0) if use.training else self.current
        if old is None:  # the first step has no past
            taken, old = torch.ones_like(taken), torch.zeros_like(current)
            used = current if self.feedback is None else torch.where(self.feedback, power_above(current), current)
        else:
            refresh = taken & self.not_previous
            refresh = refresh if self.feedback is None else refresh & ~self.feedback
            used = torch.where(refresh, current, old)
        if self.longest:
            used = self._of_history(state, current, used, use)
        if use.training:
            kept = torch.where(taken & (current < torch.inf), current, old)
            kept = kept if self.feedback is None else torch.where(self.feedback, fed_back(used, current), kept)
            store(state, key, kept, use)
        return used[:, 0]

    def _of_history(self, state: dict[str, Tensor], current: Tensor, used: Tensor, use: Use) -> Tensor:
        """The maxima to scale by, [L, 1]: the largest of a lane's last steps where it has a history, else `used`.

        Step t stands in place t mod steps of the lane's row; a maximum that is not finite is left out.
        """
        key = f"history {use.layer} {use.term}"
        past = found(state, key, use)
        if past is not None:
            used = torch.where(self.history, past.amax(1, keepdim=True), used)
        if use.training:
            row = current.new_zeros(len(current), self.longest) if past is None else past
            place = use.step % self.steps % self.longest  # lanes without a history may have more steps
            value = torch.where(self.history & (current < torch.inf), current, 0.0)
            store(state, key, row.scatter(1, place, value), use)
        return used


class Average:
    """The moving averages of a weight, for lanes that round towards them."""

    def __init__(self, quantizers: Sequence[Quantizer], device: torch.device) -> None:
        betas = [q.rounding.beta if isinstance(q.rounding, Ema) else 0.0 for q in quantizers]
        self.betas = torch.tensor(betas, device=device)[:, None, None] if any(betas) else None

    def __call__(self, state: dict[str, Tensor], w: Tensor, use: Use) -> Tensor:
        """The average of w [L, R, C] with this step's weight in it; NaN in the first EMA_STEPS steps."""
        assert self.betas is not None
        key = f"average {use.layer}"
        average = found(state, key, use)
        if average is None:
            average = w.clone()
        elif use.training:
            average = average * self.betas + w * (1 - self.betas)
        if use.training:
            store(state, key, average, use)
        return torch.where(use.step >= EMA_STEPS, average, torch.nan)


def found(state: dict[str, Tensor], key: str, use: Use) -> Tensor | None:
    """The value of a key, None if there is none; where a pass is made again, what it found the first time."""
    if use.journal is not None and use.journal.mode == "again":
        return use.journal.before.get((id(state), key), state.get(key))
    return state.get(key)


def store(state: dict[str, Tensor], key: str, value: Tensor, use: Use) -> None:
    """Write a value into the memory of the last one of that key; not where a pass is made again."""
    if use.journal is not None and use.journal.mode == "again":
        return
    old = state.get(key)
    if use.journal is not None and use.journal.mode == "first":
        use.journal.before.setdefault((id(state), key), None if old is None else old.clone())
    if old is None:
        state[key] = value.clone()
    else:
        old.copy_(value)
