"""A plain torch module with all that a lane must keep for itself, and the task that `plain_task` makes of it."""

import torch
from torch import nn

from fp4dse.tasks.own.plain import plain_task
from fp4dse.tasks.task import Task


class Net(nn.Module):
    """Batch norm, dropout, a tied weight, a frozen one, a buffer that is replaced and attention that packs its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Dropout(0.2)) for _ in range(2))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 16)
        self.head.weight = self.blocks[0][0].weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + len(x)
        h = self.norm(self.stem(x))
        for block in self.blocks:
            h = h + block(h)
        h = h + self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0]
        return {"out": self.head(self.frozen(h))}


def record(**changes) -> dict:
    """What a user's `build()` returns."""
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    return {
        "model": Net,
        "train": (x[:64], y[:64]),
        "test": (x[64:], y[64:]),
        "loss": lambda out, y: nn.functional.cross_entropy(out["out"], y),
        "metrics": {"accuracy": lambda out, y: (out["out"].argmax(-1) == y).float()},
        "steps": 8,
        "batch": 16,
        "lr": 1e-2,
    } | changes


def task_of(**changes) -> Task:
    """The task of that record."""
    return plain_task(record(**changes), "own.py:build", "own", "build")
