"""On which devices the Triton kernels run: what every operation asks that has one."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def has_kernels(x: Tensor) -> bool:
    """Whether x lies where they run."""
    return x.is_cuda and _takes(x.device)


@cache
def _takes(device: torch.device) -> bool:
    return why_not_fused(str(device)) is None


def why_not_fused(device: str) -> str | None:
    """The reason why the fused kernels are not taken on this device, or None if they are."""
    prefix = "fused quantizer not taken"
    if torch.device(device).type != "cuda":
        return f"{prefix} on {device}: it needs a CUDA device"
    if os.environ.get("FP4DSE_EAGER"):
        return f"{prefix}: FP4DSE_EAGER is set"
    if find_spec("triton") is None:
        return f"{prefix}: triton is not installed (pip install 'fp4dse[gpu]')"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"{prefix}: it needs compute capability 8.0, {torch.cuda.get_device_name(device)} has {capability}"
    return None
