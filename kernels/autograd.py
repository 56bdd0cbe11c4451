"""torch's `autograd.Function`, with a type for `apply`, which torch leaves untyped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch


class Function(torch.autograd.Function):
    """A function with a gradient of its own: static methods `forward` and `backward`, as torch has them."""

    if TYPE_CHECKING:
        apply: Callable[..., Any]
