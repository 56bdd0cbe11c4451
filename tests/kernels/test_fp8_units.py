"""FP8 operands hold what they are made of, or leave it to BF16; their products are exact but for the unit's sums."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Hadamard, Recipe
from fp4dse.dse.attention import Attention
from fp4dse.dse.exactness import has_factor
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.outliers import Clamp, Residual
from fp4dse.dse.rounding import Nearest, Stochastic
from fp4dse.dse.stages import Fprop, Wgrad
from fp4dse.kernels import LaneNumerics, gemm, lanes, stage
from fp4dse.kernels.layers import product
from fp4dse.kernels.ops import fp8
from fp4dse.kernels.ops.attention_core import AttentionCore
from fp4dse.kernels.ops.fp8 import APART, E4M3, E5M2, Fp8, History, Shift, is_taken, library, spaced
from fp4dse.kernels.ops.mxfp4 import window
from fp4dse.kernels.ops.products import Finish
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.operand import state
from fp4dse.kernels.quant.operand.records import Journal, Use
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton import unfused
from tests.each import each
from tests.kernels.test_triton import arguments_for, call_for, flat, odd_rows, signs_of, to

MX = QUANTIZERS["mxfp4"]
INTERPRETED = pytest.mark.parametrize("place", ["interpreter"], indirect=True)
"""For what a device need not compile again."""

DTYPES = (E4M3, E5M2)
CODES = torch.tensor(ELEMENTS["e2m1"].magnitudes())
SIGNED = torch.cat([CODES, -CODES])


def drawn(lanes, rows, length, spread=3, seed=0):
    """E2M1 × powers of two of blocks of 32, float32 [L, R, C]."""
    g = torch.Generator().manual_seed(seed)
    codes = SIGNED[torch.randint(16, (lanes, rows, length), generator=g)]
    exponents = torch.randint(-spread, spread + 1, (lanes, rows, -(-length // 32)), generator=g)
    x = codes * torch.exp2(exponents.float()).repeat_interleave(32, 2)[:, :, :length]
    return x


def operand(x, dtype=E5M2):
    return Fp8(*fp8.to_fp8(x, dtype))


def there(device, of):
    """An operand, its tensors on a device."""
    shift = None if of.shift is None else Shift(*(x.to(device) for x in of.shift))
    return Fp8(of.values.to(device), shift)


def assert_same_operand(got, expected):
    """Notes are of programs, and so as many as these: only whether a lane has one is the same."""
    shift = got[1]
    for a, b in (
        (got[0].view(torch.uint8), expected[0].view(torch.uint8)),
        *zip(shift[:2], expected[1][:2], strict=True),
    ):
        assert torch.equal(a.cpu(), b)
    assert torch.equal((shift.notes != 0).any(1).cpu(), (expected[1].notes != 0).any(1))
    wide = (expected[1].flags > 0).repeat_interleave(128, 2)[:, :, : got[0].shape[2]]
    a, b = (x.cpu()[wide].nan_to_num(7.0) for x in (shift.wide, expected[1].wide))
    assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def lane_of(of, lanes):
    """Some lanes of an operand, views of its tensors."""
    return Fp8(of.values[lanes], of.shift and Shift(*(t[lanes] for t in of.shift)))


def history_of(lanes, top, training=True, step=5):
    """A history whose last step, or for lists whose places 0, 1, 2, had this exponent."""
    tops = torch.zeros(lanes, 3, dtype=torch.int32)
    tops[:, (step - 1) % 3] = top
    return History(tops, torch.tensor(step), training)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_held_while_exponents_lie_within_the_window(dtype):
    """Two blocks, one with E2M1's largest number at the window's highest exponent, one j below it with every code."""
    lowest, highest = window(dtype)
    for below in range(highest - lowest + 3):
        for power in (-40, 0, 17):
            x = torch.zeros(1, 1, 128)
            x[0, 0, 0] = 6.0
            x[0, 0, 32:48] = SIGNED * 2.0**-below
            values, shift = fp8.to_fp8(x * 2.0**power, dtype)
            fits = below <= highest - lowest
            assert bool(shift.flags[0, 0, 0] == 0) == fits
            assert bool(shift.notes.any()) == (not fits)
            assert torch.equal(shift.decoded(values), x * 2.0**power)
            if not fits:
                assert not values.float().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_power_leaves_room_above_what_the_step_before_had(dtype):
    room = fp8.HEADROOM[dtype]
    for before in (-40, 0, 17):
        top = fp8.top_of(torch.tensor([[6.0 * 2.0**before]]))
        for above in range(-2, room + 3):
            x = torch.full((1, 1, 128), 6.0 * 2.0 ** (before + above))
            shift = fp8.to_fp8(x, dtype, history_of(1, int(top)))[1]
            assert bool(shift.flags.any()) == (above > room)


def test_a_history_is_written_in_training_and_empties_the_place_of_the_next_step():
    """Outside of training the largest of all steps is read. What is not finite is not kept."""
    x = torch.tensor([[1.0, 3.6], [float("inf"), -2.0], [float("nan"), 0.0], [0.0, 0.0]])
    expected = [127 + 2, 127 + 1, 0, 0]
    assert fp8.top_of(x).tolist() == expected
    for step in range(3):
        history = History(torch.tensor([[130, 120, 140]] * 4, dtype=torch.int32), torch.tensor(step), True)
        before = history.tops[0].tolist()
        assert torch.equal(history.power(E5M2), fp8.power_of(history.tops[:, (step + 2) % 3], E5M2, fp8.HEADROOM[E5M2]))
        history.write(fp8.top_of(x))
        assert history.tops[:, step].tolist() == [max(before[step], top) for top in expected]
        assert not history.tops[:, (step + 1) % 3].any()
        assert (history.tops[:, (step + 2) % 3] == before[(step + 2) % 3]).all()
        outside = history._replace(training=False)
        assert torch.equal(outside.power(E5M2), fp8.power_of(history.tops.amax(1), E5M2, fp8.HEADROOM[E5M2]))
        kept = outside.tops.clone()
        outside.write(fp8.top_of(x))
        assert torch.equal(outside.tops, kept)


def test_without_a_step_before_the_power_is_one():
    assert torch.equal(
        fp8.power_of(torch.tensor([0, 1, 127, 254], dtype=torch.int32), E5M2),
        torch.tensor([1.0, 2.0**-60, 2.0**-15, 2.0**60]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_count_for_nothing_whatever_their_sign(dtype):
    values, shift = fp8.to_fp8(torch.tensor([-0.0, 0.0]).repeat(1, 3, 64), dtype)
    assert not shift.flags.any()
    assert torch.equal(values.view(torch.uint8), torch.tensor([128, 0], dtype=torch.uint8).repeat(1, 3, 64))


def odd_segments():
    """Segments of all sizes, within the window and not; NaN, infinities, and what FP8's digits do not hold."""
    x = drawn(2, 40, 390, 2)
    x[0, :, :128] *= torch.exp2(torch.arange(-130, 30, 4).float())[:, None]
    x[0, :, 128:160] *= torch.exp2(-torch.arange(40).float())[:, None]
    x[1, 3, 200], x[1, 4, 5], x[1, 5, 300], x[1, 6, 7] = float("nan"), float("inf"), 1.8125, 2.0**-133
    x[1, 7], x[1, 8, 128:256] = 0.0, -0.0
    x[1, 9, :128], x[1, 10, :128] = 15.0, 7.0  # of 4 digits, and the largest of 3
    return x


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operand_stands_for_the_numbers_that_it_was_made_of(dtype):
    x = odd_segments()
    values, shift = fp8.to_fp8(x, dtype)
    wide = shift.flags > 0
    assert 0 < wide.sum() < 0.75 * wide.numel()
    assert wide[1, 3, 1]
    assert wide[1, 4, 0]
    assert values.float().isfinite().all()
    assert torch.equal(shift.decoded(values).nan_to_num(3.0), x.nan_to_num(3.0))


@pytest.fixture
def any_size(monkeypatch):
    """FP8 units take products of all sizes that cuBLAS takes: what the interpreter does in good time."""
    for module in (library, stage):
        monkeypatch.setattr(module, "is_taken", lambda *sizes: not any(size % 16 for size in sizes))


# --- which products ----------------------------------------------------------------------------------------------

LLAMA_350M = [(16384, outputs, inputs) for inputs, outputs in ((1024, 3072), (1024, 1024), (1024, 5472), (2736, 1024))]


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), LLAMA_350M)
def test_products_of_a_large_layer_are_taken_in_all_three_directions(tokens, outputs, inputs):
    assert is_taken(tokens, outputs, inputs)
    assert is_taken(tokens, inputs, outputs)
    assert is_taken(outputs, inputs, tokens)


def test_products_that_are_small_or_of_ragged_lines_are_not_taken():
    assert is_taken(4096, 2048, 1024)
    for sizes in ((4088, 2048, 1040), (4096, 2056, 1040), (4096, 2048, 1032), (512, 256, 256), (1008, 1024, 16384)):
        assert not is_taken(*sizes)


def test_a_stage_takes_fp8_by_shapes_and_whatever_the_number_of_lanes(on_units):
    of = on_units("mxfp4").stage("fprop", 0)
    for lanes_ in (1, 2, 7):
        x, w = (torch.empty(lanes_, n, 1024, device="meta") for n in (4096, 2048))
        assert of.takes_fp8(x, w, (2, 2), None)
        assert of.takes_fp8(x.mT, w.mT, (1, 1), None)
        assert not of.takes_fp8(x[:, :-8], w, (2, 2), None)
        assert not of.takes_fp8(x[:, :2048], w, (2, 2), None)
        assert not of.takes_fp8(x, w, (2, 2), torch.zeros(lanes_))
    ragged = torch.empty(1, 4096, 1000, device="meta"), torch.empty(1, 2176, 1000, device="meta")
    assert of.takes_fp8(*ragged, (2, 2), None), "zeros pad the contraction to whole blocks"


# --- what cuBLAS is given ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7])
def test_powers_of_lanes_lie_16_bytes_apart_wherever_they_come_from(count):
    powers = torch.exp2(torch.arange(8.0))
    for of in (powers[:count], powers[1:][:count], powers[::2][:count], powers[:1].expand(count)):
        got = spaced(of)
        assert torch.equal(got, of)
        assert spaced(got) is got
        assert not any(x.data_ptr() % 16 for x in got)
    whole = fp8.empty(powers, (8, 4, 128), E5M2, 1)[1].power
    assert [x.data_ptr() - whole.data_ptr() for x in whole] == [16 * n for n in range(8)]
    assert spaced(whole[1 : count + 1]).data_ptr() == whole.data_ptr() + 4 * APART


def exact_operands(lanes=2, rows=48, columns=32, length=256):
    """Whole numbers, whose sums are exact, in E5M2 and E4M3; one segment of each is not held in the last lane, for a
    number that meets zeros."""
    sizes = (rows, columns)
    x, y = (torch.randint(-3, 4, (lanes, n, length), generator=torch.Generator().manual_seed(n)).float() for n in sizes)
    x[-1, 3, 7], y[-1, 30, 200] = 1.5 * 2.0**-60, 1.5 * 2.0**-60
    y[-1, :, 7], x[-1, :, 200] = 0.0, 0.0
    return x, y, [operand(of, kind) for of, kind in ((x, E5M2), (y, E4M3))]


@pytest.mark.parametrize("chosen", [[0], [6], [3, 4], [*range(7)]], ids=str)
def test_cublas_is_given_rows_by_columns_scales_and_operands_of_16_bytes_and_no_fast_sums(
    any_size, monkeypatch, chosen
):
    """For lanes that are a part of others, too, and for a factor of the tensor in the place of a power."""
    given, run = [], torch._scaled_mm

    def seen(a, b, scale_a, scale_b, **more):
        given.append((a, b, scale_a, scale_b, more))
        return run(a, b, scale_a, scale_b, **more)

    monkeypatch.setattr(torch, "_scaled_mm", seen)
    _, y, (a, b) = exact_operands(7)
    factor = torch.rand(7)[chosen]
    views = slice(chosen[0], chosen[-1] + 1)
    of_factor = Fp8(y[views].nan_to_num().round().to(E4M3))
    for first, second, finish in (
        (lane_of(a, views), lane_of(b, views), Finish()),
        (lane_of(a, views), of_factor, Finish(factor_b=factor)),
    ):
        given.clear()
        library.multiply(first, second, finish)
        assert len(given) == len(chosen)
        for left, right, scale_a, scale_b, more in given:
            assert not any(t.data_ptr() % 16 for t in (left, right, scale_a, scale_b, more["out"]))
            assert left.stride() == (256, 1)
            assert right.stride() == (1, 256)
            assert scale_a.dtype == scale_b.dtype == torch.float32
            assert scale_a.numel() == scale_b.numel() == 1
            assert more["use_fast_accum"] is False
            assert more["out_dtype"] == more["out"].dtype == torch.float32


def test_the_library_refuses_what_it_does_not_take():
    a, b = (Fp8(torch.empty(1, n, 1024, device="meta").to(E5M2)) for n in (4096, 2048))
    assert library.why_not(a, b) == "dtypes: found E5M2 twice; accepted: E4M3 for one"
    b = Fp8(b.values.to(E4M3))
    assert library.why_not(a, b) is None
    small = Fp8(a.values[:, :512])
    assert library.why_not(small, b).startswith("sizes: found 512 × 2048 × 1024; accepted: large")
    with pytest.raises(ValueError, match="sizes: found"):
        library.multiply(small, b, Finish())


# --- what is computed --------------------------------------------------------------------------------------------


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", ["", "a", "b", "ab", "a rows", "bias", "ab bias"])
def test_a_product_is_finished(place, any_size, dtype, names):
    """By what cuBLAS multiplies in and by what follows, tiles that are computed anew too; also where a destination is
    given, whose lanes lie apart or begin within a line."""
    x, y, powers = exact_operands()
    plain = [Fp8(of.nan_to_num().round().to(kind)) for of, kind in ((x, E5M2), (y, E4M3))]
    factor_a = (
        torch.rand(2, 48) if "rows" in names else torch.tensor([0.75, -5.0]) if "a" in names.split("bias")[0] else None
    )
    factor_b = torch.tensor([0.5, 4.0]) if "b" in names.split("bias")[0] else None
    finish = Finish(factor_a, factor_b, torch.randn(2, 32) if "bias" in names else None, dtype)
    for numbers, (a, b) in (((x, y), powers), ((x.round(), y.round()), plain)):
        exact = torch.bmm(numbers[0].double(), numbers[1].double().mT).float()
        expected = fp8.multiply(a, b, finish)
        assert torch.equal(expected, fp8.products.finished(exact, finish))
        twice = torch.zeros_like(expected, dtype=torch.bool)  # of what is added to BF16, both are rounded
        if dtype == torch.bfloat16 and not names and a.shift is not None:
            twice[-1, 3], twice[-1, :, 30] = True, True
        size = torch.bmm(numbers[0].abs(), numbers[1].abs().mT)
        got = place.fp8.multiply(a, b, finish)
        assert got.dtype == dtype
        assert torch.equal(got[~twice], expected[~twice])
        assert ((got.float() - exact).abs() <= 2.0**-8 * size)[twice].all()
        added = got
        for room in (torch.empty(2, 3, 48 * 32, dtype=dtype)[:, 1], torch.empty(2 * 48 * 32 + 1, dtype=dtype)[1:]):
            out = room.view(2, 48, 32)
            got = place.fp8.multiply(a, b, finish._replace(out=out))
            assert got.data_ptr() == out.data_ptr()
            assert torch.equal(out, added)


@INTERPRETED
def test_wide_segments_count_where_the_rest_of_their_row_meets_zeros(place, any_size):
    """A block far below the window is all there is of the result."""
    x, y = torch.zeros(1, 16, 256), torch.zeros(1, 16, 256)
    x[0, :, 0], x[0, :, 64] = 6.0, 1.5 * 2.0**-50
    y[0, :, 64], y[0, 1, 129] = 3.0, 1.0
    got = place.fp8.multiply(operand(x), operand(y, E4M3))
    assert torch.equal(got, torch.full((1, 16, 16), 4.5 * 2.0**-50))


@INTERPRETED
def test_nan_is_where_it_is_in_a_product_of_the_same_numbers_and_nowhere_else(place, any_size):
    """In elements that are E4M3 themselves, too, where their row meets one with a flag."""
    x, y = drawn(2, 32, 256), drawn(2, 48, 256, seed=1)
    x[0, 3, 5], y[1, 7, 200], x[1, 2, 0] = float("nan"), float("nan"), float("inf")
    x[0, 4, 0], x[0, 4, 40] = 2.0**100, 2.0**-100
    itself = torch.where(y.isnan(), torch.nan, y.clamp(-8, 8).round())
    for second, b in ((y, operand(y, E4M3)), (itself, Fp8(itself.to(E4M3)))):
        expected = torch.bmm(x, second.mT)
        got = place.fp8.multiply(operand(x), b)
        assert torch.equal(got.isnan(), expected.isnan())
        held = ~expected.isnan()
        held[0, 4] = held[1, 2] = False
        assert torch.allclose(got[held], expected[held], rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("way", ["added", "added to bf16", "anew"])
def test_tiles_with_a_flag_are_mended_and_others_are_not_touched(place, way):
    """Those of one row's segments in the first lane, and of one column's in the second; one is of both. Either what is
    not held is added, or with a bias the whole is computed anew, and what is there before is NaN."""
    dtype = torch.float32 if way == "added" else torch.bfloat16
    x, y = (torch.randint(-3, 4, (2, n, 384), generator=torch.Generator().manual_seed(n)).float() for n in (272, 160))
    x[0, 200, 130], x[1, 70, 300], y[1, 140, 300] = 2.0**-40, 2.0**-40, 2.0**-40
    y[0, :, 130], x[1, :70, 300], x[1, 71:, 300], y[1, :140, 300], y[1, 141:, 300] = 0.0, 0.0, 0.0, 0.0, 0.0
    expected = torch.bmm(x.double(), y.double().mT).to(torch.float32)  # 2^-80 is rounded off: sums are exact
    a, b = (there(place.device, operand(of, kind)) for of, kind in ((x, E5M2), (y, E4M3)))
    rows, columns = place.wide.TILES[:2]
    new = torch.zeros(2, 272, 160, dtype=torch.bool)
    new[0, 200 // rows * rows : 200 // rows * rows + rows] = new[1, :, 140 // columns * columns :] = True
    new[1, 70 // rows * rows : 70 // rows * rows + rows] = True
    got = torch.full_like(expected, torch.nan).to(dtype)
    bias = torch.zeros(2, 160, device=place.device) if way == "anew" else None
    if bias is None:
        held = (of.values.cpu().float() * of.shift.power.cpu()[:, None, None] for of in (a, b))
        part = torch.bmm(*(of.mT if n else of for n, of in enumerate(held)))
        got[new] = part.to(dtype)[new]
        expected = part.to(dtype).float() + (expected - part)
        assert not torch.equal(got[new], expected.to(dtype)[new])
    got = got.to(place.device)
    place.wide.widen(got, a, b, Finish(bias=bias, dtype=dtype))
    assert torch.equal(got.cpu()[new], expected.to(dtype)[new])
    assert got.cpu()[~new].isnan().all()


@pytest.mark.parametrize("length", [256 + 32, 4096 + 32])
def test_what_is_added_to_a_long_contraction_is_that_of_each_flag(place, any_size, length):
    """Of the last segment, too, which is shorter, and of more segments than the bits of a number."""
    x, y, _ = exact_operands(2, 80, 144, length)
    for number in range(0, length, 480):
        x[0, number % 80, number], y[0, :, number] = 2.0**-40, 0.0
        y[1, number % 144, number], x[1, :, number] = 2.0**-40, 0.0
    a, b = (there(place.device, operand(of, kind)) for of, kind in ((x, E5M2), (y, E4M3)))
    assert a.shift.flags.any()
    assert b.shift.flags.any()
    assert torch.equal(place.fp8.multiply(a, b).cpu(), torch.bmm(x.double(), y.double().mT).float())


@INTERPRETED
@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_lane_has_the_same_bits_in_any_company(place, any_size, number):
    x, y = drawn(7, 80, 512, 9), drawn(7, 48, 512, 9, seed=1)
    x[2, 5, :32] *= 2.0**-40
    a, b = operand(x), operand(y, E4M3)
    together = place.fp8.multiply(a, b)
    for chosen in (slice(number), slice(7 - number, 7)):
        assert torch.equal(place.fp8.multiply(lane_of(a, chosen), lane_of(b, chosen)), together[chosen])


# --- what quantizers write ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_has_the_bits_of_the_definition(place, dtype, transposed):
    x = odd_segments()
    power = torch.tensor([2.0**3, 0.25])
    for of in (x, x.to(torch.bfloat16)):
        expected = fp8.split(of, dtype, power)
        of = of.mT.contiguous().mT if transposed else of
        assert_same_operand(place.fp8.split(of.to(place.device), dtype, power.to(place.device)), expected)


def changed(**more):
    """MXFP4 with other parts."""
    return msgspec.structs.replace(MX, **more)


def recipe(**stages):
    """MXFP4 with other stages."""
    return msgspec.structs.replace(Recipe.named("mxfp4"), **stages)


def quantized(place, arguments, dtype, history):
    """Operand, history and factors of the kernel, and of the definition."""
    values, dec = unfused.operand(*arguments)
    there = History(history.tops.to(place.device, copy=True), arguments[2].step.to(place.device), history.training)
    history = History(history.tops.clone(), *history[1:])
    expected = fp8.to_fp8(values, dtype, history)
    x, columns, call = to(place.device, arguments)
    *got, factor = fused.fp8(x, columns, call._replace(step=there.step), dtype, there)
    assert torch.equal(there.tops.cpu(), history.tops)
    assert torch.equal(factor.cpu(), dec)
    return got, expected


def edge_blocks(dtype, lanes, above=False):
    """Elements of E2M1 with all codes, bfloat16 [L, R, 128]: of 32 rows at a time a block lies so many binades below
    the others that the window ends there, or all do so many above what the step before had."""
    lowest, highest = window(dtype)
    width = highest - lowest - fp8.HEADROOM[dtype]
    below = torch.arange(-6, 1) if above else torch.arange(width - 4, width + 6)
    x = SIGNED[torch.randint(16, (lanes, 32 * len(below), 128), generator=torch.Generator().manual_seed(0))]
    x[:, :, ::32] = -6.0
    x[:, :, 37] = -0.0
    x[:, :, : 128 if above else 32] *= torch.exp2(-below.float()).repeat_interleave(32)[:, None]
    return x.to(torch.bfloat16)


ROUNDINGS = {1: [Nearest()], 2: [Nearest(), Stochastic()], 7: [Nearest(), Stochastic()] * 3 + [Nearest()]}
"""Number of lanes -> their roundings."""


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", ROUNDINGS)
def test_operands_have_the_bytes_of_the_definition_on_both_sides_of_the_windows_edges(place, dtype, columns, count):
    """Tiles that are held, some of whose segments are, and none of which is; zeros of both signs; a lane with NaN and
    an infinity. Powers lie 16 bytes apart."""
    of_lanes = [changed(rounding=rounding) for rounding in ROUNDINGS[count]]
    for above in (False, True):
        x = edge_blocks(dtype, count, above)
        x[:, 5] = -0.0
        if count > 1:
            x[1, 40, 7], x[1, 100, 120] = float("nan"), float("inf")
        arguments = arguments_for(x, of_lanes, columns)
        history = history_of(count, 129, True, int(arguments[2].step))  # of 6
        got, expected = quantized(place, arguments, dtype, history)
        held = (expected[1].flags == 0).unflatten(1, (-1, 32)).all(2).all(2)  # of tiles
        assert held.any(1).all()
        assert not held.all(1).any()
        assert_same_operand(got, expected)
        assert [p.data_ptr() % 16 for p in got[1].power] == [0] * count


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@INTERPRETED
def test_quantizers_write_what_is_made_of_their_operands(place, columns):
    for training, length, rows in ((True, 128, 14), (False, 384, 38), (True, 160, 20), (True, 32, 16)):
        x = odd_rows(2, length, rows)
        x[0, 6, :32] *= 2.0**-35
        for kind in (torch.float32, torch.bfloat16):
            arguments = arguments_for(x.to(kind), [MX, changed(rounding=Stochastic())], columns)
            history = history_of(2, torch.tensor([130, 0]), training, int(arguments[2].step))
            got, expected = quantized(place, arguments, E5M2, history)
            assert (expected[1].flags > 0).any()
            assert_same_operand(got, expected)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_programs_of_several_tiles_write_the_same(place, columns, monkeypatch):
    """Also where the last of a program's tiles lie beyond the end, or none of them has a flag."""
    for name, value in {"_MANY": 1, "_TILES_OF": (3, 4)}.items():
        monkeypatch.setattr(place.module, name, value)
    for length, rows in ((1184, 70), (96, 200)):
        x = odd_rows(2, length, rows)
        x[1, 6, length - 32 :] *= 2.0**-35
        arguments = arguments_for(x.to(torch.bfloat16), [MX, changed(rounding=Stochastic())], columns)
        got, expected = quantized(place, arguments, E5M2, history_of(2, 130, True, int(arguments[2].step)))
        assert (expected[1].flags > 0).any()
        assert_same_operand(got, expected)


@INTERPRETED
def test_a_rotated_operand_is_written_likewise(place):
    for size in (32, 256):
        arguments = arguments_for(odd_rows(2, 512), [MX] * 2, rotation=size, signs=signs_of(2, size))
        assert_same_operand(*quantized(place, arguments, E5M2, history_of(2, 128, True, int(arguments[2].step))))


@INTERPRETED
def test_the_operator_is_sound(place):
    call = to(place.device, call_for([MX] * 2))
    for columns in (False, True):
        x = torch.randn(2, 128, 128, device=place.device)
        tops = torch.zeros(2, 3, dtype=torch.int32, device=place.device)
        arguments = x, columns, E5M2, tops, True, *flat(call)
        torch.library.opcheck(torch.ops.fp4dse.fp8, arguments, test_utils=["test_schema", "test_faketensor"])


# --- layers ------------------------------------------------------------------------------------------------------

OF_TENSOR = QUANTIZERS["fp8-current"]
LAYERS = {
    "mxfp4": Recipe.named("mxfp4"),
    "tiles": Recipe.named("mxfp4-tiles"),
    "by chance": Recipe.uniform(changed(rounding=Stochastic())),
    "samples": recipe(wgrad=Wgrad(g=changed(rounding=Stochastic(samples=2)), x=MX)),
    "rotated": recipe(fprop=Fprop(x=MX, w=MX, rotation=Hadamard(32))),
    "tensor": Recipe.uniform(OF_TENSOR),
    "tensor and blocks": recipe(fprop=Fprop(x=OF_TENSOR, w=MX), wgrad=Wgrad(g=MX, x=QUANTIZERS["fp8-e5m2-current"])),
}
LEFT = {
    "residual": recipe(fprop=Fprop(x=changed(outliers=Residual()), w=MX)),
    "clamp": recipe(fprop=Fprop(x=changed(outliers=Clamp()), w=MX)),
    "int4": recipe(fprop=Fprop(x=changed(element="int4"), w=MX)),
    "e1m2": recipe(fprop=Fprop(x=MX, w=changed(element="e1m2"))),
    "mxfp8": recipe(fprop=Fprop(x=QUANTIZERS["mxfp8"], w=MX)),
    "rows": recipe(fprop=Fprop(x=QUANTIZERS["fp8-row"], w=MX)),
    "segments": recipe(fprop=Fprop(x=QUANTIZERS["fp8-1x128"], w=MX)),
    "twice": recipe(fprop=Fprop(x=QUANTIZERS["fp8-e5m2-current"], w=QUANTIZERS["fp8-e5m2-current"])),
}
"""Recipes whose fprop is left to other units."""


@pytest.fixture
def on_units(monkeypatch):
    """Numerics of two lanes of a recipe, on a CPU that is said to have FP8 units."""
    monkeypatch.setattr(gemm, "_why_not_device", lambda name, *_: None if name == "fp8-exact" else f"{name}: no")
    monkeypatch.setattr(gemm, "why_not_fused", lambda _: None)
    monkeypatch.setattr(lanes, "backend", lambda _: PLAIN)

    def made(of, lanes_=2):
        of = Recipe.named(of) if isinstance(of, str) else of
        return LaneNumerics([msgspec.structs.replace(of, gemm="fp8-exact")] * lanes_, (3, 4)[:lanes_])

    return made


@each("name", LEFT)
def test_what_fp8_units_are_not_for_is_left_to_others_with_the_reason(name):
    a, b = ([q.canonical()] for q in (LEFT[name].fprop.x, LEFT[name].fprop.w))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "_why_not_device", lambda *_: None)
        patch.setattr(gemm, "why_not_fused", lambda _: None)
        assert str(gemm.GEMMS["fp8-exact"].why_not("cuda", a, b)).startswith("fp8-exact not taken: found ")
        assert gemm.GEMMS["fp8-exact"].why_not("cuda", [MX], [MX]) is None


@each("name", LAYERS)
def test_stages_of_fp8_units_know_the_formats_of_both_operands(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "_why_not_device", lambda *_: None)
        patch.setattr(gemm, "why_not_fused", lambda _: None)
        numerics = LaneNumerics([msgspec.structs.replace(LAYERS[name], gemm="fp8-exact")], (3,))
        for of in numerics.quantized.values():
            assert of.gemm == "fp8-exact"
            assert len(of.fp8) == 2
            assert E4M3 in of.fp8.values()
            for operand_name, slot in of.slots.items():
                itself = slot.quantizers.first.block == "tensor"
                assert (operand_name in of.fp8_itself) == itself


@pytest.mark.parametrize("name", LAYERS)
@INTERPRETED
def test_a_layer_computes_the_same_in_fp8_units(place, any_size, monkeypatch, on_units, name):
    """Each stage, in all ways to quantize; the definition's products are FP32's of the same numbers."""
    kernels = msgspec.structs.replace(PLAIN, operand=fused.operand, fp8=fused.fp8, packed=fused.packed)
    monkeypatch.setattr(lanes, "backend", lambda _: kernels)
    x, w, g = (torch.randn(2, *shape) for shape in [(64, 128), (128, 128), (64, 128)])
    x[0, 5, :32] *= 2.0**-40
    x, w = x.requires_grad_(), w.requires_grad_()
    results = []
    for numerics in (LaneNumerics([LAYERS[name]] * 2, (3, 4)), on_units(LAYERS[name])):
        results.append([])
        for step, scale in ((0, 1.0), (1, 2.0**-12)):  # all that is far from the step before is exact, too
            numerics.step.fill_(step)
            y = product(x * scale, w, None, numerics, 1)
            results[-1] += [y / scale, *torch.autograd.grad(y, (x, w), g * scale)]
    assert set(numerics.gemms.values()) == {"fp8-exact"}
    for got, expected in zip(*results[::-1], strict=True):
        assert got.isfinite().all()
        assert (got - expected).norm() <= 2e-6 * expected.norm()


def test_a_layer_of_another_shape_takes_the_products_that_it_takes_without_fp8(on_units):
    """Bit for bit, and nothing is carried from step to step."""
    x, w = torch.randn(2, 5, 72), torch.randn(2, 3, 72)
    units = on_units("mxfp4")
    assert torch.equal(units.forward(0, x, w).y, LaneNumerics([recipe()] * 2, (3, 4)).forward(0, x, w).y)
    assert not units.state()


def stepped(numerics, steps, scale=1.0):
    """The results of a layer in these steps."""
    x, w = torch.randn(2, 32, 128, generator=torch.Generator().manual_seed(0)) * scale, torch.ones(2, 16, 128)
    for step in steps:
        numerics.step.fill_(step)
        numerics.forward(0, x, w)


def test_histories_are_kept_from_step_to_step_and_only_in_training(any_size, on_units):
    numerics = on_units("mxfp4")
    stepped(numerics, [0, 1])
    kept = {name: value.clone() for name, value in numerics.state().items()}
    assert {name for name in kept if "tops" in name} == {"state/fprop.x/tops 0 0", "state/fprop.w/tops 0 0"}
    tops = kept["state/fprop.w/tops 0 0"]
    assert tops.tolist() == [[127, 127, 0]] * 2
    assert tops.dtype == torch.int32
    numerics.training = False
    stepped(numerics, [2], 8.0)
    assert all(torch.equal(value, kept[name]) for name, value in numerics.state().items())
    numerics.training, copy = True, on_units("mxfp4")
    copy.load_state(kept)
    for of in (numerics, copy):
        stepped(of, [2], 8.0)
    for name, value in copy.state().items():
        assert torch.equal(value, numerics.state()[name])
        assert not torch.equal(value, kept[name])


def test_layers_side_by_side_have_the_histories_that_each_has_alone():
    """As experts that are multiplied together: of two lanes and two layers, the layers of a lane beside each other."""
    seeds, tops = torch.tensor([3, 4]), torch.tensor([[130, 120], [110, 100]], dtype=torch.int32)
    alone, together = {}, {}
    for step in range(3):
        for number, layer in enumerate((5, 7)):
            with state.history(alone, Use(seeds, torch.tensor(step), layer, True), 0) as known:
                known.write(tops[:, number] + step)
        use = Use(seeds.repeat_interleave(2), torch.tensor(step), 5, True, members=(5, 7))
        with state.history(together, use, 0) as known:
            known.write(tops.flatten() + step)
        assert alone.keys() == together.keys() == {"tops 5 0", "tops 7 0"}
        assert all(torch.equal(value, together[name]) for name, value in alone.items())


def test_a_pass_that_is_made_again_finds_and_leaves_what_the_first_one_did():
    kept, journal = {}, Journal()
    for step in range(3):
        use, seen = Use(torch.tensor([3]), torch.tensor(step), 5, True, journal=journal), []
        for journal.mode in ("first", "again"):
            with state.history(kept, use, 0) as known:
                seen.append(known.power(E5M2))
                known.write(torch.tensor([120 + step], dtype=torch.int32))
            seen.append(kept["tops 5 0"].clone())
        assert torch.equal(seen[0], seen[2])
        assert torch.equal(seen[1], seen[3])
        journal.mode = ""
        journal.before.clear()
    assert seen[0] == fp8.power_of(torch.tensor([121]), E5M2, fp8.HEADROOM[E5M2])


@each("name", QUANTIZERS)
def test_a_factor_that_is_left_out_is_one(name):
    q = QUANTIZERS[name].canonical()
    if has_factor(q) or not isinstance(q.block, int):
        return
    x = torch.randn(1, 4, 2 * q.unit) * torch.exp2(torch.arange(4.0))[:, None]
    x[0, 3] = 0.0
    assert torch.equal(unfused.operand(*arguments_for(x, [q]))[1], torch.ones(1))


def test_the_attention_core_takes_exact_products_all_the_same():
    assert AttentionCore([Attention()], torch.device("cpu"), PLAIN, "fp8-exact").exact


# --- on a device: `pytest -m gpu tests/kernels/test_fp8_units.py` -----------------------------------------------------

REAL = [(1, 16384, 3072, 1024), (2, 2736, 1024, 16384), (7, 1024, 1024, 16384), (2, 4096, 1024, 3072)]
"""Lanes, rows, columns, contraction."""
BOUND = 132 * 2.0**-13
"""Of the error of a number over the sum of its products' magnitudes, see ops/fp8."""
NORM = 2.0**-9
"""Of the norm of a tile's error over that of the tile, by chance, see ops/fp8."""


def real_operand(lanes, rows, length, seed, dtype, far):
    """E2M1 elements under scales of blocks within a few binades, float32 and FP8 on the GPU; if far, a few blocks lie
    where FP8 does not hold them, and a row does."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = SIGNED.cuda()[torch.randint(16, (lanes, rows, length), device="cuda", generator=g)]
    scales = torch.randint(-2, 3, (lanes, rows, length // 32), device="cuda", generator=g).float().exp2()
    x *= scales.repeat_interleave(32, 2)
    if far:
        x[:, ::397, 32:64] *= 2.0**-40
        x[:, 5] *= 2.0**-60
    return x, operand(x.to(torch.bfloat16), dtype)


def tiles(x):
    """[L, R, S] in tiles of the result as they are mended, [L, n, m, 64, 64]."""
    rows, columns = (size // 64 * 64 for size in x.shape[1:])
    return x[:, :rows, :columns].unflatten(1, (-1, 64)).unflatten(3, (-1, 64)).transpose(2, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("far", [False, True], ids=["", "far"])
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_products_of_real_sizes_are_exact_within_the_error_of_the_unit(sizes, far):
    """Where a bias follows, tiles with a flag are computed anew, within the error of BF16 units; else what is not held
    is added. A lane alone and a captured product have the same bits."""
    lanes_, rows, columns, length = sizes
    x, a = real_operand(lanes_, rows, length, 0, E5M2, far)
    y, b = real_operand(lanes_, columns, length, 1, E4M3, False)
    assert bool(a.shift.flags.any()) == far
    assert not b.shift.flags.any()
    exact = torch.bmm(x.double(), y.double().mT)
    size = torch.bmm(x.double().abs(), y.double().abs().mT)
    got = fp8.multiply(a, b)
    assert got.isfinite().all()
    error = (got - exact).abs()
    assert (error <= BOUND * size).all()
    held = (a.shift.flags == 0).all(2)[:, : rows // 64 * 64].unflatten(1, (-1, 64)).all(2)
    anew = fp8.multiply(a, b, Finish(bias=torch.zeros(lanes_, columns, device="cuda")))
    norm = tiles(exact).norm(dim=(3, 4))
    assert (tiles(error).norm(dim=(3, 4)) <= NORM * norm).all()
    assert (tiles(anew - exact).norm(dim=(3, 4)) <= torch.where(held, NORM, 2.0**-15)[:, :, None] * norm).all()
    for lane in {0, lanes_ - 1}:
        alone = slice(lane, lane + 1)
        assert torch.equal(fp8.multiply(lane_of(a, alone), lane_of(b, alone)), got[alone])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fp8.multiply(a, b)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, got)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_numbers_are_multiplied_exactly_in_every_lane(dtype):
    """Their sums fit 14 bits; of seven lanes, each with a power and a factor of its own."""
    x, y = (torch.randint(-3, 4, (7, n, 1024), device="cuda").float() for n in (4096, 2048))
    x[:, :, 48:], y[:, :, 48:] = 0.0, 0.0
    powers = torch.arange(-3, 4, device="cuda").float().exp2()
    a, b = operand(x * powers[:, None, None]), Fp8(y.to(E4M3))
    assert not a.shift.flags.any()
    finish = Finish(factor_b=1.5 / powers, dtype=dtype)
    expected = (torch.bmm(x, y.mT) * 1.5).to(dtype)
    assert torch.equal(fp8.multiply(a, b, finish), expected)
    out = torch.empty(7, 2, 4096, 2048, dtype=dtype, device="cuda")[:, 1]
    fp8.multiply(a, b, finish._replace(out=out))
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_a_layer_on_a_device_computes_the_same_in_fp8_units_and_a_lane_what_it_does_alone():
    """In the first step, whose power is 1, and in others; with a jump by 2^-12."""
    x, w, g = (torch.randn(2, *shape, device="cuda") for shape in ((4096, 1024), (2048, 1024), (4096, 2048)))
    x[0, 5, :32] *= 2.0**-40
    results = []
    for gemm_name, chosen in (("exact", slice(2)), ("fp8-exact", slice(2)), ("fp8-exact", slice(1, 2))):
        own_x, own_w = (of[chosen].clone().requires_grad_() for of in (x, w))
        numerics = LaneNumerics([recipe(gemm=gemm_name)] * len(own_x), (3, 4)[chosen], "cuda", dtype=torch.bfloat16)
        assert set(numerics.gemms.values()) == {"bf16-exact" if gemm_name == "exact" else gemm_name}
        results.append([])
        for step, scale in enumerate((1.0, 1.0, 2.0**-12)):
            numerics.step.fill_(step)
            y = product((own_x * scale).to(torch.bfloat16), own_w, None, numerics, 1)
            results[-1] += [y, *torch.autograd.grad(y, (own_x, own_w), (g[chosen] * scale).to(y.dtype))]
    for expected, got, alone in zip(*results, strict=True):
        assert got.isfinite().all()
        assert (got.float() - expected.float()).norm() <= 2.0**-8 * expected.float().norm()  # y is rounded to BF16
        assert torch.equal(got[1:], alone)


@pytest.mark.gpu
def test_a_layer_of_ragged_shape_has_the_bits_that_it_has_without_fp8():
    x, w = (torch.randn(2, n, 1024, device="cuda", dtype=torch.bfloat16) for n in (4104, 2048))
    of = [LaneNumerics([recipe(gemm=name)] * 2, (3, 4), "cuda") for name in ("exact", "fp8-exact")]
    first, second = (numerics.forward(0, x, w).y for numerics in of)
    assert torch.equal(first, second)
    assert not of[1].state()
