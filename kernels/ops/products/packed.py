"""Products of operands that are stored as 4-bit codes and block scales, decoded on their way to the tensor cores.

A candidate: nothing takes it before it is measured beside operands that are written in BF16. Elements are E2M1, in
blocks of 16 under scales in E4M3 or of 32 in E8M0; codes are those of quant/packed.py, and decoding.py has the bits.
Operands that both have scales in E4M3 are multiplied in FP16, which holds them, too, and takes fewer instructions.

Two packed operands are multiplied byte by byte: the numbers of even place along a step of the contraction, then those
of odd place, so that none is moved beside another. A packed operand beside a BF16 one is put in order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.products import Finish
from fp4dse.kernels.ops.products.decoding import POWERS, decoded_halves, scale_of, settled
from fp4dse.kernels.ops.products.persistent import processors
from fp4dse.kernels.ops.products.triton import Tiles, constants_of, finished_tile, place_of

GROUP = 8
"""Tiles below one another that programs take at a time."""
_NVFP4, _MXFP4 = 16, 32
"""Numbers that share a scale, in E4M3 and in E8M0."""


class Packed(NamedTuple):
    """An operand [L, R, K]: codes, uint8 [L, R, K / 2], two a byte, and scale codes, uint8 [L, K / block, R], one block
    of all rows after the other, so that the copy engine brings those of a tile; contiguous."""

    codes: Tensor
    scales: Tensor

    @property
    def block(self) -> int:
        """Numbers that share a scale."""
        return 2 * self.codes.shape[2] // self.scales.shape[1]


@triton.jit
def _halves(codes, code, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Numbers of even and of odd place, [n, 4, RUNS, ALONG / 8 / RUNS], of a tile of codes [n, ALONG / 2] and one of
    scale codes [ALONG / BLOCK, n]; RUNS: blocks of a fourth of it."""
    RUNS: tl.constexpr = code.shape[0] // 4
    scale = tl.reshape(tl.trans(scale_of(code, FORM)), (codes.shape[0], 4, RUNS, 1))
    codes = tl.reshape(codes, (codes.shape[0], 4, RUNS, BLOCK // 2))
    return decoded_halves(codes, tl.broadcast_to(scale, codes.shape), FORM)


@triton.jit
def _dealt(x):
    """Numbers [n, 4, …] as [n, K]: a run of each fourth after the other, by twos, so that a thread which holds
    neighbours holds what the tensor core asks of it: of 16 numbers two, and the two that come eight later."""
    N: tl.constexpr = x.shape[0]
    K: tl.constexpr = 4 * x.shape[2] * x.shape[3]
    x = tl.permute(tl.reshape(x, (N, 4, K // 16, 2, 2)), (0, 2, 3, 1, 4))
    return tl.reshape(x, (N, K))


@triton.jit
def _in_order(codes, code, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Numbers in their order, bfloat16 [n, ALONG]."""
    low, high = _halves(codes, code, BLOCK, FORM)
    return tl.reshape(tl.join(low, high), (codes.shape[0], 2 * codes.shape[1]))


@triton.jit(do_not_specialize=["lanes"])
def _packed_kernel(
    a,
    a_scales,
    b,
    b_scales,
    out_ptr,
    factor_a_ptr,
    factor_b_ptr,
    bias_ptr,
    lanes,
    rows,
    columns,
    length,
    power,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALONG: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    FORM_A: tl.constexpr,
    FORM_B: tl.constexpr,
    FLATTEN: tl.constexpr,
    OF_A: tl.constexpr,
    OF_B: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Tiles in turn, finished, of operands that the copy engine loads, all lanes one below the other; a or b or both
    packed.

    BLOCK_A, BLOCK_B: numbers that share a scale; 0 for an operand in bfloat16, whose scales nobody reads. FORM_A,
    FORM_B: forms of decoding.py. FLATTEN: the loops over tiles and along the contraction are one. Beyond the end of a
    lane's rows its scales are zeros, and beyond the end of its contraction so are its codes.
    """
    of_lane = ((rows + ROWS - 1) // ROWS) * ((columns + COLUMNS - 1) // COLUMNS)
    for number in tl.range(tl.program_id(0), lanes * of_lane, tl.num_programs(0), flatten=FLATTEN):
        lane = number // of_lane
        row0, column0 = place_of(number % of_lane, rows, columns, ROWS, COLUMNS, GROUP)
        out = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for start in range(0, length, ALONG):
            x = a.load([lane * rows + row0, start // (2 if BLOCK_A > 0 else 1)])
            y = b.load([lane * columns + column0, start // (2 if BLOCK_B > 0 else 1)])
            if BLOCK_A > 0:
                x_code = a_scales.load([(lane * length + start) // BLOCK_A, row0])
            if BLOCK_B > 0:
                y_code = b_scales.load([(lane * length + start) // BLOCK_B, column0])
            if BLOCK_A > 0 and BLOCK_B > 0:
                x_low, x_high = _halves(x, x_code, BLOCK_A, FORM_A)
                y_low, y_high = _halves(y, y_code, BLOCK_B, FORM_B)
                out = tl.dot(_dealt(x_low), tl.trans(settled(_dealt(y_low))), out)
                out = tl.dot(_dealt(x_high), tl.trans(settled(_dealt(y_high))), out)
            elif BLOCK_A > 0:
                out = tl.dot(_in_order(x, x_code, BLOCK_A, FORM_A), tl.trans(y), out)
            else:
                out = tl.dot(x, tl.trans(settled(_in_order(y, y_code, BLOCK_B, FORM_B))), out)
        out = out * power
        at, row = lane.to(tl.int64), row0 + tl.arange(0, ROWS).to(tl.int64)
        column = column0 + tl.arange(0, COLUMNS).to(tl.int64)
        factors = factor_a_ptr, factor_b_ptr, bias_ptr
        out = finished_tile(out, *factors, at, row, rows, column, columns, OF_A, OF_B, BIAS)
        there = out_ptr + (at * rows + row)[:, None] * columns + column[None, :]
        tl.store(there, out.to(out_ptr.dtype.element_ty), (row < rows)[:, None] & (column < columns)[None, :])


def multiply(
    a: Packed | Tensor,
    b: Packed | Tensor,
    finish: Finish,
    tiles: Tiles,
    registers: int | None = None,
    programs: int | None = None,
) -> Tensor:
    """a [L, R, K] · b [L, S, K]ᵀ, finished: [L, R, S] of its dtype; one or both packed, the other bfloat16, contiguous.

    `tiles.along` is a multiple of four blocks. registers: of a thread, None for as many as the compiler wants. While
    one program decodes another may multiply, if both fit: 128 for 8 warps. programs: so many of each processor take
    tile after tile, None for a program a tile. ValueError for operands that `why_not` has a reason against.
    """
    if reason := why_not(a, b, tiles.along):
        raise ValueError(reason)
    (x, *x_scales), (y, *y_scales) = (operand if isinstance(operand, Packed) else (operand,) for operand in (a, b))
    block_a, block_b = (operand.block if isinstance(operand, Packed) else 0 for operand in (a, b))
    (lanes, rows, _), columns = x.shape, y.shape[1]
    out = x.new_empty(lanes, rows, columns, dtype=finish.dtype)
    factors, constants = constants_of(finish, out, tiles)
    operands: list[Any] = []
    for numbers, scales, lines, block in ((x, x_scales, tiles.rows, block_a), (y, y_scales, tiles.columns, block_b)):
        operands.append(_tiles_of(numbers, lines, tiles.along // 2 if block else tiles.along))
        operands.append(_tiles_of(scales[0], tiles.along // block, lines) if block else out)
    forms = [_form(block_a, block_b), _form(block_b, block_a)]
    power = math.prod(POWERS[form] for form in forms if form)
    count = lanes * triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns)
    grid = launch_grid(count if programs is None else min(count, programs * processors(x.device)))
    blocks = {"BLOCK_A": block_a, "BLOCK_B": block_b, "FORM_A": forms[0], "FORM_B": forms[1]}
    chosen = {"GROUP": GROUP, "FLATTEN": programs is not None, "maxnreg": registers}
    sizes = lanes, rows, columns, length_of(a), power
    _packed_kernel[grid](*operands, out, *factors, *sizes, **blocks, **chosen, **constants)
    return out


def _form(block: int, other: int) -> str:
    """The form in which an operand is decoded beside another, "" for one in bfloat16."""
    if block != _NVFP4:
        return "powers" if block else ""
    return "fp16" if other == _NVFP4 else "bf16"


def why_not(a: Packed | Tensor, b: Packed | Tensor, along: int) -> str | None:
    """The reason why `multiply` does not take operands in steps of so many numbers, or None if it does."""
    packed = [operand for operand in (a, b) if isinstance(operand, Packed)]
    if not packed:
        return "operands: found none that is packed; accepted: one or two"
    if length_of(a) != length_of(b):
        return f"contraction of b: found {length_of(b):,}; accepted: that of a, {length_of(a):,}"
    for codes, scales in packed:
        block = Packed(codes, scales).block
        if block not in (_NVFP4, _MXFP4):
            return f"block: found {block}; accepted: {_NVFP4}, {_MXFP4}"
        if codes.shape[2] % 16 or codes.shape[1] % 16:
            found = f"{codes.shape[1]:,} by {2 * codes.shape[2]:,}"
            return f"packed operand: found {found}; accepted: rows a multiple of 16, numbers of a row one of 32"
        if along % (4 * block):
            return f"tiles.along: found {along}; accepted: a multiple of four blocks, {4 * block}"
        if len(codes) > 1 and length_of(a) % along:  # a step would reach into the scales of the next lane
            return f"contraction: found {length_of(a):,}; accepted: a multiple of {along}, or one lane"
    return None


def length_of(operand: Packed | Tensor) -> int:
    """Numbers along the contraction."""
    return 2 * operand.codes.shape[2] if isinstance(operand, Packed) else operand.shape[2]


def _tiles_of(x: Tensor, lines: int, along: int) -> TensorDescriptor:
    """All lanes of x as one matrix, of which such tiles are loaded."""
    return TensorDescriptor(x, [len(x) * x.shape[1], x.shape[2]], [x.stride(1), 1], [lines, along])
