"""Elements that are tables, and scales of one's own: against numpy's argmin, E2M1's own path, and every code."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp4dse.dse import Quantizer, Recipe
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.own_formats import FloatElement, TableElement, element_format, simplest
from fp4dse.dse.rounding import Ema, Nearest, Rounding, Stochastic
from fp4dse.dse.scale import E8M0, FP32, SCALE_NAMES, OwnScale, TensorScale, scale_grid
from fp4dse.kernels import quantize
from fp4dse.kernels.inspection.tensors import statistics
from fp4dse.kernels.quant.backend import _eager
from fp4dse.kernels.quant.descriptor import FLOATS, INTS, LEVELS, descriptor, levels
from fp4dse.kernels.quant.spec.grid import round_elements, round_scale, round_to_levels
from fp4dse.kernels.quant.spec.reference import decode_operand

replace = msgspec.structs.replace

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""NormalFloat4, QLoRA (2305.14314), as bitsandbytes has it (functional.py, create_normal_map)."""
SF4 = (
    *(-1.0, -0.627781, -0.454736, -0.334331, -0.237434, -0.152899, -0.074982, 0.0),
    *(0.065513, 0.132965, 0.204661, 0.283835, 0.375805, 0.491076, 0.656781, 1.0),
)
"""Student Float (2405.03103), five degrees of freedom, as its authors' code has it (SF4_5, to six digits)."""
TABLES = {
    "nf4": NF4,
    "sf4": SF4,
    "one-sided": tuple(float(n) for n in range(16)),
    "twos-complement": tuple(float(n) for n in range(-8, 8)),
    "three": (-0.75, 0.0, 2.5),
    "coarse below, fine above": (-12.0, -1.0, 0.0, 0.125, 0.25, 3.0),
    "far apart": (0.0, 2.0**-8, 2.0**8),
}


def symmetric(name: str) -> TableElement:
    """A built-in's values as a table, 0 and -0 among them, which canonical quantizers would have as the built-in."""
    magnitudes = ELEMENTS[name].magnitudes()
    return TableElement(values=(*(-value for value in magnitudes), *magnitudes))


def table_row(element: TableElement, rounding: Rounding) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Levels [1, LEVELS + BOUNDS], and the numbers of a lane that rounds so."""
    floats, ints = descriptor([Quantizer(rounding=rounding)])
    f, i = (dict(zip(n, t[:, :, None].unbind(1), strict=True)) for n, t in ((FLOATS, floats), (INTS, ints)))
    return torch.tensor([levels(element, rounding)], dtype=torch.float32), f, i


NEAREST = Nearest()


def rounded(
    values: TableElement,
    y: Tensor,
    rounding: Rounding = NEAREST,
    random: Tensor | None = None,
    guide: Tensor | None = None,
) -> Tensor:
    """y [n] on the table."""
    row, _, i = table_row(values, rounding)
    of = (t if t is None else t.view(1, 1, -1) for t in (random, guide))
    return round_to_levels(y.view(1, 1, -1), row, i, *of).view(-1)


def built_in(
    name: str, y: Tensor, rounding: Rounding = NEAREST, random: Tensor | None = None, guide: Tensor | None = None
) -> Tensor:
    """|y| on the grid of a built-in, with the sign of y: what its own path makes of it."""
    floats, ints = descriptor([Quantizer(element=name, rounding=rounding)])
    f, i = (dict(zip(n, t[:, :, None].unbind(1), strict=True)) for n, t in ((FLOATS, floats), (INTS, ints)))
    of = (t if t is None else t.view(1, 1, -1) for t in (random, guide))
    magnitude = torch.clamp(y.abs(), max=ELEMENTS[name].max).view(1, 1, -1)
    return torch.copysign(round_elements(magnitude, f, i, *of).view(-1), y)


def numbers(values: tuple[float, ...], count: int = 100_000) -> Tensor:
    """Random ones of all sizes and signs, and every value and midpoint with the float32 numbers beside it."""
    rng = np.random.default_rng(0)
    largest = np.float32(max(map(abs, values)))
    low, high = (int(np.float32(v).view(np.int32)) for v in (largest * 2.0**-20, largest * 2))
    logarithmic = rng.integers(low, high, count, dtype=np.int32).view(np.float32) * rng.choice([-1, 1], count)
    uniform = (rng.random(count, dtype=np.float32) * 2.4 - 1.2) * largest
    points = np.array([*values, *((a / 2 + b / 2) for a, b in itertools.pairwise(values))], np.float32)
    beside = [np.nextafter(points, np.float32(way) * np.inf) for way in (-1, 1)]
    return torch.from_numpy(np.concatenate([logarithmic, uniform, points, *beside]).astype(np.float32))


@pytest.mark.parametrize("name", TABLES)
def test_nearest_is_numpys_argmin(name):
    """An oracle of two lines, in float64, which holds these differences exactly or to 2^-53 of them. At a tie it takes
    the lower value, we may take the other: the distances are equal then."""
    values = np.array(TABLES[name], np.float32).astype(np.float64)
    y = numbers(TABLES[name])
    got = rounded(TableElement(values=TABLES[name]), y).numpy().astype(np.float64)
    x = y.numpy().astype(np.float64)
    expected = values[np.abs(x[:, None] - values).argmin(1)]
    differs = got != expected
    assert np.array_equal(np.abs(x - got)[differs], np.abs(x - expected)[differs])
    assert differs.sum() <= len(values)


@pytest.mark.parametrize("name", TABLES)
def test_ties_go_to_the_even_index_counted_from_zero_or_away_from_it(name):
    values = TableElement(values=TABLES[name]).values
    zero = values.index(0.0)
    for k, (low, high) in enumerate(itertools.pairwise(values)):
        middle = Fraction(low) / 2 + Fraction(high) / 2
        y = torch.tensor([float(middle)])
        if Fraction(y.item()) != middle:
            continue  # float32 does not hold it: nothing is a tie
        even = low if (k - zero) % 2 == 0 else high
        away = high if high > 0 else low
        assert rounded(TableElement(values=values), y).item() == even
        assert rounded(TableElement(values=values), y, Nearest(ties="away")).item() == away


SAME = [name for name in ELEMENTS if ELEMENTS[name].bits == 4 and ELEMENTS[name].radix == 2]


@pytest.mark.parametrize("rounding", [Nearest(), Nearest(ties="away"), Stochastic(), Stochastic(bits=8)], ids=str)
@pytest.mark.parametrize("name", SAME)
def test_a_float_formats_values_as_a_table_have_the_bits_of_its_own_path(name, rounding):
    element = symmetric(name)
    y = numbers(element.values)
    random = None
    if isinstance(rounding, Stochastic):
        random = torch.randint(0, 1 << 16, y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    got = torch.copysign(rounded(element, y, rounding, random), y)
    assert torch.equal(got.view(torch.int32), built_in(name, y, rounding, random).view(torch.int32))


@pytest.mark.parametrize("name", SAME)
def test_towards_a_moving_average_they_have_them_too(name):
    element = symmetric(name)
    y = numbers(element.values, 20_000)
    generator = torch.Generator().manual_seed(2)
    guide = y.abs() * (1 + 0.5 * torch.randn(y.shape, generator=generator))
    guide[::7] = float("nan")
    got = torch.copysign(rounded(element, y, Ema(), None, guide), y)
    assert torch.equal(got.view(torch.int32), built_in(name, y, Ema(), None, guide).view(torch.int32))
    assert not torch.equal(got, torch.copysign(rounded(element, y), y))


def test_every_value_beyond_the_ends_saturates_and_nan_stays():
    element = TableElement(values=TABLES["three"])
    y = torch.tensor([-math.inf, -3e38, -0.76, 2.6, 3e38, math.inf])
    ends = torch.tensor([-0.75] * 3 + [2.5] * 3)
    random = torch.full(y.shape, 65535, dtype=torch.int32)
    assert torch.equal(rounded(element, y), ends)
    assert torch.equal(rounded(element, y.clamp(-4, 4), Stochastic(), random), ends)
    for rounding, drawn in ((Nearest(), None), (Stochastic(), random[:1])):
        assert rounded(element, torch.tensor([math.nan]), rounding, drawn).isnan().all()


@pytest.mark.parametrize("name", ["nf4", "sf4", "twos-complement", "coarse below, fine above"])
def test_stochastic_rounding_of_a_table_is_unbiased(name):
    """With all 2^16 draws in turn the mean over them is y to within half a draw of the interval, exactly counted; no
    chance is left in this test."""
    values = TABLES[name]
    draws = torch.arange(1 << 16, dtype=torch.int32)
    rng = np.random.default_rng(3)
    for y in rng.uniform(values[0], values[-1], 40).astype(np.float32):
        low = max(v for v in map(np.float32, values) if v <= y)
        high = min(v for v in map(np.float32, values) if v >= y)
        got = rounded(TableElement(values=values), torch.full((1 << 16,), float(y)), Stochastic(), draws)
        assert set(got.tolist()) <= {float(low), float(high)}
        assert abs(got.double().mean().item() - float(y)) <= (high - low) * 2.0**-16


def test_a_drawn_mean_is_within_five_standard_errors():
    """The same through `quantize`, whose draws are Philox': 2^20 numbers of one block scale, sqrt(Var / n) · 5."""
    q = Quantizer(element=TableElement(values=NF4), block="tensor", scale=FP32(), rounding=Stochastic())
    x = torch.full((1024, 1024), 0.3)
    x[0, 0] = 1.0  # the largest, so that the scale is 1
    got = quantize(x, q, seed=5).values.flatten()[1:].double()
    low, high = NF4[10], NF4[11]
    share = (0.3 - low) / (high - low)
    error = (high - low) * math.sqrt(share * (1 - share) / got.numel())
    assert abs(got.mean().item() - 0.3) < 5 * error
    assert sorted(set(got.tolist())) == pytest.approx([low, high], rel=1e-7)


def test_nf4_is_bitsandbytes_rounding():
    """Its thresholds are the midpoints of neighbours (dQuantizeNF4, csrc/kernels.cu), at which the lower code is taken;
    blocks are scaled by their maximum in FP32."""
    thresholds = [
        *(-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544),
        *(-0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767),
        *(0.1202552504837513, 0.2035212516784668, 0.2920137718319893, 0.3893125355243683),
        *(0.5016634166240692, 0.6427869200706482, 0.8614784181118011),
    ]
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    q = Quantizer(element=TableElement(values=NF4), block=64, scale=FP32())
    amax = x.abs().amax(1, keepdim=True)
    codes = torch.bucketize(x * (1 / amax), torch.tensor(thresholds))
    got = quantize(x, q)
    assert torch.equal(got.codes, codes.to(torch.uint8))
    assert torch.equal(got.values, torch.tensor(NF4)[codes] * amax)


def test_torchaos_nf4_rounds_alike():
    """Its rounding alone, given scaled numbers: its scales are quantized a second time, to INT8, and ours are not."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor

    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    scaled = x / x.abs().max()
    codes = NF4Tensor.quantize_tensor_nearest(scaled, torch.tensor(NF4))
    assert torch.equal(rounded(TableElement(values=NF4), scaled), NF4Tensor.dequantize(codes, torch.tensor(NF4)))


# --- quantizers --------------------------------------------------------------------------------------------------

TABLE = Quantizer(element=TableElement(values=NF4, name="nf4"), block=16)
QUANTIZERS = {
    "e4m3": TABLE,
    "tensor scale": replace(TABLE, tensor_scale=TensorScale()),
    "e8m0": replace(TABLE, block=32, scale=E8M0(rule="rceil")),
    "encode": replace(TABLE, scale=SCALE_NAMES["ue5m3-encode"]),
    "four over six": replace(TABLE, tensor_scale=TensorScale(target=256.0), adapt="4over6-mse"),
    "asymmetric": replace(TABLE, element=TableElement(values=TABLES["coarse below, fine above"])),
    "16/17 stochastic": replace(TABLE, range="16/17", rounding=Stochastic()),
    "tile": replace(TABLE, block="16x16", scale=FP32()),
    "own scale": replace(TABLE, scale=OwnScale(mantissa=4, emin=-2, max=31.0)),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_table_decodes_to_its_values_times_the_scale(name):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    q = QUANTIZERS[name]
    got = quantize(x, q)
    assert set(got.elements.unique().tolist()) <= set(q.element.values)
    assert torch.equal(torch.tensor(q.element.values)[got.codes.long()], got.elements)
    error = float(((got.values - x) ** 2).sum() / (x**2).sum())
    assert error < 0.06 or name == "asymmetric"


@pytest.mark.parametrize("name", QUANTIZERS)
def test_blocks_with_nan_and_blocks_of_zeros(name):
    x = torch.zeros(2, 256)
    x[0, 3] = float("nan")
    values = quantize(x, replace(QUANTIZERS[name], block=16, tensor_scale=None)).values
    assert values[0, :16].isnan().all()
    assert not values[0, 16:].any()
    assert not values[1].any()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_lanes_of_different_tables_have_their_own_bits(name):
    q = QUANTIZERS[name]
    others = [replace(q, element=TableElement(values=values)) for values in (SF4, TABLES["three"])]
    x = torch.randn(3, 128, 16 if q.block == "16x16" else q.block, generator=torch.Generator().manual_seed(0))
    random = torch.randint(0, 1 << 16, x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    adaptive = q.adapt != "none"
    together, dec = decode_operand(x, *descriptor([q, *others]), random, adaptive)
    for lane, alone in enumerate([q, *others]):
        one = slice(lane, lane + 1)
        got, factor = decode_operand(x[one], *descriptor([alone]), random[one], adaptive)
        assert torch.equal(got, together[one])
        assert torch.equal(factor, dec[one])


def test_what_is_clipped_is_counted_on_either_side():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    q = Quantizer(element=TableElement(values=(-1.0, 0.0, 0.5)), scale=E8M0(rule="rceil"), block=32)
    scales = quantize(x, q).scales.repeat_interleave(32, 1)
    clipped = ((x > 0.5 * scales) | (x < -scales)).double().mean().item()
    assert statistics(x, q)["clipped"] == clipped > 0


def test_paths_that_do_not_know_tables_say_so():
    def why_not(path, q):
        return path.why_not_operand(q.canonical(), descriptor([q]))

    assert why_not(_eager(), TABLE) is None  # it has no kernel that could
    path = replace(_eager(), operand=lambda: None)
    assert why_not(path, TABLE).startswith("codec: found table; accepted: block, ")
    assert why_not(path, replace(Quantizer(), block=8)).startswith("block: found 8; accepted: 16, ")
    assert why_not(path, Quantizer(block="row")) is None
    q = TABLE.canonical()
    assert Recipe.uniform(q).signature() != Recipe.uniform(Quantizer()).signature()


# --- float formats of one's own ----------------------------------------------------------------------------------


@given(st.integers(0, 3), st.integers(-3, 3), st.data())
def test_a_float_element_is_a_table_or_a_format_of_the_same_values(mantissa, emin, data):
    magnitudes = [v for v in element_format_of(mantissa, emin) if v >= 2.0**emin]
    element = FloatElement(mantissa=mantissa, emin=emin, max=data.draw(st.sampled_from(magnitudes)))
    levels = element_format(element).magnitudes()
    table = TableElement(values=(*(-v for v in levels[1:]), *levels)) if len(levels) <= 8 else None
    if table:
        assert simplest(table) == simplest(element)
    y = numbers((*(-v for v in levels), *levels), 500)
    if isinstance(simplest(element), FloatElement) and table:
        row = descriptor([Quantizer(element=element)])
        f, i = (dict(zip(n, t[:, :, None].unbind(1), strict=True)) for n, t in zip((FLOATS, INTS), row, strict=True))
        own = torch.copysign(round_elements(y.abs().clamp(max=levels[-1]).view(1, 1, -1), f, i, None).view(-1), y)
        assert torch.equal(own, torch.copysign(rounded(table, y), y))


def element_format_of(mantissa: int, emin: int) -> list[float]:
    """The magnitudes of a format of three bits and a sign, or of what its mantissa needs."""
    codes = 1 << max(3, mantissa + 1)
    binade = 1 << mantissa
    return [
        (code if code < binade else (binade + code % binade) * 2.0 ** (code // binade - 1)) * 2.0 ** (emin - mantissa)
        for code in range(codes)
    ]


OWN_SCALES = {
    "ue3m4": OwnScale(mantissa=4, emin=-2, max=31.0),
    "ue6m2": OwnScale(mantissa=2, emin=-30, max=1.75 * 2.0**33),
    "powers": OwnScale(mantissa=0, emin=-7, max=2.0**7),
    "few": OwnScale(mantissa=3, emin=2, max=10.0),
}


@pytest.mark.parametrize("name", OWN_SCALES)
def test_every_code_of_an_own_scale_and_every_midpoint(name):
    """A code stays, what is between two goes to the nearer one, or rounded up to the next one. A tie goes to the even
    code; without mantissa bits, to the upper power."""
    scale = OWN_SCALES[name]
    codes = np.array(scale_grid(scale).magnitudes())
    assert len(set(codes)) == len(codes) == np.count_nonzero(codes) + 1
    middle = (codes[1:] + codes[:-1]) / 2
    below, above = (np.nextafter(middle.astype(np.float32), np.float32(way)) for way in (0, np.inf))
    steps = np.arange(len(middle))
    nearest = {
        "codes": (codes, codes),
        "ties": (middle, codes[steps + (steps % 2 if scale.mantissa else steps > 0)]),
        "below": (below, codes[:-1]),
        "above": (above, codes[1:]),
    }
    for rounding in ("nearest", "up"):
        floats, ints = descriptor([Quantizer(scale=replace(scale, rounding=rounding))])
        f, i = (dict(zip(n, t[:, :, None].unbind(1), strict=True)) for n, t in ((FLOATS, floats), (INTS, ints)))
        for what, (given_, expected) in nearest.items():
            wanted = expected if rounding == "nearest" or what == "codes" else codes[1:]
            got = round_scale(torch.tensor(given_, dtype=torch.float32).view(1, -1), f, i, None)
            assert got.view(-1).tolist() == wanted.tolist(), (what, rounding)


def test_an_own_scale_reaches_its_quantizer():
    """Scales are codes of the format, the largest saturates, and the tensor scale aims at the largest, up to 448."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 16)[:, None]
    for scale in OWN_SCALES.values():
        q = Quantizer(scale=scale, tensor_scale=TensorScale()).canonical()
        assert q.tensor_scale.target == min(448.0, scale.max)
        got = quantize(x, q)
        assert set(got.scales.unique().tolist()) <= set(scale_grid(scale).magnitudes())
        assert got.scales.max() == min(448.0, scale.max) or scale.mantissa == 0


@pytest.mark.parametrize("block", [8, 256])
@pytest.mark.parametrize("scale", ["e4m3", "ue5m3-encode", "e8m0-rceil", "bf16"])
def test_the_smallest_and_the_largest_block(block, scale):
    """A block of 8 is two of half of a block of 16 under FP32 scales; any block is what it would be alone."""
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    q = Quantizer(block=block, scale=SCALE_NAMES[scale])
    whole = quantize(x, q)
    assert whole.scales.shape == (4, 512 // block)
    for start in range(0, 512, block):
        part = slice(start, start + block)
        assert torch.equal(whole.values[:, part], quantize(x[:, part].contiguous(), q).values)


def test_levels_are_as_many_as_a_table_may_have():
    row = levels(TableElement(values=TABLES["three"]), NEAREST)
    assert row[:LEVELS] == [-0.75, 0.0, *[2.5] * 14]
    assert row[LEVELS + 2 :] == [math.inf] * 13
