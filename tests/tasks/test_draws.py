import torch

from fp4dse.tasks.draws import Draws


def draws(seeds, step=3):
    return Draws(torch.tensor(seeds), torch.tensor(step))


def test_a_lane_draws_the_same_in_any_company():
    alone, among = draws([7, 7]), draws([1, 7, 9])
    assert torch.equal(alone.normal(0, 5, 3)[0], among.normal(0, 5, 3)[1])
    assert torch.equal(alone.integers(1, 1000, 11)[0], among.integers(1, 1000, 11)[1])


def test_seeds_steps_and_sites_draw_differently():
    base = draws([7]).normal(0, 64)
    for other in (draws([8]).normal(0, 64), draws([7], 4).normal(0, 64), draws([7]).normal(1, 64)):
        assert not torch.equal(base, other)


def test_normals_have_mean_0_and_variance_1():
    x = draws([0]).normal(0, 200_000).double()
    assert abs(x.mean()) < 4 / 200_000**0.5
    assert abs(x.var() - 1) < 4 * (2 / 200_000) ** 0.5


def test_integers_are_uniform():
    counts = torch.bincount(draws([0]).integers(0, 10, 100_000)[0], minlength=10)
    assert len(counts) == 10
    assert ((counts - 10_000).abs() < 5 * 95).all()  # standard deviation 95
