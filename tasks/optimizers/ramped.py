"""AdamW whose steps between updates are each weight's own (Q-Ramping, arXiv 2502.20853 and its released code).

    count <- count + 1,  sum <- sum + g
    where the period divides the count:      Adam's momenta and update by sum / count, times count; count, sum <- 0
    elsewhere                                momenta stay, no update
    w     <- w - lr · (update + weight decay · w)          weight decay at every step

Bias corrections count all steps. A period may change while a weight waits; then its count goes on. Where all periods
are one these are AdamW's bits, so that lanes without any share a population with those that have some.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fp4dse.kernels.ops.adamw import NUMBERS, adam, pieces
from fp4dse.kernels.ops.rounded.copies import Copies


def state(flat: Tensor) -> dict[str, Tensor]:
    """Tensors kept beside AdamW's momenta, for weights [L, P]: steps between updates, gradients since the last one and
    their number."""
    return {
        "period": torch.ones_like(flat, dtype=torch.int32),
        "count": torch.zeros_like(flat, dtype=torch.int32),
        "sum": torch.zeros_like(flat),
    }


def restart(kept: Mapping[str, Tensor]) -> None:
    """Make it plain AdamW, which waits for nothing."""
    kept["period"].fill_(1)
    kept["count"].zero_()
    kept["sum"].zero_()


def adamw(
    flat: Tensor,
    kept: Mapping[str, Tensor],
    gradient: Tensor,
    alive: Tensor,
    numbers: Tensor,
    decaying: Tensor | None,
    copies: Copies | None = None,
) -> None:
    """One step in place; arguments as of kernels.ops.adamw.adamw, kept: its momenta and `state`."""
    for of in pieces(flat):
        here = {name: value[of] for name, value in kept.items()}
        n = dict(zip(NUMBERS, numbers[of][:, :, None].unbind(1), strict=True))
        count = here["count"] + 1
        total = torch.where(count == 1, gradient[of], here["sum"] + gradient[of])
        due = count % here["period"] == 0
        update, mean, square = adam(total / count, here["mean"], here["square"], n)
        update = torch.where(due, update * count, 0.0)
        if decaying is not None:
            update = torch.where((n["weight_decay"] > 0) & decaying, update + flat[of] * n["weight_decay"], update)
        new = {
            "mean": torch.where(due, mean, here["mean"]),
            "square": torch.where(due, square, here["square"]),
            "count": torch.where(due, 0, count),
            "sum": torch.where(due, 0.0, total),
        }
        flat[of].copy_(torch.where(alive[of, None], flat[of] - n["step"] * update, flat[of]))
        for name, value in new.items():
            here[name].copy_(torch.where(alive[of, None], value, here[name]))
    if copies is not None:
        copies.refresh(changed=True)
