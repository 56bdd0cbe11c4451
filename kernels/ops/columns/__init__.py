"""The columns of images, and what a gradient of them is to the images: a convolution is a product of such columns.

    columns[(b, u, v), (i, j, c)] = x[b, s·u + i - p, s·v + j - p, c]        zero outside the image
    dx[b, y, z, c] = Σ over the taps (i, j) of dcolumns[(b, u, v), (i, j, c)],   s·u + i - p = y,   s·v + j - p = z

The channels of an image stand last, so that the columns of one kernel row are kw·C neighbours of an image row: im2col
copies kh such runs a row. A pixel's sum begins with +0 and is taken in FP32 in the order of the taps, whatever lane and
device, and rounded once, to the image's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.kernels.dispatch import Operation

_COLUMNS = Operation(__name__)


class Window(NamedTuple):
    """The part of an image that a convolution sees: a kernel of (height, width) in steps of `stride`, with so many
    zeros around the image."""

    kernel: tuple[int, int]
    stride: int = 1
    padding: int = 0

    @property
    def is_pixel(self) -> bool:
        """True if columns are the pixels themselves."""
        return self == ((1, 1), 1, 0)

    def positions(self, height: int, width: int) -> tuple[int, int]:
        """(H', W'), how often it fits. ValueError for an image that is smaller than the kernel."""
        sizes = height + 2 * self.padding, width + 2 * self.padding
        if any(n < k for n, k in zip(sizes, self.kernel, strict=True)):
            raise ValueError(f"image of {height}×{width} with padding {self.padding}: kernel {self.kernel}")
        down, across = ((n - k) // self.stride + 1 for n, k in zip(sizes, self.kernel, strict=True))
        return down, across


def im2col(x: Tensor, window: Window) -> Tensor:
    """Images [L, B, H, W, C] -> columns [L, B·H'·W', kh·kw·C], the contraction ordered (kh, kw, C)."""
    if window.is_pixel:
        return x.flatten(1, 3)
    if kernels := _COLUMNS.kernels(x):
        return kernels.im2col(x, window)
    (height, width), stride, p = window.kernel, window.stride, window.padding
    channels = x.shape[-1]
    lines = F.pad(x, (0, 0, p, p, p, p)).flatten(3)  # [L, B, H + 2p, (W + 2p)·C]
    runs = lines.unfold(3, width * channels, stride * channels).unfold(2, height, stride)
    return runs.mT.reshape(len(x), -1, height * width * channels)


def col2im(g: Tensor, window: Window, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The gradient of images of this shape [L, B, H, W, C] from that of their columns, both of this dtype: g
    [L, B·H'·W', kh·kw·C] is rounded to it first if it is not of it."""
    lanes, batch, height, width, channels = shape
    if window.is_pixel:
        return g.to(dtype).view(shape)
    if kernels := _COLUMNS.kernels(g):
        return kernels.col2im(g, window, shape, dtype)
    p, (down, across) = window.padding, window.positions(height, width)
    padded = g.new_zeros(lanes, batch, height + 2 * p, width + 2 * p, channels, dtype=torch.float32)
    parts = g.to(dtype).view(lanes, batch, down, across, -1).split(channels, dim=-1)
    taps = ((i, j) for i in range(window.kernel[0]) for j in range(window.kernel[1]))
    for (i, j), part in zip(taps, parts, strict=True):
        rows, columns_ = (
            slice(at, at + (n - 1) * window.stride + 1, window.stride) for at, n in ((i, down), (j, across))
        )
        padded[:, :, rows, columns_] += part
    return padded[:, :, p : p + height, p : p + width].to(dtype)
