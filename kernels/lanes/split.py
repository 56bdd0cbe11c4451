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
    """The groups of a layer, which together are all lanes. where: the lanes of each, as an index of the lane axis: a
    slice where they lie side by side, else int64 [lanes]."""

    groups: tuple[Group, ...]
    where: tuple[slice | Tensor, ...]

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [L, …] as a tensor for each group; not to be written to."""
        return _Cut.apply(x, self.where)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `cut`."""
        return _Join.apply(self.where, *parts)


def make_split(groups: Sequence[Group], device: torch.device) -> Split:
    """The split into these groups."""
    return Split(tuple(groups), tuple(_index(group.lanes, device) for group in groups))


def _index(lanes: tuple[int, ...], device: torch.device) -> slice | Tensor:
    whole = range(lanes[0], lanes[-1] + 1)
    return slice(whole.start, whole.stop) if lanes == tuple(whole) else torch.tensor(lanes, device=device)


def _taken(x: Tensor, where: Sequence[slice | Tensor]) -> tuple[Tensor, ...]:
    return tuple(x[lanes] if isinstance(lanes, slice) else x.index_select(0, lanes) for lanes in where)


def _put(parts: Sequence[Tensor], where: Sequence[slice | Tensor]) -> Tensor:
    """Each part where it belongs, in one pass over it."""
    first = parts[0]
    out = first.new_empty(sum(len(part) for part in parts), *first.shape[1:])
    for part, lanes in zip(parts, where, strict=True):
        if isinstance(lanes, slice):
            out[lanes] = part
        else:
            out.index_copy_(0, lanes, part)
    return out


class _Cut(Function[tuple[Tensor, ...]]):
    """x [L, …] as tensors of some lanes each; their gradients are put back without a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: tuple[slice | Tensor, ...]) -> tuple[Tensor, ...]:
        ctx.where = where
        return _taken(x, where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _put(gradients, ctx.where), None


class _Join(Function[Tensor]):
    """The inverse of `_Cut`."""

    @staticmethod
    def forward(ctx: Any, where: tuple[slice | Tensor, ...], *parts: Tensor) -> Tensor:
        ctx.where = where
        return _put(parts, where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, *tuple[Tensor, ...]]:
        return None, *_taken(g, ctx.where)
