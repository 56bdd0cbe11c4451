"""Cutting an operand into the blocks that share a scale, and joining it again. Operands are [L, rows, contraction]."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fp4dse.dse.quantizer import block_elements, tile


def cut(x: Tensor, block: int | str) -> Tensor:
    """[L, R, C] -> [L, n, B]. C must be a multiple of the block, for a tile R too."""
    lanes, rows, columns = x.shape
    if edge := tile(block):
        x = x.reshape(lanes, rows // edge, edge, columns // edge, edge).transpose(2, 3)
    size = {"row": columns, "tensor": rows * columns}.get(str(block)) or block_elements(block) or 1
    return x.reshape(lanes, -1, size)


def join(blocks: Tensor, shape: Sequence[int], block: int | str) -> Tensor:
    """The inverse of `cut`: [L, n, B] -> shape [L, R, C]."""
    lanes, rows, columns = shape
    if edge := tile(block):
        blocks = blocks.view(lanes, rows // edge, columns // edge, edge, edge).transpose(2, 3)
    return blocks.reshape(*shape)


def pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Zeros after the end of `dim` (1 or 2), up to a multiple of `size`."""
    missing = -x.shape[dim] % size
    if not missing:
        return x
    return F.pad(x, (0, missing) if dim == 2 else (0, 0, 0, missing))
