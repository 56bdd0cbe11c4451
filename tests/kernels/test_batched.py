"""A matrix's product has the same bits alone, in any company, and at any place in it."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fp4dse.kernels.gemm import GEMMS
from fp4dse.kernels.ops import products as batched
from fp4dse.tasks.threads import torch_threads

SHAPES = [
    *itertools.product((1, 3, 7, 16, 33, 64), (1, 5, 10, 24, 63), (1, 9, 16, 50, 127, 256)),
    *itertools.product((1, 7, 16), (1, 10), (1024, 8192, 8201)),
    *[(130, 9, 2048), (255, 5, 128), (15, 9, 9), (192, 15, 255), (130, 8, 63), (250, 130, 96)],
]
"""(rows, columns, contraction): narrow results, long contractions, sizes that fill no lines."""
LANES = (1, 2, 3, 7, 64)


def operand(lanes, rows, k, dtype=torch.float32, seed=0):
    return torch.randn(lanes, rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid(x, columns):
    """x [L, R, K], along its columns or not."""
    return x.mT.contiguous().mT if columns else x.contiguous()


def differing(run, a, b, lanes=LANES):
    """How often a lane's product in company of some size is not what it is among all."""
    among, wrong = run(a, b), 0
    for n in lanes:
        chosen = torch.randperm(len(a), generator=torch.Generator().manual_seed(n))[:n]
        few = run(*(laid(x[chosen], x.stride(1) == 1 and x.shape[2] > 1) for x in (a, b)))
        wrong += n - int((few == among[chosen]).all(2).all(1).sum())
    return wrong


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("columns", [*itertools.product((False, True), (False, True))], ids=str)
@pytest.mark.parametrize("name", ["fp32", "bf16-rounded"])
def test_a_product_has_the_same_bits_in_any_company(name, columns, threads):
    with torch_threads(threads):
        for rows, wide, k in SHAPES[:: 3 if (name, threads) == ("fp32", 1) else 11]:
            lanes = 64 if k < 1024 else 16
            a, b = laid(operand(lanes, rows, k), columns[0]), laid(operand(lanes, wide, k, seed=1), columns[1])
            assert differing(GEMMS[name].run, a, b, [n for n in LANES if n <= lanes]) == 0, (rows, wide, k)


@given(*[st.integers(1, 70)] * 2, st.integers(1, 300), st.booleans(), st.booleans(), st.sampled_from([2, 3, 9]))
@example(2, 15, 63, False, False, 9)
@example(30, 9, 65, True, True, 9)
def test_a_matrix_in_any_place_is_multiplied_as_if_alone(rows, wide, k, a_columns, b_columns, lanes):
    a, b = laid(operand(1, rows, k), a_columns), laid(operand(1, wide, k, seed=1), b_columns)
    alone = batched.multiply(a, b)
    of_all = batched.multiply(*(laid(x.repeat(lanes, 1, 1), c) for x, c in ((a, a_columns), (b, b_columns))))
    assert torch.equal(of_all, alone.expand(lanes, -1, -1))
    exact, size = a.double() @ b.double().mT, a.double().abs() @ b.double().abs().mT
    assert ((alone - exact).abs() <= 2.0**-18 * size).all()


def test_what_fills_lines_does_not_stay_in_a_product():
    """NaN beside an odd matrix is another lane's: the zeros are new."""
    a, b = operand(3, 5, 7), operand(3, 3, 7, seed=1)
    expected = batched.multiply(a, b)
    a[1] = torch.nan
    got = batched.multiply(a, b)
    assert got.is_contiguous()
    assert torch.equal(got[[0, 2]], expected[[0, 2]])
    assert got[1].isnan().all()


@pytest.mark.parametrize("columns", [*itertools.product((False, True), (False, True))], ids=str)
def test_matrices_that_fill_lines_are_multiplied_as_torch_does(columns):
    for rows, wide, k in ((16, 1, 16), (48, 10, 1024), (64, 64, 32), (40, 24, 48), (160, 3, 8192)):
        a, b = (laid(operand(3, n, k, seed=n), c) for n, c in zip((rows, wide), columns, strict=True))
        assert torch.equal(batched.multiply(a, b), torch.bmm(a, b.mT))


def test_products_one_by_one_are_those_of_the_batch():
    a, b = operand(3, 40, 64), operand(3, 24, 64, seed=1)
    for x, y in itertools.product((a, laid(a, True)), (b, laid(b, True))):
        assert torch.allclose(batched.one_by_one(x, y), torch.bmm(x, y.mT), atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 48), (5, 8), (7, 9), (1, 3), (3, 1)])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_twice_lies_as_it_lay(shape, columns, dtype):
    x = laid(operand(1, *shape, dtype), columns)
    pair = batched.twice(x)
    assert pair.shape == (2, *shape)
    assert pair.stride()[1:] == x.stride()[1:]
    assert torch.equal(pair, torch.cat([x, x]))
    shared = pair.data_ptr() == x.data_ptr()
    assert shared == (max(x.stride()[1:]) * x.element_size() % 16 == 0)


def large(rows, columns, k, dtype=torch.bfloat16, lanes=1):
    return batched.is_large(*(torch.empty(lanes, n, k, dtype=dtype, device="meta") for n in (rows, columns)))


def test_large_products_are_told_by_their_shape():
    for lanes in (1, 2, 16):
        assert large(16384, 1024, 1024, lanes=lanes)  # language:350M
        assert large(1024, 2736, 16384, lanes=lanes)  # its weight gradient
        assert not large(16384, 352, 128, lanes=lanes)  # language:9M
        assert not large(128, 352, 2**19, lanes=lanes)  # a long contraction fills no GPU
    assert large(1024, 1024, 2**13)
    assert not large(1024, 1024, 2**13 - 8)
    assert not large(1024, 1023, 2**14)
    assert not large(2048, 1024, 2**14 + 4)
    assert large(2048, 1024, 2**14 + 4, torch.float32)


@pytest.mark.parametrize("columns", [*itertools.product((False, True), (False, True))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_products_by_a_kernel_have_the_same_bits_in_any_company(place, columns, dtype):
    for rows, wide, k in ((1, 1, 1), (7, 10, 130), (70, 1, 64), (10, 65, 9)):
        a, b = (
            laid(operand(3, n, k, dtype, n), c).to(place.device) for n, c in zip((rows, wide), columns, strict=True)
        )
        got = place.products.multiply(a, b, "ieee")
        exact, size = a.double() @ b.double().mT, a.double().abs() @ b.double().abs().mT
        assert ((got - exact).abs() <= 2.0**-18 * size).all()
        for chosen in ([1], [2, 0]):
            assert torch.equal(place.products.multiply(a[chosen], b[chosen], "ieee"), got[chosen])


FINISHES = {
    "nothing": {},
    "rounded": {"dtype": torch.bfloat16},
    "factors of lanes": {"factor_a": (), "factor_b": ()},
    "factors of rows": {"factor_a": (0,), "factor_b": (1,)},
    "one factor, a bias": {"factor_b": (), "bias": (1,)},
    "all": {"factor_a": (), "factor_b": (1,), "bias": (1,), "dtype": torch.bfloat16},
}
"""What is given, of which sizes of a result [R, S], each with a lane axis before them."""


def finish_of(name, lanes, sizes, device):
    values = dict(FINISHES[name])
    for key in values.keys() - {"dtype"}:
        of = [sizes[i] for i in values[key]]
        values[key] = operand(lanes, 1, math.prod(of), seed=len(key)).view(lanes, *of).to(device)
    return batched.Finish(**values)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [*itertools.product((False, True), (False, True))], ids=str)
@pytest.mark.parametrize("name", ["nothing", "rounded", "factors of lanes"])
def test_on_a_gpu_a_finished_product_has_the_same_bits_in_any_company(columns, name):
    for rows, wide, k in [*SHAPES[::18], (512, 256, 256), (256, 256, 8192), (2304, 1024, 1024)]:
        lanes = 64 if rows * wide * k < 2**28 else 7
        a, b = (
            laid(operand(lanes, n, k, torch.bfloat16, n), c).cuda() for n, c in zip((rows, wide), columns, strict=True)
        )
        end = (
            batched.Finish(dtype=torch.bfloat16) if name == "rounded" else finish_of(name, lanes, (rows, wide), "cuda")
        )
        among = batched.multiply(a, b, finish=end)
        assert among.dtype == end.dtype
        for n in (1, 2, 7):
            of = torch.randperm(lanes, generator=torch.Generator().manual_seed(n))[:n].cuda()
            few = end._replace(
                **{key: f[of] for key in ("factor_a", "factor_b") if (f := getattr(end, key)) is not None}
            )
            found = batched.multiply(*(laid(x[of], c) for x, c in zip((a, b), columns, strict=True)), finish=few)
            assert torch.equal(found, among[of]), (rows, wide, k, n)


LAYOUTS = [(False, True), (True, False), (True, True)]


@pytest.mark.parametrize(
    ("columns", "name"), [*((c, "all") for c in LAYOUTS), *(((False, False), n) for n in FINISHES)], ids=str
)
def test_a_tile_is_finished_as_a_whole_product_is(place, columns, name):
    kernels = place.products
    ways = {
        "described": partial(kernels.described, tiles=kernels.Tiles(128, 64, 64, 4, 3)),
        "tiled": kernels.tiled,
        "narrow": partial(kernels.multiply, fp32="ieee"),
    }
    for way, rows, wide, k, dtype in (
        ("described", 136, 72, 128, torch.bfloat16),
        ("tiled", 128, 64, 64, torch.bfloat16),
        ("tiled", 96, 72, 40, torch.bfloat16),
        ("narrow", 20, 5, 70, torch.bfloat16),
        ("narrow", 20, 5, 70, torch.float32),
    ):
        run = ways[way]
        a, b = (
            laid(operand(2, n, k, dtype, n), c).to(place.device) for n, c in zip((rows, wide), columns, strict=True)
        )
        finish = finish_of(name, 2, (rows, wide), place.device)
        product = run(a, b, finish=batched.AS_IT_IS)
        exact, size = a.double() @ b.double().mT, a.double().abs() @ b.double().abs().mT
        assert ((product - exact).abs() <= 2.0**-18 * size).all()
        got = run(a, b, finish=finish)
        assert got.dtype == finish.dtype
        assert torch.equal(got, batched.finished(product, finish))
        alone = finish._replace(**{k: getattr(finish, k)[1:] for k in FINISHES[name] if k != "dtype"})
        assert torch.equal(run(a[1:], b[1:], finish=alone), got[1:])


HOWS = {
    "plain": {},
    "in halves": {"parts": 2},
    "by threads": {"staged": False, "flatten": False},
    "several programs": {"programs": 2},
}


@pytest.mark.parametrize("columns", [*itertools.product((False, True), (False, True))], ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_programs_that_take_tile_after_tile_have_the_bits_of_a_program_a_tile(place, how, columns):
    """Fewer tiles than programs, more, and rows and columns that fill none."""
    tiles, how = place.products.Tiles(64, 64, 64, 4, 2), place.persistent.How(**HOWS[how])
    for lanes, rows, wide, k in ((1, 64, 64, 128), (3, 136, 72, 64), (2, 72, 200, 192)):
        a, b = (
            laid(operand(lanes, n, k, torch.bfloat16, n), c).to(place.device)
            for n, c in zip((rows, wide), columns, strict=True)
        )
        for name in ("nothing", "all", "factors of lanes"):
            finish = finish_of(name, lanes, (rows, wide), place.device)
            wanted = place.products.described(a, b, finish, tiles)
            assert torch.equal(place.persistent.persistent(a, b, finish, tiles, how), wanted)


def test_rows_that_the_copy_engine_does_not_write_are_refused(place):
    a, b = (operand(1, n, 64, torch.bfloat16).to(place.device) for n in (64, 68))
    kernels, rounded = place.persistent, batched.Finish(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="columns: found 68"):
        kernels.persistent(a, b, rounded, place.products.Tiles(64, 64, 64, 4, 2))
    by_threads = kernels.How(staged=False)
    assert kernels.persistent(a, b, rounded, place.products.Tiles(64, 64, 64, 4, 2), by_threads).shape == (1, 64, 68)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [*itertools.product((False, True), (False, True))], ids=str)
def test_on_a_gpu_persistent_programs_have_the_bits_of_a_program_a_tile(columns):
    from fp4dse.kernels.ops.products import persistent, triton

    specialized = persistent.How(flatten=False, specialized=True, staged=False)
    for how, tiles in (
        (persistent.How(), triton.Tiles(128, 256, 64, 8, 3)),
        (persistent.How(parts=2), triton.TALL),
        (specialized, triton.Tiles(128, 256, 64, 4, 3)),
    ):
        for lanes, rows, wide, k in ((1, 4096, 3072, 1024), (16, 2304, 1152, 384), (3, 1000, 520, 640)):
            a, b = (
                laid(operand(lanes, n, k, torch.bfloat16, n), c).cuda()
                for n, c in zip((rows, wide), columns, strict=True)
            )
            finish = finish_of("all", lanes, (rows, wide), "cuda")
            wanted = triton.described(a, b, finish, triton.TALL)
            for _ in range(5):
                assert torch.equal(persistent.persistent(a, b, finish, tiles, how), wanted)


def test_a_kernel_reads_no_factor_of_another_shape(place):
    a, b = (operand(2, n, 64, torch.bfloat16).to(place.device) for n in (24, 32))
    for name, shape in (("factor_a", (2, 1)), ("factor_b", (2, 24)), ("factor_a", (1,))):
        with pytest.raises(ValueError, match="factor: found"):
            place.products.tiled(a, b, batched.Finish(**{name: torch.ones(shape, device=place.device)}))


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_is_described_has_no_tile_that_reaches_into_another_lane_along_the_contraction(place, lanes):
    whole, cut = operand(lanes, 24, 64, torch.bfloat16), operand(lanes, 24, 40, torch.bfloat16)
    takes = place.products.are_described
    assert takes(whole, whole)
    assert takes(laid(whole, True), whole)
    assert takes(cut, cut)
    assert not takes(laid(cut, True), cut)
    assert takes(whole[:, :16], whole) == (lanes == 1)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_a_long_contraction_is_added_in_parts_of_its_shape_alone(place, monkeypatch, columns):
    monkeypatch.setattr(place.products, "LENGTH", 64)
    a, b = (laid(operand(2, n, 300, seed=n), columns).to(place.device) for n in (20, 5))
    parts = 300 / place.products.part_of(300, 2, 32)
    assert parts > 4
    got = place.products.multiply(a, b, "ieee")
    exact, size = a.double() @ b.double().mT, a.double().abs() @ b.double().abs().mT
    assert ((got - exact).abs() <= 2.0**-18 * size).all()
    assert torch.equal(place.products.multiply(a[1:2], b[1:2], "ieee"), got[1:2])


def test_no_matrix_is_cut_into_more_parts_than_fill_a_device(place):
    for length, tiles in ((2**13, 1), (2**13 + 1, 1), (512 * 112 * 112, 3), (2**30, 1), (2**20, 2000)):
        part = place.products.part_of(length, tiles, 64)
        parts = -(-length // part)
        assert part % 64 == 0
        assert parts == 1 or parts * tiles <= 1024
        assert (parts > 1) == (length > 2**13 and tiles < 1024)


def test_an_empty_contraction_is_zero(place):
    a, b = (torch.ones(2, n, 0, device=place.device) for n in (3, 4))
    assert torch.equal(place.products.multiply(a, b, "ieee").cpu(), torch.zeros(2, 3, 4))


@pytest.mark.parametrize(
    ("rows", "columns", "k"), [(512, 10, 256), (10, 256, 512), (64, 64, 8), (129, 68, 8193), (64, 63, 64)]
)
def test_few_rows_short_contractions_and_rows_that_are_not_aligned_are_narrow(rows, columns, k):
    a, b = (torch.empty(2, n, k, device="meta") for n in (rows, columns))
    assert batched.is_narrow(a, b)
    assert not batched.is_narrow(*(torch.empty(2, n, 64, device="meta") for n in (64, 48)))
    parts = torch.empty(2, 4099, device="meta")[:, :4096].view(2, 64, 64)  # lanes that lie apart
    assert batched.is_narrow(parts, parts)
