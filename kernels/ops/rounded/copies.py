"""Copies in BF16 of parameters that are views [L, …] into one tensor [L, P], which an optimizer's kernel may write.

A copy lies in one piece, as products want their operands: all lanes of one parameter, then those of the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.kernels.ops.launching import TILE
from fp4dse.kernels.ops.rounded import keep_copy, refresh

_APART = 128
"""Copies begin at multiples of so many numbers, 256 bytes: no product's way may depend on what lies before its
operand."""
ALIGNED = 8
"""Numbers that a kernel writes at once where sizes and places are multiples of it."""


class Copies:
    """The copies of some parameters.

    values      bfloat16 [N], all copies
    places      int64 [T, 3], of each: where in a lane of the flat tensor it begins, its numbers there, and where in
                `values` its copy begins
    tiles       int32 [P / TILE, 2]: the first of them that reaches into a tile of the flat tensor, and the first that
                begins after the tile
    is_aligned  True if all of `places` are multiples of ALIGNED
    """

    def __init__(self, parameters: Sequence[tuple[Tensor, int]], length: int) -> None:
        """parameters: with where each begins in a lane of the flat tensor, which has `length` numbers; in that order,
        one or more."""
        self.parameters = [parameter for parameter, _ in parameters]
        rows, end = [], 0
        for parameter, start in parameters:
            rows.append((start, parameter[0].numel(), end))
            end += parameter.numel() + -parameter.numel() % _APART
        device = self.parameters[0].device
        self.values = torch.zeros(end, dtype=torch.bfloat16, device=device)
        for parameter, (_, _, at) in zip(self.parameters, rows, strict=True):
            keep_copy(parameter, self.values[at : at + parameter.numel()].view(parameter.shape))
        places, edges = torch.tensor(rows), torch.arange(0, length, TILE)
        begins, ends = places[:, 0].contiguous(), places[:, 0] + places[:, 1]
        first, after = torch.searchsorted(ends, edges, right=True), torch.searchsorted(begins, edges + TILE)
        self.tiles = torch.stack([first, after], 1).to(torch.int32).to(device)
        self.places, self.is_aligned = places.to(device), not (places % ALIGNED).any()
        self.refresh()

    def refresh(self, changed: bool = False) -> None:
        """Make copies of parameters that changed in place since theirs were made; of all, if `changed`."""
        for parameter in self.parameters:
            refresh(parameter, changed)
