"""Group and batch norm of images, channels last, with the gain and shift that follow them and the SiLU after those.

    out = (x - mean) · inverse        inverse = 1 / sqrt(mean (x - mean)² + eps)        y = out · gain + shift
    dx = (g' - mean g' - out · mean(g' out)) · inverse, g' = g · gain        dgain = Σ g out, dshift = Σ g, over pixels

x is [N, P, C]: N images of P pixels, or N lanes of P pixels and as many groups as channels. Sums go down the pixels, in
the order of `sums.lane_sum`, and then over the channels of a group. So means of g' and g' out come from dgain and
dshift, and tiles of pixels and whole groups can be read as they lie in memory. One that a program can hold is read
once. Else sums are made in stages, of parts of the pixels, then of these parts and the groups; and with the moments
given, the kernels are element-wise.

Every operation is a single IEEE rounding in the order of its definition and `ops.silu`, so that the
bits are theirs; between the two it is rounded to x's dtype, as between two functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fp4dse.kernels.ops.group_norm.kernels import backward_kernel, forward_kernel, moments_kernel, sum_kernel
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.layer_norm.triton import rows_of
from fp4dse.kernels.ops.sums import lane_sum as sum_of_lanes

_HELD = 14
"""2^14 numbers of a tensor are the most that a program holds; of leaves, whose numbers take registers, a quarter."""
_SMALL, _PART, _EACH = 11, 13, 12
"""Tiles of whole groups take more groups up to 2^11 numbers; 2^13 are of a part of a sum, 2^12 of what has none."""
_LINE, _LONG_LINE = 3, 5
"""2^3 channels are read together, if there are as many, or 2^5: 32 bytes of FP32, or 128."""


class _Tile(NamedTuple):
    """2^rows × 2^channels numbers, 2^of_a_warp a warp's; 2^levels channels for each group, if it has whole groups."""

    rows: int
    channels: int
    levels: int = 0
    of_a_warp: int = 10

    @property
    def flags(self) -> dict[str, int]:
        return {"ROW_LEVELS": self.rows, "CHANNELS": 1 << self.channels, "LEVELS": self.levels}

    @property
    def launch(self) -> dict[str, int | bool]:
        warps = 1 << max(min(self.rows + self.channels - self.of_a_warp, 4), 0)
        return {"num_warps": warps, "enable_fp_fusion": False}


def _bits(count: int) -> int:
    """Levels of a tree over so many."""
    return (count - 1).bit_length()


def _whole(rows: int, groups: int, of_group: int, line: int = _LINE) -> _Tile | None:
    """All rows of some groups, if a program holds them."""
    levels = _bits(of_group)
    more = max(line - levels, _SMALL - levels - _bits(rows), 0)
    tile = _Tile(_bits(rows), levels + min(more, _bits(groups)), levels)
    held = _HELD if of_group == 1 << levels else _HELD - 2
    return tile if tile.rows + tile.channels <= held else None


def _part(rows: int, channels: int) -> _Tile:
    wide = min(_bits(channels), _LONG_LINE)
    return _Tile(min(_PART - wide, _bits(rows)), wide)


def _each(rows: int, channels: int) -> _Tile:
    wide = min(_bits(channels), _LONG_LINE)
    return _Tile(min(_EACH - wide, _bits(rows)), wide, of_a_warp=9)


def why_not(x: Tensor, groups: int) -> str | None:
    """The reason why the kernels do not take x [..., C], or None if they do."""
    most = 1 << 13
    if x.numel() == 0 or x.shape[-1] // groups > most:
        return f"x: found {tuple(x.shape)} in {groups} groups; accepted: groups of 1 to {most} channels"
    return None


class _Norm(NamedTuple):
    """The arguments that the launches of one norm share; `numbers`: how many a moment is of."""

    x: Tensor
    groups: int
    gain: Tensor
    shift: Tensor
    scales: bool
    smooths: bool

    @property
    def numbers(self) -> float:
        return float(self.x.shape[1] * self.of_group)

    @property
    def of_group(self) -> int:
        return self.x.shape[2] // self.groups

    @property
    def strides(self) -> tuple[int, int]:
        return self.gain.stride(0), self.shift.stride(0)

    @property
    def flags(self) -> dict[str, int | bool]:
        return {"SCALES": self.scales, "SMOOTHS": self.smooths, "OF_GROUP": self.of_group}


def _norm(x: Tensor, groups: int, gain: Tensor | None, shift: Tensor | None, smooths: bool) -> _Norm:
    x = x.contiguous()
    nothing = x.view(-1, x.shape[2])
    scale, offset = (nothing if t is None else rows_of(t) for t in (gain, shift))
    return _Norm(x, groups, scale, offset, gain is not None, smooths)


def group_norm(
    x: Tensor, groups: int, gain: Tensor | None, shift: Tensor | None, eps: float, smooths: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm of x [N, P, C], or SiLU of it, in x's dtype; float32 means, variances and inverses [N, groups].

    gain, shift: [N, C] of one dtype, or None both."""
    norm = _norm(x, groups, gain, shift, smooths)
    (images, rows, channels), x = norm.x.shape, norm.x
    y, moments = torch.empty_like(x), x.new_empty(3, images, groups, dtype=torch.float32)
    mean, variance, inverse = moments
    whole = _whole(rows, groups, norm.of_group)
    if whole is None:
        _moments(norm, _sums(norm, "x"), mean)
        _moments(norm, _sums(norm, "squares", mean), variance, inverse, eps=eps)
    tile = whole or _each(rows, channels)
    tensors = x, norm.gain, norm.shift, y, mean, variance, inverse
    programs, parts = _programs(norm, images, rows, tile)
    numbers = rows, channels, parts, *norm.strides, norm.numbers, eps
    forward_kernel[launch_grid(programs)](
        *tensors, *numbers, WHOLE=whole is not None, **norm.flags, **tile.flags, **tile.launch
    )
    return y, mean, variance, inverse


def group_norm_gradient(
    x: Tensor,
    groups: int,
    mean: Tensor,
    inverse: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    g: Tensor,
    smooths: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, gain and shift from g, that of what `group_norm` gave for them."""
    norm = _norm(x, groups, gain, shift, smooths)
    (images, rows, channels), x, g = norm.x.shape, norm.x, g.contiguous()
    dx, sums = torch.empty_like(x), x.new_empty(2, images, channels, dtype=torch.float32)
    means = mean
    whole = _whole(rows, groups, norm.of_group)
    if whole is None:
        means = x.new_empty(2, images, groups, dtype=torch.float32)
        _moments(norm, _sums(norm, "gradients", mean, inverse, g), means, sums=sums)
    tile = whole or _each(rows, channels)
    tensors = x, mean, inverse, norm.gain, norm.shift, g, dx, sums, means
    programs, parts = _programs(norm, images, rows, tile)
    numbers = images, rows, channels, parts, *norm.strides, norm.numbers
    backward_kernel[launch_grid(programs)](
        *tensors, *numbers, WHOLE=whole is not None, **norm.flags, **tile.flags, **tile.launch
    )
    if gain is None:
        return dx, None, None
    d_gain, d_shift = sums.to(gain.dtype).unbind(0)
    return dx, d_gain, d_shift


def _programs(norm: _Norm, images: int, rows: int, tile: _Tile) -> tuple[int, int]:
    """Programs, and parts of the rows of an image."""
    parts = triton.cdiv(rows, 1 << tile.rows)
    wide = 1 << tile.channels
    blocks = triton.cdiv(norm.groups, wide >> tile.levels) if tile.levels else triton.cdiv(norm.x.shape[2], wide)
    return images * parts * blocks, parts


def _sums(
    norm: _Norm, of: str, mean: Tensor | None = None, inverse: Tensor | None = None, g: Tensor | None = None
) -> Tensor:
    """Sums of parts of the pixels [N, parts, C], or of gradients [2, N, parts, C]."""
    x, (images, rows, channels) = norm.x, norm.x.shape
    tile = _part(rows, channels)
    programs, roots = _programs(norm, images, rows, tile)
    out = x.new_empty(*[2] * (of == "gradients"), images, roots, channels, dtype=torch.float32)
    given = (x if t is None else t for t in (mean, inverse))
    tensors = x, *given, norm.gain, norm.shift, x if g is None else g, out
    sizes = {"ROW_LEVELS": tile.rows, "CHANNELS": 1 << tile.channels}
    numbers = images, rows, channels, roots, *norm.strides
    sum_kernel[launch_grid(programs)](*tensors, *numbers, OF=of, **norm.flags, **sizes, **tile.launch)
    return out


def _moments(
    norm: _Norm,
    parts: Tensor,
    means: Tensor,
    inverse: Tensor | None = None,
    sums: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Fills means [..., N, groups] from parts [..., N, roots, C], and inverse or sums of its shape, if asked for."""
    parts, (images, _, channels) = parts.flatten(0, -3), norm.x.shape
    if (tile := _whole(parts.shape[1], norm.groups, norm.of_group, line=0)) is None:
        parts = sum_of_lanes(parts, 1)[:, None]
        levels = _bits(norm.of_group)
        tile = _Tile(0, levels, levels)
    tensors = parts, norm.gain, parts if sums is None else sums, means, means if inverse is None else inverse
    programs, _ = _programs(norm, len(parts), parts.shape[1], tile)
    numbers = images, parts.shape[1], channels, norm.strides[0], norm.numbers, eps
    flags = {"SCALES": norm.scales and sums is not None, "INVERTS": inverse is not None, "OF_GROUP": norm.of_group}
    moments_kernel[launch_grid(programs)](*tensors, *numbers, **flags, **tile.flags, **tile.launch)
