"""SwiGLU in one kernel in either direction, with the bits of the definition.

SiLU is rounded to the dtype of both factors, as it is between two functions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import TILE, launch_grid
from fp4dse.kernels.ops.silu.triton import sigmoid


@triton.jit
def _swiglu_kernel(
    x_ptr, g_ptr, out_ptr, rows, width, BACKWARD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    one, both = row[:, None] * width + column[None, :], row[:, None] * (2 * width) + column[None, :]
    dtype = x_ptr.dtype.element_ty
    gate, up = tl.load(x_ptr + both, mask, 0.0).to(tl.float32), tl.load(x_ptr + both + width, mask, 0.0).to(tl.float32)
    s = sigmoid(gate)
    silu = (gate * s).to(dtype).to(tl.float32)
    if BACKWARD:
        g = tl.load(g_ptr + one, mask, 0.0).to(tl.float32)
        inner = (g * up).to(dtype).to(tl.float32)
        tl.store(out_ptr + both, (inner * (s * (1.0 + gate * (1.0 - s)))).to(dtype), mask)
        tl.store(out_ptr + both + width, (g * silu).to(dtype), mask)
    else:
        tl.store(out_ptr + one, (silu * up).to(dtype), mask)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) ∘ up of x [..., 2·F], gate before up: [..., F] of its dtype."""
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    _launch_swiglu(x, y, y, backward=False)
    return y


def swiglu_gradient(x: Tensor, g: Tensor) -> Tensor:
    """The gradient of x from g, that of `swiglu`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch_swiglu(x, g.contiguous(), out, backward=True)
    return out


def _launch_swiglu(x: Tensor, g: Tensor, out: Tensor, backward: bool) -> None:
    width = x.shape[-1] // 2
    columns = min(triton.next_power_of_2(width), 256)
    rows, count = TILE // columns, x.numel() // (2 * width)
    programs = launch_grid(triton.cdiv(count, rows), triton.cdiv(width, columns))
    flags = {"BACKWARD": backward, "ROWS": rows, "COLUMNS": columns, "num_warps": 4, "enable_fp_fusion": False}
    _swiglu_kernel[programs](x, g, out, count, width, **flags)
