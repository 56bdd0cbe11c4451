"""Numbers rounded to a dtype, to nearest even.

Weights of a population are views into one tensor: those of a lane lie together, lanes apart. Libraries read what lies
so at half the speed of memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.dispatch import Operation

_ROUNDED = Operation(__name__)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [L, …] rounded to a dtype; x itself if it has that."""
    if x.dtype == dtype:
        return x
    lies_apart = x[0].is_contiguous() and not x.is_contiguous()
    if lies_apart and (x.dtype, dtype) == (torch.float32, torch.bfloat16) and (kernels := _ROUNDED.kernels(x)):
        return kernels.rounded(x)
    return x.to(dtype)
