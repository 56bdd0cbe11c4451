"""MXFP4 and FP8 are converted into each other without a third format: by exponents, exactly within a window."""

import itertools

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp4dse.dse import QUANTIZERS
from fp4dse.kernels import quantize
from fp4dse.kernels.ops import mxfp4
from fp4dse.kernels.ops.mxfp4 import E4M3, E5M2, NAN
from fp4dse.kernels.quant.packed import unpack
from tests.kernels.comparing import take_kernels

WINDOWS = {E4M3: (-8, 6), E5M2: (-15, 13)}
ORACLES = {
    E4M3: (ml_dtypes.float8_e4m3fn, format_info_ocp_e4m3),
    E5M2: (ml_dtypes.float8_e5m2, format_info_ocp_e5m2),
}
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
dtypes = pytest.mark.parametrize("dtype", WINDOWS, ids=["e4m3", "e5m2"])


def packed(four: Tensor) -> Tensor:
    """Codes of 4 bits [..., n], two a byte."""
    four = four.to(torch.uint8)
    return four[..., 0::2] | four[..., 1::2] << 4


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [L, R, C]."""
    blocks = codes.flatten(1).unflatten(1, (-1, 16))
    return unpack(blocks, scales.flatten(1), (QUANTIZERS["mxfp4"],) * len(codes)).view(*scales.shape[:2], -1)


def operand(lanes: int, rows: int, columns: int, spread: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A packed operand whose scales are up to 2^spread apart, with blocks of zeros."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (lanes, rows, columns // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(120, 121 + spread, (lanes, rows, columns // 32), generator=g).to(torch.uint8)
    codes.unflatten(2, (-1, 16))[torch.rand(scales.shape, generator=g) < 0.1] = 0
    return codes, scales


def same(here: Tensor, there: Tensor) -> bool:
    """The same bits, but for the kind of NaN."""
    here, there = here.cpu(), there.cpu()
    if here.dtype not in WINDOWS:
        return here.dtype == there.dtype and torch.equal(here, there)
    bits = here.view(torch.uint8) == there.view(torch.uint8)
    return here.dtype == there.dtype and bool((bits | here.float().isnan() & there.float().isnan()).all())


@dtypes
def test_the_window_holds_every_code_and_the_next_exponent_does_not(dtype):
    assert tuple(mxfp4.window(dtype)) == WINDOWS[dtype]
    lowest, highest = WINDOWS[dtype]
    for exponent in range(lowest - 2, highest + 3):
        values = torch.from_numpy(E2M1 * 2.0**exponent).float()
        assert torch.equal(values.to(dtype).float(), values) == (lowest <= exponent <= highest)


@dtypes
def test_all_codes_at_all_distances_are_those_of_other_libraries(dtype):
    """Two blocks a tile: the first sets its scale, the second has all codes, 0 to 254 exponents below."""
    theirs, info = ORACLES[dtype]
    lowest, highest = WINDOWS[dtype]
    tops = torch.tensor([*range(20), 126, 127, 128, 200, 254])
    below = torch.arange(255)[None].expand(len(tops), -1)
    scales = torch.stack([tops[:, None].expand_as(below), torch.clamp(tops[:, None] - below, min=0)], 2)
    four = torch.stack([torch.full((32,), 7), torch.arange(32) % 16]).expand(*scales.shape, -1)
    got = mxfp4.to_fp8(packed(four.flatten(2)), scales.to(torch.uint8), dtype)
    tile = torch.clamp(tops - highest, min=0)
    assert torch.equal(got.factor.double(), torch.exp2(tile.double() - 127)[:, None, None].expand_as(got.factor))
    exponents = (scales - tile[:, None, None]).numpy()
    exact = E2M1[four.numpy()] * 2.0 ** exponents[..., None].astype(np.float64)
    wanted = exact.astype(theirs).view(np.uint8)
    assert not np.isnan(wanted.view(theirs).astype(np.float32)).any()
    ours = got.values[:, :, :64].view(torch.uint8).unflatten(2, (2, 32)).numpy()
    assert (ours != wanted).sum() == 0
    assert np.array_equal(got.outside[:, :, 0].numpy(), exponents.min(2) < lowest)
    for j, code in itertools.product(range(lowest - 6, highest + 1), range(16)):
        value = gfloat.round_float(info, E2M1[code] * 2.0**j, sat=True)
        row = mxfp4.fp8_codes(dtype)[max(j, lowest - 5) - lowest + 5].view(dtype).float()
        assert row[code & 7] == abs(value)


@dtypes
def test_inside_the_window_nothing_is_rounded_along_either_axis(dtype):
    lowest, highest = WINDOWS[dtype]
    codes, scales = operand(2, 256, 256, spread=highest - lowest)
    for convert, wanted in ((mxfp4.to_fp8, decoded(codes, scales)), (mxfp4.columns_to_fp8, decoded(codes, scales).mT)):
        got = convert(codes, scales, dtype)
        assert torch.equal(got.decoded(), wanted)
        assert not got.outside.any()


@dtypes
def test_below_the_window_an_element_moves_by_half_of_the_smallest_number_at_most_and_its_tile_is_named(dtype):
    codes, scales = operand(2, 256, 128, spread=60)
    exact = decoded(codes, scales)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for convert, wanted in ((mxfp4.to_fp8, exact), (mxfp4.columns_to_fp8, exact.mT)):
        got = convert(codes, scales, dtype)
        error = (got.decoded() - wanted).abs().unflatten(2, (-1, 128))
        assert (error <= got.factor[..., None] * smallest / 2).all()
        rounded, outside = (error > 0).any(3), got.outside
        outside = outside.repeat_interleave(rounded.shape[1] // outside.shape[1], 1)
        assert rounded.any()
        assert not (rounded & ~outside).any()


def test_blocks_of_zeros_and_of_nan_do_not_set_a_scale():
    codes, scales = operand(1, 128, 128, spread=3)
    codes[0, 0], scales[0, 0] = 0, 254
    scales[0, 1, 1] = NAN
    rows, columns = (convert(codes, scales) for convert in (mxfp4.to_fp8, mxfp4.columns_to_fp8))
    wanted = decoded(codes, scales)
    assert torch.equal(rows.decoded()[0, 0], torch.zeros(128))
    assert rows.factor[0, 0] == 1
    for got, exact in ((rows, wanted), (columns, wanted.mT)):
        assert not got.outside.any()
        assert torch.equal(got.decoded().isnan(), exact.isnan())
        assert torch.equal(got.decoded().nan_to_num(), exact.nan_to_num())


@dtypes
def test_every_fp8_number_is_rounded_to_mxfp4_once(dtype):
    """Of each finite code beside each that may be the largest of its block."""
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype)
    finite = numbers[torch.isfinite(numbers.float())].view(torch.uint8)
    largest = finite[:, None, None].expand(-1, len(finite) + 1, 32)
    blocks = largest.clone()
    blocks[:, :, 1] = torch.minimum(torch.cat([finite, finite[:1]])[None], largest[:, :, 1])
    blocks[:, :, 2] = blocks[:, :, 1] | 0x80
    x = blocks.reshape(1, len(finite), -1)
    x = F.pad(x, (0, -x.shape[2] % 128)).view(dtype)
    factor = torch.full((1, len(finite), x.shape[2] // 128), 0.25)
    codes, scales = mxfp4.from_fp8(x, factor)
    values = x.float() / 4
    amax = values.unflatten(2, (-1, 32)).abs().amax(-1)
    scale = torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(amax)) - 2), 2.0**-127)
    assert torch.equal(torch.exp2(scales.double() - 127).float(), scale)
    exact = values.unflatten(2, (-1, 32)) / scale[..., None]
    wanted = np.clip(exact.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    four = torch.stack([codes & 15, codes >> 4], -1).flatten(2).unflatten(2, (-1, 32)).numpy()
    assert (four != wanted).sum() == 0


@settings(max_examples=20)
@given(st.integers(0, 2**20), st.integers(0, 12), st.integers(1, 3))
def test_a_second_rounding_moves_an_element_by_a_sixteenth_of_its_blocks_largest_at_most(seed, spread, tall):
    codes, scales = operand(1, 32 * tall - seed % 5, 64, spread, seed)
    once = decoded(codes, scales).mT
    twice = decoded(*mxfp4.to_columns(codes, scales))
    once = F.pad(once, (0, -once.shape[2] % 32)).unflatten(2, (-1, 32))
    twice = twice.unflatten(2, (-1, 32))
    amax = once.abs().amax(-1, keepdim=True)
    new = torch.exp2(torch.floor(torch.log2(amax.clamp(min=2.0**-120))) - 2)
    assert torch.equal(twice.abs().amax(-1, keepdim=True), amax)  # nothing saturates
    assert ((twice - once).abs() <= new / 4).all()
    assert (new / 4 <= amax / 16).logical_or(amax == 0).all()
    assert torch.equal(torch.where(once.abs() >= new, once, 0.0), torch.where(once.abs() >= new, twice, 0.0))


def test_the_bounds_of_a_second_rounding_are_reached():
    """4 beside 3/4 of an eighth of it: 0.75 under the new scale becomes 1, and 0.25 becomes 0."""
    four = torch.zeros(32, 32, dtype=torch.uint8)
    four[0], four[1], four[2] = 6, 3, 1  # 4, 1.5, 0.5
    scales = torch.full((1, 32, 1), 127, dtype=torch.uint8)
    scales[0, 1], scales[0, 2] = 126, 126
    got = decoded(*mxfp4.to_columns(packed(four)[None], scales))
    assert got[0, :, :3].tolist() == [[4.0, 1.0, 0.0]] * 32


def test_what_is_rounded_twice_is_near_what_is_rounded_once():
    """Of normal numbers: the error of MXFP4 along the columns of what was MXFP4 along the rows, in units of its own."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1))
    rows = quantize(x, QUANTIZERS["mxfp4"])
    direct = quantize(x.T, QUANTIZERS["mxfp4"]).values
    codes, scales = packed(rows.codes)[None], (torch.log2(rows.scales) + 127).to(torch.uint8)[None]
    assert torch.equal(decoded(codes, scales)[0], rows.values)
    twice = decoded(*mxfp4.to_columns(codes, scales))[0]
    once, both, added = (float((y - z).norm()) for y, z in ((direct, x.T), (twice, x.T), (twice, rows.values.T)))
    assert added < 0.3 * once
    assert once < both < 1.1 * once


# --- kernels ---------------------------------------------------------------------------------------------------------

SHAPES = [(1, 128, 128), (2, 256, 192), (1, 130, 160), (1, 128, 96), (3, 1, 32), (2, 31, 64)]
"""Whole tiles, more than whole tiles along both axes and along one, and less than a tile or a block."""


def special(lanes: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """An operand with scales inside the window and outside, the least there is, and NaN."""
    codes, scales = operand(lanes, rows, columns, spread=25)
    scales[:, 0] = 0
    scales[:, rows // 2, -1] = NAN
    return codes, scales


def compare(place, name: str, operands: tuple[Tensor, ...], *more: torch.dtype) -> None:
    """The kernel gives what the definition gives."""
    got = getattr(place.mxfp4, name)(*(t.to(place.device) for t in operands), *more)
    for here, there in zip(getattr(mxfp4, name)(*operands, *more), got, strict=True):
        assert same(here, there)


KERNELS = ["to_fp8", "columns_to_fp8", "to_columns", "from_fp8"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_have_the_bits_of_the_definition(place, name, shape):
    operands = special(*shape)
    compare(place, name, mxfp4.to_fp8(*operands)[:2] if name == "from_fp8" else operands)


TOP, DISTANCES = 140, 28


def every_byte() -> tuple[Tensor, Tensor]:
    """Codes and scales of five tiles. Four have every byte, at every place of a word, in blocks of each distance from
    their tile's largest scale, from 0 to 26, and at the 28th under NaN's. The first and the last have blocks of zeros
    under larger scales, the last in some columns nothing else."""
    number = torch.arange(4 * 127).view(4, 127)
    distance = F.pad(number % DISTANCES, (1, 0)).flatten()
    start = F.pad(number // DISTANCES, (1, 0)).flatten()[:, None]
    codes = (start % 4 * 64 + torch.arange(64) + start // 4) % 256
    rows = zip(distance.tolist(), codes.tolist(), strict=True)
    found = {(far, n % 4, byte) for far, line in rows for n, byte in enumerate(line)}
    assert len(found) == DISTANCES * 4 * 256
    scales = torch.where((distance == DISTANCES - 1)[:, None], NAN, TOP - distance[:, None]).repeat(1, 4)
    codes[90], scales[90] = 0, 254
    zeros, large = torch.zeros(128, 64, dtype=torch.int64), torch.arange(127, 255)[:, None].repeat(1, 4)
    zeros[5, :32] = 3
    return torch.cat([codes, zeros])[None].to(torch.uint8), torch.cat([scales, large])[None].to(torch.uint8)


@dtypes
def test_the_kernel_of_columns_has_the_bits_of_the_definition_for_every_byte_under_every_scale(place, dtype):
    compare(place, "columns_to_fp8", every_byte(), dtype)


@pytest.mark.parametrize("name", KERNELS[:2])
def test_kernels_have_the_bits_of_the_definition_in_e5m2(place, name):
    compare(place, name, special(2, 40, 160), E5M2)


@dtypes
def test_the_kernel_to_mxfp4_has_the_bits_of_the_definition_for_all_codes(place, dtype):
    x = torch.randint(0, 256, (2, 5, 256), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    x[0, :3] &= 0x8F  # small ones alone
    x[1, 0, :64] = 0
    factor = torch.tensor([2.0**-127, 2.0**-120, 2.0**-119, 1.0, 8.0])[None, :, None].expand(2, -1, 2)
    compare(place, "from_fp8", (x.view(dtype), factor))


@dtypes
def test_the_kernel_to_mxfp4_has_nan_where_fp32_has_no_such_number(place, dtype):
    x = torch.arange(128, dtype=torch.uint8).repeat_interleave(32).view(1, 32, 128)
    for exponent in (112, 113, 118, 119, 120, 127):
        compare(place, "from_fp8", (x.view(dtype), torch.full((1, 32, 1), 2.0**exponent)))


def test_functions_take_the_kernels_where_they_run(place, monkeypatch):
    take_kernels(monkeypatch, "mxfp4")
    codes, scales = (t.to(place.device) for t in operand(1, 32, 32, spread=3))
    for name in KERNELS:
        monkeypatch.setattr(place.mxfp4, name, lambda *_, name=name: name)
        assert getattr(mxfp4, name)(codes, scales) == name
