"""torch's `autograd.Function`, with the type of its result, which torch leaves unsaid: `Function[Tensor]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class Function(torch.autograd.Function, Generic[Result]):
    """A function with a gradient of its own: static methods `forward` and `backward`, as torch has them."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *operands: Any) -> Result: ...
