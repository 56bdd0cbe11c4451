"""torch's `autograd.Function`, with the type of its result, which torch leaves unsaid: `Function[Tensor]`; and a start
for backward passes whose first gradients are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Function(torch.autograd.Function, Generic[Result]):
    """A function with a gradient of its own: static methods `forward` and `backward`, as torch has them."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *operands: Any) -> Result: ...


def contraction(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """The sum of all output · gradient, to be differentiated and not to be read: the derivative by an output is its
    gradient, to the bit. `backward` and `torch.autograd.grad` take gradients themselves, but import sympy for them, for
    which a process takes .4 s, more than for a small training."""
    with torch.enable_grad():  # also in a backward pass
        return _Contraction.apply(gradients, *outputs)


class _Contraction(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients
