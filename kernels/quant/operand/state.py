"""State that a slot carries from one training step to the next: tensor maxima, the largest exponents of operands in FP8
(ops/fp8), and moving averages of weights.

It is a dict of tensors, the lane axis first. A new value is written into the memory of the old one, because a captured
CUDA graph reads it there.

A maximum that is not finite is never kept: where a loss scale moves, such a step is left out, and the next one goes on
from the maxima before it. A held maximum is zero after a tensor of zeros, or as long as none was finite; the factor is
then one. It is taken again at steps 1, 2, 4, 8 … of the first period, rather than once that is over. Which steps these
are does not depend on the maxima, so that no other step has to measure them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.rounding import Ema
from fp4dse.kernels.ops.fp8 import STEPS, History
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.quant.spec.feedback import fed_back, power_above

EVERY_STEP = {"current": True, "previous": True, "held": False, "history": False, "feedback": False}
"""`TensorScale.amax` -> True if every step's maximum is taken, else one in so many. Another policy is a KeyError."""
EMA_STEPS = 10
"""Steps before a moving average takes part in rounding."""


class Maxima:
    """The tensor maxima that tensor scales follow, by each lane's policy (`TensorScale.amax`): those of this step or of
    the previous one, held ones, the largest of so many steps, or powers of two with feedback.

    A maximum that is not finite is not kept: the one before stays, or zero if there was none, which is a factor of one.
    """

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
        anew = [1 if s is None or EVERY_STEP[s.amax] else n for s, n in zip(scales, steps, strict=True)]
        self.anew = column(anew)
        """Steps after which a maximum is taken into the state."""
        self.held = column([s is not None and s.amax == "held" for s in scales])
        self.history = column([s is not None and s.amax == "history" for s in scales])
        self.longest = max([n for s, n in zip(scales, steps, strict=True) if s and s.amax == "history"], default=0)
        fed_back = [s is not None and s.amax == "feedback" for s in scales]
        self.feedback = column(fed_back) if any(fed_back) else None
        self.always = any(s is None or s.amax != "held" for s in scales)
        self.periods = set(steps)

    def due(self, step: int) -> bool:
        """True if the state depends on the maxima of this step's tensor in some lane."""
        return self.has_state and (
            self.always or any(step % period == 0 or (step < period and is_retry(step)) for period in self.periods)
        )

    def __call__(self, state: dict[str, Tensor], take: Callable[[], Tensor], use: Use) -> Tensor | None:
        """The maxima to scale by, [L]; None where they are the current ones in every lane. `take` returns these, and is
        called only where some lane needs them. State changes in training alone."""
        if use.clip is not None:
            return use.clip if self.has_factor else None
        if not self.has_state:
            return None
        old = found(state, "amax", use, use.term)
        if old is not None and not self.always and not (use.training and use.measuring):
            return old[:, 0]
        current = take()[:, None]
        taken = (use.step % self.anew == 0) if use.training else self.current
        if old is None:  # the first step has no past
            taken, old = torch.ones_like(taken), torch.zeros_like(current)
            used = current if self.feedback is None else torch.where(self.feedback, power_above(current), current)
        else:
            if use.training:
                taken = taken | (self.held & (use.step < self.anew) & is_retry(use.step) & (old == 0))
            refresh = taken & self.not_previous
            refresh = refresh if self.feedback is None else refresh & ~self.feedback
            used = torch.where(refresh, current, old)
        if self.longest:
            used = self._of_history(state, current, used, use)
        if use.training:
            kept = torch.where(taken & (current < torch.inf), current, old)
            kept = kept if self.feedback is None else torch.where(self.feedback, fed_back(used, current), kept)
            store(state, "amax", kept, use, use.term)
        return used[:, 0]

    def _of_history(self, state: dict[str, Tensor], current: Tensor, used: Tensor, use: Use) -> Tensor:
        """The maxima to scale by, [L, 1]: the largest of a lane's last steps where it has a history, else `used`.

        Step t stands in place t mod steps of the lane's row; a maximum that is not finite is left out.
        """
        past = found(state, "history", use, use.term)
        if past is not None:
            used = torch.where(self.history, past.amax(1, keepdim=True), used)
        if use.training:
            row = current.new_zeros(len(current), self.longest) if past is None else past
            place = use.step % self.steps % self.longest  # lanes without a history may have more steps
            value = torch.where(self.history & (current < torch.inf), current, 0.0)
            store(state, "history", row.scatter(1, place, value), use, use.term)
        return used


def is_retry(step: Any) -> Any:
    """True at steps 1, 2, 4, 8 …; of a tensor of numbers bool, of an int a truth value."""
    return (step > 0) & (step & (step - 1) == 0)


class Average:
    """The moving averages of a weight, for lanes that round towards them."""

    def __init__(self, quantizers: Sequence[Quantizer], device: torch.device) -> None:
        betas = [q.rounding.beta if isinstance(q.rounding, Ema) else 0.0 for q in quantizers]
        self.betas = torch.tensor(betas, device=device)[:, None, None] if any(betas) else None

    def __call__(self, state: dict[str, Tensor], w: Tensor, use: Use) -> Tensor:
        """The average of w [L, R, C] with this step's weight in it; NaN in the first EMA_STEPS steps."""
        assert self.betas is not None
        average = found(state, "average", use)
        if average is None:
            average = w.clone()
        elif use.training:
            average = average * self.betas + w * (1 - self.betas)
        if use.training:
            store(state, "average", average, use)
        return torch.where(use.step >= EMA_STEPS, average, torch.nan)


@contextmanager
def history(state: dict[str, Tensor], use: Use, term: int) -> Iterator[History]:
    """The largest exponents of an operand's term in the steps before, to be read and written in the block. What is
    written is what a pass that is made again writes, too."""
    tops = found(state, "tops", use, term)
    is_new = tops is None
    if tops is None:
        count = len(use.seeds)
        tops = torch.zeros(count, STEPS, dtype=torch.int32, device=use.seeds.device)
    yield History(tops, use.step, use.training)
    if use.training and (is_new or use.members):  # else it was written where it lies
        store(state, "tops", tops, use, term)


def found(state: dict[str, Tensor], kind: str, use: Use, term: int | None = None) -> Tensor | None:
    """The value of a kind in the layer of `use`, None if there is none; where a pass is made again, what it found the
    first time. Of layers whose lanes stand side by side, those of all."""
    values = [_found(state, key, use) for key in _keys(kind, use, term)]
    if not use.members:
        return values[0]
    there = [value for value in values if value is not None]
    return torch.stack(there, 1).flatten(0, 1) if len(there) == len(values) else None


def store(state: dict[str, Tensor], kind: str, value: Tensor, use: Use, term: int | None = None) -> None:
    """Write a value into the memory of the last one of that kind and layer; not where a pass is made again."""
    if use.journal is not None and use.journal.mode == "again":
        return
    keys = _keys(kind, use, term)
    values = value.unflatten(0, (-1, len(keys))).unbind(1) if use.members else (value,)
    if use.journal is not None and use.journal.mode == "first":
        for key in keys:
            old = state.get(key)
            use.journal.before.setdefault((id(state), key), None if old is None else old.clone())
    kept = {key: state[key] for key in keys if key in state}
    if kept:
        torch._foreach_copy_(list(kept.values()), [v for k, v in zip(keys, values, strict=True) if k in kept])
    state.update({key: v.clone() for key, v in zip(keys, values, strict=True) if key not in kept})


def _found(state: dict[str, Tensor], key: str, use: Use) -> Tensor | None:
    if use.journal is not None and use.journal.mode == "again":
        return use.journal.before.get((id(state), key), state.get(key))
    return state.get(key)


def _keys(kind: str, use: Use, term: int | None) -> list[str]:
    """The names of a value: its kind, the layer, and the term where there is one for each."""
    end = "" if term is None else f" {term}"
    return [f"{kind} {layer}{end}" for layer in use.members or (use.layer,)]
