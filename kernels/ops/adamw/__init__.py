"""Adam, and AdamW in place (arXiv 1412.6980, 1711.05101), for lanes with numbers of their own.

    mean   <- β1 · mean + (1 - β1) · g             square <- β2 · square + (1 - β2) · g²
    update  = mean/(1 - β1^t) / (sqrt(square/(1 - β2^t)) + eps) + weight decay · w
    w      <- w - lr · update

Each operation is a single IEEE rounding, so that a lane's bits depend neither on its neighbours nor on the device. It
is memory that bounds a step: one kernel reads and writes each tensor once, single operations do so 22 times. Copies in
BF16, which some weights have, are written by the same kernel, which has the new numbers at hand.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.kernels.ops.rounded.copies import Copies

_ADAMW = Operation(__name__, native=True)

NUMBERS = ("step", "b1", "past1", "b2", "past2", "eps", "correction1", "correction2", "weight_decay")
"""The numbers of a lane that `adamw` takes, in this order; step: learning rate times its factor."""

IN_CACHE = 1 << 18
"""Elements in a piece, if a lane has no more: 22 operations, in turn, are much faster on these than on all."""


def adam(g: Tensor, mean: Tensor, square: Tensor, n: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's update [L, P] from gradient and momenta, and the new momenta. n: NUMBERS by name, [L, 1] each."""
    mean = mean * n["b1"] + g * n["past1"]
    square = square * n["b2"] + g * g * n["past2"]
    scale = sqrt(square / n["correction2"]) + n["eps"]
    return mean / n["correction1"] / scale, mean, square


def adamw(
    flat: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    alive: Tensor,
    numbers: Tensor,
    decaying: Tensor | None,
    copies: Copies | None = None,
) -> None:
    """One step in place: flat, mean, square, gradient [L, P]; alive bool [L]: the others keep their bits; numbers
    [L, 9] as in NUMBERS; decaying bool [P]: the elements that have weight decay, None for none; copies: of views into
    flat, None for none."""
    if kernels := _ADAMW.kernels(gradient):
        kernels.adamw(flat, mean, square, gradient, alive, numbers, decaying, copies)
        return
    for of in pieces(flat):
        _adamw(flat[of], mean[of], square[of], gradient[of], alive[of], numbers[of], decaying)
    if copies is not None:
        copies.refresh(changed=True)


def _adamw(
    flat: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    alive: Tensor,
    numbers: Tensor,
    decaying: Tensor | None,
) -> None:
    """The step by single operations."""
    n = dict(zip(NUMBERS, numbers[:, :, None].unbind(1), strict=True))
    update, new_mean, new_square = adam(gradient, mean, square, n)
    if decaying is not None:
        update = torch.where((n["weight_decay"] > 0) & decaying, update + flat * n["weight_decay"], update)
    new_flat = flat - n["step"] * update
    for old, new in (flat, new_flat), (mean, new_mean), (square, new_square):
        old.copy_(torch.where(alive[:, None], new, old))


def pieces(flat: Tensor) -> Iterator[slice]:
    """The lanes of [L, P] that single operations go over at a time: on a CPU so few that they stay in its cache."""
    some = len(flat) if flat.is_cuda else max(1, IN_CACHE // flat.shape[1])
    return (slice(first, first + some) for first in range(0, len(flat), some))
