"""Losses and metrics that several tasks take, element by element: the engine averages over all but the lane axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """-log p of the labels, in nats: logits out [L, …, classes], y int64 [L, …] -> [L, …]."""
    return -F.log_softmax(out, dim=-1).gather(-1, y[..., None])[..., 0]


def correct(out: Tensor, y: Tensor) -> Tensor:
    """1 where the largest of the logits is the label's, else 0; shapes as for `cross_entropy`."""
    return (out.argmax(dim=-1) == y).to(torch.float32)
