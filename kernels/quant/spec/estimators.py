"""The gradient that passes backwards through the quantizer of a forward operand, by arithmetic that has one result.

With x̂ = S · Q(z), z = x/S, S the block's scale with the tensor's factor, and g the gradient with respect to x̂:

    dL/dx_j = g_j · Q'(z_j)  +  slope · w_j · sign(x_j) · Σ_i g_i · [Q(z_i) - z_i · Q'(z_i)]

Q(z) is the element that the forward pass used, Q' the surrogate of its derivative, the same in both places. The second
term is the gradient through the block scale, slope = dS/d amax. Before its rounding S is amax/val_max, so that slope =
q'(u)/val_max, with q' the surrogate of the derivative of that rounding at u, what is rounded: one (E8M0 included),
unless an estimator says otherwise. w is one at the first largest element of the block and zero elsewhere, or
softmax(80 |x| / amax), the gradient of a soft maximum (codecs/softmax.py) whose own amax is held. The diagonal forms
keep i = j of the sum only. The tensor's factor, what becomes of scales that are zero, and the constant of range
`aligned` count as constants. 2509.17791.

Under the encode convention m = 1/S is what is rounded, and the paper's term,
    -(m₀/amax) · q'(m₀) · w_j sign(x_j) · Σ_i g_i [x_i Q'/m - Q/m²],  m₀ = val_max/amax the unrounded m,
is this one times (S · val_max / amax)², one but for the rounding of m. That factor is left out: where m saturates it
has no bound, and the derivative of what it stands for is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fp4dse.dse.estimator import DGE, STE, Clipped, PowerLaw, Sigmoid, Spline, Through, Trust
from fp4dse.dse.formats import FloatFormat
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.scale import scale_grid
from fp4dse.kernels.ops.elementary import exp_nonpositive, power
from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.spec.codecs.softmax import exponentials, soft_maxima
from fp4dse.kernels.quant.spec.grid import FLT_MAX
from fp4dse.kernels.quant.spec.reference import effective_scale, widened

NEAR = 2.0**-20
"""Relative distance from the largest element within which z counts as it: what a scale puts there in exact arithmetic
may come out of FP32 on either side."""
KNOTS = 40
"""Of the spline, equispaced from minus to plus the largest element."""


def through(
    g: Tensor,
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    dec: Tensor,
    spec: Through,
    element: FloatFormat,
    slope: Tensor | float | None = None,
) -> Tensor:
    """The gradient of x [L, n, B] from g [L, n, B], that of the decoded operand, q · scale · dec.

    x: the operand in blocks, padded and rotated. q: its decoded elements [L, n, B], of the grid `element`.
    scale: [L, n], or [L, n, B] where elements of a block have different ones (then spec.scale must be `none`).
    dec: [L], or [L, rows] whose blocks are consecutive. slope: dS/d amax, [L], [L, n] or one number; None:
    1/element.max.
    All float32. A block whose scale is zero has no gradient through it, and that of a block that decodes to NaN is NaN.
    """
    unit = effective_scale(scale, dec)
    z = position(x, unit, element.max)
    factor = torch.where(torch.isnan(q), q, surrogate(z, q, spec, element))
    out = g * factor
    if spec.scale == "none":
        return out
    share = torch.where(unit > 0, g * (q - z * factor), 0.0)
    of_block, weights = SCALE_GRADIENTS[spec.scale]
    if of_block:
        share = lane_sum(share, 2)[:, :, None]
    weight = weights(x)
    if isinstance(slope, Tensor):
        slope = slope.view(len(x), -1, 1)
    return out + share * (weight * torch.sign(x)) * (1 / element.max if slope is None else slope)


def position(x: Tensor, unit: Tensor, largest: float) -> Tensor:
    """z = x / unit, the largest element where it is `NEAR` it; 0 where x is; finite unless x is not."""
    z = torch.where(x == 0, x, torch.clamp(x / unit, -FLT_MAX, FLT_MAX))
    return torch.where((z.abs() - largest).abs() <= largest * NEAR, torch.copysign(torch.full_like(z, largest), z), z)


def surrogate(z: Tensor, q: Tensor, spec: Through, element: FloatFormat) -> Tensor:
    """Q'(z) of the shape of z. q: the elements that the forward pass made of z."""
    factor = FACTORS[type(spec.element)](z, q, spec.element, element)
    return torch.where(z.abs() >= element.max, factor, 1.0) if spec.masked else factor


def rounded_slope(x: Tensor, dec: Tensor, slope: Tensor, spec: Through, quantizer: Quantizer) -> Tensor:
    """dS/d amax [L, n] with the surrogate of the scale's rounding: slope · q'(u).

    x, dec: as `through` takes them. slope: [L], of the unrounded scale. Of the quantizer only the scale and how it
    follows from the block count. u = amax · slope / dec is what is rounded, under the encode convention 1/u.
    """
    amax = x.abs().amax(dim=2)
    amax = soft_maxima(x, amax) if quantizer.codec == "softmax" else amax
    wide, wanted = widened(dec.view(len(x), -1), x.shape[1]), amax * slope[:, None]
    grid, encode = scale_grid(quantizer.scale), getattr(quantizer.scale, "convention", "") == "encode"
    u = position(wide.expand_as(wanted), wanted, grid.max) if encode else position(wanted, wide, grid.max)
    return scale_surrogate(u, spec, grid) * slope[:, None]


def scale_surrogate(u: Tensor, spec: Through, grid: FloatFormat) -> Tensor:
    """q'(u) of the shape of u >= 0, scales before they are rounded to the grid. It does not depend on the direction."""
    factor = SCALE_FACTORS[type(spec.scale_rounding)](u, u, spec.scale_rounding, grid)
    return torch.where(u >= grid.max, factor, 1.0) if spec.masked else factor


def _ste(z: Tensor, _q: Tensor, _: STE, _element: FloatFormat) -> Tensor:
    return torch.ones_like(z)


def _clipped(z: Tensor, _q: Tensor, _: Clipped, element: FloatFormat) -> Tensor:
    return (z.abs() <= element.max).to(z.dtype)


def _dge(z: Tensor, _q: Tensor, dge: DGE, element: FloatFormat) -> Tensor:
    centre, width = _interval(z, element)
    t = (z.abs() - centre) / (width * 0.5)
    factor = torch.clamp(power(t.abs(), 1 / dge.k - 1) * (1 / dge.k), max=dge.cap)
    return torch.where(z.abs() <= element.max, factor, 0.0)


def _power_law(z: Tensor, _q: Tensor, law: PowerLaw, element: FloatFormat) -> Tensor:
    centre, width = _interval(z, element)
    u = (z.abs() - centre).abs()
    return torch.where(u > 0, power(u, 1 / law.k - 1) * (1 / law.k) * (width * 0.5), 0.0)


def _sigmoid(z: Tensor, _q: Tensor, sigmoid: Sigmoid, element: FloatFormat) -> Tensor:
    centre, width = _interval(z, element)
    u = (z.abs() - centre) * 12.0 / (width * sigmoid.temperature)
    e = exp_nonpositive(-u.abs())
    half = 1.0 + e
    return torch.clamp(e / (half * half) * (12 / sigmoid.temperature), min=sigmoid.lower)  # σ(1 - σ)


def _spline(z: Tensor, _q: Tensor, spline: Spline, element: FloatFormat) -> Tensor:
    knots, slopes = _spline_table(element, z.device)
    return torch.clamp(slopes[torch.bucketize(z.abs(), knots, right=True)], min=spline.lower)


def _trust(z: Tensor, q: Tensor, _: Trust, element: FloatFormat) -> Tensor:
    widths = _intervals(element, z.device)[1]
    return ((q - z).abs() <= widths.amax() * 0.5).to(z.dtype)


FACTORS: dict[type, Callable[[Tensor, Tensor, Any, FloatFormat], Tensor]] = {
    STE: _ste,
    Clipped: _clipped,
    DGE: _dge,
    PowerLaw: _power_law,
    Sigmoid: _sigmoid,
    Spline: _spline,
    Trust: _trust,
}
"""Relaxation -> its derivative at z, where the forward pass made q of it. All are even in z.

Python numbers multiply and never divide: dividing by one is another operation on a GPU.
"""


def _thirds(u: Tensor, _: Tensor, spline: Spline, grid: FloatFormat) -> Tensor:
    """The interpolant of rounding to nearest on an interval's thirds is flat, rises by 3, and is flat again.

    40 equispaced knots have 2.8 segments to an interval of E2M1. From zero to the largest scale, one segment
    would have all scales below a 39th of that.
    """
    centre, width = _interval(u, grid)
    rises = (u - centre).abs() * 6.0 < width
    return torch.clamp(torch.where(rises, 3.0, 0.0), min=spline.lower)


SCALE_FACTORS = {kind: factor for kind, factor in FACTORS.items() if kind is not Trust} | {Spline: _thirds}
"""The same for the rounding of a scale."""


NUMBERS: dict[type, Callable[[Any], tuple[float, ...]]] = {
    DGE: lambda dge: (1 / dge.k - 1, 1 / dge.k, dge.cap),
    PowerLaw: lambda law: (1 / law.k - 1, 1 / law.k),
    Sigmoid: lambda sigmoid: (sigmoid.temperature, 12 / sigmoid.temperature, sigmoid.lower),
    Spline: lambda spline: (spline.lower,),
    STE: lambda _: (),
    Clipped: lambda _: (),
    Trust: lambda _: (),
}
"""Relaxation -> what its kernel takes of it."""


def numbers(spec: Through, element: FloatFormat, device: torch.device) -> Tensor:
    """The numbers of an estimator for the kernel, float64: three numbers of the relaxation of elements, three of that
    of scales, the spline's knots, and its slopes."""
    of = [NUMBERS[type(r)](r) for r in (spec.element, spec.scale_rounding)]
    knots, slopes = _spline_numbers(element)
    row = [number for three in of for number in (*three, 0.0, 0.0, 0.0)[:3]]
    return torch.tensor([*row, *knots, *slopes], dtype=torch.float64, device=device)


def _interval(z: Tensor, element: FloatFormat) -> tuple[Tensor, Tensor]:
    """Centre and width of the grid's interval that |z| is in; a grid point is in the one above, the largest below."""
    levels, widths = _intervals(element, z.device)
    index = torch.bucketize(z.abs(), levels[1:-1], right=True)
    return (levels[:-1] + widths * 0.5)[index], widths[index]


@cache
def _intervals(element: FloatFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """Magnitudes, and the intervals' widths, one fewer."""
    levels = torch.tensor(element.magnitudes(), dtype=torch.float32, device=device)
    return levels, levels[1:] - levels[:-1]


@cache
def _spline_table(element: FloatFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """`_spline_numbers` as float32."""
    knots, slopes = (torch.tensor(t, dtype=torch.float32, device=device) for t in _spline_numbers(element))
    return knots, slopes


def _spline_numbers(element: FloatFormat) -> tuple[list[float], list[float]]:
    """The knots on the positive side, and the slopes before, between and after them.

    The segment around zero comes first. Beyond the grid the slope is zero. No knot is midway between two elements.
    """
    values = element.magnitudes()

    def nearest(y: float) -> float:
        return min(values, key=lambda value: abs(value - y))

    step = 2 * element.max / (KNOTS - 1)
    knots = [step * (i + 0.5) for i in range(KNOTS // 2)]
    slopes = [2 * nearest(knots[0]) / step, *((nearest(b) - nearest(a)) / step for a, b in pairwise(knots)), 0.0]
    return knots, slopes


def _first_largest(x: Tensor) -> Tensor:
    """One at the first element of largest magnitude of each block, zero elsewhere; nowhere in a block with NaN."""
    magnitude = x.abs()
    index = torch.arange(x.shape[2], device=x.device)
    largest = magnitude == magnitude.amax(dim=2, keepdim=True)
    return (index == torch.where(largest, index, x.shape[2]).amin(dim=2, keepdim=True)).to(x.dtype)


def _softmax(x: Tensor) -> Tensor:
    """softmax(80 |x| / amax) in each block."""
    e = exponentials(x, x.abs().amax(dim=2))
    return e / lane_sum(e, 2)[:, :, None]


SCALE_GRADIENTS: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "diagonal": (False, _first_largest),
    "exact": (True, _first_largest),
    "softmax-diagonal": (False, _softmax),
    "softmax": (True, _softmax),
}
"""Gradient through the scale -> whether it is that of the whole block, and the weights w."""
