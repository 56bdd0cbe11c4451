"""The columns of images, and the gradient of images from that of their columns, in one kernel each that reads and
writes every number once.

    im2col   a row has kh runs of kw·C numbers, each a piece of an image row, zero where it hangs over the edge
    col2im   a pixel gathers what the taps have for it, in their order, from +0; a tap that has nothing adds +0, which
             no sum feels that began with it

The bits are those of the definition. What counts images or rows has 64 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.columns import Window
from fp4dse.kernels.ops.launching import launch_grid

_COPIED, _SUMMED = 4096, 1024
"""Numbers of a program."""
_WIDEST = 128
_BIG = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _positions(block, area, SIZE: tl.constexpr):
    """Of the SIZE positions from block · SIZE on, `area` to an image: their numbers, images, and numbers therein."""
    first = block.to(tl.int64) * SIZE
    image = first // area
    within = (first - image * area).to(tl.int32) + tl.arange(0, SIZE)
    return first + tl.arange(0, SIZE), image + within // area, within % area


@triton.jit
def _im2col_kernel(
    x_ptr,
    out_ptr,
    rows,
    area,
    across,
    height,
    line,
    channels,
    stride,
    padding,
    run,
    runs,
    chunks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of one run of some rows. line: numbers of an image row; area, across: rows of an image and of a line
    of windows."""
    part = tl.program_id(0) % (runs * chunks)
    row, image, position = _positions(tl.program_id(0) // (runs * chunks), area, ROWS)
    i = part // chunks
    column = part % chunks * COLUMNS + tl.arange(0, COLUMNS)
    y = position // across * stride + i - padding
    along = ((position % across * stride - padding) * channels)[:, None] + column[None, :]
    exists = (row < rows)[:, None] & (column < run)[None, :]
    inside = ((y >= 0) & (y < height))[:, None] & (along >= 0) & (along < line)
    x = tl.load(x_ptr + ((image * height + y) * line)[:, None] + along, exists & inside, 0.0)
    tl.store(out_ptr + (row * (runs * run) + i * run)[:, None] + column[None, :], x, exists)


@triton.jit
def _col2im_kernel(
    g_ptr,
    out_ptr,
    pixels,
    area,
    width,
    channels,
    down,
    across,
    padding,
    chunks,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Some channels of some pixels. HEIGHT, WIDTH: of the kernel; down, across: windows of an image."""
    pixel, image, position = _positions(tl.program_id(0) // chunks, area, PIXELS)
    channel = tl.program_id(0) % chunks * CHANNELS + tl.arange(0, CHANNELS)
    y, z = position // width + padding, position % width + padding
    exists = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    dtype = out_ptr.dtype.element_ty
    total = tl.full([PIXELS, CHANNELS], 0.0, tl.float32)
    for i in tl.static_range(HEIGHT):
        u = (y - i) // STRIDE
        fits = (y >= i) & (u * STRIDE == y - i) & (u < down)
        for j in tl.static_range(WIDTH):
            v = (z - j) // STRIDE
            seen = fits & (z >= j) & (v * STRIDE == z - j) & (v < across)
            row = (image * down + u) * across + v
            at = row * (HEIGHT * WIDTH * channels) + (i * WIDTH + j) * channels
            g = tl.load(g_ptr + at[:, None] + channel[None, :], exists & seen[:, None], 0.0)
            total += g.to(dtype).to(tl.float32)
    tl.store(out_ptr + (pixel * channels)[:, None] + channel[None, :], total.to(dtype), exists)


def im2col(x: Tensor, window: Window) -> Tensor:
    """`columns.im2col` of float32 or bfloat16 images."""
    lanes, batch, height, width, channels = x.shape
    down, across = window.positions(height, width)
    rows, runs, run = lanes * batch * down * across, window.kernel[0], window.kernel[1] * channels
    out = x.new_empty(lanes, batch * down * across, runs * run)
    columns = _tile(run)
    chunks, tall = triton.cdiv(run, columns), _COPIED // columns
    programs = launch_grid(triton.cdiv(rows, tall) * runs * chunks)
    sizes = rows, down * across, across, height, width * channels, channels, window.stride, window.padding
    _im2col_kernel[programs](x.contiguous(), out, *sizes, run, runs, chunks, ROWS=tall, COLUMNS=columns, **_BIG)
    return out


def col2im(g: Tensor, window: Window, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """`columns.col2im` of a float32 or bfloat16 gradient."""
    lanes, batch, height, width, channels = shape
    down, across = window.positions(height, width)
    out, pixels, columns = g.new_empty(shape, dtype=dtype), lanes * batch * height * width, _tile(channels)
    chunks, tall = triton.cdiv(channels, columns), _SUMMED // columns
    programs = launch_grid(triton.cdiv(pixels, tall) * chunks)
    sizes = pixels, height * width, width, channels, down, across, window.padding, chunks
    kernel = {"HEIGHT": window.kernel[0], "WIDTH": window.kernel[1], "STRIDE": window.stride}
    _col2im_kernel[programs](g.contiguous(), out, *sizes, **kernel, PIXELS=tall, CHANNELS=columns, **_BIG)
    return out


def _tile(size: int) -> int:
    """Numbers of a row in a program: a power of two that leaves none idle, if one of 32 or more does."""
    whole = min(size & -size, _WIDEST)
    return whole if whole >= 32 else min(triton.next_power_of_2(size), _WIDEST)
