"""Groups of rows are multiplied in one launch, as far as they are filled."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.kernels.gemm import GEMMS, Filled, product
from fp4dse.kernels.ops.grouped import grouped


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
def test_what_is_empty_is_not_read(place, contracted):
    count = torch.tensor([0, 5, 20])
    a, b = integers(3, 20, 20), integers(3, 24, 20, seed=1)
    clean = expected(with_zeros(a, count, 2 if contracted else 1), b)
    empty = torch.arange(20) >= count[:, None]
    a.masked_fill_(empty.unsqueeze(1 if contracted else 2), torch.nan)
    if contracted:
        b.masked_fill_(empty.unsqueeze(1), torch.nan)
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
