"""Groups of rows are multiplied in one launch, as far as they are filled."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.kernels.gemm import GEMMS, Filled, product
from fp4dse.kernels.ops.grouped import grouped
from fp4dse.kernels.ops.products import in_segments, multiply


def integers(*shape, seed=0, device="cpu"):
    """Small numbers, of which FP32 holds every sum."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float().to(device)


def ragged(groups, room, seed=0):
    """Numbers of filled rows, some of them none and some all."""
    count = torch.randint(room + 1, (groups,), generator=torch.Generator().manual_seed(seed))
    count[0], count[-1] = 0, room
    return count


def with_zeros(x, count, dim):
    empty = torch.arange(x.shape[dim]) >= count[:, None]
    return x.masked_fill(empty.unsqueeze(3 - dim), 0.0)


def expected(a, b):
    return torch.einsum("grk,gsk->grs", a.double(), b.double()).float()


SIZES = [(4, 16, 32, 48), (3, 40, 10, 17), (2, 130, 70, 33), (5, 1, 1, 1)]
"""Groups, rows, columns, contraction."""


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("contracted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_its_definition(place, sizes, contracted, dtype):
    groups, rows, columns, length = sizes
    count = ragged(groups, length if contracted else rows)
    a = with_zeros(integers(groups, rows, length), count, 2 if contracted else 1)
    b = integers(groups, columns, length, seed=1)
    for x, y in (a, b), (a.mT.contiguous().mT, b.mT.contiguous().mT):
        args = (t.to(place.device) for t in (x.to(dtype), y.to(dtype), count))
        assert torch.equal(place.grouped.grouped(*args, contracted, "ieee").cpu(), expected(a, b))
    assert torch.equal(grouped(a, b, count, contracted), expected(a, b))


@pytest.mark.parametrize("contracted", [False, True])
@pytest.mark.parametrize("factors", ["a", "b", "ab"])
@pytest.mark.parametrize("sizes", [(3, 40, 20, 256), (2, 17, 33, 384)])
def test_segments_have_their_factors_and_what_is_empty_is_not_read(place, sizes, factors, contracted):
    groups, rows, columns, length = sizes
    count = ragged(groups, length if contracted else rows)
    a, b = with_zeros(integers(groups, rows, length), count, 2 if contracted else 1), integers(groups, columns, length)
    if contracted:
        b = with_zeros(b, count, 2)
    powers = [2.0 ** integers(groups, n, length // 128, seed=2) for n in (rows, columns)]
    of = [f if name in factors else None for name, f in zip("ab", powers, strict=True)]
    wanted = in_segments(a, b, *of, multiply)
    if contracted:
        dirty = [x.masked_fill(beyond(count, length, 128)[:, None], torch.nan) for x in (a, b)]
    else:
        dirty = [a.masked_fill(beyond(count, rows)[:, :, None], torch.nan), b]
    arguments = [*dirty, *of, count]
    there = [None if x is None else x.to(place.device) for x in arguments]
    got = place.grouped.grouped_in_segments(*there, contracted, "ieee").cpu()
    assert torch.equal(got, wanted)
    product_of = product(GEMMS["fp32"], (a, b), tuple(of), Filled(count, contracted))
    assert torch.equal(product_of, wanted)


def beyond(count, length, piece=1):
    """Where nothing is filled, from the next whole piece on: bool [G, length]."""
    return torch.arange(length) >= (count + piece - 1)[:, None] // piece * piece


@pytest.mark.parametrize("contracted", [False, True])
def test_what_is_empty_is_not_read(place, contracted):
    """Along K not from the next piece of 128 bytes on."""
    count = torch.tensor([0, 5, 70])
    a, b = integers(3, 70, 70), integers(3, 24, 70, seed=1)
    a = with_zeros(a, count, 2 if contracted else 1)
    clean = expected(a, b)
    if contracted:
        a, b = (x.masked_fill(beyond(count, 70, 32)[:, None], torch.nan) for x in (a, b))
    else:
        a = a.masked_fill(beyond(count, 70)[:, :, None], torch.nan)
    out = place.grouped.grouped(*(t.to(place.device) for t in (a, b, count)), contracted, "ieee")
    assert torch.equal(out.cpu(), clean)


def test_a_group_has_the_same_bits_whatever_the_others_have(place):
    a, b, count = torch.randn(4, 40, 70), torch.randn(4, 24, 70), torch.tensor([40, 7, 0, 33])
    a = with_zeros(a, count, 1)
    whole = place.grouped.grouped(*(t.to(place.device) for t in (a, b, count)), False, "ieee")
    few = place.grouped.grouped(*(t[[3, 1]].to(place.device) for t in (a, b, count)), False, "ieee")
    full = place.grouped.grouped(*(t.to(place.device) for t in (a, b, torch.full_like(count, 40))), False, "ieee")
    assert torch.equal(whole[[3, 1]], few)
    assert torch.equal(whole, full)


@given(
    sizes=st.tuples(st.integers(1, 4), *(st.integers(1, 40) for _ in range(3))),
    seed=st.integers(0, 99),
    contracted=st.booleans(),
)
def test_a_product_that_knows_what_is_filled_is_the_product(sizes, seed, contracted):
    groups, rows, columns, length = sizes
    count = ragged(groups, length if contracted else rows, seed)
    a = with_zeros(integers(groups, rows, length, seed=seed), count, 2 if contracted else 1)
    b, factor = integers(groups, columns, length, seed=seed + 1), torch.full((groups,), 0.5)
    for name in ("fp32", "bf16-rounded"):
        got = product(GEMMS[name], (a, b), (factor, None), Filled(count, contracted))
        assert torch.equal(got, product(GEMMS[name], (a, b), (factor, None)))
        assert torch.equal(got, 0.5 * expected(a, b))
