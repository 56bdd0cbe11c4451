"""Conformance: what the quantizers on this machine compute, checked against what their definitions say.

Every check counts cases and mismatches, so that a broken compiler, driver or kernel shows itself before it makes a
table of results. `fp4dse selftest [--device cuda]` prints them; the frozen vectors that it compares with are in
`kernels/vectors.npz` and are free for others to use (see `vectors.vectors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import Hadamard, Quantizer, Recipe
from fp4dse.dse.formats import E8M0_RULES, ELEMENTS
from fp4dse.dse.rounding import Nearest, Stochastic
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import E8M0, SCALE_NAMES
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.quant.backend import PLAIN, backend
from fp4dse.kernels.quant.operand.kinds import make_slot
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.quant.quantize import quantize
from fp4dse.kernels.quant.spec import blocks
from fp4dse.kernels.vectors import BLOCK_SCALED, vectors, with_whole_tiles


class Check(msgspec.Struct, frozen=True):
    """A check: its name, its cases, and how many of them were wrong."""

    name: str
    cases: int
    wrong: int


def selftest(device: str = "cpu") -> Iterator[Check]:
    """All checks on a device, one after the other."""
    for check in CHECKS:
        yield from check(device)


def codes_and_midpoints(device: str) -> Iterator[Check]:
    """Every code keeps its value; every midpoint goes to the even code, its neighbours to the nearest."""
    for element, f in ELEMENTS.items():
        if element == "s1p2" or f.radix != 2:
            continue  # the elements of one codec alone: their vectors are below
        values = torch.tensor(f.magnitudes())
        middle = (values[1:] + values[:-1]) / 2
        code = torch.arange(len(middle))
        below, above = (torch.nextafter(middle, torch.tensor(to)) for to in (-1.0, math.inf))
        x = torch.cat([values, middle, below, above])
        expected = torch.cat([values, values[code + code % 2], values[:-1], values[1:]])
        got = torch.cat([_unscaled(sign * x, element, device) * sign for sign in (1, -1)])
        yield _compare(f"{element}: codes, midpoints ± 1 ulp", got, expected.repeat(2))


def scale_rules(device: str) -> Iterator[Check]:
    """E8M0 exponents at amax on every rule's boundary ± 1 ulp, from the rule's own inequality in float64."""
    fits: dict[str, Callable[[float, int], bool]] = {  # the exponent is the smallest one that fits; E2M1: 6 = 1.5 · 2^2
        "floor": lambda x, e: x < 8 * 2.0**e,
        "ceil": lambda x, e: x <= 4 * 2.0**e,
        "rceil": lambda x, e: x <= 6 * 2.0**e,
        "even": lambda x, e: x < 7 * 2.0**e,
        "nearest": lambda x, e: x * x < 72 * 4.0**e,
        "encode": lambda x, e: 3 * x <= 16 * 2.0**e,
    }
    edges = [m * 2.0**k for m in (1.0, 4 / 3, 1.5, 1.75, 1.5 / math.sqrt(2)) for k in range(-100, 100, 7)]
    at = torch.tensor(edges)
    amax = torch.cat([torch.nextafter(at, torch.tensor(0.0)), at, torch.nextafter(at, torch.tensor(math.inf))])
    x = torch.zeros(len(amax), 32)
    x[:, 5] = amax
    for rule in E8M0_RULES:
        expected = []
        for value in amax.tolist():
            e = math.frexp(value)[1] - 5
            while not fits[rule](value, e):
                e += 1
            expected.append(2.0**e)
        scale = SCALE_NAMES[f"e8m0-{rule}"]
        got = quantize(x.to(device), Quantizer(block=32, scale=scale)).scales
        assert got is not None
        yield _compare(f"e8m0-{rule}: maxima at boundaries ± 1 ulp", got.flatten(), torch.tensor(expected))


def fast_path(device: str) -> Iterator[Check]:
    """The path that training takes equals the reference on all BF16 and FP16 numbers and on blocks of every kind."""
    chosen = backend(device)
    inputs = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    cases = {name: everything.view(dtype).float() for name, dtype in inputs.items()} | {"odd blocks": odd_blocks()}
    seeds, step = torch.arange(2, device=device), torch.zeros((), dtype=torch.int64, device=device)
    for name, q in BLOCK_SCALED.items():
        wrong = count = 0
        stochastic = msgspec.structs.replace(q, rounding=Stochastic())
        has_none = quantizer_faults(stochastic)
        for lanes in [[q, q]] if has_none else [[q, q], [stochastic, q]]:
            recipes = [Recipe.uniform(lane) for lane in lanes]
            taken, reference = (make_slot(recipes, "fprop.x", torch.device(device), path) for path in (chosen, PLAIN))
            for x in cases.values():
                x = blocks.pad(x.reshape(2, -1, 128).to(device), 1, 32)
                use = Use(seeds, step, 0, training=False)
                got, expected = (slot.quantize(x, use).terms[0] for slot in (taken, reference))
                wrong += _mismatches(got.values, expected.values)
                count += got.values.numel()
        yield Check(f"{name}: path `{chosen.name}` against the reference", count, wrong)


def stochastic_statistics(device: str) -> Iterator[Check]:
    """Mean over 4,096 draws within five standard errors of x, and never off its two neighbours."""
    points = torch.tensor([0.1, 0.25, 0.6, 1.2, 1.5, 1.9, 2.2, 3.1, 3.9, 4.7, 5.5, 5.95])
    values = torch.tensor(ELEMENTS["e2m1"].magnitudes())
    n = 4096
    for bits in (8, 16):
        got = _unscaled(points.repeat(n), "e2m1", device, Stochastic(bits=bits)).view(n, -1).double()
        high = values[torch.searchsorted(values, points)].double()
        low = values[torch.searchsorted(values, points, right=True) - 1].double()
        error = ((high - points) * (points - low) / n).sqrt().clamp(min=1e-9)
        wrong = ((got.mean(0) - points).abs() > 5 * error + (high - low) * 2.0 ** -(bits + 1)).sum()
        off = ((got != low) & (got != high)).sum()
        yield Check(f"stochastic, {bits} bits: mean and neighbours", got.numel() + len(points), int(wrong + off))


def rotations(device: str) -> Iterator[Check]:
    """With quantizers off a rotation cancels in every GEMM, to 1e-6."""
    none = Recipe.uniform(Quantizer.named("none"))
    x, w = (torch.randn(2, rows, 128, generator=torch.Generator().manual_seed(0)).to(device) for rows in (64, 48))
    for size in (16, 32, 64, 128):
        numerics = LaneNumerics([none, none], [0, 1], device)
        plain = torch.bmm(x, w.mT)
        for stage in numerics.quantized.values():
            stage.rotation = Hadamard(size=size)
        wrong = sum(
            float((numerics.gemm(stage, 0, x, 2, w, 2) - plain).norm() / plain.norm()) > 1e-6
            for stage in numerics.quantized
        )
        yield Check(f"rotation {size}: cancels in all three products", 3, wrong)


def contraction_axis(device: str) -> Iterator[Check]:
    """Changing one element changes its own block and no other."""
    for name, q in BLOCK_SCALED.items():
        x = with_whole_tiles(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)), q).to(device)
        if q.tensor_scale:
            x[0, 0] = 1000  # the tensor's maximum stays what it is
        changed = x.clone()
        changed[37, 50] *= 64
        before, after = (quantize(t, q).values for t in (x, changed))
        touched = torch.zeros_like(x)
        touched[37, 50] = 1
        own_block = q.unit if isinstance(q.block, int) else q.block
        cut = blocks.cut(touched[None], own_block)
        own = cut.amax(2, keepdim=True).expand_as(cut)
        outside = blocks.join(own, (1, *x.shape), own_block)[0] == 0
        wrong = int(((before != after) & outside).sum()) + int(torch.equal(before, after))
        yield Check(f"{name}: an element reaches its own block alone", int(outside.sum()) + 1, wrong)


def frozen_vectors(device: str) -> Iterator[Check]:
    """The vectors that ship with the package."""
    stored = vectors()
    x = torch.from_numpy(stored["x"]).to(device)
    for name, q in BLOCK_SCALED.items():
        if f"{name}/values" not in stored:
            yield Check(f"{name}: no frozen vectors (python -m fp4dse.kernels.vectors makes them)", 1, 1)
            continue
        got = quantize(with_whole_tiles(x, q), q)
        expected = torch.from_numpy(stored[f"{name}/values"])
        wrong = _mismatches(got.values.cpu(), expected)
        assert got.codes is not None
        wrong += int((got.codes.cpu() != torch.from_numpy(stored[f"{name}/codes"])).sum())
        yield Check(f"{name}: frozen vectors", 2 * expected.numel(), wrong)


CHECKS = (
    codes_and_midpoints,
    scale_rules,
    fast_path,
    stochastic_statistics,
    rotations,
    contraction_axis,
    frozen_vectors,
)


def odd_blocks() -> Tensor:
    """float32 [2, 64, 128]: wide range, zero, subnormal, huge, one outlier, NaN, Inf."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, 128, generator=generator)
    x[:, 8:16] *= torch.exp2(torch.randint(-60, 60, (2, 8, 1), generator=generator).float())
    x[:, 16], x[:, 17], x[:, 18], x[:, 19, 0] = 0, x[:, 17] * 1e-41, x[:, 18] * 1e37, 1e30
    x[1, 20, 3], x[1, 21, 5], x[1, 22, 6] = math.nan, math.inf, -math.inf
    return x


def _unscaled(values: Tensor, element: str, device: str, rounding: Stochastic | None = None) -> Tensor:
    """`values` quantized under a block scale of 1: each stands beside the largest element."""
    rows = torch.zeros(len(values), 32)
    rows[:, 0], rows[:, 1] = ELEMENTS[element].max, values
    q = Quantizer(element=element, block=32, scale=E8M0(), rounding=rounding or Nearest())
    return quantize(rows.to(device), q).values[:, 1].cpu()


def _mismatches(got: Tensor, expected: Tensor) -> int:
    """Elements whose bits differ; NaN equals NaN."""
    return int((~((got == expected) | (got.isnan() & expected.isnan()))).sum())


def _compare(name: str, got: Tensor, expected: Tensor) -> Check:
    return Check(name, got.numel(), _mismatches(got.cpu(), expected))
