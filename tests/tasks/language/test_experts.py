"""Tokens reach the experts that they chose, with static shapes, and come back with their weights."""

import pytest
import torch
from torch import nn

from fp4dse.tasks.language import experts
from fp4dse.tasks.language.experts import Experts, capacity, dispatch, two_largest


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Linear(nn.Module):
    """A plain product with a lane axis."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return torch.bmm(x, self.weight.mT)


def model(count=4, width=6, lanes=3, chosen=slice(None)):
    router = Linear(randn(lanes, count, width, seed=1)[chosen])
    return Experts(router, nn.ModuleList(Linear(randn(lanes, width, width, seed=2 + e)[chosen]) for e in range(count)))


def plain(moe, x):
    """Every expert on every token, weighted, in autograd's own operations."""
    tokens = x.flatten(1, 2)
    p = torch.softmax(moe.router(tokens), -1)
    top, chosen = p.topk(2, dim=-1)
    weights = torch.zeros_like(p).scatter(2, chosen, top / top.sum(-1, keepdim=True))
    y = sum(mlp(tokens) * weights[..., e, None] for e, mlp in enumerate(moe.mlps))
    share = torch.zeros_like(p).scatter(2, chosen, 0.5).mean(1)
    return y.view_as(x), (share * p.mean(1)).sum(1) * len(moe.mlps)


def gradients(moe, function, x):
    x = x.clone().requires_grad_()
    y, balance = function(x)
    ((y * (y * y - 0.3).detach()).sum() + 3 * balance.sum()).backward()
    out = [y.detach(), balance.detach(), x.grad, *(p.grad for p in moe.parameters())]
    moe.zero_grad()
    return out


def test_with_room_for_all_it_is_the_plain_mixture(monkeypatch):
    monkeypatch.setattr(experts, "CAPACITY", 2.0)  # of four experts: every token
    moe, x = model(), randn(3, 2, 40, 6)
    for a, b in zip(gradients(moe, moe, x), gradients(moe, lambda x: plain(moe, x), x), strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_lanes_are_their_own():
    x = randn(3, 2, 40, 6)
    moe, few = model(), model(chosen=[2, 0])
    for a, b in zip(gradients(moe, moe, x), gradients(few, few, x[[2, 0]]), strict=True):
        assert torch.equal(a[[2, 0]], b)


@pytest.mark.parametrize("skew", [0.0, 5.0])
def test_every_choice_has_a_place_of_its_own_or_none(skew):
    logits = randn(2, 50, 4)
    logits[..., 0] += skew
    chosen = two_largest(logits)
    room = capacity(50, 4)
    positions, tokens_of, choices_of = dispatch(chosen, 4)
    dropped = positions == 4 * room
    for lane in range(2):
        taken = positions[lane][~dropped[lane]]
        assert len(set(taken.tolist())) == len(taken)
        for token in range(50):
            for n in range(2):
                if not dropped[lane, token, n]:
                    at = positions[lane, token, n]
                    assert at // room == chosen[lane, token, n]
                    assert (tokens_of[lane, at], choices_of[lane, at]) == (token, 2 * token + n)
        assert int((tokens_of[lane] < 50).sum()) == len(taken)
    assert bool(dropped.any()) == (skew > 0)


def test_a_full_expert_drops_later_tokens_and_second_choices_first():
    chosen = torch.tensor([[[1, 0]] * 10 + [[0, 1]] * 20])
    room = capacity(30, 8)
    positions, _, _ = dispatch(chosen, 8)
    assert room == 16
    assert (positions[0, :10, 0] == torch.arange(16, 26)).all()
    assert (positions[0, 10:26, 0] == torch.arange(16)).all()
    assert (positions[0, 26:, 0] == 8 * room).all()  # first choices that come too late
    assert (positions[0, :10, 1] == 8 * room).all()  # expert 0 is full of first choices
    assert (positions[0, 10:16, 1] == torch.arange(26, 32)).all()
    assert (positions[0, 16:, 1] == 8 * room).all()


def test_a_token_without_a_place_is_left_as_zero():
    x = randn(1, 1, 1, 6).expand(2, 1, 200, 6).contiguous()  # all choose the same two
    y, balance = model(lanes=2)(x)
    kept = y.abs().amax(-1)[:, 0] > 0
    assert kept.sum(1).tolist() == [capacity(200, 4)] * 2
    assert kept[:, : capacity(200, 4)].all()
    assert (balance > 1).all()


def test_balance_is_one_where_choices_and_probabilities_are_even():
    moe = model(lanes=2)
    moe.router.weight.data.zero_()
    _, balance = moe(randn(2, 1, 16, 6))
    assert balance.tolist() == [1, 1]


def test_the_two_largest_are_the_first_of_equal_ones():
    assert two_largest(torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])).tolist() == [[1, 2], [0, 1]]
