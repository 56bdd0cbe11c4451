"""The quantizer fused into one Triton kernel: any mix of recipes in one launch, read once, written once.

A program takes tiles of whole blocks of one lane and reads that lane's row of the descriptor tables; only the block
size and what no lane needs (see `fused.Features`) are compile-time constants. Bits equal those of
`reference.decode_operand` with `philox.random16`, whatever the tiles. The block maximum is taken on the integer bits
of |x|, where NaN sorts above Inf, so that it is not lost. `triton_numbers` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.descriptor import FLOATS, INTS
from fp4dse.kernels.fused import WIDE
from fp4dse.kernels.philox import STREAMS
from fp4dse.kernels.triton_numbers import (
    as_float,
    as_int,
    binade_of,
    inverse_of_power,
    nearest,
    round_wide,
    smaller,
    thresholds,
    up_from,
)

KNOWN = {"random_step", "scale_stochastic", "ema"}  # the first follows from random_shift; not called for the others
"""Columns of the descriptor tables that the kernel heeds."""


def _column(name: str) -> tl.constexpr:
    KNOWN.add(name)
    return tl.constexpr((FLOATS if name in FLOATS else INTS).index(name))


_ELEM_PMIN = _column("elem_pmin")
_ELEM_ULPS = _column("elem_ulps")
_ELEM_MAX = _column("elem_max")
_INV_VAL_MAX = _column("inv_val_max")
_TENSOR_TARGET = _column("tensor_target")
_SCALE_PMIN = _column("scale_pmin")
_SCALE_ULPS = _column("scale_ulps")
_SCALE_MAX = _column("scale_max")
_SCALE_ZERO = _column("scale_zero")
_PRESCALE = _column("prescale")
_POSTSCALE = _column("postscale")
_FLOAT_SCALE = _column("float_scale")
_E8M0_CARRY = _column("e8m0_carry")
_E8M0_OFFSET = _column("e8m0_offset")
_SCALE_UP = _column("scale_up")
_ENCODE = _column("encode")
_HYBRID = _column("hybrid")
_LOG_TIES = _column("log_ties")
_HALF_AWAY = _column("half_away")
_RANDOM_SHIFT = _column("random_shift")
_STOCHASTIC = _column("stochastic")
_ADAPT = _column("adapt")
_ADAPT_MAE = _column("adapt_mae")
_N_FLOATS, _N_INTS = tl.constexpr(len(FLOATS)), tl.constexpr(len(INTS))
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_INF = tl.constexpr(float("inf"))
_WIDE = tl.constexpr(WIDE)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _load(ptr, mask):
    """float32; zero where masked."""
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _tensor_factor(target, amax):
    wanted = tl.minimum(tl.div_rn(target, amax), _FLT_MAX)
    return tl.where((target > 0) & (amax > 0), wanted, 1.0)


@triton.jit
def _any_scale(amax, enc, inv_val_max, f, i):
    """Scale and multiplier of blocks for float scales of any kind."""
    encode = tl.load(i + _ENCODE) > 0
    ideal = amax * (enc * inv_val_max)
    wanted = smaller(tl.where(encode, tl.div_rn(1.0, ideal), ideal), tl.load(f + _SCALE_MAX))
    stored = round_wide(wanted, tl.load(f + _SCALE_PMIN), tl.load(f + _SCALE_ULPS), tl.load(i + _SCALE_UP))
    stored = tl.where(stored == 0, tl.load(f + _SCALE_ZERO), stored)
    source = tl.where(tl.load(i + _HYBRID) > 0, wanted, stored)
    mult = smaller(tl.div_rn(1.0, source * tl.div_rn(1.0, enc)), _FLT_MAX)
    return tl.where(encode, tl.div_rn(1.0, stored), stored), tl.where(encode, source * enc, mult)


@triton.jit
def _usual_scale(amax, enc, inv_enc, inv_val_max, usual):
    """Scale and multiplier of blocks for E8M0, and for 8-bit float scales that are rounded to nearest."""
    float_scale, scale_pmin, scale_inv_ulps, scale_max, scale_zero, e8m0_carry, e8m0_offset = usual
    if float_scale > 0:
        scale = nearest(tl.minimum(amax * (enc * inv_val_max), scale_max), scale_pmin, scale_inv_ulps)
        scale = tl.where(scale == 0, scale_zero, scale)
    else:
        exponent = (as_int(amax * enc) + e8m0_carry >> 23) - e8m0_offset
        exponent = tl.minimum(tl.maximum(exponent, 0), 254)
        scale = as_float(tl.maximum(exponent << 23, 0x00400000))  # exponent 0 is 2^-127
    return scale, smaller(tl.div_rn(1.0, scale * inv_enc), _FLT_MAX)


@triton.jit
def _encoded(
    magnitude, amax, tensor, inv_val_max, element, usual, draws, f, i, STOCHASTIC: tl.constexpr, UNUSUAL: tl.constexpr
):
    """Element magnitudes [n, B] and scales [n].

    tensor: the tensor's factor, its inverse, and the bound of usable block maxima. draws: if STOCHASTIC, whether this
    lane is, and arguments of `thresholds`. f, i: the lane's row, for what is rarely needed.
    """
    enc, inv_enc, limit = tensor
    pmin, inv_ulps, largest, prescale = element
    if UNUSUAL:
        kind = tl.load(i + _ENCODE) + tl.load(i + _HYBRID) + tl.load(i + _SCALE_UP)
        if (kind > 0) | (tl.load(f + _SCALE_MAX) > _WIDE):
            scale, mult = _any_scale(amax, enc, inv_val_max, f, i)
        else:
            scale, mult = _usual_scale(amax, enc, inv_enc, inv_val_max, usual)
    else:
        scale, mult = _usual_scale(amax, enc, inv_enc, inv_val_max, usual)
    y = smaller(magnitude * tl.where(amax < limit, mult * prescale, float("nan"))[:, None], largest)
    if STOCHASTIC:
        stochastic, block, shift, key = draws
        if stochastic > 0:
            q = up_from(y, pmin, inv_ulps, thresholds(block, shift, inv_ulps, key, magnitude.shape[1]))
        else:
            q = _to_nearest(y, pmin, inv_ulps, i, UNUSUAL)
    else:
        q = _to_nearest(y, pmin, inv_ulps, i, UNUSUAL)
    return q, scale


@triton.jit
def _to_nearest(y, pmin, inv_ulps, i, UNUSUAL: tl.constexpr):
    """Element magnitudes to nearest, with the ties of the lane."""
    if UNUSUAL:
        if tl.load(i + _HALF_AWAY) > 0:
            q = up_from(y, pmin, inv_ulps, inv_ulps * -0.5)
        else:
            # a power of two's own binade has one grid point: the tie goes to the even code, not to the larger
            binade = binade_of(y, pmin)
            tie = (y == binade * 1.5) & ((as_int(binade) >> 23 & 1) < tl.load(i + _LOG_TIES))
            q = tl.where(tie, binade, nearest(y, pmin, inv_ulps))
    else:
        q = nearest(y, pmin, inv_ulps)
    return q


@triton.jit
def _error(magnitude, q, scale, dec, absolute):
    """Error of each block [n], added up as `lane_sum` does: first half + second half, until one is left."""
    error = tl.abs((q * scale[:, None]) * dec - magnitude)
    error = tl.where(absolute > 0, error, error * error)
    for _ in tl.static_range(10):  # BLOCKS end at 2^10
        if error.shape[1] > 1:
            error = tl.reduce(tl.reshape(error, (error.shape[0], 2, error.shape[1] // 2)), 1, _plus)
    return tl.reshape(error, (error.shape[0],))


@triton.jit(do_not_specialize=["site", "stream"])
def _quantize_kernel(
    x_ptr,
    out_ptr,
    dec_ptr,
    floats_ptr,
    ints_ptr,
    amax_ptr,
    seeds_ptr,
    step_ptr,
    site,
    stream,
    rows,
    blocks,
    B: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """TILES tiles of one lane, a block wide and TILE_ROWS high.

    x: bfloat16 or float32 [L, rows, blocks · B], or [L, blocks · B, rows] where COLUMNS. out: bfloat16 or float32
    [L, rows, blocks · B]. Tiles go from the end to the start: what the tensor maximum read last is still in the cache.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    lane = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    f, i = floats_ptr + lane * _N_FLOATS, ints_ptr + lane * _N_INTS
    pmin, inv_ulps = tl.load(f + _ELEM_PMIN), inverse_of_power(tl.load(f + _ELEM_ULPS))
    inv_val_max, stochastic = tl.load(f + _INV_VAL_MAX), tl.load(i + _STOCHASTIC)
    element = pmin, inv_ulps, tl.load(f + _ELEM_MAX), tl.load(f + _PRESCALE)
    usual = (
        tl.load(i + _FLOAT_SCALE),
        tl.load(f + _SCALE_PMIN),
        inverse_of_power(tl.load(f + _SCALE_ULPS)),
        tl.load(f + _SCALE_MAX),
        tl.load(f + _SCALE_ZERO),
        tl.load(i + _E8M0_CARRY),
        tl.load(i + _E8M0_OFFSET),
    )
    enc = inv_val_max * 0.0 + 1.0
    inv_enc = enc
    limit = enc * _INF
    if TENSOR_SCALE:
        target, tensor_amax = tl.load(f + _TENSOR_TARGET), tl.load(amax_ptr + lane)
        enc = _tensor_factor(target, tensor_amax)
        inv_enc = tl.div_rn(1.0, enc)
        limit = tl.where((tensor_amax < _INF) | (target == 0), _INF, 0.0)
    tensor = enc, inv_enc, limit
    dec = inv_enc * tl.load(f + _POSTSCALE)
    if program == 0:
        tl.store(dec_ptr + lane, dec)
    shift, seed, step = tl.load(i + _RANDOM_SHIFT), tl.load(seeds_ptr + lane), tl.load(step_ptr)

    width = blocks * B
    row = tl.arange(0, TILE_ROWS)
    offsets = row[:, None] * width + tl.arange(0, B)[None, :]
    for n in range(TILES):
        tile = program * TILES + (TILES - 1 - n)
        row0, block0 = tile // blocks * TILE_ROWS, tile % blocks
        origin = (lane * rows + row0) * width + block0 * B
        inside = row < rows - row0
        if COLUMNS:
            # this hides that more than two neighbours follow: a thread takes two rows, and of each a whole block
            pairs = row // 2 * 2 + row % 2
            corner = (lane * width + block0 * B) * rows + row0
            there = tl.arange(0, B)[:, None] * rows + pairs[None, :]
            x = tl.trans(_load(x_ptr + corner + there, inside[None, :]))
        else:
            x = _load(x_ptr + origin + offsets, inside[:, None])

        magnitude = tl.abs(x)
        amax = as_float(tl.reduce(as_int(magnitude), 1, _larger))
        draws = stochastic, (row0 + row) * blocks + block0, shift, (seed, stream, step, site)
        rest = (element, usual, draws, f, i)
        q, scale = _encoded(magnitude, amax, tensor, inv_val_max, *rest, STOCHASTIC, UNUSUAL)
        if ADAPTIVE:  # noqa: SIM102 - known when compiling, unlike what follows
            if tl.load(i + _ADAPT) > 0:
                q2, scale2 = _encoded(magnitude, amax, tensor, inv_val_max * 1.5, *rest, STOCHASTIC, UNUSUAL)
                absolute = tl.load(i + _ADAPT_MAE)
                second = _error(magnitude, q2, scale2, dec, absolute) < _error(magnitude, q, scale, dec, absolute)
                q, scale = tl.where(second[:, None], q2, q), tl.where(second, scale2, scale)
        out = as_float(as_int(q * scale[:, None]) | (as_int(x) & -0x80000000))
        tl.store(out_ptr + origin + offsets, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _maximum_kernel(x_ptr, out_ptr, n, TILE: tl.constexpr):
    """max |x| of one tile of one lane. x: bfloat16 or float32 [L, n]; out: [L, tiles]."""
    programs, lane = tl.num_programs(0), tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    magnitude = tl.abs(_load(x_ptr + lane * n + offsets, offsets < n))
    amax = as_float(tl.reduce(as_int(magnitude), 0, _larger))
    tl.store(out_ptr + lane * programs + tl.program_id(0), amax)


# None of these changes results. A program's descriptor row and division cost as much as a tile, so that programs of a
# large tensor take several; a small one is spread over the device first.
_TILE, _COLUMN_TILE = 2048, 1024  # elements
_TILES, _MANY = 4, 8192
_MAXIMUM_TILE = 8192


def tensor_maxima(x: Tensor) -> Tensor:
    """max |x| of each lane, float32 [L]; NaN if x holds one. x: float32 or bfloat16 [L, …], contiguous."""
    lanes, n = len(x), x[0].numel()
    tiles = triton.cdiv(n, _MAXIMUM_TILE)
    partial = torch.empty(lanes, tiles, dtype=torch.float32, device=x.device)
    _maximum_kernel[tiles, lanes](x, partial, n, TILE=_MAXIMUM_TILE, num_warps=4, enable_fp_fusion=False)
    return partial.amax(1)


def launch(
    x: Tensor,
    columns: bool,
    block: int,
    floats: Tensor,
    ints: Tensor,
    features: Sequence[bool],
    tensor_amax: Tensor | None,
    seeds: Tensor,
    step: Tensor,
    site: int,
    out: Tensor,
    dec: Tensor,
) -> None:
    """Write `reference.decode_operand` of x into out [L, R, C] and dec [L]; arguments as in `fused.operand`."""
    lanes, rows, width = out.shape
    if columns:  # a block stays within a thread, a row of a warp's tile within a line of memory
        blocks, tile_rows = width // block, max(32, _COLUMN_TILE // block)
        warps = tile_rows * block // _COLUMN_TILE
    else:
        rows, blocks, tile_rows, warps = rows * width // block, 1, _TILE // block, 4
    tiles = triton.cdiv(rows, tile_rows) * blocks
    of_program = _TILES if lanes * tiles >= _MANY else 1
    tensor_scale, stochastic, adaptive, unusual = features
    _quantize_kernel[triton.cdiv(tiles, of_program), lanes](
        x,
        out,
        dec,
        floats,
        ints,
        dec if tensor_amax is None else tensor_amax,
        seeds,
        step,
        site,
        STREAMS["rounding"],
        rows,
        blocks,
        B=block,
        TILE_ROWS=tile_rows,
        TILES=of_program,
        COLUMNS=columns,
        TENSOR_SCALE=tensor_scale,
        STOCHASTIC=stochastic,
        ADAPTIVE=adaptive,
        UNUSUAL=unusual,
        num_warps=warps,
        enable_fp_fusion=False,
    )
