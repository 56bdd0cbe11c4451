"""A convolution with a lane axis: the quantized product of its columns (ops/columns) with its weight.

    Y = columns · Wᵀ                    contraction (i, j, c): kernel row, kernel column, input channel
    dcolumns = dY · W                   contraction over output channels, for each tap apart
    dW = dYᵀ · columns                  contraction over images and positions

So the six slots are those of a linear layer, and a block of a scale lies along (kh, kw, Cin). The channels of an image
stand last, so a block that divides Cin stays within one pixel. Columns are kh·kw times the image, and are made again
for dW: what is kept for the backward pass is the image, also where codes are wanted (`LaneNumerics.packed`).
Codes of 4 bits, 17/32 bytes each, take less than an image in BF16 where windows overlap little, but that image is often
kept beside them: a normalisation, a ReLU or another convolution has it, too.
"""

from __future__ import annotations

from torch import Tensor

from fp4dse.dse.layers.place import Place
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.layers import ANYWHERE, QuantLinear
from fp4dse.kernels.ops.columns import Window


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
        self.window = Window((weight.shape[2], weight.shape[3]), stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.window.positions(*x.shape[2:4])
        y = self.product(x, self.window)
        return y.view(*x.shape[:2], *positions, -1)
