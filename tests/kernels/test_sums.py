"""A lane sum on a GPU has the bits of the tree of additions, whatever part of it a launch takes."""

import pytest
import torch

from fp4dse.kernels.ops.sums import divided, lane_mean, lane_sum, wide_sum


def same(here: torch.Tensor, there: torch.Tensor) -> bool:
    return here.shape == there.shape and torch.equal(here.cpu(), there)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 100, 1023, 3001])
def test_lane_sums(place, n):
    x = torch.randn(3, n, 5)
    for dim, turned in ((1, x), (2, x.mT), (1, x[:, :, 0]), (-1, x[:, :, 0])):
        assert same(place.sums.lane_sum(turned.to(place.device), dim), lane_sum(turned, dim))


@pytest.mark.parametrize("m", [16, 17, 40])
@pytest.mark.parametrize("n", [2, 16, 17, 100, 1023, 3001])
def test_sums_of_many_columns(place, monkeypatch, n, m):
    x = torch.randn(2, n, m)
    for little in (0, 1 << 21):
        monkeypatch.setattr(place.sums, "_LITTLE", little)
        assert same(place.sums.lane_sum(x.to(place.device), 1), lane_sum(x, 1))


@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 9, 5), (3, 5, 40), (2, 300, 17), (1, 2500, 2)])
def test_sums_of_bfloat16_are_those_of_the_same_numbers_in_float32(place, shape):
    x = torch.randn(shape).to(torch.bfloat16)
    expected = lane_sum(x.to(torch.float32), 1)
    assert torch.equal(wide_sum(x, 1), expected)
    assert same(place.sums.lane_sum(x.to(place.device), 1), expected)


def test_sums_of_more_rows_than_a_grid_has_in_its_second_dimension(place):
    x = torch.randn(70_001, 5)
    assert same(place.sums.lane_sum(x.to(place.device), 1), lane_sum(x, 1))


def test_sums_of_what_cannot_be_counted_in_31_bits(place, monkeypatch):
    monkeypatch.setattr(place.sums, "_FAR", 1)
    x = torch.randn(2, 9000, 3)
    assert same(place.sums.lane_sum(x.to(place.device), 1), lane_sum(x, 1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 524_288, 64), (64, 256, 192), (2, 1_000_003, 1), (3, 65_536, 3), (512, 64, 2048)]
)
def test_sums_as_large_as_those_of_training(place, shape):
    x = torch.randn(shape)
    assert same(place.sums.lane_sum(x.to(place.device), 1), lane_sum(x, 1))


def test_a_lane_sum_hands_its_gradient_to_every_term():
    x = torch.randn(2, 7, 3, requires_grad=True)
    (lane_sum(x, 1) * torch.arange(3)).sum().backward()
    assert torch.equal(x.grad, torch.arange(3.0).expand(2, 7, 3))


def test_a_total_is_divided_as_by_a_number_of_its_own():
    total = torch.randn(100, generator=torch.Generator().manual_seed(1)) * torch.exp2(torch.arange(100) * 2.5 - 140)
    total[:3] = torch.tensor([torch.inf, torch.nan, -0.0])
    for count in (1, 2, 3, 64, 100, 2**17):
        found, expected = divided(total, count), (total.double() / count).float()
        assert torch.equal(found.view(torch.int32)[2:], expected.view(torch.int32)[2:]), count
        assert torch.equal(found[:2].isnan(), expected[:2].isnan())


def test_the_mean_of_one_number_a_lane_is_that():
    x = torch.randn(3)
    assert lane_mean(x) is x
