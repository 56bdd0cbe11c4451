"""The quantizers compute what their definitions say: exhaustive where the space is tiny, oracles where it is not."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, ConfigError, Hadamard, Quantizer
from fp4dse.dse.formats import ELEMENTS, SCALES
from fp4dse.dse.rounding import Nearest, Stochastic
from fp4dse.dse.scale import BF16, E4M3, E5M2, E8M0, FP32, UE4M4, UE5M3, TensorScale, scale_key
from fp4dse.kernels import native, quantize
from fp4dse.kernels.ops.philox import random16
from fp4dse.kernels.quant.descriptor import FLOATS, INTS, descriptor
from fp4dse.kernels.quant.spec import grid, reference
from fp4dse.kernels.quant.spec.blocks import cut, join
from fp4dse.kernels.quant.spec.codecs.codes import CODES
from fp4dse.kernels.vectors import with_whole_tiles
from tests.each import each

BLOCK_SCALED = {name: q for name, q in QUANTIZERS.items() if not q.is_plain}
E2M1 = torch.tensor(ELEMENTS["e2m1"].magnitudes())
MX = Quantizer.named("mxfp4")
GENERAL = [name for name in ELEMENTS if name not in ("s1p2", "radix4", "radix4-odd")]  # the others have own codecs
FOUR_BITS = [name for name in ELEMENTS if ELEMENTS[name].bits == 4]


def stochastic(q: Quantizer) -> Quantizer:
    return msgspec.structs.replace(q, rounding=Stochastic())


def unscaled(values: torch.Tensor, element: str = "e2m1", rounding=None):
    """`values` quantized with a block scale of exactly 1: each stands in a row that holds the largest element."""
    rows = torch.zeros(len(values), 32)
    rows[:, 0], rows[:, 1] = ELEMENTS[element].max, values
    q = msgspec.structs.replace(MX, element=element, rounding=rounding or MX.rounding)
    got = quantize(rows, q)
    assert (got.scales == 1).all()
    return got


@pytest.mark.parametrize("element", GENERAL)
def test_all_codes_round_trip(element):
    magnitudes = torch.tensor(ELEMENTS[element].magnitudes())
    got = unscaled(torch.cat([magnitudes, -magnitudes]), element)
    assert torch.equal(got.values[:, 1], torch.cat([magnitudes, -magnitudes]))
    sign = 1 << ELEMENTS[element].bits - 1
    codes = [*range(len(magnitudes)), *range(sign, sign + len(magnitudes))]  # E2M1: 0 … 15, and -0 is code 8
    assert got.codes[:, 1].tolist() == codes


@pytest.mark.parametrize("element", GENERAL)
def test_every_midpoint_goes_to_the_even_code_and_its_neighbours_to_the_nearest(element):
    values = torch.tensor(ELEMENTS[element].magnitudes())
    middle = (values[1:] + values[:-1]) / 2
    even = [values[code + code % 2].item() for code in range(len(middle))]
    assert unscaled(middle, element).values[:, 1].tolist() == even
    assert torch.equal(unscaled(middle, element, Nearest(ties="away")).values[:, 1], values[1:])
    below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(1e9))
    for rounding in (Nearest(), Nearest(ties="away")):
        assert torch.equal(unscaled(below, element, rounding).values[:, 1], values[:-1])
        assert torch.equal(unscaled(above, element, rounding).values[:, 1], values[1:])


def scale_of(name: str):
    """The scale record of a name in formats.SCALES."""
    tag, _, largest = name.partition("-")
    classes = {"e4m3": E4M3, "ue5m3": UE5M3, "e5m2": E5M2, "ue4m4": UE4M4, "bf16": BF16, "fp32": FP32}
    return classes[tag](**({"max": int(largest)} if largest else {}))


@pytest.mark.parametrize("name", [name for name in SCALES if SCALES[name].bits == 8])
def test_every_scale_code_is_reached_and_kept(name):
    values = torch.tensor(SCALES[name].magnitudes())
    x = torch.zeros(len(values), 16)
    x[:, 0] = 6 * values
    for zero, instead in (("keep", 0.0), ("one", 1.0), ("min", values[1].item())):
        q = Quantizer(scale=msgspec.structs.replace(scale_of(name), zero=zero))
        assert quantize(x, q).scales[:, 0].tolist() == [instead, *values[1:].tolist()]


def test_a_scale_rounded_up_clips_nothing():
    x = torch.randn(4096, 16)
    for scale in (E4M3(rounding="up"), UE5M3(rounding="up"), E5M2(rounding="up")):
        got = quantize(x, Quantizer(scale=scale))
        needed = x.abs().amax(1) / 6
        assert (got.scales[:, 0] >= needed * (1 - 2**-22)).all()
        assert (got.scales[:, 0] <= needed * (1 + 2.0 ** -SCALES[scale_key(scale)].mantissa) + 2**-9).all()


def test_every_e8m0_exponent_is_reached():
    exponents = range(-127, 126)  # 6 · 2^125 is the largest block maximum that FP32 holds
    x = torch.zeros(len(exponents), 32)
    x[:, 0] = torch.tensor([6 * 2.0**e for e in exponents])
    for rule in ("floor", "rceil"):
        got = quantize(x, Quantizer(block=32, scale=E8M0(rule=rule)))
        assert got.scales[:, 0].tolist() == [2.0**e for e in exponents]
        assert torch.equal(got.values, x)


@pytest.mark.parametrize(
    ("amax", "floor", "rceil"),  # (scale, decoded maximum)
    [(5, (1, 4), (1, 4)), (6.5, (1, 6), (2, 6)), (7, (1, 6), (2, 8)), (7.5, (1, 6), (2, 8)), (8, (2, 8), (2, 8))],
)
def test_worked_examples_of_mxfp4(amax, floor, rceil):
    x = torch.zeros(1, 32)
    x[0, 3] = amax
    for name, expected in (("mxfp4", floor), ("mxfp4-rceil", rceil)):
        got = quantize(x, Quantizer.named(name))
        assert (got.scales.item(), got.values[0, 3].item()) == expected


def test_worked_example_of_nvfp4():
    x = torch.zeros(2, 16)
    x[0, 0], x[1, :3] = 4.0, torch.tensor([1.6, 0.7, -0.2])
    got = quantize(x, Quantizer.named("nvfp4"))
    assert got.tensor_scale.item() == pytest.approx(1 / 672, rel=1e-7)
    assert got.scales.flatten().tolist() == [448, 176]
    assert got.elements[1, :3].tolist() == [6, 3, -1]
    assert got.values[1, :3].tolist() == pytest.approx([1.5714, 0.7857, -0.2619], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "rounding", "expected"),
    [
        ("mxfp4", "nearest", 1.322e-2),
        ("mxfp4-rceil", "nearest", 1.330e-2),
        ("nvfp4", "nearest", 9.05e-3),
        ("ue5m3-t448", "nearest", 9.05e-3),
        ("nvfp4-1716", "stochastic", 2.354e-2),
        ("mxfp4-ceil", "nearest", 2.08e-2),
        ("mxfp4-even", "nearest", 1.25e-2),
        ("mxfp4-2d", "nearest", 2.25e-2),
        ("nvfp4-2d", "nearest", 1.24e-2),
        ("nvint4", "nearest", 7.44e-3),
        ("nvfp4-4over6-mse", "nearest", 7.56e-3),
        ("nvfp4-4over6-mae", "nearest", 7.80e-3),
        (Quantizer(scale=FP32()), "nearest", 8.86e-3),
        (Quantizer(block=32, scale=FP32()), "nearest", 1.022e-2),
        (Quantizer(element="int4", scale=FP32()), "nearest", 7.25e-3),
        (Quantizer(element="int4", block=32, scale=FP32()), "nearest", 9.40e-3),
        (Quantizer(element="e3m0", block=32, scale=FP32()), "nearest", 3.27e-2),
        (Quantizer(block=32, scale=E8M0(rule="nearest")), "nearest", 1.475e-2),
        (Quantizer(scale=E8M0()), "nearest", 1.387e-2),
        (Quantizer(scale=E8M0(rule="rceil")), "nearest", 1.271e-2),
        (Quantizer(scale=E8M0(rule="even")), "nearest", 1.211e-2),
    ],
)
def test_gaussian_error_anchors(name, rounding, expected):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 2048, generator=generator)
    q = Quantizer.named(name) if isinstance(name, str) else name
    got = quantize(x, stochastic(q) if rounding == "stochastic" else q).values
    assert float(((got - x) ** 2).sum() / (x**2).sum()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("quantizer", "bias"),
    [
        (QUANTIZERS["nvfp4-1716"], 0.0),
        (QUANTIZERS["mxfp4-rceil"], 0.0),
        (QUANTIZERS["mxfp4-34"], 0.0),
        (QUANTIZERS["nvfp4"], -0.0034),  # a scale rounded down clips the block maximum
        (QUANTIZERS["mxfp4"], -0.011),  # the floor rule clips
    ],
)
def test_stochastic_rounding_is_unbiased_where_nothing_clips(quantizer, bias):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 4096, generator=generator)
    v = quantize(x, stochastic(quantizer), seed=3).values
    gain = float((v.double() * x.double()).sum() / (x.double() ** 2).sum())
    error = 3 * (2.4e-2 / x.numel()) ** 0.5  # three standard errors of the gain at a relative MSE of 2.4e-2
    assert gain - 1 == pytest.approx(bias, abs=max(error, 3e-4 if bias == 0 else 1e-3))


def test_the_probability_of_rounding_up_is_the_fraction_over_all_draws():
    r = torch.arange(65536, dtype=torch.int32)
    for bits in (8, 16):
        floats, ints = descriptor([msgspec.structs.replace(MX, rounding=Stochastic(bits=bits))])
        column = dict(zip(FLOATS, floats[0], strict=True)) | dict(zip(INTS, ints[0], strict=True))
        threshold = grid.midpoint_threshold(r, column["random_shift"])
        for fraction in (0.0, 2.0**-17, 1 / 3, 0.5, 0.9, 1 - 2.0**-17, 1 - 2.0**-24):
            up = float((torch.tensor(fraction) >= threshold).double().mean())
            assert abs(up - fraction) <= 2.0 ** -(bits + 1)


def test_stochastic_rounding_only_meets_the_two_neighbours():
    points = torch.rand(2000) * 6
    low = E2M1[torch.searchsorted(E2M1, points, right=True) - 1]
    high = E2M1[torch.searchsorted(E2M1, points)]
    rows = torch.zeros(len(points), 32)
    rows[:, 0], rows[:, 1] = 6.0, points
    for seed in range(20):
        got = quantize(rows, stochastic(MX), seed=seed).values[:, 1]
        assert ((got == low) | (got == high)).all()


def spread(scales: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Block scales repeated to the shape of a matrix."""
    for dim in (0, 1):
        scales = scales.repeat_interleave(like.shape[dim] // scales.shape[dim], dim=dim)
    return scales


def special_blocks() -> torch.Tensor:
    """Lanes of blocks: random, wide range, zero, subnormal, huge, one outlier, NaN, Inf."""
    torch.manual_seed(0)
    x = torch.randn(2, 64, 16)
    x[:, 8:16] *= torch.exp2(torch.randint(-60, 60, (2, 8, 1)).float())
    x[:, 16] = 0
    x[:, 17] *= 1e-41
    x[:, 18] *= 1e37
    x[:, 19, 0] = 1e30
    x[1, 20, 3] = float("nan")
    x[1, 21, 5] = float("inf")
    x[1, 22, 6] = -float("inf")
    return x


ROW_BLOCKS = {name: q for name, q in BLOCK_SCALED.items() if isinstance(q.block, int)}


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_native_code_has_the_bits_of_the_reference(name, drawn):
    """drawn: one lane rounds to nearest and one does not; else both do."""
    assert native.why_not_native() is None
    q = QUANTIZERS[name]
    sizes = (q.block,) if isinstance(q.block, int) else (16, 32)
    for x in (special_blocks().view(2, -1, size) for size in sizes):
        random = random16(torch.arange(2), 1, torch.tensor(0), torch.tensor(0), x[0].numel()).view_as(x)
        tables = descriptor([stochastic(q) if drawn else q, q])
        arguments = (x, *tables, random if drawn else None, q.adapt != "none")
        encoded, dec = native.quantize_blocks(*arguments, codec=q.codec)
        wanted = reference.decode_operand(*arguments, codec=q.codec)
        for a, b in zip(wanted, (reference.decoded(encoded), dec), strict=True):
            assert torch.equal(a.nan_to_num(nan=7e7), b.nan_to_num(nan=7e7))
            assert torch.equal(a.isnan(), b.isnan())


@each("name", ROW_BLOCKS)
def test_a_block_with_nan_or_inf_decodes_to_nan_and_others_do_not(name):
    q = QUANTIZERS[name]
    x = special_blocks()
    got = quantize(x[1].reshape(-1, q.unit), q).values  # a row is what shares a factor
    bad = ~torch.isfinite(x[1].reshape(-1, q.unit)).all(dim=1)
    if q.tensor_scale and q.factors_over == "tensor":  # nothing can be scaled by a maximum of NaN
        assert got.isnan().all()
    else:
        assert torch.equal(got.isnan().all(dim=1), bad)
        assert torch.equal(got.isnan().any(dim=1), bad)


@each("name", BLOCK_SCALED)
def test_a_zero_block_stays_zero_and_signs_are_kept(name):
    x = torch.zeros(64, 128)
    x[32:] = torch.randn(32, 128)
    x = with_whole_tiles(x, QUANTIZERS[name])
    got = quantize(x, QUANTIZERS[name])
    assert (got.values[:32] == 0).all()
    same = torch.signbit(got.elements) == torch.signbit(x)
    if name == "razer":  # it has no -0
        same |= got.elements == 0
    assert same.all()


@each("name", BLOCK_SCALED)
def test_the_stored_parts_multiply_to_the_values(name):
    q = QUANTIZERS[name]
    got = quantize(with_whole_tiles(torch.randn(64, 128), q), q)
    element = ELEMENTS[q.element]
    assert torch.equal((got.elements * spread(got.scales, got.elements)) * got.tensor_scale, got.values)
    if q.codec not in CODES:  # codes of those need meta as well: tests/kernels/codecs
        sign = 1 << element.bits - 1
        magnitude = torch.tensor(element.magnitudes())[(got.codes & sign - 1).long()]
        assert torch.equal(torch.where(got.codes >= sign, -magnitude, magnitude), got.elements)


EXACT_IN_BF16 = [name for name, q in BLOCK_SCALED.items() if q.scale != FP32() and q.codec not in ("if4", "macro")]


@each("name", EXACT_IN_BF16)
def test_an_element_times_its_scale_is_exact_in_bf16(name):
    x = torch.randn(64, 512) * torch.exp2(torch.randn(64, 1) * 8)
    got = quantize(with_whole_tiles(x, QUANTIZERS[name]), QUANTIZERS[name])
    operand = got.elements * spread(got.scales, got.elements)
    assert torch.equal(reference.round_bf16(operand), operand)


def test_mxfp4_commutes_with_powers_of_two():
    x = torch.randn(16, 64)
    for name in ("mxfp4", "mxfp4-rceil"):
        q = Quantizer.named(name)
        assert torch.equal(quantize(x * 2.0**9, q).values, quantize(x, q).values * 2.0**9)


def test_a_tensor_scale_target_moves_the_largest_scale():
    for target in (448.0, 256.0):
        q = Quantizer(tensor_scale=TensorScale(target=target))
        assert quantize(torch.randn(64, 64), q).scales.max() == target


def test_values_are_rotated_back():
    x = torch.randn(32, 64)
    plain = Quantizer.named("none")
    for signs in ("random", "none"):
        got = quantize(x, plain, rotation=Hadamard(size=32, signs=signs), seed=5)
        assert torch.allclose(got.values, x, atol=1e-5)
        assert not torch.allclose(got.elements, x, atol=0.1)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4, 40), r"x.shape\[-1\]: found 40; accepted: a multiple of the block size 16"),
        (torch.zeros(4, 8), r"found 8; accepted: a multiple of the block size 16"),
        (torch.zeros(0, 16), r"x.shape: found \(0, 16\)"),
        (torch.zeros(4, 16, dtype=torch.int32), r"x.dtype: found 'torch.int32'"),
    ],
)
def test_wrong_input_is_named(x, message):
    with pytest.raises(ConfigError, match=message):
        quantize(x, Quantizer.named("nvfp4"))


def test_a_rotation_larger_than_the_axis_is_named():
    with pytest.raises(ConfigError, match=r"found 16; accepted: a multiple of the rotation size 32"):
        quantize(torch.zeros(4, 16), Quantizer.named("nvfp4"), rotation=Hadamard(size=32))


@pytest.mark.parametrize("name", ["nvfp4-2d", "mxfp4-2d"])
def test_a_weight_in_tiles_and_its_transpose_have_one_encoding(name):
    w = torch.randn(64, 96)
    here, there = quantize(w, Quantizer.named(name)), quantize(w.T, Quantizer.named(name))
    for field in ("values", "codes", "scales"):
        assert torch.equal(getattr(here, field), getattr(there, field).T), field


@pytest.mark.parametrize("block", [16, 128, "16x16", "32x32", "row", "tensor"])
def test_joining_what_was_cut_gives_it_back(block):
    x = torch.randn(3, 64, 128)
    blocks = cut(x, block)
    assert blocks.numel() == x.numel()
    assert torch.equal(join(blocks, x.shape, block), x)


def test_every_row_and_the_whole_tensor_may_be_a_block():
    x = torch.randn(8, 48)
    for block, amax in (("row", x.abs().amax(1, keepdim=True)), ("tensor", x.abs().amax().view(1, 1))):
        got = quantize(x, Quantizer(element="e4m3", block=block, scale=FP32()))
        assert torch.allclose(got.scales, amax / 448, rtol=1e-6)


def test_the_encode_convention_loses_small_blocks_where_decode_keeps_them():
    """Rows over four decades. Encode stores the multiplier: E4M3 runs out of range above it for small blocks, and a
    division by the tensor maximum makes that worse; decoding scales, or UE5M3, do not mind. (2509.17791, section 1.5
    of our notes on it: flushed 28.2 %, 42.9 %, 6.8 %, 6.8 %.)"""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 1024, generator=generator) * torch.logspace(-4, 0, 1024)[:, None]

    def flushed(scale, tensor_scale=None) -> float:
        return float((quantize(x, Quantizer(scale=scale, tensor_scale=tensor_scale)).values == 0).double().mean())

    encode = E4M3(convention="encode", zero="min")
    assert flushed(encode) == pytest.approx(0.282, abs=0.01)
    assert flushed(encode, TensorScale()) == pytest.approx(0.429, abs=0.01)
    assert flushed(encode, TensorScale(target=1 / 448)) == pytest.approx(0.068, abs=0.005)
    assert flushed(E4M3(), TensorScale()) == pytest.approx(0.068, abs=0.005)
    assert flushed(UE5M3(convention="encode", zero="min")) == pytest.approx(0.068, abs=0.005)


def test_a_hybrid_scale_quantizes_as_if_it_were_not_rounded():
    x = torch.randn(256, 64)
    hybrid, plain_ = (quantize(x, Quantizer(scale=E4M3(hybrid=h))) for h in (True, False))
    exact = quantize(x, Quantizer(scale=FP32()))
    assert torch.equal(hybrid.scales, plain_.scales)
    assert (hybrid.codes == exact.codes).double().mean() > 0.999  # one FP32 rounding apart
    assert not torch.equal(hybrid.codes, plain_.codes)


def test_a_block_that_adapts_keeps_the_better_of_its_two_encodings():
    x = torch.randn(512, 64)
    for metric, error in (("mse", lambda d: d**2), ("mae", lambda d: d.abs())):
        adaptive = Quantizer.named(f"nvfp4-4over6-{metric}")
        six = msgspec.structs.replace(adaptive, adapt="none")
        kept, first = quantize(x, adaptive), quantize(x, six)
        worse = (
            error(kept.values - x).view(512, 4, 16).sum(-1) > error(first.values - x).view(512, 4, 16).sum(-1) + 1e-6
        )
        assert not worse.any()
        changed = kept.scales != first.scales
        assert 0.3 < float(changed.double().mean()) < 0.6  # 45 % of Gaussian blocks take 4
        ratio = kept.scales[changed] / first.scales[changed]
        assert ((ratio > 1.5 * 15 / 17) & (ratio < 1.5 * 17 / 15)).all()  # two roundings to E4M3 apart


def test_aligned_is_three_quarters_of_the_range_and_the_published_factor():
    """2505.14669's backward pass: floor scales of x, elements of 3x/4 to nearest, products times 4/3 · 1.009276."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    got = quantize(x, msgspec.structs.replace(Quantizer.named("mxfp4"), range="aligned"))
    blocks = x.double().view(-1, 32)
    scale = 2.0 ** (torch.frexp(blocks.abs().amax(1))[1].double() - 3)[:, None]
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nearest = (0.75 * blocks.abs() / scale)[:, :, None].sub(levels).abs().argmin(2)
    wanted = torch.copysign(levels[nearest], blocks) * scale * (4 / 3 * 1.009276)
    assert torch.allclose(got.values.double().view(-1, 32), wanted, rtol=1e-6)
    assert ((x * got.values).sum() / (x * x).sum()).item() == pytest.approx(1, abs=1e-3)
