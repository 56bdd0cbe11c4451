"""Group and batch norm as Triton code; `kernels/ops/group_norm/__init__.py` says what is computed and in which order.

A program has a tile [2^ROW_LEVELS, CHANNELS] of one of the images of x [N, P, C], by `_tile`. OF_GROUP channels are a
group, and 2^LEVELS the leaves of the tree over them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.kernels.ops.silu.triton import sigmoid
from fp4dse.kernels.ops.sums.trees import column_sum, lane_sum, leaf

_ABSENT = tl.constexpr(1 << 30)


@triton.jit
def _tile(
    rows,
    C,
    parts,
    SUMS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    ROW_LEVELS: tl.constexpr,
    LEVELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Number of the image, of one of `parts` parts of its rows, these rows, and channels; not below `rows` and C if
    there is none. SUMS: rows are those under one sum of their tree. LEVELS: if not 0, whole groups, each in the order
    of its tree."""
    wide = (CHANNELS >> LEVELS) * OF_GROUP if LEVELS > 0 else CHANNELS
    blocks = (C + wide - 1) // wide
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks % parts
    position = block * CHANNELS + tl.arange(0, CHANNELS)
    channel = position
    if OF_GROUP < 1 << LEVELS:
        within = leaf(position & ((1 << LEVELS) - 1), 0, OF_GROUP, LEVELS)
        channel = tl.where(within < OF_GROUP, (position >> LEVELS) * OF_GROUP + within, _ABSENT)
    row = tl.arange(0, 1 << ROW_LEVELS)
    row = leaf(row, part, rows, ROW_LEVELS) if SUMS else part * (1 << ROW_LEVELS) + row
    return (tl.program_id(0) // blocks // parts).to(tl.int64), part, row, channel


@triton.jit
def _place(n, rows, row, C, channel):
    """The position of a tile, and the mask of what there is of it."""
    return ((n * rows + row) * C)[:, None] + channel[None, :], (row < rows)[:, None] & (channel < C)[None, :]


@triton.jit
def _load(pointer, at, inside):
    return tl.load(pointer + at, inside, 0.0).to(tl.float32)


@triton.jit
def _sum(x, mask):
    return column_sum(tl.where(mask, x, -0.0))


@triton.jit
def _means(x, count, LEVELS: tl.constexpr):
    """Sums of channels [CHANNELS] -> the means of their groups."""
    if LEVELS > 0:
        total = lane_sum(tl.reshape(x, (x.shape[0] >> LEVELS, 1 << LEVELS)))
        x = tl.reshape(tl.broadcast_to(total[:, None], (x.shape[0] >> LEVELS, 1 << LEVELS)), (x.shape[0],))
    return tl.div_rn(x, count)


@triton.jit
def _scaled(out, gain_ptr, shift_ptr, gain_at, shift_at, inside, SCALES: tl.constexpr):
    if SCALES:
        out = out * _load(gain_ptr, gain_at, inside)[None, :] + _load(shift_ptr, shift_at, inside)[None, :]
    return out


@triton.jit
def _before_silu(g, y, dtype: tl.constexpr):
    """The gradient of y from g, that of its SiLU."""
    y = y.to(dtype).to(tl.float32)
    s = sigmoid(y)
    return (g * (s * (1.0 + y * (1.0 - s)))).to(dtype).to(tl.float32)


@triton.jit
def forward_kernel(
    x_ptr,
    gain_ptr,
    shift_ptr,
    y_ptr,
    mean_ptr,
    variance_ptr,
    inverse_ptr,
    rows,
    C,
    parts,
    gain_stride,
    shift_stride,
    count,
    eps,
    WHOLE: tl.constexpr,
    SCALES: tl.constexpr,
    SMOOTHS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    ROW_LEVELS: tl.constexpr,
    LEVELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """WHOLE: of groups with all their rows, moments [N, C / OF_GROUP] are made, else they are given."""
    n, _, row, channel = _tile(rows, C, parts, WHOLE, OF_GROUP, ROW_LEVELS, LEVELS, CHANNELS)
    at, mask = _place(n, rows, row, C, channel)
    inside, of_group = channel < C, n * (C // OF_GROUP) + channel // OF_GROUP
    x = _load(x_ptr, at, mask)
    if WHOLE:
        mean = _means(_sum(x, mask), count, LEVELS)
        centred = x - mean[None, :]
        variance = _means(_sum(centred * centred, mask), count, LEVELS)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
        tl.store(mean_ptr + of_group, mean, inside)
        tl.store(variance_ptr + of_group, variance, inside)
        tl.store(inverse_ptr + of_group, inverse, inside)
    else:
        centred = x - _load(mean_ptr, of_group, inside)[None, :]
        inverse = _load(inverse_ptr, of_group, inside)
    gain_at, shift_at = n * gain_stride + channel, n * shift_stride + channel
    y = _scaled(centred * inverse[None, :], gain_ptr, shift_ptr, gain_at, shift_at, inside, SCALES)
    y = y.to(y_ptr.dtype.element_ty)
    if SMOOTHS:
        wide = y.to(tl.float32)
        y = (wide * sigmoid(wide)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask)


@triton.jit
def backward_kernel(
    x_ptr,
    mean_ptr,
    inverse_ptr,
    gain_ptr,
    shift_ptr,
    g_ptr,
    dx_ptr,
    sums_ptr,
    means_ptr,
    images,
    rows,
    C,
    parts,
    gain_stride,
    shift_stride,
    count,
    WHOLE: tl.constexpr,
    SCALES: tl.constexpr,
    SMOOTHS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    ROW_LEVELS: tl.constexpr,
    LEVELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """WHOLE: gradients of gain and shift, sums [2, N, C], are made, else means of g' out and g', [2, N, C / OF_GROUP],
    are given."""
    n, _, row, channel = _tile(rows, C, parts, WHOLE, OF_GROUP, ROW_LEVELS, LEVELS, CHANNELS)
    at, mask = _place(n, rows, row, C, channel)
    inside, of_group = channel < C, n * (C // OF_GROUP) + channel // OF_GROUP
    gain_at, shift_at = n * gain_stride + channel, n * shift_stride + channel
    inverse = _load(inverse_ptr, of_group, inside)[None, :]
    out = (_load(x_ptr, at, mask) - _load(mean_ptr, of_group, inside)[None, :]) * inverse
    g = _load(g_ptr, at, mask)
    if SMOOTHS:
        y = _scaled(out, gain_ptr, shift_ptr, gain_at, shift_at, inside, SCALES)
        g = _before_silu(g, y, x_ptr.dtype.element_ty)
    if WHOLE:
        along, level = _sum(g * out, mask), _sum(g, mask)
        if SCALES:
            gain = _load(gain_ptr, gain_at, inside)
            tl.store(sums_ptr + n * C + channel, along, inside)
            tl.store(sums_ptr + (images + n) * C + channel, level, inside)
            along, level = along * gain, level * gain
        along, level = _means(along, count, LEVELS), _means(level, count, LEVELS)
    else:
        along = _load(means_ptr, of_group, inside)
        level = _load(means_ptr, (images + n) * (C // OF_GROUP) + channel // OF_GROUP, inside)
    if SCALES:
        g = g * _load(gain_ptr, gain_at, inside)[None, :]
    dx = (g - level[None, :] - out * along[None, :]) * inverse
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask)


@triton.jit
def sum_kernel(
    x_ptr,
    mean_ptr,
    inverse_ptr,
    gain_ptr,
    shift_ptr,
    g_ptr,
    out_ptr,
    images,
    rows,
    C,
    roots,
    gain_stride,
    shift_stride,
    OF: tl.constexpr,
    SCALES: tl.constexpr,
    SMOOTHS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    ROW_LEVELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums of level ROW_LEVELS of the trees over the rows of x, of (x - mean)², [N, roots, C], or of g · out and of g,
    [2, N, roots, C]."""
    n, root, row, channel = _tile(rows, C, roots, True, OF_GROUP, ROW_LEVELS, 0, CHANNELS)
    at, mask = _place(n, rows, row, C, channel)
    inside, of_group = channel < C, n * (C // OF_GROUP) + channel // OF_GROUP
    x = _load(x_ptr, at, mask)
    if OF != "x":
        x = x - _load(mean_ptr, of_group, inside)[None, :]
    if OF == "squares":
        x = x * x
    if OF == "gradients":
        out = x * _load(inverse_ptr, of_group, inside)[None, :]
        g = _load(g_ptr, at, mask)
        if SMOOTHS:
            gain_at, shift_at = n * gain_stride + channel, n * shift_stride + channel
            y = _scaled(out, gain_ptr, shift_ptr, gain_at, shift_at, inside, SCALES)
            g = _before_silu(g, y, x_ptr.dtype.element_ty)
        tl.store(out_ptr + ((images + n) * roots + root) * C + channel, _sum(g, mask), inside)
        x = g * out
    tl.store(out_ptr + (n * roots + root) * C + channel, _sum(x, mask), inside)


@triton.jit
def moments_kernel(
    parts_ptr,
    gain_ptr,
    sums_ptr,
    means_ptr,
    inverse_ptr,
    images,
    rows,
    C,
    gain_stride,
    count,
    eps,
    SCALES: tl.constexpr,
    INVERTS: tl.constexpr,
    OF_GROUP: tl.constexpr,
    ROW_LEVELS: tl.constexpr,
    LEVELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """parts [K, rows, C] -> means of groups [K, C / OF_GROUP]. SCALES: sums [K, C] over the rows, too, which for the
    means are times gain [images, C], that of k % images. INVERTS: also 1 / sqrt(mean + eps)."""
    n, _, row, channel = _tile(rows, C, 1, True, OF_GROUP, ROW_LEVELS, LEVELS, CHANNELS)
    at, mask = _place(n, rows, row, C, channel)
    inside, of_group = channel < C, n * (C // OF_GROUP) + channel // OF_GROUP
    total = _sum(_load(parts_ptr, at, mask), mask)
    if SCALES:
        tl.store(sums_ptr + n * C + channel, total, inside)
        total = total * _load(gain_ptr, n % images * gain_stride + channel, inside)
    mean = _means(total, count, LEVELS)
    tl.store(means_ptr + of_group, mean, inside)
    if INVERTS:
        tl.store(inverse_ptr + of_group, tl.div_rn(1.0, tl.sqrt_rn(mean + eps)), inside)
