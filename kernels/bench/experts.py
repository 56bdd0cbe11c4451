"""The GPU's rows of products of experts (ops/grouped): one launch for all groups, beside what torch has.

Groups have different numbers of tokens, as a router leaves them: from half of the even share to one and a half. Ours
have room for two shares each, of which what is empty is skipped; torch's lie one after the other, without room. Its
FP8 product takes E4M3 under a factor for each row and rounds the result to BF16; ours multiplies in BF16, without
factors and under those of 128 that FP8 recipes have, and gives FP32. Rows count the operations of tokens that
are there.

Operands are small integers, whose sums FP32 holds, so that ours are checked for equality; results in BF16 are rounded
once, and those of FP8 units, which accumulate in fewer bits, may be off by a part in 64 of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.kernels.bench.clock import CALLS, graph, median_us, named
from fp4dse.kernels.dispatch import why_not_fused
from fp4dse.kernels.gemm import GEMMS, Filled, product
from fp4dse.kernels.ops.products import SEGMENT

E4M3 = torch.float8_e4m3fn


class Shape(NamedTuple):
    """Products of `groups` experts, of `share` tokens each on average: [tokens, length] · [columns, length]ᵀ."""

    what: str
    groups: int
    share: int
    columns: int
    length: int


SHAPES = (
    Shape("8 experts of 2,048 tokens, 4096 to 14336", 8, 2048, 14336, 4096),
    Shape("32 experts of 512 tokens, 7168 to 2048", 32, 512, 2048, 7168),
    Shape("64 experts of 256 tokens, 2048 to 1408", 64, 256, 1408, 2048),
    Shape("8 experts of 1,024 tokens, 384 to 1024", 8, 1024, 1024, 384),
)
"""Mixtral's, DeepSeek-V3's and DeepSeekMoE's, and `moe8-10M`'s."""


class Row(NamedTuple):
    """Median time of a product; operations a second; the time of torch's FP8 product over it; outputs that are wrong.
    None, and a note, for what this torch has not."""

    what: str
    time_us: float | None
    tflops: float | None
    of_torch_fp8: float | None
    wrong: int | None
    note: str = ""


class Operands(NamedTuple):
    """Of one shape: float32 a [G, room, K], zeros after the first `filled` rows, b [G, N, K]; filled: int64
    [G]."""

    a: Tensor
    b: Tensor
    filled: Tensor

    def flat(self) -> tuple[Tensor, Tensor]:
        """The tokens of all groups one after the other, [M, K], and where each group ends, int32 [G]."""
        rows = [a[:n] for a, n in zip(self.a, self.filled.tolist(), strict=True)]
        return torch.cat(rows), self.filled.cumsum(0).to(torch.int32)


def bench(device: str, only: Sequence[str] = (), shapes: Sequence[Shape] = SHAPES) -> Iterator[Row]:
    """The rows of all shapes on a CUDA device; only: words of their names, as in `table.bench`.

    ConfigError for a device without the kernels, and for words that no row has.
    """
    if reason := why_not_fused(device):
        raise ConfigError("device", device, f"a device with the fused kernels ({reason})")
    with torch.cuda.device(device):
        yield from _rows(device, only, shapes)


def _rows(device: str, only: Sequence[str], shapes: Sequence[Shape]) -> Iterator[Row]:
    found = False
    for shape in shapes:
        wanted = {way: f"{shape.what}: {way}" for way in WAYS if named(f"{shape.what}: {way}", only)}
        found = found or bool(wanted)
        if not wanted:
            continue
        of, tokens = operands(shape, device), shape.groups * shape.share
        exact = torch.cat([a[:n] @ b.T for a, b, n in zip(of.a, of.b, of.filled.tolist(), strict=True)])
        fp8_us = _measured(WAYS["torch, FP8"], of, exact)[0]
        for way, what in wanted.items():
            us, wrong, note = _measured(WAYS[way], of, exact)
            rate = us and 2e-6 * tokens * shape.columns * shape.length / us
            yield Row(what, us, rate, us and fp8_us and fp8_us / us, wrong, note)
    if not found:
        raise ConfigError("--only", ", ".join(only), "a part of the name of a row, such as fp8")


def operands(shape: Shape, device: str) -> Operands:
    """Integers from -2 to 2. Every two groups have two shares."""
    g = torch.Generator(device).manual_seed(0)
    more = torch.randint(shape.share // 2 + 1, (shape.groups // 2,), generator=g, device=device)
    count = shape.share + torch.stack([more, -more], 1).flatten()
    sizes = (shape.groups, 2 * shape.share, shape.length), (shape.groups, shape.columns, shape.length)
    a, b = (torch.randint(-2, 3, size, generator=g, device=device).float() for size in sizes)
    a.masked_fill_((torch.arange(a.shape[1], device=device) >= count[:, None])[:, :, None], 0.0)
    return Operands(a, b, count)


Way = Callable[[Operands], tuple[Callable[[], Tensor], bool]]
"""Operands of a shape -> the product as a call, whose result is ours, [G, room, N], or torch's, [M, N]; and whether it
is exact."""


def _ours(of: Operands) -> tuple[Callable[[], Tensor], bool]:
    a, b, filled = of.a.bfloat16(), of.b.bfloat16(), Filled(of.filled, False)
    return lambda: product(GEMMS["bf16-exact"], (a, b), (None, None), filled), True


def _ours_under_factors(of: Operands) -> tuple[Callable[[], Tensor], bool]:
    a, b, filled = of.a.bfloat16(), of.b.bfloat16(), Filled(of.filled, False)
    along = _ones(a), _ones(b)
    return lambda: product(GEMMS["bf16-exact"], (a, b), along, filled), True


def _ones(x: Tensor) -> Tensor:
    """A factor for each segment of the rows of x."""
    return torch.ones(*x.shape[:2], x.shape[2] // SEGMENT, device=x.device)


def _torch_bf16(of: Operands) -> tuple[Callable[[], Tensor], bool]:
    (a, ends), b = of.flat(), of.b.bfloat16().mT
    a = a.bfloat16()
    return lambda: torch._grouped_mm(a, b, offs=ends), False


def _torch_fp8(of: Operands) -> tuple[Callable[[], Tensor], bool]:
    (a, ends), b = of.flat(), of.b.to(E4M3).mT
    a = a.to(E4M3)
    one_a, one_b = torch.ones(len(a), device=a.device), torch.ones(len(b), b.shape[2], device=b.device)

    def call() -> Tensor:
        return torch._scaled_grouped_mm(a, b, one_a, one_b, offs=ends, out_dtype=torch.bfloat16)

    return call, False


WAYS: dict[str, Way] = {
    "ours, BF16": _ours,
    "ours, BF16 under factors of 128": _ours_under_factors,
    "torch, BF16": _torch_bf16,
    "torch, FP8": _torch_fp8,
}


def _measured(way: Way, of: Operands, exact: Tensor) -> tuple[float | None, int | None, str]:
    """Time in µs and the number of wrong outputs; None and what torch said where it has no such product."""
    try:
        call, is_exact = way(of)
        got = call()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        return None, None, f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if got.ndim == 3:
        got = torch.cat([rows[:n] for rows, n in zip(got, of.filled.tolist(), strict=True)])
    bound = 0.0 if is_exact else float(exact.abs().max()) / 64
    wrong = int(((got.float() - exact).abs() > bound).sum())
    del got
    return median_us(graph(call)) / CALLS, wrong, ""
