"""Recomputation (activation checkpointing, 1604.06174): a part of a model keeps its inputs for the backward pass and
nothing in between; what is needed of that is made again, with the same bits.

Random bits come from counters, so that they are the same. What quantizers carry from step to step is not: a pass that
was made once has changed it. So the first pass notes what it found there (`Journal`), and the second one reads that and
changes nothing, nor does it count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4dse.kernels.autograd import Function, contraction
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.quant.operand.records import Journal

Outputs = tuple[Tensor | None, ...]


def recomputed(module: nn.Module, numerics: LaneNumerics, *inputs: Tensor | None) -> Any:
    """module(*inputs), a tuple of tensors and None, whose inside is made again in the backward pass.

    Gradients are those of inputs and of the module's parameters.
    """
    if not torch.is_grad_enabled():
        return module(*inputs)
    return _Recomputed.apply(module, numerics, len(inputs), *inputs, *module.parameters())


class _Recomputed(Function[Outputs]):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, numerics: LaneNumerics, count: int, *tensors: Tensor | None) -> Outputs:
        ctx.module, ctx.numerics, ctx.journal = module, numerics, Journal()
        ctx.save_for_backward(*tensors[:count])
        ctx.set_materialize_grads(False)
        with _pass(numerics, ctx.journal, "first"):
            return tuple(module(*tensors[:count]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Outputs:
        needed = ctx.needs_input_grad[3:]
        inputs = [
            x if x is None else x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, needed, strict=False)
        ]
        with torch.enable_grad(), _pass(ctx.numerics, ctx.journal, "again"):
            outputs = ctx.module(*inputs)
        ctx.journal.before.clear()
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None]
        of = [x for x, need in zip([*inputs, *ctx.module.parameters()], needed, strict=True) if need]
        found = iter(_gradients(pairs, of))
        return None, None, None, *(next(found) if need else None for need in needed)


def _gradients(pairs: Sequence[tuple[Tensor, Tensor]], of: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of tensors from those of outputs, None for a tensor that no output depends on."""
    outputs, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(contraction(outputs, gradients), of, allow_unused=True)


@contextmanager
def _pass(numerics: LaneNumerics, journal: Journal, mode: Literal["first", "again"]) -> Iterator[None]:
    """Forward with this journal. Numerics that layers keep a copy of know it afterwards, and then it does nothing."""
    numerics.journal, journal.mode = journal, mode
    try:
        yield
    finally:
        numerics.journal, journal.mode = None, ""
