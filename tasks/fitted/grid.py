"""A weight's grid with its scales held: the numbers that each element may become while others around it change.

Scales follow from a weight once, as its quantizer makes them, and stay. In each block one element, the largest, is an
anchor: it keeps the value that rounding to nearest gives it. No other element is larger than the format's largest, so
that a scale that follows from the largest element is found again when the result is quantized, and nothing moves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.dse import ConfigError, Quantizer
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.outliers import outlier_words
from fp4dse.dse.own_formats import element_name
from fp4dse.dse.quantizer import tile
from fp4dse.dse.rounding import Nearest, rounding_name
from fp4dse.kernels import quantize


class Grid(NamedTuple):
    """The grid of a weight [N, K].

    scales   of each element, float64 [N, K], positive where the block holds anything
    levels   magnitudes of the element format, float64, ascending
    anchors  the elements that keep their value, bool [N, K], and `fixed`, their values, float64 [N, K]
    """

    scales: Tensor
    levels: Tensor
    anchors: Tensor
    fixed: Tensor

    def rounded(self, w: Tensor, column: int | slice = slice(None)) -> Tensor:
        """Weights [N, ·] of a column, or of several, to the grid: nearest, ties to the even code; anchors stay."""
        scales, anchors, fixed = (of[:, column] for of in (self.scales, self.anchors, self.fixed))
        found = nearest(w / scales, self.levels) * scales
        return torch.where(anchors, fixed, torch.where(scales > 0, found, 0.0))


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """x to the nearest of ±levels; the even index where two are as near, the last one beyond."""
    between = (levels[1:] + levels[:-1]) / 2
    low, high = (torch.bucketize(x.abs().contiguous(), between, right=right) for right in (False, True))
    return torch.sign(x) * levels[torch.where(low % 2 == 0, low, high)]


def why_not_held(q: Quantizer) -> ConfigError | None:
    """The reason why a weight's grid cannot be held under a quantizer, None if it can."""
    amax = q.tensor_scale.amax if q.tensor_scale else "current"
    named = {"tensor_scale.amax": (amax, "current"), "outliers": (outlier_words(q.outliers) or "none", "none")}
    for field, value in {"adapt": "none", "scaling": "amax", "range": "full", "arithmetic": "fp32"}.items():
        named[field] = getattr(q, field), value
    named["rounding"] = rounding_name(q.rounding), rounding_name(Nearest())
    found = {field: of for field, of in named.items() if of[0] != of[1]}
    if not found and (q.element not in ELEMENTS or q.codec != "block"):
        found["element"] = element_name(q.element), ", ".join(ELEMENTS) + " with one scale a block"
    for field, (value, accepted) in found.items():
        return ConfigError(f"fprop.w.{field}", value, f"{accepted} (weights are fitted to one grid)")
    return None


def hold(w: Tensor, quantizer: Quantizer, shrink: Tensor | None = None) -> Grid:
    """The grid of a weight [N, K] under a quantizer. K is a multiple of its unit, N of its tile's edge. ConfigError
    where `why_not_held`.

    shrink: factors of the blocks' maxima, at most 1, of each element [N, K], the same in a block: scales follow from
    these. The block of the largest element of all keeps its own where there is a tensor scale, which must not move.
    """
    q = quantizer.evaluated()
    if (reason := why_not_held(q)) is not None:
        raise reason
    w = w.detach().to(torch.float32)
    largest = spread(block_maxima(w, q), q, w)
    shrunk = w if shrink is None else w * shrink.to(torch.float32)
    if q.tensor_scale is not None:
        over = largest.amax(1, keepdim=True) if q.factors_over == "row" else largest.max()
        shrunk = torch.where(largest == over, w, shrunk)
    made = quantize(shrunk, q)
    assert made.scales is not None
    factor = made.tensor_scale.to(torch.float64)
    scales = spread(made.scales, q, w).to(torch.float64) * (spread_factor(factor, w) if factor.ndim else factor)
    levels = torch.tensor(ELEMENTS[str(q.element)].magnitudes(), dtype=torch.float64, device=w.device)
    first = _first_of_blocks(w.abs() == largest, q) & (largest > 0)
    wide = w.to(torch.float64)
    fixed = nearest(wide / torch.where(scales > 0, scales, 1.0), levels) * scales
    return Grid(scales, levels, first, fixed)


def block_maxima(w: Tensor, q: Quantizer) -> Tensor:
    """max |w| of each block of w [N, K], in the shape that scales have."""
    n, k = w.shape
    if edge := tile(q.block):
        return w.abs().view(n // edge, edge, k // edge, edge).amax((1, 3))
    if isinstance(q.block, int):
        return w.abs().view(n, -1, q.block).amax(2)
    return w.abs().amax(1, keepdim=True) if q.block == "row" else w.abs().amax().view(1, 1)


def spread(scales: Tensor, q: Quantizer, w: Tensor) -> Tensor:
    """One number a block, for each element of w [N, K]."""
    edge = tile(q.block) or 1
    scales = scales.reshape(-1, scales.shape[-1]).repeat_interleave(edge, 0)
    return scales.repeat_interleave(w.shape[1] // scales.shape[1], 1).expand(w.shape)


def spread_factor(factor: Tensor, w: Tensor) -> Tensor:
    """Factors of rows, segments or tiles, [·, ·], for each element of w [N, K]."""
    rows, columns = (of // by for of, by in zip(w.shape, factor.shape, strict=True))
    return factor.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def padded(w: Tensor, q: Quantizer) -> Tensor:
    """w [N, K] with zeros up to whole blocks."""
    edge = tile(q.block) or 1
    return F.pad(w, (0, -w.shape[1] % q.unit, 0, -w.shape[0] % edge))


def _first_of_blocks(is_so: Tensor, q: Quantizer) -> Tensor:
    """The first true element of each block of bool [N, K], false elsewhere."""
    n, k = is_so.shape
    edge = tile(q.block)
    rows, columns = (edge, edge) if edge else (1, q.block) if isinstance(q.block, int) else (1, k)
    rows = n if q.block == "tensor" else rows
    blocks = is_so.view(n // rows, rows, k // columns, columns).transpose(1, 2).flatten(2)
    first = blocks & (blocks.to(torch.int64).cumsum(2) == 1)
    return first.view(n // rows, k // columns, rows, columns).transpose(1, 2).reshape(n, k)
