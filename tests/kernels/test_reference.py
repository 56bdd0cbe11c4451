"""The quantizers compute what their definitions say: exhaustive where the space is tiny, oracles where it is not."""

import itertools
import math

import gfloat
import gfloat.formats
import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import QUANTIZERS, ConfigError, Hadamard, Quantizer
from fp4dse.dse.formats import ELEMENTS, SCALES
from fp4dse.dse.quantizer import E8M0, Stochastic, TensorScale
from fp4dse.kernels import backend, quantize, reference
from fp4dse.kernels.descriptor import descriptor
from fp4dse.kernels.philox import random16

BLOCK_SCALED = {name: q for name, q in QUANTIZERS.items() if not q.is_plain}
E2M1 = torch.tensor(ELEMENTS["e2m1"].magnitudes())
MX = Quantizer.named("mxfp4")


def stochastic(q: Quantizer) -> Quantizer:
    return msgspec.structs.replace(q, rounding=Stochastic())


def with_scale_one(values: torch.Tensor) -> torch.Tensor:
    """Rows of 32 that hold a 6 and otherwise one value each, so that the E8M0 scale is exactly 1."""
    rows = torch.zeros(len(values), 32)
    rows[:, 0], rows[:, 1] = 6.0, values
    return rows


def test_all_sixteen_codes_round_trip():
    values = torch.cat([E2M1, -E2M1])
    got = quantize(with_scale_one(values), MX)
    assert torch.equal(got.values[:, 1], values)
    assert got.codes[:, 1].tolist() == list(range(16))  # -0 is code 8
    assert (got.scales == 1).all()


def test_every_midpoint_goes_to_the_even_code_and_its_neighbours_to_the_nearest():
    middle = (E2M1[1:] + E2M1[:-1]) / 2
    assert quantize(with_scale_one(middle), MX).values[:, 1].tolist() == [0, 1, 1, 2, 2, 4, 4]
    below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(9.0))
    assert torch.equal(quantize(with_scale_one(below), MX).values[:, 1], E2M1[:-1])
    assert torch.equal(quantize(with_scale_one(above), MX).values[:, 1], E2M1[1:])


def test_elements_equal_ml_dtypes_and_gfloat():
    x = torch.cat([torch.linspace(-6, 6, 200_001), torch.rand(800_000) * 12 - 6])
    ours = quantize(with_scale_one(x), MX).values[:, 1]
    theirs = x.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(ours.numpy(), theirs)
    info = gfloat.formats.format_info_ocp_e2m1
    assert np.array_equal(ours.numpy(), gfloat.round_ndarray(info, x.double().numpy(), sat=True).astype(np.float32))


@pytest.mark.parametrize(("name", "codes"), [("e4m3", 127), ("ue5m3", 255)])
def test_every_scale_code_is_reached_and_kept(name, codes):
    values = torch.tensor(SCALES[name].magnitudes())
    assert len(values) == codes
    x = torch.zeros(codes, 16)
    x[:, 0] = 6 * values
    q = Quantizer(scale=type(QUANTIZERS["ue5m3"].scale)() if name == "ue5m3" else QUANTIZERS["nvfp4"].scale)
    scales = quantize(x, q).scales[:, 0]
    zero = 1.0 if name == "ue5m3" else 0.0  # the zero policy
    assert scales.tolist() == [zero, *values[1:].tolist()]


def test_every_e8m0_exponent_is_reached():
    exponents = range(-127, 126)  # 6 · 2^125 is the largest block maximum that FP32 holds
    x = torch.zeros(len(exponents), 32)
    x[:, 0] = torch.tensor([6 * 2.0**e for e in exponents])
    for rule in ("floor", "rceil"):
        got = quantize(x, Quantizer(block=32, scale=E8M0(rule=rule)))
        assert got.scales[:, 0].tolist() == [2.0**e for e in exponents]
        assert torch.equal(got.values, x)


@pytest.mark.parametrize("name", SCALES)
def test_scale_rounding_equals_an_oracle(name):
    s = SCALES[name]
    exponents = torch.rand(300_000) * (math.log2(s.max) - s.emin + s.mantissa + 2) + s.emin - s.mantissa - 1
    wanted = torch.minimum(torch.exp2(exponents), torch.tensor(s.max))
    as_tensor = torch.tensor
    got = reference.round_scale(wanted, as_tensor(2.0**s.emin), as_tensor(2.0**s.mantissa), as_tensor(False))
    if name == "e4m3":
        theirs = wanted.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        info = gfloat.FormatInfo(
            name="ue5m3",
            k=8,
            precision=4,
            bias=15,
            is_signed=False,
            domain=gfloat.Domain.Finite,
            has_nz=False,
            num_high_nans=1,
            has_subnormals=True,
            is_twos_complement=False,
        )
        theirs = gfloat.round_ndarray(info, wanted.double().numpy()).astype(np.float32)
    assert np.array_equal(got.numpy(), theirs)


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


def nvfp4_chain(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """NVFP4 written once more, in numpy float32 and ml_dtypes casts, operation by operation: (codes, scales)."""
    f = np.float32
    amax = np.abs(x).max()
    enc = min(f(2688) / amax, f(3.4028235e38)) if amax > 0 else f(1)
    dec = f(1) / enc
    blocks = x.reshape(-1, 16)
    scale = np.minimum(np.abs(blocks).max(1) * (enc * (f(1) / f(6))), f(448)).astype(ml_dtypes.float8_e4m3fn)
    scale = scale.astype(f)
    with np.errstate(divide="ignore", over="ignore"):
        mult = np.minimum(f(1) / (scale * dec), f(3.4028235e38))
        codes = np.clip(blocks * mult[:, None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return codes.view(np.uint8) & 15, scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0, 12])
def test_nvfp4_follows_the_operation_order_of_its_definition(dtype, spread):
    torch.manual_seed(1)
    x = torch.randn(256, 64) * torch.exp2(torch.randn(256, 1) * spread)
    x = x.to(dtype)
    got = quantize(x, Quantizer.named("nvfp4"))
    codes, scales = nvfp4_chain(x.float().numpy())
    assert np.array_equal(got.scales.numpy().ravel(), scales)
    assert np.array_equal(got.codes.numpy().reshape(-1, 16)[scales > 0], codes[scales > 0])


@pytest.mark.parametrize(
    ("name", "rounding", "expected"),
    [
        ("mxfp4", "nearest", 1.322e-2),
        ("mxfp4-rceil", "nearest", 1.330e-2),
        ("nvfp4", "nearest", 9.05e-3),
        ("ue5m3-t448", "nearest", 9.05e-3),
        ("nvfp4-1716", "stochastic", 2.354e-2),
    ],
)
def test_gaussian_error_anchors(name, rounding, expected):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 4096, generator=generator)
    q = Quantizer.named(name)
    got = quantize(x, stochastic(q) if rounding == "stochastic" else q).values
    assert float(((got - x) ** 2).sum() / (x**2).sum()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("quantizer", "bias"),
    [
        (QUANTIZERS["nvfp4-1716"], 0.0),
        (QUANTIZERS["mxfp4-rceil"], 0.0),
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


def test_stochastic_rounding_probability_is_the_fraction_for_every_draw():
    r = torch.arange(65536, dtype=torch.int32)
    threshold = reference.stochastic_threshold(r)
    for fraction in (0.0, 2.0**-17, 1 / 3, 0.5, 0.9, 1 - 2.0**-17, 1 - 2.0**-24):
        up = float((torch.tensor(fraction) >= threshold).double().mean())
        assert abs(up - fraction) <= 2.0**-17


def test_stochastic_rounding_only_meets_the_two_neighbours():
    points = torch.rand(2000) * 6
    low = E2M1[torch.searchsorted(E2M1, points, right=True) - 1]
    high = E2M1[torch.searchsorted(E2M1, points)]
    for seed in range(20):
        got = quantize(with_scale_one(points), stochastic(MX), seed=seed).values[:, 1]
        assert ((got == low) | (got == high)).all()


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


@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_the_compiled_path_has_the_bits_of_the_reference(name):
    compiled = backend("cpu")
    if compiled.name != "compiled":
        pytest.fail(f"this machine does not compile: {compiled.why_not}")
    q = QUANTIZERS[name]
    for x, rounding in itertools.product((special_blocks(), special_blocks().view(2, 32, 32)), (False, True)):
        random = random16(torch.arange(2), 1, torch.tensor(0), torch.tensor(0), x[0].numel()).view_as(x)
        tables = descriptor([stochastic(q) if rounding else q, q])
        wanted = reference.decode_operand(x, *tables, random if rounding else None)
        got = compiled.decode_operand(x, *tables, random if rounding else None)
        for a, b in zip(wanted, got, strict=True):
            assert torch.equal(a.nan_to_num(nan=7e7), b.nan_to_num(nan=7e7))
            assert torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_a_block_with_nan_or_inf_decodes_to_nan_and_others_do_not(name):
    q = QUANTIZERS[name]
    x = special_blocks()
    block = q.block
    got = quantize(x[1].reshape(-1, block), q).values
    bad = ~torch.isfinite(x[1].reshape(-1, block)).all(dim=1)
    if q.tensor_scale:  # the tensor's maximum is not a number: nothing in it can be scaled
        assert got.isnan().all()
    else:
        assert torch.equal(got.isnan().all(dim=1), bad)
        assert torch.equal(got.isnan().any(dim=1), bad)


@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_a_zero_block_stays_zero_and_signs_are_kept(name):
    x = torch.zeros(2, 64)
    x[1] = torch.randn(64)
    got = quantize(x, QUANTIZERS[name])
    assert (got.values[0] == 0).all()
    assert torch.equal(torch.signbit(got.elements), torch.signbit(x))


@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_the_stored_parts_multiply_to_the_values(name):
    q = QUANTIZERS[name]
    got = quantize(torch.randn(8, 128), q)
    scales = got.scales.repeat_interleave(q.block, dim=1)
    assert torch.equal((got.elements * scales) * got.tensor_scale, got.values)
    magnitude = E2M1[(got.codes & 7).long()]
    assert torch.equal(torch.where(got.codes >= 8, -magnitude, magnitude), got.elements)


@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_an_element_times_its_scale_is_exact_in_bf16(name):
    got = quantize(torch.randn(64, 512) * torch.exp2(torch.randn(64, 1) * 8), QUANTIZERS[name])
    operand = got.elements * got.scales.repeat_interleave(QUANTIZERS[name].block, dim=1)
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
