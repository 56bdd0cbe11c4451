"""One layer whose lanes compute in different ways: they are put together in groups that compute alike.

Lanes of a population share the structure of their recipe. What their rules for layers (dse/layers/rule.py) change may
give some of them another one in a layer: those are computed apart there, and the results are joined again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4dse.kernels.autograd import Function

if TYPE_CHECKING:
    from fp4dse.kernels.lanes import LaneNumerics


class Group(NamedTuple):
    """Lanes that compute alike in a layer: their positions in the population, in rising order, and their numerics."""

    lanes: tuple[int, ...]
    numerics: LaneNumerics


class Split(NamedTuple):
    """The groups of a layer, which together are all lanes.

    order    int64 [L]: the lanes, group after group; None where they lie so already
    places   int64 [L]: where each lane lies in `order`
    """

    groups: tuple[Group, ...]
    order: Tensor | None
    places: Tensor | None

    def cut(self, x: Tensor) -> Sequence[Tensor]:
        """x [L, …] as a tensor for each group."""
        if self.order is not None:
            x = _Reordered.apply(x, self.order, self.places)
        return x.split([len(group.lanes) for group in self.groups])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `cut`."""
        x = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        if self.places is None:
            return x
        return _Reordered.apply(x, self.places, self.order)


def make_split(groups: Sequence[Group], device: torch.device) -> Split:
    """The split into these groups."""
    order = [lane for group in groups for lane in group.lanes]
    if order == sorted(order):
        return Split(tuple(groups), None, None)
    places = sorted(range(len(order)), key=order.__getitem__)
    return Split(tuple(groups), *(torch.tensor(of, device=device) for of in (order, places)))


class _Reordered(Function):
    """x[order] of x [L, …]; places: the inverse of order. Gradients are put back without a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.places = places
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g.index_select(0, ctx.places), None, None
