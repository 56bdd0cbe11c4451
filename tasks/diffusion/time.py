"""The time as a model sees it: sines and cosines of it (2006.11239), and two linear layers, the first with SiLU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from fp4dse.kernels import silu
from fp4dse.tasks.diffusion.process import TIMES


def time_shapes(waves: int, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the two layers; the embedding is `width` wide."""
    return {"time1": (width, waves), "time2": (width, width)}


def time_embedding(times: Tensor, layer: nn.ModuleDict, waves: int) -> Tensor:
    """Embedding [L, B, width] of times int64 [L, B], by the layers time1 and time2."""
    hidden = silu(layer["time1"](_waves(waves, times.device)[times]))
    return silu(layer["time2"](hidden))


@cache
def _waves(count: int, device: torch.device) -> Tensor:
    """float32 [TIMES, count]: sin and cos of t · 10000^(-2i/count), made on the CPU so that devices agree."""
    half = torch.arange(count // 2, dtype=torch.float64)
    angle = torch.arange(TIMES, dtype=torch.float64)[:, None] * 10000.0 ** (-half / (count // 2))
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(torch.float32).to(device)
