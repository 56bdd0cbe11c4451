"""FP8 operands hold what they are made of, or leave it to BF16; their products are exact but for the unit's sums."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Hadamard, Recipe
from fp4dse.dse.attention import Attention
from fp4dse.dse.channels import CHANNEL_NAMES
from fp4dse.dse.exactness import has_factor
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.outliers import Clamp, Residual
from fp4dse.dse.rounding import Nearest, Stochastic
from fp4dse.dse.stages import Fprop, Wgrad
from fp4dse.kernels import LaneNumerics, lanes
from fp4dse.kernels.gemm import GEMMS
from fp4dse.kernels.layers import product
from fp4dse.kernels.ops import fp8
from fp4dse.kernels.ops.attention_core import AttentionCore
from fp4dse.kernels.ops.fp8 import E4M3, E5M2, Fp8, History, Shift, library
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
    return Fp8(of.values.to(device), shift, None if of.factor is None else of.factor.to(device))


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


@each("element", ELEMENTS)
def test_every_element_of_four_bits_is_held_alone_by_the_format_with_enough_digits(element):
    codes = torch.tensor(ELEMENTS[element].magnitudes())
    x = torch.nn.functional.pad(torch.cat([codes, -codes]), (0, -2 * len(codes) % 128))[None, None]
    dtype = E4M3 if element == "e4m3" else E5M2
    values, shift = fp8.to_fp8(x, dtype)
    assert not shift.flags.any()
    assert torch.equal(shift.decoded(values), x)


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


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_has_the_bits_of_the_definition(place, dtype, transposed):
    x = odd_segments()
    power = torch.tensor([2.0**3, 0.25])
    for of in (x, x.to(torch.bfloat16)):
        expected = fp8.split(of, dtype, power)
        of = of.mT.contiguous().mT if transposed else of
        assert_same_operand(place.fp8.split(of.to(place.device), dtype, power.to(place.device)), expected)


SIZES = [(5, 7, 128), (130, 33, 384), (64, 200, 256), (16, 64, 2304), (33, 20, 352), (3, 5, 72), (64, 16, 17)]


def bound(a, b):
    """Of the error, for each element of the result: of sums within a segment, of 14 bits, and of those of segments."""
    return (2.0**-12 + 2.0**-20) * torch.bmm(a.double().abs(), b.double().abs().mT)


@pytest.mark.parametrize(("rows", "columns", "length"), SIZES)
@pytest.mark.parametrize("dtypes", [(E5M2, E5M2), (E4M3, E5M2), (E4M3, E4M3)], ids=str)
def test_a_product_is_that_of_the_decoded_numbers(place, dtypes, rows, columns, length):
    x, y = drawn(3, rows, length), drawn(3, columns, length, seed=1)
    x[1, 2, :32] *= 2.0**-40  # below each window
    y[2, :, 128:160] *= 2.0**-33
    x[0, 0, :128], y[0, 0, :128] = 0.0, 0.0
    a, b = (there(place.device, operand(of, dtype)) for of, dtype in zip((x, y), dtypes, strict=True))
    exact = torch.bmm(x.double(), y.double().mT)
    for multiply in (fp8.multiply, place.fp8.multiply):
        got = multiply(a, b).cpu()
        assert ((got.double() - exact).abs() <= bound(x, y)).all()


@pytest.mark.parametrize("contracted", [False, True])
def test_what_is_not_filled_is_not_read_and_changes_nothing(place, contracted):
    """As rows of experts; a long contraction of few rows is cut in parts."""
    count = torch.tensor([0, 70, 300, 2304] if contracted else [0, 1, 64, 200])
    x, y = drawn(4, 200, 2304), drawn(4, 24, 2304, seed=1)
    filled = torch.arange(2304 if contracted else 200) < count[:, None]
    x *= filled[:, None] if contracted else filled[:, :, None]
    y *= filled[:, None] if contracted else 1.0
    a, b = (there(place.device, operand(of)) for of in (x, y))
    wanted = place.fp8.multiply(a, b)
    beyond = torch.arange(2304) >= (count + 127)[:, None] // 128 * 128
    tiles = torch.arange(200) >= (count + 127)[:, None] // 128 * 128
    dirty = torch.where((beyond[:, None] if contracted else tiles[:, :, None]).to(place.device), 3.0, a.values.float())
    got = place.fp8.multiply(a._replace(values=dirty.to(E5M2)), b, Finish(), count.to(place.device), contracted)
    assert torch.equal(got, wanted)
    assert torch.equal(fp8.multiply(operand(x), operand(y), Finish(), count, contracted)[0], torch.zeros(200, 24))


def test_wide_segments_count_where_the_rest_of_their_row_meets_zeros(place):
    """A block far below the window is all there is of the result."""
    x, y = torch.zeros(1, 3, 256), torch.zeros(1, 2, 256)
    x[0, :, 0], x[0, :, 64] = 6.0, 1.5 * 2.0**-50
    y[0, :, 64], y[0, 1, 129] = 3.0, 1.0
    got = place.fp8.multiply(there(place.device, operand(x)), there(place.device, operand(y))).cpu()
    assert torch.equal(got, torch.full((1, 3, 2), 4.5 * 2.0**-50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_with_a_flag_are_computed_anew_and_others_are_not_touched(place, dtype):
    """Those of one row's segment in the first lane, and of one column's in the second. What is there before is NaN."""
    x, y = (torch.randint(-3, 4, (2, n, 384), generator=torch.Generator().manual_seed(n)).float() for n in (270, 150))
    x[0, 200, 130], y[1, 140, 300] = 2.0**-40, 2.0**-40
    y[0, :, 130], x[1, :, 300] = 0.0, 0.0  # so that sums are exact
    expected = torch.bmm(x.double(), y.double().mT).to(torch.float32).to(dtype)
    a, b = (there(place.device, operand(of, kind)) for of, kind in ((x, E5M2), (y, E4M3)))
    got = torch.full_like(expected, torch.nan, device=place.device)
    place.wide.widen(got, a, b, Finish(dtype=dtype), None, False)
    new = torch.zeros(2, 270, 150, dtype=torch.bool)
    rows, columns = place.wide.TILES[:2]
    new[0, 200 // rows * rows : 200 // rows * rows + rows] = new[1, :, 140 // columns * columns :] = True
    assert torch.equal(got.cpu()[new], expected[new])
    assert got.cpu()[~new].isnan().all()


def exact_operands(place, lanes=2):
    """Whole numbers, whose sums are exact, in E5M2 and E4M3; one segment of each is not held in the last lane, for a
    number that meets zeros."""
    x, y = (torch.randint(-3, 4, (lanes, n, 256), generator=torch.Generator().manual_seed(n)).float() for n in (48, 32))
    x[-1, 3, 7], y[-1, 30, 200] = 1.5 * 2.0**-60, 1.5 * 2.0**-60
    y[-1, :, 7], x[-1, :, 200] = 0.0, 0.0
    return x, y, [there(place.device, operand(of, kind)) for of, kind in ((x, E5M2), (y, E4M3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", ["", "of a", "of b"])
def test_a_large_product_is_the_librarys(place, monkeypatch, dtype, factor):
    """What it does not take a kernel multiplies, with the same result here."""
    x, y, (a, b) = exact_operands(place)
    factors = [torch.tensor([0.75, -5.0]) if factor == f"of {of}" else None for of in "ab"]
    if factor:  # of numbers that FP8 has themselves
        x, y = (of.nan_to_num().round() for of in (x, y))
        a, b = (Fp8(of.to(kind).to(place.device)) for of, kind in ((x, E5M2), (y, E4M3)))
    finish = Finish(*(None if f is None else f.to(place.device) for f in factors), None, dtype)
    exact = torch.bmm(x.double(), y.double().mT).float()
    for f in factors:
        exact = exact if f is None else exact * f[:, None, None]
    assert library.why_not(a, b, finish).startswith("sizes: accepted: large")
    products = [place.fp8.multiply(a, b, finish)]
    monkeypatch.setattr(library, "is_large", lambda *_: True)
    assert library.why_not(a, b, finish) is None
    called = []
    monkeypatch.setattr(place.fp8.library, "multiply", lambda *of, run=library.multiply: called.append(1) or run(*of))
    products.append(place.fp8.multiply(a, b, finish))
    assert called
    for made in products:
        assert torch.equal(made.cpu(), exact.to(dtype))
    alone = [Fp8(of.values[1:], of.shift and Shift(*(t[1:] for t in of.shift))) for of in (a, b)]
    last = Finish(*(None if f is None else f[1:].to(place.device) for f in factors), None, dtype)
    assert torch.equal(place.fp8.multiply(*alone, last)[0], products[1][1])


def test_the_library_says_what_it_does_not_take(place, monkeypatch):
    _, _, (a, b) = exact_operands(place)
    assert library.why_not(a, b, Finish()).startswith("sizes")
    monkeypatch.setattr(library, "is_large", lambda *_: True)
    assert library.why_not(a, b, Finish()) is None
    of_lanes, of_rows = torch.ones(2, device=place.device), torch.ones(2, 48, device=place.device)
    plain_a, plain_b = a._replace(shift=None), b._replace(shift=None)
    cases = {
        "dtypes: found E5M2 twice": (a, a._replace(values=a.values[:, :32]), Finish()),
        "factors of segments": (a, plain_b._replace(factor=torch.ones(2, 32, 2)), Finish()),
        "sizes: accepted: a contraction": (a, b._replace(values=b.values[:, :30]), Finish()),
        "finish: accepted: no bias": (a, b, Finish(bias=torch.ones(2, 32))),
        "finish: accepted: a factor of one": (plain_a, plain_b, Finish(of_lanes, of_lanes)),
        "finish: accepted: a factor or a power": (a, plain_b, Finish(of_lanes)),
    }
    for reason, arguments in cases.items():
        assert library.why_not(*arguments).startswith(reason)
    assert library.why_not(plain_a, plain_b, Finish(of_rows)).startswith("finish: accepted: a factor of one")
    assert library.why_not(plain_a, b, Finish(of_lanes)) is None


def test_nan_is_where_it_is_in_a_product_of_the_same_numbers_and_nowhere_else(place):
    x, y = drawn(2, 20, 256), drawn(2, 24, 256, seed=1)
    x[0, 3, 5], y[1, 7, 200], x[1, 2, 0] = float("nan"), float("nan"), float("inf")
    x[0, 4, 0], x[0, 4, 40] = 2.0**100, 2.0**-100
    expected = torch.bmm(x, y.mT)
    got = place.fp8.multiply(there(place.device, operand(x)), there(place.device, operand(y))).cpu()
    assert torch.equal(got.isnan(), expected.isnan())
    held = ~expected.isnan()
    held[0, 4] = held[1, 2] = False
    assert torch.allclose(got[held], expected[held], rtol=2e-3, atol=1e-2)


def test_operands_are_loaded_with_a_copy_engine_or_without_one(place, monkeypatch):
    a, b = (there(place.device, operand(drawn(2, n, 384, 9, n))) for n in (33, 70))
    expected = place.fp8.multiply(a, b)
    monkeypatch.setattr(place.fp8, "has_copy_engine", lambda device: False)
    assert torch.equal(place.fp8.multiply(a, b), expected)


@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_lane_has_the_same_bits_in_any_company(place, number):
    x, y = drawn(7, 70, 2176, 9), drawn(7, 40, 2176, 9, seed=1)
    x[2, 5, :32] *= 2.0**-40
    a, b = operand(x), operand(y)
    together = place.fp8.multiply(there(place.device, a), there(place.device, b))
    for chosen in ([*range(number)], [*range(7 - number, 7)]):
        of = [Fp8(t.values[chosen], Shift(*(s[chosen] for s in t.shift))) for t in (a, b)]
        assert torch.equal(place.fp8.multiply(*(there(place.device, t) for t in of)), together[chosen])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [256, 2304])
def test_a_product_is_finished(place, dtype, length):
    whole = [torch.randint(-3, 4, (2, n, length), generator=torch.Generator().manual_seed(n)).float() for n in (33, 20)]
    a, b = (there(place.device, operand(x)) for x in whole)
    factor_a, factor_b, bias = torch.tensor([0.75, -2.0]), torch.rand(2, 20), torch.randn(2, 20)
    finish = Finish(*(t.to(place.device) for t in (factor_a, factor_b, bias)), dtype)
    exact = torch.bmm(whole[0].double(), whole[1].double().mT).float()
    expected = (exact * factor_a[:, None, None] * factor_b[:, None, :] + bias[:, None, :]).to(dtype)
    assert torch.equal(place.fp8.multiply(a, b, finish).cpu(), expected)


KINDS = [("factors", "factors"), ("factors", "powers"), ("powers", "factors"), ("", "factors"), ("factors", "")]


@pytest.mark.parametrize("kinds", KINDS)
def test_factors_of_segments_multiply_their_sums(place, kinds):
    """Of whole numbers, whose sums are exact: each rounding is that of the definition of products.in_segments."""
    from fp4dse.kernels.ops.products import in_segments, multiply

    operands, plain, factors = [], [], []
    for number, (kind, rows) in enumerate(zip(kinds, (20, 33), strict=True)):
        g = torch.Generator().manual_seed(number)
        x = torch.randint(-3, 4, (2, rows, 256), generator=g).float()
        factor = torch.rand(2, rows, 2, generator=g) if kind == "factors" else None
        of = operand(x, E4M3) if kind == "powers" else Fp8(x.to(E4M3), None, factor)
        operands.append(there(place.device, of))
        plain.append(x)
        factors.append(factor)
    got = place.fp8.multiply(*operands).cpu()
    assert torch.equal(got, in_segments(*plain, *factors, multiply))


def test_nothing_is_summed_over_an_empty_contraction(place):
    a, b = (there(place.device, operand(torch.zeros(2, n, 0))) for n in (3, 4))
    assert torch.equal(place.fp8.multiply(a, b).cpu(), torch.zeros(2, 3, 4))


def test_long_contractions_of_small_results_are_cut_by_their_shape_alone(place):
    for segments in (1, 8, 16, 128):
        for tiles in (1, 8, 64, 132, 500):
            part = place.fp8.part_of(segments, tiles)
            assert part == segments or (part * 128 >= place.fp8.PART and tiles * -(-segments // part) <= place.fp8.FULL)


def changed(**more):
    """MXFP4 with other parts."""
    return msgspec.structs.replace(MX, **more)


def recipe(**stages):
    """MXFP4 with other stages."""
    return msgspec.structs.replace(Recipe.named("mxfp4"), **stages)


ROUNDED = {"mxfp4": [MX, msgspec.structs.replace(MX, rounding=Stochastic())], "hif4": [QUANTIZERS["hif4"]] * 2}


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


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUNDED)
def test_quantizers_write_what_is_made_of_their_operands(place, name, kind, columns):
    dtype = E4M3 if name == "hif4" else E5M2
    block = ROUNDED[name][0].block
    for training, length, rows in ((True, 128, 14), (False, 384, 38), (True, 5 * block, 20), (True, block, 16)):
        x = odd_rows(2, length, rows)
        x[0, 6, :32] *= 2.0**-35
        x = x.to(kind)
        for of_lanes in (ROUNDED[name], ROUNDED[name][:1] * 2):
            arguments = arguments_for(x, of_lanes, columns)
            history = history_of(2, torch.tensor([130, 0]), training, int(arguments[2].step))
            got, expected = quantized(place, arguments, dtype, history)
            assert (expected[1].flags > 0).any()
            assert_same_operand(got, expected)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("element", ["e2m1", "int4", "e3m0", "e1m2"])
def test_tiles_of_blocks_that_are_all_held_are_written_likewise(place, element, columns):
    """And those on both sides of the window's edges: all rows of a tile have a block that is as far below the others,
    or all are as large."""
    codes = torch.tensor(ELEMENTS[element].magnitudes())
    for block, below in (32, torch.arange(20, 34)), (128, torch.arange(2)), (32, torch.arange(-6, 0)):
        drawn_codes = torch.randint(len(codes), (2, 32 * len(below), 128), generator=torch.Generator().manual_seed(0))
        x = torch.cat([codes, -codes])[drawn_codes]
        x[:, :, ::block] = -codes[-1]
        far = torch.exp2(-below.float()).repeat_interleave(32)[:, None]
        x[:, :, : 128 if below[0] < 0 else block] *= far
        lanes_of = [changed(element=element, block=block, rounding=r) for r in (Nearest(), Stochastic())]
        arguments = arguments_for(x.to(torch.bfloat16), lanes_of, columns)
        top = int(fp8.top_of(codes[None])) - fp8.HEADROOM[E5M2] * (below[0] > 0)
        history = history_of(2, top, True, int(arguments[2].step))
        got, expected = quantized(place, arguments, E5M2, history)
        held = (expected[1].flags == 0).unflatten(1, (-1, 32)).all(2).all(2)  # of tiles
        assert held.any()
        assert held.all() == (block == 128)
        assert_same_operand(got, expected)


def test_a_rotated_operand_is_written_likewise(place):
    for size in (32, 256):
        arguments = arguments_for(odd_rows(2, 512), [MX] * 2, rotation=size, signs=signs_of(2, size))
        assert_same_operand(*quantized(place, arguments, E5M2, history_of(2, 128, True, int(arguments[2].step))))


LAYERS = {
    **{name: Recipe.named(name) for name in ("mxfp4", "mxfp4-tiles", "hopper-moe-fp4")},
    "by chance": Recipe.uniform(changed(rounding=Stochastic())),
    "samples": recipe(wgrad=Wgrad(g=changed(rounding=Stochastic(samples=2)), x=MX)),
    "residual": recipe(fprop=Fprop(x=changed(outliers=Residual()), w=MX)),
    "clamp": recipe(fprop=Fprop(x=changed(outliers=Clamp()), w=MX)),
    "channels": recipe(fprop=Fprop(x=MX, w=MX, channels=CHANNEL_NAMES["arc"])),
    "errors": recipe(fprop=Fprop(x=MX, w=MX, channels=CHANNEL_NAMES["hcp"])),
    "rotated": recipe(fprop=Fprop(x=MX, w=MX, rotation=Hadamard(32))),
    "rows": Recipe.uniform(QUANTIZERS["fp8-row"]),
    "tensor": Recipe.uniform(QUANTIZERS["fp8-e5m2-current"]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_the_same_in_fp8_units(place, monkeypatch, name):
    """Each stage, in all ways to quantize; the definition's products are FP32's of the same numbers."""
    wanted = GEMMS["fp8-exact"]
    monkeypatch.setitem(GEMMS, "fp8-exact", msgspec.structs.replace(wanted, why_not=lambda *_: None))
    kernels = msgspec.structs.replace(PLAIN, operand=fused.operand, fp8=fused.fp8, packed=fused.packed)
    monkeypatch.setattr(lanes, "backend", lambda _: kernels)
    exact, units = LAYERS[name], msgspec.structs.replace(LAYERS[name], gemm="fp8-exact")
    assert not units.validate()
    x, w, g = (torch.randn(2, *shape, device=place.device) for shape in [(128, 128)] * 3)
    x[0, 5, :32] *= 2.0**-40
    x, w = x.requires_grad_(), w.requires_grad_()
    results = []
    for of in (exact, units):
        numerics = LaneNumerics([of] * 2, (3, 4), place.device)
        assert (set(numerics.gemms.values()) == {"fp8-exact"}) == (of is units)
        results.append([])
        for step, scale in ((0, 1.0), (1, 2.0**-12)):  # all that is far from the step before is exact, too
            numerics.step.fill_(step)
            y = product(x * scale, w, None, numerics, 1)
            results[-1] += [y / scale, *torch.autograd.grad(y, (x, w), g * scale)]
    for got, expected in zip(*results[::-1], strict=True):
        assert got.isfinite().all()
        assert (got - expected).norm() <= (2e-6 if place.device == "cpu" else 3e-4) * expected.norm()


def stepped(numerics, steps, scale=1.0):
    """The results of a layer in these steps."""
    x, w = torch.randn(2, 32, 128, generator=torch.Generator().manual_seed(0)) * scale, torch.ones(2, 16, 128)
    for step in steps:
        numerics.step.fill_(step)
        numerics.forward(0, x, w)


@pytest.fixture
def cpu_units(monkeypatch):
    """FP8 units on a CPU."""
    monkeypatch.setitem(GEMMS, "fp8-exact", msgspec.structs.replace(GEMMS["fp8-exact"], why_not=lambda *_: None))
    monkeypatch.setattr(lanes, "backend", lambda _: PLAIN)
    return LaneNumerics([recipe(gemm="fp8-exact")] * 2, (3, 4))


def test_histories_are_kept_from_step_to_step_and_only_in_training(cpu_units):
    numerics = cpu_units
    stepped(numerics, [0, 1])
    kept = {name: value.clone() for name, value in numerics.state().items()}
    assert {name for name in kept if "tops" in name} == {"state/fprop.x/tops 0 0", "state/fprop.w/tops 0 0"}
    tops = kept["state/fprop.w/tops 0 0"]
    assert tops.tolist() == [[127, 127, 0]] * 2
    assert tops.dtype == torch.int32
    numerics.training = False
    stepped(numerics, [2], 8.0)
    assert all(torch.equal(value, kept[name]) for name, value in numerics.state().items())
    numerics.training, copy = True, LaneNumerics([recipe(gemm="fp8-exact")] * 2, (3, 4))
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


def test_a_layer_may_have_any_size(monkeypatch):
    monkeypatch.setitem(GEMMS, "fp8-exact", msgspec.structs.replace(GEMMS["fp8-exact"], why_not=lambda *_: None))
    monkeypatch.setattr(lanes, "backend", lambda _: PLAIN)
    x, w = torch.randn(2, 5, 72), torch.randn(2, 3, 72)
    exact, units = (LaneNumerics([recipe(gemm=gemm)] * 2, (3, 4)).forward(0, x, w).y for gemm in ("exact", "fp8-exact"))
    assert torch.allclose(exact, units, rtol=0, atol=1e-5)


def test_the_operator_is_sound(place):
    call = to(place.device, call_for([MX] * 2))
    for columns in (False, True):
        x = torch.randn(2, 128, 128, device=place.device)
        tops = torch.zeros(2, 3, dtype=torch.int32, device=place.device)
        arguments = x, columns, E5M2, tops, True, *flat(call)
        torch.library.opcheck(torch.ops.fp4dse.fp8, arguments, test_utils=["test_schema", "test_faketensor"])


def gradient_like(lanes, rows, length, seed, far):
    """Numbers whose rows and columns differ in size, float32 on the GPU; if far, a few by more than FP8 holds."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(lanes, rows, length, device="cuda", generator=g)
    x *= torch.exp2(torch.randn(lanes, rows, 1, device="cuda", generator=g))
    if far:
        x[:, ::397, 32:64] *= 2.0**-40
    return x


REAL = [(1, 16384, 3072, 1024), (1, 5472, 1024, 16384), (64, 512, 256, 256), (3, 1024, 1024, 16384), (2, 1000, 48, 640)]
"""Lanes, rows, columns, contraction."""


@pytest.mark.gpu
@pytest.mark.parametrize("far", [False, True], ids=["", "far"])
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_products_of_real_sizes_are_those_of_bf16_within_the_error_of_the_unit(sizes, far):
    """And captured in a graph, with the same bits; the quantizer writes what is made of its BF16 operand."""
    lanes, rows, columns, length = sizes
    made, exact = [], []
    for seed, (n, dtype) in enumerate(((rows, E5M2), (columns, E4M3))):
        x = gradient_like(lanes, n, length, seed, far and dtype == E5M2)
        call = to("cuda", call_for([MX] * lanes))
        values, _ = fused.operand(x, False, call, torch.bfloat16)
        tops = fp8.top_of(values)[:, None].repeat(1, 3)
        history = History(tops, call.step, True)
        expected = fp8.to_fp8(values.cpu(), dtype, History(tops.cpu(), call.step.cpu(), True))
        operand = Fp8(*fused.fp8(x, False, call, dtype, history)[:2])
        assert bool(operand.shift.flags.any()) == (far and dtype == E5M2)
        assert torch.equal(operand.shift.decoded(operand.values), values.float())
        assert_same_operand(operand, expected)
        made.append(operand)
        exact.append(values)
    got, wanted = fp8.multiply(*made), GEMMS["bf16-exact"].run(*exact)
    size = GEMMS["bf16-exact"].run(*(x.abs() for x in exact))
    assert got.isfinite().all()
    assert ((got - wanted).abs() <= 2.0**-11 * size).all()
    assert (got - wanted).norm() < 3e-4 * wanted.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fp8.multiply(*made)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, got)
    alone = [Fp8(x.values[-1:], Shift(*(t[-1:] for t in x.shift))) for x in made]
    assert torch.equal(fp8.multiply(*alone), got[-1:])
