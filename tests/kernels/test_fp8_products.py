"""Products of FP8 operands are exact but for the unit's sums, and cuBLAS is given what it takes."""

import pytest
import torch

from fp4dse.kernels.ops import fp8
from fp4dse.kernels.ops.fp8 import APART, E4M3, E5M2, Fp8, is_taken, library, spaced
from fp4dse.kernels.ops.products import Finish
from tests.kernels.fp8_operands import (
    INTERPRETED,
    SIGNED,
    drawn,
    lane_of,
    operand,
    there,
)

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
@pytest.mark.parametrize("count", [1, 3, 4, 8, 8200, 2049])
def test_a_note_is_seen_wherever_it_is_and_of_either_operand(place, any_size, count):
    """Notes are read four at a time where their number allows it."""
    _, _, operands = exact_operands()
    expected = fp8.multiply(*operands)
    for which in range(2):
        for at in {0, count // 2, count - 1}:
            chosen = []
            for number, of in enumerate(operands):
                notes = torch.zeros(2, count if number == which else 5, dtype=torch.uint8)
                notes[-1, at if number == which else 0] = number == which
                chosen.append(of._replace(shift=of.shift._replace(notes=notes)))
            other = operands[1 - which]
            held = other.shift._replace(flags=torch.zeros_like(other.shift.flags))
            chosen[1 - which] = other._replace(shift=held._replace(notes=chosen[1 - which].shift.notes))
            wanted = fp8.multiply(*chosen)
            assert not torch.equal(wanted, expected)
            assert torch.equal(place.fp8.multiply(*chosen), wanted)


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


@INTERPRETED
def test_an_infinite_number_leaves_no_finite_one_of_its_products_and_touches_no_other(place, any_size):
    """Where the other operand has a flag in the same segment, too: there what is added has zeros that meet it."""
    x, y = drawn(1, 32, 256), drawn(1, 48, 256, seed=1)
    x[0, 3, 5], x[0, 3, 6], y[0, 7, 7] = 2.0**-100, 2.0**20, float("inf")
    a, b = operand(x), operand(y, E4M3)
    assert a.shift.flags[0, 3, 0]
    assert b.shift.flags[0, 7, 0]
    expected = torch.bmm(x, y.mT)
    got = place.fp8.multiply(a, b)
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert expected.isinf().any()
    held = expected.isfinite()
    held[0, 3] = False  # whose size is another
    assert torch.allclose(got[held], expected[held], rtol=2e-3, atol=1e-2)


HEAVY = [pytest.param(way, marks=pytest.mark.heavy) for way in ("added to bf16", "anew")]


@pytest.mark.parametrize("way", ["added", *HEAVY])
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


@pytest.mark.heavy
@INTERPRETED
def test_a_lane_has_the_same_bits_in_any_company(place, any_size):
    x, y = drawn(7, 80, 512, 9), drawn(7, 48, 512, 9, seed=1)
    x[2, 5, :32] *= 2.0**-40
    a, b = operand(x), operand(y, E4M3)
    together = place.fp8.multiply(a, b)
    for chosen in (slice(1), slice(6, 7), slice(2), slice(5, 7), slice(7)):
        assert torch.equal(place.fp8.multiply(lane_of(a, chosen), lane_of(b, chosen)), together[chosen])


@INTERPRETED
def test_of_64_lanes_each_has_the_bits_that_it_has_alone(place, any_size):
    """The first, the last and two between, of which 0 and 37 have numbers that FP8 does not hold."""
    x, y = drawn(64, 16, 128, 2), drawn(64, 16, 128, 2, seed=1)
    x[0, 5, :32] *= 2.0**-40
    y[37, 3, 32:64] *= 2.0**-40
    a, b = operand(x), operand(y, E4M3)
    assert [torch.nonzero(of.shift.flags.any(2).any(1)).flatten().tolist() for of in (a, b)] == [[0], [37]]
    together = place.fp8.multiply(a, b)
    for lane in (0, 36, 37, 63):
        alone = slice(lane, lane + 1)
        assert torch.equal(place.fp8.multiply(lane_of(a, alone), lane_of(b, alone)), together[alone])


# --- on a device: `pytest -m gpu tests/kernels -k fp8` ------------------------------------------------------------

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
