"""The product of two quantized operands, and the choice of the matrix unit that computes it.

    out[l, r, s] = Σ_k a[l, r, k] · b[l, s, k]        a: [L, R, K], b: [L, S, K], out: float32 [L, R, S]

Operands are element × block scale, without tensor factors. They have few significant bits (dse.exactness), so a fast
unit often holds them without rounding. Then every product of two numbers is exact, and only the accumulation in FP32
is the chip's:

    bf16-exact     operands of at most 8 bits in BF16
    tf32-exact     operands of at most 11 bits in TF32
    fp32           any operand, on any device
    fp8-exact      E2M1 × E8M0 in E5M2 or E4M3, under a power of two for the lane, and elements of FP8 under a factor of
                   the tensor; tiles of the result whose operands these do not hold are BF16's, and so are products of
                   other shapes than ops/fp8 lists. Hopper adds FP8 products in fewer than 24 bits and promotes their
                   sums to FP32 (ops/fp8 has the bound). Only on request
    bf16-rounded   operands decoded with all their factors and rounded to BF16, exact or not, as in most
                   simulations. Only on request

Factors that change along the contraction, one for each segment of 128 of a row, are in no operand. The product is then
the sum of those of the segments, each scaled (`products.in_segments`), by any of these backends.

A backend that cannot take operands says why. `pick` takes the fastest exact one. The choice depends on the device and
on the operands' `product_format`, which is the same in all lanes of a population; the order of additions depends on the
shape alone (ops/products). So a lane has the same bits whatever other lanes are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.dse.exactness import (
    OPERAND_FORMATS,
    element_grid,
    fp8_format,
    fp8_formats,
    operand_format,
    operand_grid,
    significant_bits,
)
from fp4dse.kernels.dispatch import by_device, why_not_capable, why_not_fused
from fp4dse.kernels.ops import fp8
from fp4dse.kernels.ops.grouped import grouped, grouped_in_segments
from fp4dse.kernels.ops.products import AS_IT_IS, Finish, bf16, finished, in_segments, multiply


class Run(Protocol):
    """(a, b, finish) -> their product, finished (`products.Finish`)."""

    def __call__(self, a: Tensor, b: Tensor, finish: Finish = ..., /) -> Tensor: ...


class Gemm(msgspec.Struct, frozen=True):
    """A way to multiply operands.

    run       (a, b, finish) -> [L, R, S]; a, b: float32 or `operand`
    why_not   (device, quantizers of a, quantizers of b) -> why it cannot take them, one sentence; None if it can
    operand   the dtype that `run` converts operands to: a quantizer may write it directly
    sums      how the unit's sums of fewer bits than FP32 become FP32, a word for rows; "": it has none
    fp8       operands come in FP8, under a power of two for a lane, where their shapes are those of ops/fp8; `run` is
              for other shapes
    whole     operands come decoded with all their factors, not as element × block scale alone
    fp32      products of FP32 numbers in the kernel that scales partial sums, `ieee` or `tf32`; None: by `run` alone
    """

    run: Run
    why_not: Callable[[str, Sequence[Quantizer], Sequence[Quantizer]], str | None]
    operand: torch.dtype = torch.float32
    sums: str = ""
    fp8: bool = False
    whole: bool = False
    fp32: str | None = None


def pick(
    device: str, quantizers_a: Sequence[Quantizer], quantizers_b: Sequence[Quantizer], wanted: str = "exact"
) -> tuple[str, tuple[str, ...]]:
    """The name of a backend, and why others were passed over before it, one sentence each.

    The backend is the one that is wanted, if it takes the operands of all lanes, else the fastest exact one: on the CPU
    always `fp32`. Only backends that the device might have are asked.
    """
    reasons: list[str] = []
    asked = () if wanted == "exact" else (wanted,)
    for name in asked + by_device(device, cpu=(), cuda=FASTEST):
        if (reason := GEMMS[name].why_not(device, quantizers_a, quantizers_b)) is None:
            return name, tuple(reasons)
        reasons.append(reason)
    return "fp32", tuple(reasons)


def name_with_sums(name: str) -> str:
    """The name of a backend in rows, with how it adds: `fp8-exact/promoted+rest`, some numbers at a time in the
    unit's bits, then what FP8 does not hold."""
    return f"{name}/{sums}" if (sums := GEMMS[name].sums) else name


class Filled(NamedTuple):
    """The rows of the first operand, or if `contracted` the numbers along the contraction, that are not zeros: the
    first `number`, int64 [L] (ops/grouped)."""

    number: Tensor
    contracted: bool


def product(
    gemm: Gemm,
    operands: tuple[Tensor, Tensor],
    factors: tuple[Tensor | None, Tensor | None],
    filled: Filled | None = None,
    end: Finish = AS_IT_IS,
    shifts: tuple[fp8.Shift | None, fp8.Shift | None] = (None, None),
) -> Tensor:
    """The product of two operands [L, R, S]: values [L, R, K] and [L, S, K], each times its factor; then as `end` says,
    which has no factors.

    A factor is None, [L], one for each row ([L, R] of the first operand, [L, S] of the second), or one for each segment
    of a row ([L, R, K / 128], [L, S, K / 128]). filled: what is not zeros, where that is known. shifts:
    of values in FP8, which have no factors of segments and are filled.
    """
    a, b = operands
    along_a, along_b = (None if f is None or f.ndim < 3 else f for f in factors)
    first, second = (None if f is None or f.ndim == 3 else f for f in factors)
    finish = end._replace(factor_a=first, factor_b=second)
    if a.dtype in fp8.TOPS:
        return fp8.multiply(fp8.Fp8(a, shifts[0]), fp8.Fp8(b, shifts[1]), finish)
    if along_a is None and along_b is None:
        if filled is None or gemm.fp32 is None:
            return gemm.run(a, b, finish)
        return finished(grouped(a.to(gemm.operand), b.to(gemm.operand), *filled, gemm.fp32), finish)
    if gemm.fp32 is not None:
        a, b = a.to(gemm.operand), b.to(gemm.operand)
        if filled is not None:
            out = grouped_in_segments(a, b, along_a, along_b, *filled, gemm.run, gemm.fp32)
            return finished(out, finish)
    return finished(in_segments(a, b, along_a, along_b, gemm.run, gemm.fp32), finish)


def fp32(a: Tensor, b: Tensor, finish: Finish = AS_IT_IS) -> Tensor:
    """The product of operands as they are, in FP32."""
    return multiply(a, b, finish=finish)


def tf32_exact(a: Tensor, b: Tensor, finish: Finish = AS_IT_IS) -> Tensor:
    """The product of operands whose last 13 bits are zero: TF32 drops no others."""
    return multiply(a, b, "tf32", finish)


def _why_not_device(name: str, device: str, least: tuple[int, int]) -> str | None:
    if by_device(device, cpu=True, cuda=False):
        return f"{name} not taken on {device}: it needs a CUDA device"
    if torch.version.hip:
        return f"{name} not taken on {device}: it is cuBLAS's, and this is ROCm"
    reason = why_not_capable(device, least)
    return reason and f"{name} not taken: it needs {reason}"


def _bits(q: Quantizer) -> str:
    bits, found = significant_bits(q), operand_grid(q)
    if bits is None or found is None:
        return "is rounded even in FP32" if element_grid(q) else "is of a codec that dse/exactness.py does not know"
    return f"has up to {bits} significant bits, down to 2^{found.step}"


def _held_in(name: str, number: str) -> Callable[[str, Sequence[Quantizer], Sequence[Quantizer]], str | None]:
    """The `why_not` of a backend that needs numbers of OPERAND_FORMATS[number] and compute capability 8.0."""
    holding = list(OPERAND_FORMATS)[: list(OPERAND_FORMATS).index(number) + 1]

    def why_not(device: str, quantizers_a: Sequence[Quantizer], quantizers_b: Sequence[Quantizer]) -> str | None:
        if reason := _why_not_device(name, device, (8, 0)):
            return reason
        for q in (*quantizers_a, *quantizers_b):
            if operand_format(q) not in holding:
                return f"{name} not taken: {number} does not hold {q.label()}, which {_bits(q)}"
        return None

    return why_not


def _why_not_fp8(device: str, quantizers_a: Sequence[Quantizer], quantizers_b: Sequence[Quantizer]) -> str | None:
    if reason := _why_not_device("fp8-exact", device, (8, 9)):
        return reason
    if reason := why_not_fused(device):
        return f"fp8-exact not taken: {reason}"
    for q in (*quantizers_a, *quantizers_b):
        if fp8_format(q) is None:
            taken = "E2M1 × E8M0 in blocks, or FP8 under a factor of the tensor"
            return f"fp8-exact not taken: found {q.label()}; accepted: {taken}"
    if fp8_formats(quantizers_a, quantizers_b) is None:
        return "fp8-exact not taken: found E5M2 twice; accepted: E4M3 for one"
    return None


def _never(*_: object) -> str | None:
    return None


GEMMS: dict[str, Gemm] = {
    "bf16-exact": Gemm(bf16, _held_in("bf16-exact", "bf16"), torch.bfloat16, fp32="ieee"),
    "tf32-exact": Gemm(tf32_exact, _held_in("tf32-exact", "tf32"), fp32="tf32"),
    "fp32": Gemm(fp32, _never, fp32="ieee"),
    "fp8-exact": Gemm(bf16, _why_not_fp8, torch.bfloat16, sums="promoted+rest", fp8=True, fp32="ieee"),
    "bf16-rounded": Gemm(bf16, _never, torch.bfloat16, whole=True),
}
"""Name -> backend."""

FASTEST = ("bf16-exact", "tf32-exact")
"""The order in which `pick` asks, before it takes `fp32`."""
