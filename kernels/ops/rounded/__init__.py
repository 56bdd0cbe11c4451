"""Numbers rounded to a dtype, to nearest even.

Weights of a population are views into one tensor: those of a lane lie together, lanes apart. Libraries read what lies
so at half the speed of memory.

A tensor that is read more often than it changes may have a copy in BF16 beside it (`keep_copy`). One that is as new as
the tensor is taken, else the tensor is rounded. Torch counts what changes a tensor in place; what it does not see, a
kernel, a captured step or `.data`, has to write the copy too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.dispatch import Operation

_ROUNDED = Operation(__name__)
_COPY = "copy_in_bf16"
"""The attribute of a tensor that has its copy."""


class Copy:
    """A copy of a tensor in BF16. version: of the tensor when it was made, as torch counts them."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.version: int | None = None

    def __getstate__(self) -> dict[str, object]:
        """As one that is to be made: torch counts anew for a tensor that is loaded or copied."""
        return {"values": self.values, "version": None}


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [L, …] rounded to a dtype, not to be written to; x itself if it has that."""
    if x.dtype == dtype:
        return x
    copy = getattr(x, _COPY, None)
    if dtype == torch.bfloat16 and isinstance(copy, Copy) and copy.version == x._version:
        return copy.values
    if lies_apart(x) and (x.dtype, dtype) == (torch.float32, torch.bfloat16) and (kernels := _ROUNDED.kernels(x)):
        return kernels.rounded(x, x.new_empty(x.shape, dtype=dtype))
    return x.to(dtype)


def lies_apart(x: Tensor) -> bool:
    """True if each lane of x [L, …] lies in one piece, and not all of them together."""
    return x[0].is_contiguous() and not x.is_contiguous()


def keep_copy(x: Tensor, values: Tensor | None) -> None:
    """Have `values`, bfloat16 [L, …] in one piece, as the copy of float32 x, which is made by `refresh`; None: none."""
    if values is None:
        vars(x).pop(_COPY, None)
    else:
        setattr(x, _COPY, Copy(values))


def refresh(x: Tensor, changed: bool = False) -> None:
    """Make the copy of x anew if x is newer, or was changed behind torch's back. Not to be called between a forward and
    a backward pass."""
    copy: Copy = getattr(x, _COPY)
    if not changed and copy.version == x._version:
        return
    source = x.detach()
    if lies_apart(source) and (kernels := _ROUNDED.kernels(source)):
        kernels.rounded(source, copy.values)
    else:
        copy.values.copy_(source)
    copy.version = x._version
