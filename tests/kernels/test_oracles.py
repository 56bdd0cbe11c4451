"""The reference against gfloat, ml_dtypes and torchao, which we did not write.

Code for code on a million numbers a format, and on every code, midpoint, BF16 and FP16 number. What a format is, the
oracles say by their own records or by one written here in their terms, never by ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace

import gfloat
import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from gfloat import Domain, FormatInfo, RoundMode
from gfloat.formats import (
    format_info_bfloat16,
    format_info_binary32,
    format_info_ocp_e2m1,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
)
from torch import Tensor

from fp4dse.dse import QUANTIZERS, Quantizer
from fp4dse.dse.formats import ELEMENTS, SCALES
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.scale import SCALE_NAMES, UE5M3, FloatScale
from fp4dse.kernels import quantize
from fp4dse.kernels.ops.philox import STREAMS, random16
from fp4dse.kernels.quant.descriptor import FLOATS, INTS, descriptor
from fp4dse.kernels.quant.spec.codecs.block import block_scales
from fp4dse.kernels.quant.spec.grid import round_elements

CHUNK, CHUNKS = 1 << 18, 4  # a million numbers a format
LARGEST_SCALE = (2 - 2.0**-7) * 2.0**126  # of BF16 below 2^127, whose inverse is no normal number; scales end there
FLT_MAX = np.float32(np.finfo(np.float32).max)


def form(name: str, bits: int, precision: int, bias: int, signed: bool, nans: int = 0, inf: bool = False) -> FormatInfo:
    """A format that gfloat has no record of, in gfloat's terms: `nans` codes at the top, below them Inf."""
    return FormatInfo(
        name=name,
        k=bits,
        precision=precision,
        bias=bias,
        is_signed=signed,
        domain=Domain.Extended if inf else Domain.Finite,
        has_nz=signed,
        num_high_nans=nans,
        has_subnormals=True,
        is_twos_complement=False,
    )


ELEMENT_FORMS = {
    "e2m1": format_info_ocp_e2m1,
    "e1m2": form("e1m2", 4, precision=3, bias=0, signed=True),
    "e3m0": form("e3m0", 4, precision=1, bias=3, signed=True),
    "int4": form("int4", 4, precision=3, bias=-1, signed=True),
    "e4m3": format_info_ocp_e4m3,
    "e5m2": format_info_ocp_e5m2,
}
SCALE_FORMS = {
    "e4m3": format_info_ocp_e4m3,
    "ue5m3": form("ue5m3", 8, precision=4, bias=15, signed=False, nans=1),
    "ue5m3-61440": form("ue5m3-61440", 8, precision=4, bias=15, signed=False, nans=7, inf=True),
    "ue5m3-122880": form("ue5m3-122880", 8, precision=4, bias=15, signed=False),
    "e5m2": format_info_ocp_e5m2,
    "ue4m4": form("ue4m4", 8, precision=5, bias=7, signed=False),
    "bf16": format_info_bfloat16,
    "fp32": format_info_binary32,
}


def gfloat_values(info: FormatInfo, x: np.ndarray, rnd: RoundMode = RoundMode.TiesToEven, **bits) -> np.ndarray:
    """x rounded by gfloat in float64, saturating, as float32."""
    return gfloat.round_ndarray(info, x.astype(np.float64), rnd, sat=True, **bits).astype(np.float32)


def cast(dtype, largest: float) -> Callable[[np.ndarray], np.ndarray]:
    """A cast by ml_dtypes, clamped first: some of its types overflow to Inf or NaN."""
    return lambda x: np.clip(x, -largest, largest).astype(dtype).astype(np.float32)


@cache
def torchao() -> SimpleNamespace:
    """What of torchao is compared. Importing it takes seconds, of which other tests have no use."""
    from torchao.prototype.mx_formats import kernels, mx_tensor, nvfp4_tensor

    return SimpleNamespace(kernels=kernels, mx=mx_tensor, nvfp4=nvfp4_tensor)


def torchao_e2m1(x: np.ndarray) -> np.ndarray:
    grid = np.array([gfloat.decode_float(format_info_ocp_e2m1, code).fval for code in range(16)], np.float32)
    return grid[torchao().kernels.f32_to_f4_unpacked(torch.from_numpy(x)).numpy()]


def uniform_grid(step: float, largest: float) -> Callable[[np.ndarray], np.ndarray]:
    """numpy's rounding to integers: what E1M2 and INT4 come down to."""
    return lambda x: np.clip(np.rint(x / np.float32(step)), -largest / step, largest / step) * np.float32(step)


SECOND_ELEMENT_ORACLES: dict[str, list[Callable[[np.ndarray], np.ndarray]]] = {
    "e2m1": [cast(ml_dtypes.float4_e2m1fn, 6), torchao_e2m1],
    "e1m2": [uniform_grid(0.5, 3.5)],
    "e3m0": [],
    "int4": [uniform_grid(1, 7)],
    "e4m3": [cast(ml_dtypes.float8_e4m3fn, 448)],
    "e5m2": [cast(ml_dtypes.float8_e5m2, 57344)],
}
SECOND_SCALE_ORACLES = {
    "e4m3": [cast(ml_dtypes.float8_e4m3fn, 448)],
    "e5m2": [cast(ml_dtypes.float8_e5m2, 57344)],
    "bf16": [cast(ml_dtypes.bfloat16, SCALES["bf16"].max)],
}


def same(a: np.ndarray | Tensor, b: np.ndarray | Tensor) -> bool:
    """Equal in every bit, the sign of zero included."""
    a, b = (np.ascontiguousarray(v, dtype=np.float32) for v in (a, b))
    return np.array_equal(a.view(np.int32), b.view(np.int32))


def chunks(low: float, top: float, signed: bool) -> Iterator[np.ndarray]:
    """CHUNKS × CHUNK float32 numbers below `top`: half of them uniform, half uniform in their bits from `low` on."""
    rng = np.random.default_rng(0)
    first, last = (int(np.float32(v).view(np.int32)) for v in (low, top))
    for _ in range(CHUNKS):
        x = rng.integers(first, last, CHUNK, dtype=np.int32).view(np.float32)
        x[::2] = rng.random(CHUNK // 2, dtype=np.float32) * np.float32(top)
        x = np.minimum(x, np.nextafter(np.float32(top), np.float32(0)))
        if signed:
            x[rng.integers(0, 2, CHUNK, dtype=bool)] *= -1
        yield x


def grid(info: FormatInfo) -> np.ndarray:
    """Every finite magnitude of the format, ascending, decoded by gfloat from its codes."""
    codes = range(1 << info.k - info.is_signed)
    values = np.array([gfloat.decode_float(info, code).fval for code in codes])
    return values[np.isfinite(values)].astype(np.float32)


def edges(values: np.ndarray) -> np.ndarray:
    """Every value and every midpoint of neighbours, with the float32 numbers on both sides of it."""
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    zero, far = np.float32(0), np.float32(np.inf)
    return np.concatenate([points, np.nextafter(points, zero), np.nextafter(points, far)])


def all_of(dtype: torch.dtype) -> Tensor:
    """All finite BF16 or FP16 numbers."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return x[torch.isfinite(x)]


# --- formats -----------------------------------------------------------------------------------------------------


def test_every_format_has_an_oracle_but_those_that_nobody_ships():
    assert set(ELEMENTS) - set(ELEMENT_FORMS) == {"radix4", "radix4-odd", "s1p2"}  # s1p2: HiFloat4's, ties away
    assert set(SCALES) - set(SCALE_FORMS) == set()


@pytest.mark.parametrize("name", ELEMENT_FORMS)
def test_the_codes_of_an_element_mean_what_gfloat_says(name):
    assert grid(ELEMENT_FORMS[name]).tolist() == ELEMENTS[name].magnitudes()


@pytest.mark.parametrize("name", [name for name in SCALE_FORMS if SCALES[name].bits == 8])
def test_the_codes_of_a_scale_mean_what_gfloat_says(name):
    assert grid(SCALE_FORMS[name]).tolist() == SCALES[name].magnitudes()


def elements(x: Tensor, element: str) -> np.ndarray:
    """x, below twice the top binade's start, quantized with a scale of one; its codes decoded by gfloat's table."""
    info, top = ELEMENT_FORMS[element], 2.0 ** ELEMENTS[element].emax
    row = torch.cat([x.new_tensor([top]), x])[None]
    got = quantize(row, Quantizer(element=element, block="row", scale=SCALE_NAMES["e8m0-floor"]))
    assert got.scales.item() == 1
    table = np.array([gfloat.decode_float(info, code).fval for code in range(1 << info.k)], np.float32)
    return table[got.codes.numpy()[0, 1:]]


def element_oracles(name: str) -> list[Callable[[np.ndarray], np.ndarray]]:
    return [lambda x: gfloat_values(ELEMENT_FORMS[name], x), *SECOND_ELEMENT_ORACLES[name]]


@pytest.mark.parametrize("name", ELEMENT_FORMS)
def test_elements_equal_their_oracles_on_a_million_numbers(name):
    top = 2.0 ** (ELEMENTS[name].emax + 1)
    smallest = float(grid(ELEMENT_FORMS[name])[1])
    for x in chunks(smallest / 16, top, signed=True):
        got = elements(torch.from_numpy(x), name)
        for oracle in element_oracles(name):
            assert same(got, oracle(x))


@pytest.mark.parametrize("name", ELEMENT_FORMS)
def test_elements_equal_their_oracles_on_all_codes_midpoints_bf16_and_fp16_numbers(name):
    top = 2.0 ** (ELEMENTS[name].emax + 1)
    points = edges(grid(ELEMENT_FORMS[name]))
    for x in (torch.from_numpy(np.concatenate([points, -points])), all_of(torch.bfloat16), all_of(torch.float16)):
        x = x[x.abs().double() < top]
        got = elements(x, name)
        for oracle in element_oracles(name):
            assert same(got, oracle(x.float().numpy()))


def scale(name: str) -> FloatScale:
    """The scale record of a name in formats.SCALES."""
    tag, _, largest = name.partition("-")
    return UE5M3(max=int(largest)) if largest else SCALE_NAMES[tag]


def columns(q: Quantizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The quantizer's numbers by name, [1, 1] each."""
    floats, ints = descriptor([q])
    f = dict(zip(FLOATS, floats[:, :, None].unbind(1), strict=True))
    return f, dict(zip(INTS, ints[:, :, None].unbind(1), strict=True))


def scales_of(amax: np.ndarray, q: Quantizer, inv_val_max: Tensor | None = None) -> Tensor:
    """The reference's scales of blocks with these maxima, without a tensor scale."""
    f, i = columns(q)
    one = torch.ones(1, 1)
    wanted = f["inv_val_max"] if inv_val_max is None else inv_val_max
    return block_scales(torch.from_numpy(amax)[None], one, wanted, f, i, None)[0][0]


def stored(wanted: np.ndarray, name: str, rounding: str = "nearest") -> Tensor:
    """What is stored for wanted block scales: the scales of blocks with these maxima, were the largest element one."""
    part = msgspec.structs.replace(scale(name), zero="keep", rounding=rounding)
    return scales_of(wanted, Quantizer(scale=part), torch.ones(1, 1))


@pytest.mark.parametrize("name", SCALE_FORMS)
def test_scales_equal_their_oracles_on_a_million_numbers(name):
    info = SCALE_FORMS[name]
    smallest, top = max(info.smallest_subnormal / 16, 2.0**-126), min(2 * info.max, LARGEST_SCALE)
    for wanted in chunks(smallest, top, signed=False):
        got = stored(wanted, name)
        for oracle in (lambda x: gfloat_values(info, x), *SECOND_SCALE_ORACLES.get(name, [])):
            assert same(got, oracle(wanted))


@pytest.mark.parametrize("name", SCALE_FORMS)
def test_scales_equal_their_oracles_on_all_codes_midpoints_bf16_and_fp16_numbers(name):
    info = SCALE_FORMS[name]
    points = edges(grid(info)) if info.k == 8 else np.zeros(1, np.float32)
    for x in (points, *(all_of(dtype).float().numpy() for dtype in (torch.bfloat16, torch.float16))):
        x = np.abs(x[np.abs(x) < LARGEST_SCALE])
        assert same(stored(x, name), gfloat_values(info, x))
        x = x[(x == 0) | (x >= np.finfo(np.float32).tiny)]  # what is subnormal in FP32 is not rounded up, but to zero
        assert same(stored(x, name, "up"), gfloat_values(info, x, RoundMode.TowardPositive))


# --- E8M0 rules --------------------------------------------------------------------------------------------------

POWERS = form("powers of two", 10, precision=1, bias=511, signed=False)  # wider than any quotient here
HALVES = form("1 and 1.5 times powers of two", 11, precision=2, bias=511, signed=False)


def power_by_gfloat(rule: str, amax: np.ndarray, element: str = "e2m1") -> np.ndarray:
    """The E8M0 scale of a block with this maximum, by gfloat's roundings; `even` and `encode` of E2M1 alone."""
    x, largest = amax.astype(np.float64), ELEMENT_FORMS[element].max
    top = 2.0 ** math.floor(math.log2(largest))
    if rule == "encode":
        multipliers = gfloat.round_ndarray(POWERS, 4 / x, RoundMode.TiesToEven, sat=True)
        return np.maximum(1 / multipliers, 2.0**-127).astype(np.float32)
    source, mode = {
        "floor": (x / top, RoundMode.TowardZero),
        "ceil": (x / top, RoundMode.TowardPositive),
        "rceil": (x / largest, RoundMode.TowardPositive),
        "even": (gfloat.round_ndarray(HALVES, x / 4, sat=True), RoundMode.TowardZero),
    }[rule]
    return np.maximum(gfloat.round_ndarray(POWERS, source, mode, sat=True), 2.0**-127).astype(np.float32)


def ours(x: Tensor, rule: str):
    return quantize(x, Quantizer(block=32, scale=SCALE_NAMES[f"e8m0-{rule}"]))


@pytest.mark.parametrize("rule", ["floor", "ceil", "rceil", "even", "encode"])
def test_e8m0_scales_equal_gfloat_on_a_million_maxima(rule):
    q, lowest = Quantizer(block=32, scale=SCALE_NAMES[f"e8m0-{rule}"]), np.float32(1e-45)
    binades = 2.0 ** np.arange(-149, 127)
    boundaries = edges((np.multiply.outer([1, 1.5, 1.75], binades)).astype(np.float32))
    boundaries = boundaries[(boundaries > 0) & np.isfinite(boundaries)]
    exact = [np.abs(all_of(dtype).float().numpy()) for dtype in (torch.bfloat16, torch.float16)]
    for amax in (boundaries, *(x[x > 0] for x in exact), *chunks(float(lowest), 2.0**127, signed=False)):
        assert same(scales_of(amax, q), power_by_gfloat(rule, amax))


def torchao_codes(packed: Tensor, like: Tensor) -> Tensor:
    return torchao().kernels.unpack_uint4(packed.view(torch.uint8)).view(like.shape)


def blocks(dtype: torch.dtype) -> Iterator[Tensor]:
    """CHUNKS × CHUNK normal numbers, rows scaled by 2^-60 … 2^60; four blocks a row with a boundary ± 1 ulp in them."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(CHUNKS):
        x = torch.randn(CHUNK // 1024, 1024, generator=generator)
        x *= torch.exp2(torch.randint(-60, 61, (len(x), 1), generator=generator).float())
        top = torch.tensor([1.0, 1.25, 1.5, 1.75])[torch.randint(0, 4, (len(x), 4), generator=generator)]
        bits = top.to(dtype).view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
        ulps = torch.randint(-1, 2, top.shape, generator=generator)
        x[:, :128:32] = (bits + ulps).to(bits.dtype).view(dtype).float() * 2.0 ** torch.randint(3, 70, (1,)).item()
        yield x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["floor", "ceil", "rceil", "even"])
def test_mxfp4_equals_torchao_and_gfloat(rule, dtype):
    """torchao's rceil takes a floating log2, which misses maxima just above 6 · 2^k: within 2^-17 they are left out."""
    for x in blocks(dtype):
        got = ours(x, rule)
        theirs, packed = torchao().mx.to_mx(
            x, torch.float4_e2m1fn_x2, 32, torchao().mx.ScaleCalculationMode[rule.upper()]
        )
        scales, codes = theirs.to(torch.float32), torchao_codes(packed, x)
        fine = torch.ones_like(scales, dtype=torch.bool)
        if rule == "rceil":
            significand = torch.frexp(x.float().view(*scales.shape, 32).abs().amax(-1))[0]
            fine = ~((significand > 0.75) & (significand <= 0.75 * (1 + 2**-17)))
            assert fine.double().mean() > (0.999 if dtype == torch.bfloat16 else 0.9)
        assert torch.equal(got.scales[fine], scales[fine])
        assert torch.equal(got.codes.view(*scales.shape, 32)[fine], codes.view(*scales.shape, 32)[fine])
        amax = x.float().view(*scales.shape, 32).abs().amax(-1)
        assert same(got.scales, power_by_gfloat(rule, amax.numpy()))
        if rule == "rceil":  # one rule is enough for the elements: they were compared under all of them above
            shared = got.scales.repeat_interleave(32, 1)
            assert same(got.elements, gfloat_values(format_info_ocp_e2m1, (x.double() / shared).numpy()))


# --- MXFP8 -------------------------------------------------------------------------------------------------------

MXFP8 = {
    f"mxfp8{of_element}{of_rule}": (element, of_rule.removeprefix("-") or "floor")
    for of_element, element in (("", "e4m3"), ("-e5m2", "e5m2"))
    for of_rule in ("", "-ceil", "-rceil")
}
FP8_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def test_every_named_mxfp8_is_compared():
    assert MXFP8.keys() == {name for name in QUANTIZERS if name.startswith("mxfp8")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MXFP8)
def test_mxfp8_equals_torchao_and_gfloat(name, dtype):
    """Of rceil the maxima just above the largest element · 2^k are left out, as in MXFP4's test."""
    element, rule = MXFP8[name]
    for x in blocks(dtype):
        got = quantize(x, Quantizer.named(name))
        theirs, codes = torchao().mx.to_mx(x, FP8_TYPES[element], 32, torchao().mx.ScaleCalculationMode[rule.upper()])
        scales, codes = theirs.to(torch.float32), codes.view(torch.uint8).view(*theirs.shape, 32)
        amax = x.float().view(*scales.shape, 32).abs().amax(-1)
        fine = torch.ones_like(scales, dtype=torch.bool)
        if rule == "rceil":
            significand = torch.frexp(amax)[0]
            fine = ~((significand > 0.875) & (significand <= 0.875 * (1 + 2**-17)))
            assert fine.double().mean() > (0.999 if dtype == torch.bfloat16 else 0.9)
        assert torch.equal(got.scales[fine], scales[fine])
        assert torch.equal(got.codes.view(*scales.shape, 32)[fine], codes[fine])
        assert same(got.scales, power_by_gfloat(rule, amax.numpy(), element))
        shared = got.scales.repeat_interleave(32, 1)
        assert same(got.elements, gfloat_values(ELEMENT_FORMS[element], (x.double() / shared).numpy()))


# --- NVFP4 -------------------------------------------------------------------------------------------------------


def nvfp4_chain(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """NVFP4 written once more, in numpy float32 and ml_dtypes casts, operation by operation: (codes, scales)."""
    f = np.float32
    amax = np.abs(x).max()
    enc = min(f(2688) / amax, FLT_MAX) if amax > 0 else f(1)
    dec = f(1) / enc
    tiles = x.reshape(-1, 16)
    scale = np.minimum(np.abs(tiles).max(1) * (enc * (f(1) / f(6))), f(448)).astype(ml_dtypes.float8_e4m3fn)
    scale = scale.astype(f)
    with np.errstate(divide="ignore", over="ignore"):
        mult = np.minimum(f(1) / (scale * dec), FLT_MAX)
        codes = np.clip(tiles * mult[:, None], f(-6), f(6)).astype(ml_dtypes.float4_e2m1fn)
    return codes.view(np.uint8) & 15, scale


def nvfp4_inputs(dtype: torch.dtype) -> Iterator[Tensor]:
    """Tensors of CHUNK numbers: normal, with wide rows, and with block maxima on the midpoints between E4M3 numbers."""
    generator = torch.Generator().manual_seed(1)
    e4m3 = torch.from_numpy(grid(format_info_ocp_e4m3))
    middles = 6 * (e4m3[1:] + e4m3[:-1]) / 2
    for chunk in range(CHUNKS):
        x = torch.randn(CHUNK // 1024, 1024, generator=generator)
        if chunk % 3 == 1:
            x *= torch.exp2(torch.randn(len(x), 1, generator=generator) * 12)
        if chunk % 3 == 2:
            x = x.clamp(-3, 3) / 4
            x[:, ::16] = 1
            x = x.view(-1, 16) * middles[torch.randint(0, len(middles), (x.numel() // 16, 1), generator=generator)]
            x[0, 0] = 2688  # the tensor's maximum: enc is one
        yield x.view(-1, 1024).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_follows_the_operation_order_of_its_definition(dtype):
    for x in nvfp4_inputs(dtype):
        got = quantize(x, Quantizer.named("nvfp4"))
        codes, scales = nvfp4_chain(x.float().numpy())
        assert same(got.scales.flatten(), scales)
        kept = scales > 0  # a block whose scale is zero is lost, whatever its codes
        assert np.array_equal(got.codes.numpy().reshape(-1, 16)[kept], codes[kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [-3, 0, 9])
def test_nvfp4_equals_torchao_where_the_dialects_agree(exponent, dtype):
    """torchao divides where the definition multiplies by a rounded reciprocal, and its smallest scale is 2^-6.

    With a power of two as the tensor scale one difference is left: amax / 6 against amax · FP32(1/6), half an ulp
    apart, which is another scale only where amax / 6 is within an ulp of the midpoint between two E4M3 numbers.
    """
    e4m3 = torch.from_numpy(grid(format_info_ocp_e4m3))
    middles = (e4m3[1:] + e4m3[:-1]) / 2
    compared = 0
    for x in nvfp4_inputs(dtype):
        x = x.clamp(-2688, 2688)
        x[0, 0] = 2688
        x = x * 2.0**exponent
        got = quantize(x, Quantizer.named("nvfp4"))
        assert got.tensor_scale.item() == 2.0**exponent
        theirs, packed = torchao().nvfp4.nvfp4_quantize(x, per_tensor_scale=torch.tensor(2.0**exponent))
        codes = torchao_codes(packed, x).view(-1, 16)
        wanted = x.float().view(-1, 16).abs().amax(1) / 6 / 2.0**exponent
        near = middles[torch.searchsorted(middles, wanted).clamp(1, len(middles) - 1)[:, None] - torch.tensor([0, 1])]
        fine = ((near - wanted[:, None]).abs() > 2.0**-22 * wanted[:, None]).all(1) & (wanted > 2.0**-6)
        compared += int(fine.sum()) * 16
        assert torch.equal(got.scales.flatten()[fine], theirs.float().flatten()[fine])
        assert torch.equal(got.codes.view(-1, 16)[fine], codes[fine])
    assert compared > 0.38 * CHUNK * CHUNKS


# --- stochastic rounding -----------------------------------------------------------------------------------------


def rounded_with(x: np.ndarray, draws: np.ndarray, element: str, bits: int) -> np.ndarray:
    """The reference's element rounding of magnitudes with given 16-bit draws."""
    f, i = columns(Quantizer(element=element, block=32, rounding=Stochastic(bits=bits)))
    y = torch.from_numpy(x)[None, :, None]
    return round_elements(y, f, i, torch.from_numpy(draws)[None, :, None])[0, :, 0].numpy()


def stochastic_inputs(element: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Magnitudes of the format's range, a quarter of them at 2^-17 multiples (ties), with 16-bit draws."""
    rng = np.random.default_rng(2)
    info = ELEMENT_FORMS[element]
    smallest = float(grid(info)[1])
    for x in chunks(smallest / 2**20, info.max, signed=False):
        step = np.float32(smallest * 2.0**-17)
        x[::4] = np.rint(x[::4] / step) * step
        yield np.minimum(x, np.float32(info.max)), rng.integers(0, 1 << 16, len(x), dtype=np.int32)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("element", ["e2m1", "int4", "e4m3"])
def test_stochastic_rounding_equals_gfloat_with_the_same_bits(element, bits):
    """gfloat's StochasticFast is the midpoint form: up iff fraction + (2r + 1) / 2^(b + 1) >= 1."""
    for x, draws in stochastic_inputs(element):
        theirs = gfloat_values(
            ELEMENT_FORMS[element],
            x,
            RoundMode.StochasticFast,
            srbits=(draws >> 16 - bits).astype(np.int64),
            srnumbits=bits,
        )
        assert same(rounded_with(x, draws, element, bits), theirs)


@pytest.mark.parametrize("bits", [8, 16])
def test_stochastic_rounding_differs_from_gfloats_careful_form_on_ties_alone(bits):
    """gfloat's Stochastic first rounds the fraction to b bits, ties to even; the midpoint form rounds ties up. So with
    the same r they differ where the fraction is (n + 1/2) / 2^b with n even, and there at r = 2^b - 1 - n alone."""
    differ = 0
    even = np.arange(0, 256, 2)
    for x, draws in stochastic_inputs("e2m1"):
        x[: len(even)] = (even + 0.5) / 2 ** (bits + 1)  # ties below 0.5, with the draw that tells the forms apart
        draws[: len(even)] = (2**bits - 1 - even) << 16 - bits
        r = (draws >> 16 - bits).astype(np.int64)
        theirs = gfloat_values(format_info_ocp_e2m1, x, RoundMode.Stochastic, srbits=r, srnumbits=bits)
        got = rounded_with(x, draws, "e2m1", bits)
        step = np.where(x < 2, 0.5, np.where(x < 4, 1.0, 2.0))
        n = x / step % 1 * 2.0**bits
        tie = (n % 1 == 0.5) & (np.floor(n) % 2 == 0) & (r == 2**bits - 1 - np.floor(n))
        assert np.array_equal(got != theirs, tie)
        differ += int(tie.sum())
    assert differ >= CHUNKS * len(even)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", ["mxfp4-rceil", "mxfp4"])
def test_stochastic_mxfp4_equals_gfloat_with_the_documented_draws(name, bits):
    """Element e of the operand takes draw e of its (seed, step, site)."""
    q = msgspec.structs.replace(Quantizer.named(name), rounding=Stochastic(bits=bits))
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(3))
    got = quantize(x, q, seed=5, step=6, site=7)
    draws = random16(torch.tensor([5]), STREAMS["rounding"], torch.tensor(6), torch.tensor(7), x.numel())
    r = (draws.view(x.shape) >> 16 - bits).long().numpy()
    powers = power_by_gfloat(
        name.removeprefix("mxfp4-").replace("mxfp4", "floor"), x.view(1024, 32, 32).abs().amax(-1).numpy()
    )
    scaled = x.double().numpy() / np.repeat(powers, 32, 1)
    assert same(got.scales, powers)
    # gfloat saturates after it has rounded, the definition before: beyond the largest element both give it
    theirs = gfloat_values(format_info_ocp_e2m1, scaled, RoundMode.StochasticFast, srbits=r, srnumbits=bits)
    assert same(got.elements, theirs)


def test_a_tie_has_both_outcomes_with_equal_weight_over_all_draws():
    draws = np.arange(1 << 16, dtype=np.int32)
    for bits in (8, 16):
        up = rounded_with(np.full(1 << 16, 2.5, np.float32), draws, "e2m1", bits) == 3
        assert math.isclose(up.mean(), 0.5)
