"""The error of a quantizer is split exactly, the counters count what they say, and nothing undefined gets a number."""

import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4dse.dse import QUANTIZERS, ConfigError, Quantizer, Recipe
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.outliers import Residual
from fp4dse.dse.rounding import Nearest, Stochastic
from fp4dse.dse.scale import E4M3, E8M0, FP32, UE5M3, TensorScale
from fp4dse.kernels import LaneNumerics, decompose, quantize, statistics, why_not_decomposed
from fp4dse.kernels.inspection.decompose import finite, split
from fp4dse.kernels.quant.counters import COUNTERS, SQUARED_ERRORS, count
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec.blocks import cut
from fp4dse.kernels.quant.spec.reference import quantize_blocks
from fp4dse.kernels.vectors import with_whole_tiles
from tests.each import each

DEFINED = [name for name, q in QUANTIZERS.items() if why_not_decomposed(q) is None]
BF16 = Recipe.named("bf16")
RCEIL = Quantizer.named("mxfp4-rceil")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(seed: int, bits: float) -> torch.Tensor:
    """[32, 128], row scales over `bits` binades each way, some zeros, one row of them."""
    x = normal(32, 128, seed=seed) * torch.exp2(bits * normal(32, 1, seed=seed + 1).clamp(-1, 1))
    x[normal(32, 128, seed=seed + 2) > 1.5] = 0
    x[3] = 0
    return x


@pytest.fixture(scope="module")
def gaussian():
    x = normal(2048, 2048)
    return x, decompose(x, RCEIL)


def test_the_gaussian_figures_of_the_truncation_free_rule(gaussian):
    x, parts = gaussian
    shares = parts.shares()
    assert shares["scale"] == pytest.approx(1.763, rel=0.02)
    assert shares["grid"] == pytest.approx(0.747, rel=0.02)
    assert shares["dead"] == pytest.approx(0.020, abs=0.001)  # published to two digits
    assert shares["scale·grid"] == pytest.approx(-1.531, rel=0.02)
    cosine = parts.cross["scale", "grid"] / 2 / math.sqrt(parts.energy["scale"] * parts.energy["grid"])
    assert cosine == pytest.approx(-0.667, rel=0.02)
    assert parts.dead_elements / x.numel() == pytest.approx(0.077, rel=0.02)


def test_the_dead_zone_of_e2m1_is_a_24th_of_the_block_maximum(gaussian):
    x, parts = gaussian
    blocks = x.view(-1, 32).double()
    amax = blocks.abs().amax(1, keepdim=True)
    clearly_below, clearly_above = (blocks.abs() * f < amax / 24 for f in (1 + 1e-6, 1 - 1e-6))
    dead = parts.dead.view(-1, 32) != 0
    assert dead[clearly_below].all()
    assert not dead[~clearly_above].any()


@pytest.mark.parametrize("name", DEFINED)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), bits=st.floats(0, 30))
def test_the_parts_add_up_to_the_error_exactly(name, seed, bits):
    x = spread(seed, bits)
    parts = decompose(x, Quantizer.named(name))
    error = quantize(x, Quantizer.named(name)).values.double() - x.double()
    assert torch.equal(parts.scale + parts.dead + parts.grid, error)
    assert parts.total == float((error * error).sum())
    assert sum(parts.energy.values()) + sum(parts.cross.values()) == pytest.approx(parts.total, rel=1e-9)
    assert parts.cross["dead", "grid"] == 0


@each("element", [name for name in ELEMENTS if name != "s1p2"])
@each("block", [16, "16x16", "row", "tensor"])
def test_the_parts_follow_from_the_definition(element, block):
    """Q* in float64 from the list of magnitudes, away from the points where FP32 and float64 may decide apart."""
    x = spread(5, 3)
    q = Quantizer(element=element, block=block, scale=E4M3(), tensor_scale=TensorScale())
    parts = decompose(x, q)
    blocks = cut(x[None].double(), block)[0]
    amax = blocks.abs().amax(1, keepdim=True)
    ideal = amax / q.val_max
    t = torch.where(amax > 0, blocks.abs() / ideal, 0.0)
    values = torch.tensor(ELEMENTS[element].magnitudes(), dtype=torch.float64)
    middles = (values[1:] + values[:-1]) / 2
    index = torch.searchsorted(middles, t)
    near = (t[:, :, None] - middles).abs().amin(2) < 1e-5 * t
    rest = torch.copysign(values[index] * ideal.nan_to_num(), blocks) - blocks
    dead, grid = (cut(part[None], block)[0] for part in (parts.dead, parts.grid))
    for got, expected in ((dead, torch.where(index == 0, rest, 0.0)), (grid, torch.where(index > 0, rest, 0.0))):
        assert torch.allclose(got[~near], expected[~near], rtol=1e-4, atol=1e-6 * float(amax.max()))
    assert near.float().mean() < 0.2  # the points that were left out are few: zeros have none


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), bits=st.floats(0, 30))
def test_dead_and_scale_are_orthogonal_under_the_truncation_free_rule(seed, bits):
    assert decompose(spread(seed, bits), RCEIL).cross["scale", "dead"] == 0


def test_dead_and_scale_are_not_orthogonal_where_a_scale_is_below_the_ideal_one(gaussian):
    x, _ = gaussian
    for name in ("mxfp4", "nvfp4"):
        assert decompose(x[:64], Quantizer.named(name)).cross["scale", "dead"] < 0


def test_an_unrounded_scale_has_no_scale_error():
    parts = decompose(normal(64, 64), Quantizer(scale=FP32()))
    assert not parts.scale.any()
    assert parts.energy["dead"] > 0


def test_a_tensor_without_error_has_no_shares():
    parts = decompose(torch.tensor([[6.0, -3.0] + [0.0] * 30]), RCEIL)
    assert parts.total == 0
    assert parts.shares() == {}


@pytest.mark.parametrize("range_", ["3/4", "aligned"])
def test_the_ideal_of_a_range_that_scales_the_product_is_the_full_range_on_x(range_):
    x, full = normal(64, 64), Quantizer.named("mxfp4")
    parts, of_full = (decompose(x, q) for q in (msgspec.structs.replace(full, range=range_), full))
    assert torch.equal(parts.grid, of_full.grid)
    assert torch.equal(parts.dead, of_full.dead)
    assert not torch.equal(parts.scale, of_full.scale)


def test_the_ideal_of_range_16_17_maps_the_maximum_to_its_own_val_max():
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([96.0, 4.2])  # s* = 17: 4.2 is below 17/4, and above 16/4
    assert decompose(x, Quantizer.named("nvfp4-1716")).dead_elements == 1
    assert decompose(x, Quantizer.named("nvfp4")).dead_elements == 0


@pytest.mark.parametrize(
    ("quantizer", "field"),
    [
        (Quantizer.named("bf16"), "element"),
        (Quantizer.named("none"), "element"),
        (msgspec.structs.replace(RCEIL, rounding=Stochastic()), "rounding"),
        (Quantizer.named("nvfp4-4over6-mse"), "adapt"),
        (Quantizer.named("razer"), "adapt"),
        (Quantizer.named("quest-mxfp4"), "scaling"),
        (Quantizer.named("amxfp4"), "scaling"),
        (Quantizer.named("hif4"), "scale"),
    ],
)
def test_what_is_not_defined_is_refused_by_its_field(quantizer, field):
    with pytest.raises(ConfigError, match=rf"^quantizer\.{field}: found ") as caught:
        decompose(normal(32, 32), quantizer)
    assert why_not_decomposed(quantizer) == str(caught.value)


def test_scales_finer_than_the_block_are_refused():
    x = normal(4, 64)
    with pytest.raises(ConfigError, match="one scale a block"):
        split(x, quantize(x, Quantizer(block=16)), Quantizer(block=32))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), bits=st.floats(0, 20), alpha=st.sampled_from([0.25, 0.5, 1.0]))
def test_the_parts_of_a_fallback_add_up_and_are_those_of_the_definition(seed, bits, alpha):
    """Against E2M1 written out in float64, with both scales rounded up to a power of two, and ideal."""
    x = spread(seed, bits)
    parts = decompose(x, msgspec.structs.replace(RCEIL, outliers=Residual(alpha)))
    original = x.double().view(-1, 32)
    found = {name: getattr(parts, name).view(-1, 32) for name in ("scale", "dead", "grid")}
    used, ideal = (with_fallback(original, alpha, scale) for scale in (power_above, lambda s: s))
    size = original.abs().amax(1, keepdim=True).clamp(min=1e-30)
    near = (sum(found.values()) - (used - original)).abs() > 1e-5 * size  # FP32 may decide otherwise at a tie
    near |= (found["dead"] + found["grid"] - (ideal - original)).abs() > 1e-5 * size
    assert near.float().mean() < 0.02
    dead = (ideal == 0) & (original != 0) & ~near
    assert torch.allclose(found["dead"][dead], -original[dead], rtol=1e-9, atol=0)
    assert not found["grid"][dead].any()
    assert sum(parts.energy.values()) + sum(parts.cross.values()) == pytest.approx(parts.total, rel=1e-9)


def power_above(s):
    return torch.exp2(torch.log2(s.clamp(min=2.0**-127)).ceil())


def with_fallback(x, alpha, rounded):
    """x [n, 32] in float64."""
    first = e2m1(x, rounded)
    return first + alpha * e2m1(x - first, rounded)


def e2m1(x, rounded):
    values = torch.tensor(ELEMENTS["e2m1"].magnitudes(), dtype=torch.float64)
    scale = rounded(x.abs().amax(1, keepdim=True) / 6).clamp(min=2.0**-127)
    t = (x / scale).abs()[..., None] - values
    return torch.copysign(values[t.abs().argmin(-1)], x) * scale


def test_a_fallback_mends_what_is_dead(gaussian):
    x, plain = gaussian
    mended = decompose(x, msgspec.structs.replace(RCEIL, outliers=Residual(0.5)))
    assert mended.dead_elements < 0.3 * plain.dead_elements
    assert mended.total < 0.5 * plain.total
    assert statistics(x, msgspec.structs.replace(RCEIL, outliers=Residual(0.5)))["mse"] == pytest.approx(
        mended.total / float(x.double().square().sum())
    )


def test_half_away_is_defined():
    assert why_not_decomposed(msgspec.structs.replace(RCEIL, rounding=Nearest(ties="away"))) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_refused(value):
    x = normal(2, 32)
    x[1, 3] = value
    for function in (decompose, statistics):
        with pytest.raises(ConfigError, match=r"^x: found '1 elements that are NaN or Inf'"):
            function(x, RCEIL)


def test_what_overflows_when_decoded_is_refused():
    x = torch.full((1, 32), 3.3e38)  # 3.9 · 2^126, and 4 · 2^126 is beyond FP32
    for function in (decompose, statistics):
        with pytest.raises(ConfigError, match=r"^x̂: found '32 elements that are NaN or Inf'"):
            function(x, RCEIL)


def test_float64_beyond_float32_is_refused():
    with pytest.raises(ConfigError, match="NaN or Inf"):
        finite(torch.full((32,), 1e300, dtype=torch.float64))


# --- counters ----------------------------------------------------------------------------------------------------


def pieces(x: torch.Tensor, tables) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements, scales and factors of blocks [L, n, B]."""
    encoded, dec = quantize_blocks(x, *tables)
    return encoded.q, encoded.scale, dec


def counted(lanes: list[Quantizer], x: torch.Tensor) -> dict[str, list[int]]:
    """x [L, n, B]"""
    tables = descriptor(lanes)
    found = count(x, *pieces(x, tables), *tables)
    return {name: found[name].tolist() for name in COUNTERS}


def test_counters_of_a_block_worked_by_hand():
    x = torch.zeros(1, 4, 16)
    x[0, 0, :4] = torch.tensor([7.0, -6.5, 0.2, 1e-9])  # floor: s = 1, so two clip and two are flushed
    x[0, 1, :2] = torch.tensor([6.0, 0.5])
    x[0, 2, 0] = 1.0
    got = counted([Quantizer(scale=E8M0())], x)
    assert got == {"clipped": [2], "flushed": [2], "zeroed": [0], "saturated": [0]}
    got = counted([Quantizer(scale=E8M0(rule="rceil"))], x)
    assert got == {"clipped": [0], "flushed": [2], "zeroed": [0], "saturated": [0]}


def test_squared_errors_of_clipped_and_flushed_elements_worked_by_hand():
    x = torch.zeros(1, 2, 16)
    x[0, 0, :5] = torch.tensor([7.0, -6.5, 0.2, 1e-9, 2.4])  # 7 and 6.5 become 6; 2.4 is rounded to 2
    x[0, 1, :2] = math.nan
    tables = descriptor([Quantizer(scale=E8M0())])
    got = count(x, *pieces(x, tables), *tables)
    assert got["clipped_error"].tolist() == [1.25]
    assert got["flushed_error"].item() == pytest.approx(0.2**2, rel=1e-6)
    assert set(got) == {*COUNTERS, *SQUARED_ERRORS}


def test_squared_errors_of_clipped_and_flushed_elements_are_part_of_the_whole():
    for name in ("nvfp4", "mxfp4", "nvfp4-4over6-mse", "hif4", "if4", "mixfp4"):
        q, x = Quantizer.named(name), spread(3, 6)
        decoded, original = quantize(x, q).values.double(), x.double()
        errors = (decoded - original).square()
        got = counter_errors(x, q)
        assert got["flushed_error"] == pytest.approx(float(errors[(decoded == 0) & (x != 0)].sum()), rel=1e-6), name
        assert got["clipped_error"] + got["flushed_error"] <= float(errors.sum()), name


def counter_errors(x: torch.Tensor, q: Quantizer) -> dict[str, float]:
    """The SQUARED_ERRORS of x [R, C] as an operand's slot counts them."""
    recipe = msgspec.structs.replace(BF16, fprop=msgspec.structs.replace(BF16.fprop, x=q))
    numerics = LaneNumerics([recipe], [0])
    numerics.counting = True
    numerics.gemm("fprop", 0, x[None], 2, torch.zeros(1, 1, x.shape[1]), 2)
    return {name: float(numerics.slots["fprop.x"].counts[name]) for name in SQUARED_ERRORS}


def test_a_lost_block_is_zeroed_and_flushed_but_not_clipped():
    x = torch.zeros(1, 2, 16)
    x[0, 0, :3] = 1.5 * 2.0**-10  # E4M3 rounds the scale 2^-12 to 0; under its smallest, 2^-9, this is 0.75
    assert counted([Quantizer(scale=E4M3())], x) == {"clipped": [0], "flushed": [3], "zeroed": [1], "saturated": [0]}
    assert counted([Quantizer(scale=E4M3(zero="min"))], x)["zeroed"] == [0]


def test_a_saturated_scale_is_one_that_clips_at_the_end_of_its_format():
    x = torch.zeros(1, 3, 16)
    x[0, 0, :2] = torch.tensor([5000.0, 3.0])  # E4M3 ends at 448 · 6 = 2688
    x[0, 1, 0] = 2688.0
    x[0, 2, 0] = 7.0
    assert counted([Quantizer(scale=E4M3())], x)["saturated"] == [1]
    assert counted([Quantizer(scale=UE5M3())], x)["saturated"] == [0]
    encode = Quantizer(scale=E4M3(convention="encode", zero="min"))  # the smallest multiplier is 2^-9: up to 512 · 6
    assert counted([encode], x)["saturated"] == [1]
    x[0, 0] = 6 * 80_000  # multiplier 1.6 · 2^-17 becomes 2^-16: clips, but the scale could be twice as large
    encode = Quantizer(scale=UE5M3(max=61440, convention="encode", zero="min"))
    got = counted([encode], x)
    assert got["clipped"][0] >= 16
    assert got["saturated"] == [0]


def test_a_tensor_scale_does_not_saturate_its_own_largest_block():
    for seed in range(50):
        x = spread(seed, 10)[None].view(1, -1, 16)
        for scale in (E4M3(), UE5M3()):
            assert counted([Quantizer(scale=scale, tensor_scale=TensorScale())], x)["saturated"] == [0]


@pytest.mark.parametrize("name", ["mxfp4-rceil", "mxfp4-34", "mxfp4-ceil", "nvfp4-1716", "fp8"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), bits=st.floats(0, 4))
def test_a_quantizer_that_clips_nothing_is_counted_so(name, seed, bits):
    assert statistics(spread(seed, bits), Quantizer.named(name))["clipped"] == 0


def test_a_lane_is_counted_alone():
    lanes = [Quantizer.named(name) for name in ("nvfp4", "e4m3-b16", "ue5m3", "nvfp4-1716")]
    x = torch.stack([spread(seed, 12).view(-1, 16) for seed in range(4)])
    together = counted(lanes, x)
    for i, lane in enumerate(lanes):
        alone = counted([lane], x[i : i + 1])
        assert {name: [values[i]] for name, values in together.items()} == alone


def test_nan_and_padding_are_counted_nowhere():
    x = spread(0, 3).view(1, -1, 16)
    padded = torch.cat([x, torch.zeros(1, 5, 16), torch.full((1, 2, 16), math.nan)], 1)
    q = Quantizer.named("mxfp4")
    assert counted([q], padded) == counted([q], x)


def test_a_scale_per_element_counts_as_one_per_block():
    x = spread(1, 8).view(1, -1, 16)
    tables = descriptor([Quantizer.named("nvfp4")])
    q, scale, dec = pieces(x, tables)
    spelled_out = scale[:, :, None].expand_as(q)
    by_block, by_element = (count(x, q, s, dec, *tables) for s in (scale, spelled_out))
    assert all(torch.equal(by_block[name], by_element[name]) for name in COUNTERS)
    assert int(by_block["flushed"]) > 0


def test_a_factor_per_part_counts_as_its_parts_alone():
    x = torch.cat([spread(seed, 8).view(1, -1, 16) for seed in range(2)], 1)
    tables = descriptor([Quantizer.named("nvfp4")])
    halves = [pieces(half, tables) for half in x.chunk(2, 1)]
    q, scale, dec = (torch.cat(pieces, 1) for pieces in zip(*((q, s, d[:, None]) for q, s, d in halves), strict=True))
    together = count(x, q, scale, dec, *tables)
    alone = [count(half, *pieces, *tables) for half, pieces in zip(x.chunk(2, 1), halves, strict=True)]
    assert {name: together[name].tolist() for name in COUNTERS} == {
        name: (alone[0][name] + alone[1][name]).tolist() for name in COUNTERS
    }
    for name in SQUARED_ERRORS:
        assert together[name].tolist() == pytest.approx((alone[0][name] + alone[1][name]).tolist())


# --- statistics --------------------------------------------------------------------------------------------------


def test_statistics_from_their_definitions():
    for name, q in QUANTIZERS.items():
        x = with_whole_tiles(spread(2, 6), q)
        got, decoded, original = statistics(x, q), quantize(x, q).values.double(), x.double()
        energy = (original**2).sum()
        assert got["mse"] == pytest.approx(float(((decoded - original) ** 2).sum() / energy), rel=1e-12)
        assert got["gain"] == pytest.approx(float((decoded * original).sum() / energy), rel=1e-12)
        assert got["sqnr_db"] is None or got["sqnr_db"] == pytest.approx(-10 * math.log10(got["mse"]))
        assert got["bits"] == q.bits_per_element
        if q.is_plain:
            assert [got[name] for name in COUNTERS] == [None] * 4
        else:
            assert got["flushed"] == float(((decoded == 0) & (x != 0)).double().mean()), name
        assert (got["decomposition"] is None) == (got["note"] is not None)


@pytest.mark.parametrize(
    ("name", "fits", "clips"),
    [
        ("hif4", 7.0, 7.8),  # both have scale 1, and 7 = 1.75 · 2²
        ("blockdialect", 7.4, 7.8),  # the top of the widest dialect is 7.5
        ("if4", 1.57, 1.6),  # beside a tensor maximum of 4 the scale of 1.57 is rounded up, that of 1.6 down
    ],
)
def test_elements_of_another_unit_are_counted_against_their_own_largest(name, fits, clips):
    for value, share in ((fits, 0), (clips, 1 / 256)):
        x = torch.zeros(2, 128)
        x[0, 0], x[1, 0] = 4.0, value
        assert statistics(x, Quantizer.named(name))["clipped"] == share


def test_a_tensor_of_zeros_has_no_relative_error():
    got = statistics(torch.zeros(4, 32), RCEIL)
    assert [got[key] for key in ("mse", "sqnr_db", "gain", "decomposition")] == [None] * 4
    assert got["flushed"] == got["zeroed"] == 0
