"""The error of a quantizer on a bell curve: the yardstick by which operands of a recipe are compared without
training."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fp4dse.dse import Quantizer
from fp4dse.kernels import statistics

SHAPE = (256, 1024)


@cache
def _normal() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def gaussian_statistics(quantizer: Quantizer) -> dict[str, Any]:
    """`statistics` of the quantizer on 256 × 1024 standard normal numbers, always the same ones."""
    return statistics(_normal(), quantizer)
