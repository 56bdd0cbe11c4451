"""Tokens reach the experts that they chose, with static shapes, and come back with their weights."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fp4dse.dse import ConfigError, Recipe
from fp4dse.kernels import LaneNumerics, QuantLinear
from fp4dse.kernels.recompute import recomputed
from fp4dse.tasks.language.decoder import Shape
from fp4dse.tasks.language.experts import RATE, Experts, Mixture, dispatch, largest, shares


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Linear(nn.Module):
    """A plain product with a lane axis."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return torch.bmm(x, self.weight.mT)


TWO = Mixture()


class Each(nn.ModuleList):
    """Modules, one after the other."""

    def forward(self, x, _filled):
        return torch.stack([mlp(part) for mlp, part in zip(self, x.unbind(1), strict=True)], 1)


def model(count=4, width=6, lanes=3, chosen=slice(None), mixture=TWO):
    router = Linear(randn(lanes, count, width, seed=1)[chosen])
    mlps = Each(Linear(randn(lanes, width, width, seed=2 + e)[chosen]) for e in range(count))
    shared = Linear(randn(lanes, width, width, seed=99)[chosen]) if mixture.shared else None
    return Experts(router, mlps, shared, mixture)


def plain(moe, x):
    """Every expert on every token, weighted, in autograd's own operations."""
    tokens = x.flatten(1, 2)
    p = torch.softmax(moe.router(tokens), -1)
    top, chosen = p.topk(moe.mixture.chosen, dim=-1)
    weights = torch.zeros_like(p).scatter(2, chosen, top / top.sum(-1, keepdim=True))
    y = sum(mlp(tokens) * weights[..., e, None] for e, mlp in enumerate(moe.mlps))
    y = y + (moe.shared(tokens) if moe.shared else 0)
    share = torch.zeros_like(p).scatter(2, chosen, 1 / moe.mixture.chosen).mean(1)
    return y.view_as(x), (share * p.mean(1)).sum(1) * len(moe.mlps)


def gradients(moe, function, x):
    x = x.clone().requires_grad_()
    y, balance = function(x)
    ((y * (y * y - 0.3).detach()).sum() + 3 * balance.sum()).backward()
    out = [y.detach(), balance.detach(), x.grad, *(p.grad for p in moe.parameters())]
    moe.zero_grad()
    return out


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("more", [{"capacity": None}, {"capacity": 4.0, "shared": 6}])
def test_with_room_for_all_it_is_the_plain_mixture(count, more):
    moe, x = model(mixture=Mixture(chosen=count, **more)), randn(3, 2, 40, 6)
    for a, b in zip(gradients(moe, moe, x), gradients(moe, lambda x: plain(moe, x), x), strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1e-3)


def test_lanes_are_their_own():
    x = randn(3, 2, 40, 6)
    moe, few = model(), model(chosen=[2, 0])
    for a, b in zip(gradients(moe, moe, x), gradients(few, few, x[[2, 0]]), strict=True):
        assert torch.equal(a[[2, 0]], b)


@pytest.mark.parametrize("skew", [0.0, 5.0])
def test_every_choice_has_a_place_of_its_own_or_none(skew):
    logits = randn(2, 50, 4)
    logits[..., 0] += skew
    chosen = largest(logits, 2)
    room = Mixture().positions(50, 4)
    positions, tokens_of, choices_of, filled = dispatch(chosen, 4, room)
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
        assert int((tokens_of[lane] < 50).sum()) == len(taken) == int(filled[lane].sum())
        empty = (tokens_of[lane] == 50).view(4, room)
        assert torch.equal(empty, torch.arange(room) >= filled[lane][:, None])
    assert bool(dropped.any()) == (skew > 0)


def test_a_full_expert_drops_later_tokens_and_second_choices_first():
    chosen = torch.tensor([[[1, 0]] * 10 + [[0, 1]] * 20])
    room = Mixture().positions(30, 8)
    positions, _, _, _ = dispatch(chosen, 8, room)
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
    room = Mixture().positions(200, 4)
    assert kept.sum(1).tolist() == [room] * 2
    assert kept[:, :room].all()
    assert (balance > 1).all()


def test_balance_is_one_where_choices_and_probabilities_are_even():
    moe = model(lanes=2)
    moe.router.weight.data.zero_()
    _, balance = moe(randn(2, 1, 16, 6))
    assert balance.tolist() == [1, 1]


def test_the_largest_are_the_first_of_equal_ones():
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert largest(x, 2).tolist() == [[1, 2], [0, 1]]
    assert largest(x, 4).tolist() == [[1, 2, 3, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("tokens", [1, 16, 50, 200])
def test_without_a_capacity_nothing_is_dropped(tokens):
    chosen = torch.zeros(1, tokens, 1, dtype=torch.int64)  # all want the first
    room = Mixture(1, capacity=None).positions(tokens, 8)
    positions, _, _, filled = dispatch(chosen, 8, room)
    assert (positions < 8 * room).all()
    assert filled.tolist() == [[tokens] + [0] * 7]
    assert room < tokens + 16


def test_more_room_than_tokens_is_not_made():
    assert Mixture(4, capacity=8.0).positions(48, 8) == Mixture(4, capacity=None).positions(48, 8) == 48


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"chosen": 5}, "chosen: found 5"),
        ({"chosen": 1}, "accepted: 2 to 4"),
        ({"capacity": 0.0}, "capacity"),
        ({"shared": -5}, "shared: found -5; accepted: a width above 0, or 0 for no MLP"),
        ({"balance": "x"}, "balance: found 'x'; accepted: loss or bias"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(wrong, said):
    """By itself, and before there are weights of a model with it."""
    with pytest.raises(ConfigError, match=said):
        Mixture(**wrong).check(4)
    with pytest.raises(ConfigError, match=said):
        Shape(32, 32, 1, 2, 32, 4, mixture=Mixture(**wrong)).initial(16, [0])


# --- biases in place of a loss -----------------------------------------------------------------------------------


def biased(lanes=2, recipes=None):
    numerics = LaneNumerics(recipes or [Recipe.named("bf16")] * lanes, range(lanes))
    router = QuantLinear(randn(lanes, 4, 6, seed=1), None, numerics, 0)
    return Experts(
        router, Each(nn.Identity() for _ in range(4)), None, Mixture(balance="bias", capacity=None)
    ), numerics


def test_biases_move_by_the_sign_of_what_an_expert_lacks():
    moe, _ = biased()
    x = randn(2, 2, 40, 6)
    first = largest(torch.softmax(moe.router(x.flatten(1, 2)), -1), 2)
    _, balance = moe(x)
    assert balance is None
    assert torch.equal(moe.bias, RATE * torch.sign(0.25 - shares(first, 4)))
    assert dict(moe.named_buffers())["bias"] is moe.bias  # part of what is stored


def test_biases_rest_in_lanes_that_keep_the_weights_that_they_start_from():
    plain = Recipe.named("bf16")
    still = replace(plain, training=replace(plain.training, trains="none"))
    moe, _ = biased(recipes=[plain, still])
    moe(randn(2, 2, 40, 6))
    assert moe.bias[0].any()
    assert not moe.bias[1].any()


def test_biases_decide_who_is_chosen_and_not_with_which_weight():
    moe, numerics = biased()
    numerics.training = False
    moe.bias.copy_(torch.tensor([0.0, 0.0, 9.0, 9.0]).expand(2, 4))
    x = randn(2, 1, 40, 6)
    assert (moe(x)[0] - x).abs().max() < 1e-6  # weights of identities have a sum of one
    assert set(moe.chosen(torch.softmax(randn(2, 40, 4), -1)).unique().tolist()) == {2, 3}


def test_biases_rest_under_evaluation_and_in_later_parts_of_a_batch():
    moe, numerics = biased()
    x = randn(2, 1, 40, 6)
    numerics.part = 1
    moe(x)
    numerics.part, numerics.training = 0, False
    moe(x)
    assert not moe.bias.any()


def test_a_pass_that_is_made_again_chooses_as_the_first_and_moves_no_bias():
    x = randn(2, 1, 40, 6)
    found = []
    for again in (False, True):
        moe, numerics = biased()
        moe.bias.copy_(torch.tensor([0.0, 5e-4, 0.0, -5e-4]).expand(2, 4))
        inputs = x.clone().requires_grad_()
        y, _ = recomputed(moe, numerics, inputs) if again else moe(inputs)
        (y * y).sum().backward()
        found.append((y.detach(), moe.bias.clone(), inputs.grad, moe.router.weight.grad))
    assert all(map(torch.equal, *found))


def test_biases_spread_what_a_skewed_router_sends():
    moe, _ = biased()
    moe.router.weight.data[:, 0] += 0.05
    x = randn(2, 1, 400, 6)
    x[..., 0] = x[..., 0].abs() + 1
    p = torch.softmax(moe.router(x.flatten(1, 2)), -1)
    before = shares(largest(p, 2), 4)
    for _ in range(400):
        moe(x)
    after = shares(largest(p + moe.bias[:, None], 2), 4)
    assert ((after - 0.25).abs().amax(1) < 0.5 * (before - 0.25).abs().amax(1)).all()
