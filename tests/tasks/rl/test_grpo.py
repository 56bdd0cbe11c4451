"""Advantages and loss are those of TRL's trainer (GRPOTrainer, loss type bnpo), written out here number by number."""

import math

import pytest
import torch

from fp4dse.kernels import lane_mean
from fp4dse.tasks.rl.grpo import Clip, Target, advantages, is_clipped, k3, log_probability, share_of, token_loss

L, B, T, V = 2, 6, 5, 7


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_advantages_are_relative_to_the_group():
    rewards = (randn(L, 3, 4) > 0).float()
    found = advantages(rewards)
    for lane in range(L):
        for group in range(3):
            r = rewards[lane, group].tolist()
            mean = sum(r) / 4
            std = math.sqrt(sum((x - mean) ** 2 for x in r) / 3)  # torch.std
            expected = [(x - mean) / (std + 1e-4) for x in r]
            assert found[lane, group].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_group_of_one_reward_teaches_nothing():
    assert advantages(torch.ones(1, 2, 8)).abs().max() == 0


def target_of(log_p, kl=0.0):
    counts = torch.arange(T) < torch.tensor([[1, 5, 2, 3, 4, 5], [5, 5, 5, 1, 1, 1]])[..., None]
    noise = [0.3 * randn(L, B, T, seed=seed) for seed in (1, 2)]
    tokens = torch.randint(V, (L, B, T), generator=torch.Generator().manual_seed(3))
    advantage = randn(L, B, 1, seed=4).expand(L, B, T)
    weight = (0.2 * randn(L, B, T, seed=5)).exp()
    held = torch.full((L, B, 1 if kl else 0), kl)
    return counts, Target(tokens, log_p + noise[0], log_p + noise[1], advantage, weight, share_of(counts), held)


def trl(log_p, target, counts, clip):
    """Lane by lane, token by token, in Python's numbers."""
    out = []
    for lane in range(L):
        total, number = 0.0, 0
        for b in range(B):
            for t in range(T):
                if not counts[lane, b, t]:
                    continue
                old, ref, a, w = (
                    x[lane, b, t].item() for x in (target.log_old, target.log_ref, target.advantage, target.weight)
                )
                new = log_p[lane, b, t].item()
                ratio = math.exp(new - old)
                bounded = min(max(ratio, 1 - clip.low), 1 + clip.high)
                loss = -min(ratio * a, bounded * a) * w
                loss += clip.kl * (math.exp(ref - new) - (ref - new) - 1)
                total, number = total + loss, number + 1
        out.append(total / number)
    return out


@pytest.mark.parametrize("clip", [Clip(), Clip(high=0.28), Clip(low=0.1, high=0.3, kl=0.04)])
def test_the_loss_is_trls(clip):
    log_p = -randn(L, B, T).abs()
    counts, target = target_of(log_p, clip.kl)
    found = lane_mean(token_loss(log_p, target, clip))
    assert found.tolist() == pytest.approx(trl(log_p, target, counts, clip), rel=1e-5)


@pytest.mark.parametrize("clip", [Clip(), Clip(low=0.1, high=0.3, kl=0.04)])
def test_its_gradient_is_that_of_the_formula(clip):
    """By differences of the formula's value."""
    log_p = -randn(L, B, T).abs()
    counts, target = target_of(log_p, clip.kl)
    leaf = log_p.clone().requires_grad_()
    lane_mean(token_loss(leaf, target, clip)).sum().backward()
    for at in [(0, 1, 2), (1, 0, 0), (1, 2, 4), (0, 0, 3)]:
        step = torch.zeros_like(log_p)
        step[at] = 1e-3
        ends = [sum(trl(log_p + sign * step, target, counts, clip)) for sign in (1, -1)]
        assert leaf.grad[at].item() == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=2e-2, abs=2e-5)


def test_a_lane_without_a_hold_has_its_own_bits_beside_one_that_has_it():
    """And nothing of a reference that is beyond all numbers."""
    log_p = -randn(L, B, T).abs()
    _, plain = target_of(log_p)
    _, held = target_of(log_p, 0.5)
    held.kl[0] = 0.0
    held.log_ref[0] = 1e4
    leaves = [log_p.clone().requires_grad_() for _ in range(2)]
    losses = [token_loss(leaf, target, Clip()) for leaf, target in zip(leaves, (plain, held), strict=True)]
    for loss in losses:
        loss.sum().backward()
    assert torch.equal(losses[0][0], losses[1][0])
    assert torch.equal(leaves[0].grad[0], leaves[1].grad[0])
    assert not torch.equal(losses[0][1], losses[1][1])


def test_clipped_tokens_are_those_without_a_gradient():
    log_p = -randn(L, B, T).abs()
    counts, target = target_of(log_p)
    leaf = log_p.clone().requires_grad_()
    token_loss(leaf, target, Clip()).sum().backward()
    assert torch.equal(is_clipped(log_p, target, Clip()) & counts, (leaf.grad == 0) & counts)


def test_what_lies_behind_an_end_counts_for_nothing_even_if_it_is_not_finite():
    log_p = -randn(L, B, T).abs()
    counts, target = target_of(log_p)
    wild = torch.where(counts, log_p, torch.inf).requires_grad_()
    loss = token_loss(wild, target, Clip())
    assert torch.equal(loss, token_loss(log_p, target, Clip()))


def test_log_probabilities_are_of_the_last_tokens():
    logits, tokens = randn(L, B, T + 3, V), torch.randint(V, (L, B, T))
    found = log_probability(logits, tokens)
    for t in range(T):
        of = torch.log_softmax(logits[1, 2, 3 + t].double(), 0)[tokens[1, 2, t]]
        assert found[1, 2, t].item() == pytest.approx(of.item(), rel=1e-5)


def test_k3_estimates_the_divergence():
    """Its mean under p is KL(p, q), to rounding, summed over all outcomes."""
    p, q = (torch.softmax(randn(V, seed=seed).double(), 0) for seed in (0, 1))
    log_ratio = (q / p).log()
    assert (p * k3(log_ratio)).sum().item() == pytest.approx((p * -log_ratio).sum().item(), rel=1e-9)
    assert k3(log_ratio).min() >= 0
