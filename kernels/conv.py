"""A convolution with a lane axis: the quantized product of its im2col matrix with its weight.

    columns[m, (i, j, c)] = x[b, s·u + i - p, s·v + j - p, c],   m = (b, u, v),   zero outside the image
    Y = columns · Wᵀ                    contraction (i, j, c): kernel row, kernel column, input channel
    dcolumns = dY · W                   contraction over output channels, for each tap apart
    dW = dYᵀ · columns                  contraction over images and positions

So the six slots are those of a linear layer, and a block of a scale lies along (kh, kw, Cin). The channels of an image
stand last, so a block that divides Cin stays within one pixel. The gradient of the image is the sum of kh·kw shifted
slices of dcolumns, added in FP32 and in the order of the taps, which is the same for every lane, device and number of
lanes, and rounded once, to the image's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.dse.place import Place
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.layers import ANYWHERE, QuantLinear


def im2col(x: Tensor, kernel: tuple[int, int], stride: int = 1, padding: int = 0) -> Tensor:
    """Images [L, B, H, W, C] -> columns [L, B, H', W', kh·kw·C], the contraction ordered (kh, kw, C)."""
    if kernel == (1, 1) and stride == 1 and padding == 0:
        return x
    return _Columns.apply(x, kernel, stride, padding)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, kernel: tuple[int, int], stride: int, padding: int) -> Tensor:
        ctx.shape, ctx.kernel, ctx.stride, ctx.padding = x.shape, kernel, stride, padding
        padded = F.pad(x, (0, 0, padding, padding, padding, padding))
        return torch.cat([padded[tap] for tap in _taps(padded.shape, kernel, stride)], dim=-1)

    @staticmethod
    def backward(ctx, g: Tensor):
        lanes, batch, height, width, channels = ctx.shape
        p = ctx.padding
        padded = g.new_zeros(lanes, batch, height + 2 * p, width + 2 * p, channels, dtype=torch.float32)
        taps = _taps(padded.shape, ctx.kernel, ctx.stride)
        for tap, part in zip(taps, g.split(channels, dim=-1), strict=True):
            padded[tap] += part
        return padded[:, :, p : p + height, p : p + width].to(g.dtype), None, None, None


def _taps(shape: torch.Size, kernel: tuple[int, int], stride: int) -> list[tuple[slice, ...]]:
    """Index of what each tap of the kernel sees of a padded image."""
    everything = slice(None)
    rows, columns = ((n - k) // stride * stride + 1 for n, k in zip(shape[2:4], kernel, strict=True))
    return [
        (everything, everything, slice(i, i + rows, stride), slice(j, j + columns, stride))
        for i in range(kernel[0])
        for j in range(kernel[1])
    ]


class QuantConv2d(QuantLinear):
    """A convolution of L lanes: x [L, B, H, W, Cin] -> [L, B, H', W', Cout], H' = (H + 2·padding - kh) // stride + 1.

    weight: [L, Cout, kh, kw, Cin] (torch's [Cout, Cin, kh, kw], permuted by (0, 2, 3, 1)), kept as the [L, Cout,
    kh·kw·Cin] of the product; bias: [L, Cout] or None. `layer` and `place` are as in QuantLinear. ValueError for an
    image that is smaller than the kernel.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        numerics: LaneNumerics,
        layer: int,
        place: Place = ANYWHERE,
        stride: int = 1,
        padding: int = 0,
    ) -> None:
        super().__init__(weight.flatten(2), bias, numerics, layer, place)
        self.kernel = (weight.shape[2], weight.shape[3])
        self.stride, self.padding = stride, padding

    def forward(self, x: Tensor) -> Tensor:
        if any(n + 2 * self.padding < k for n, k in zip(x.shape[2:4], self.kernel, strict=True)):
            raise ValueError(f"image of {x.shape[2]}×{x.shape[3]} with padding {self.padding}: kernel {self.kernel}")
        return super().forward(im2col(x, self.kernel, self.stride, self.padding))
