"""Group-relative policy optimization (GRPO, 2402.03300) with the changes of DAPO (2503.14476) that are one number each.

    A_i  = (r_i - mean r) / (std r + 1e-4)                  over the samples of one prompt, std with G - 1
    ρ    = π(token) / π_old(token)
    loss = -w min(ρ A, clip(ρ, 1 - low, 1 + high) A) + kl (π_ref/π - log π_ref/π - 1)
    w    = min(π_old / π_rollout, tis)                      truncated importance sampling

averaged over the tokens of a minibatch (token-level), whatever the lengths of answers. π_old is the trainer's own
forward pass at the time of the rollout. Formulas are those of TRL's trainer (loss type bnpo).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.kernels import lane_sum
from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.kernels.ops.sums import divided

EPS = 1e-4


class Clip(msgspec.Struct, frozen=True):
    """Numbers of the loss. low, high: bounds of ρ below and above 1; DAPO's clip-higher has high = 0.28. kl: weight of
    the divergence from the base policy, of lanes whose recipes have none (`training.kl`)."""

    low: float = 0.2
    high: float = 0.2
    kl: float = 0.0


class Target(NamedTuple):
    """Of answers, in the order of their tokens: [L, B, T] each, int64 tokens, else float32.

    log_old     log π_old
    log_ref     log π_ref, zeros where the loss does not use it
    advantage   of the answer, in each of its tokens
    weight      w
    share       tokens of a minibatch over those that count, 0 for tokens behind an answer's end: the mean over all
                tokens is that over those that count
    kl          its weight, of each lane, in each of its answers: [L, B, 1], or [L, B, 0] where no lane has one
    """

    tokens: Tensor
    log_old: Tensor
    log_ref: Tensor
    advantage: Tensor
    weight: Tensor
    share: Tensor
    kl: Tensor


def advantages(rewards: Tensor) -> Tensor:
    """A of rewards float32 [L, prompts, samples]."""
    samples = rewards.shape[2]
    away = rewards - divided(lane_sum(rewards, 2), samples)[..., None]
    std = sqrt(divided(lane_sum(away * away, 2), samples - 1))[..., None]
    return away / (std + EPS)


def share_of(counts: Tensor) -> Tensor:
    """`Target.share` of tokens that count, bool [L, B, T], in a minibatch of these B answers."""
    number = counts.flatten(1).sum(dim=1)  # of integers: any order
    each = torch.full_like(number, counts[0].numel(), dtype=torch.float32) / number.to(torch.float32)
    return torch.where(counts, each[:, None, None], 0.0)


def log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """log π of tokens [L, B, T], of the same shape, by the last T rows of logits [L, B, ·, V]: row t is of token t."""
    last = logits[:, :, -tokens.shape[2] :]
    return F.log_softmax(last, dim=-1).gather(-1, tokens[..., None])[..., 0]


def token_loss(log_p: Tensor, target: Target, clip: Clip) -> Tensor:
    """The loss of each token, [L, B, T], times its share."""
    ratio = (log_p - target.log_old).exp()
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = -torch.minimum(ratio * target.advantage, clipped * target.advantage) * target.weight
    if target.kl.shape[2]:
        has = target.kl > 0
        away = torch.where(has, target.log_ref - log_p, 0.0)  # a lane without it gets nothing of it, NaN neither
        loss = torch.where(has, loss + target.kl * k3(away), loss)
    return torch.where(target.share > 0, loss * target.share, 0.0)


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - d - 1 for d = log q/p at draws from p: an estimate of KL(p, q) that is never negative."""
    return log_ratio.exp() - log_ratio - 1


def is_clipped(log_p: Tensor, target: Target, clip: Clip) -> Tensor:
    """True for tokens whose ratio is beyond the bound that their advantage has, so that they have no gradient."""
    ratio = (log_p - target.log_old).exp()
    above = (ratio > 1 + clip.high) & (target.advantage > 0)
    return above | (ratio < 1 - clip.low) & (target.advantage < 0)
