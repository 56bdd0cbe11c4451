"""Denoising diffusion (2006.11239): what a model is given, what it must say, and how images come out of it.

    x_t = sqrt(ᾱ_t) x_0 + sqrt(1 - ᾱ_t) ε,   ᾱ_t = Π_{s <= t} (1 - β_s),   β linear from 1e-4 to 0.02 over 1,000 times

The model sees x_t and t and predicts ε; the loss is the squared error. Images are scaled to [-1, 1]. Sampling steps
through a subset of the times (2010.02502): from t to an earlier u,

    x̂_0 = clip((x_t - sqrt(1 - ᾱ_t) ε̂) / sqrt(ᾱ_t)),   ε̂ from x̂_0 anew,
    x_u = sqrt(ᾱ_u) x̂_0 + sqrt(1 - ᾱ_u - σ²) ε̂ + σ z,   σ² = η² (1 - ᾱ_u)/(1 - ᾱ_t) · (1 - ᾱ_t/ᾱ_u)

which is DDPM's ancestral sampling for η = 1 and deterministic (DDIM) for η = 0. Times, noise and z are of the seed and
the step, so every recipe of a seed meets the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from fp4dse.tasks.data.images import Images
from fp4dse.tasks.draws import Draws

TIMES = 1000
BETAS = (1e-4, 0.02)
PASS = 128
"""Samples of a lane in one pass of the sampler: part of the definition, because a tensor scale is taken over a pass."""


@cache
def alpha_bar() -> tuple[float, ...]:
    """ᾱ_t for t = 0 … TIMES - 1: the share of the image's variance that is left."""
    first, last = BETAS
    share, shares = 1.0, []
    for t in range(TIMES):
        share *= 1 - (first + (last - first) * t / (TIMES - 1))
        shares.append(share)
    return tuple(shares)


@cache
def _roots(device: torch.device) -> tuple[Tensor, Tensor]:
    """sqrt(ᾱ_t) and sqrt(1 - ᾱ_t), float32 [TIMES]."""
    shares = torch.tensor(alpha_bar(), dtype=torch.float64)
    return shares.sqrt().float().to(device), (1 - shares).sqrt().float().to(device)


@cache
def _half(data: Callable[[], Images], device: torch.device) -> Tensor:
    return torch.tensor(data().top / 2, device=device)


def noised(data: Callable[[], Images], x: Tensor, _y: Tensor, draws: Draws) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Pixels uint8 [L, B, H, W, C] -> ((x_t, t int64 [L, B]), ε): a time and a noise for each image."""
    images = x.to(torch.float32) / _half(data, x.device) - 1.0
    times = draws.integers(0, TIMES, x.shape[1])
    noise = draws.normal(1, *x.shape[1:])
    image_part, noise_part = (root[times][:, :, None, None, None] for root in _roots(x.device))
    return (image_part * images + noise_part * noise, times), noise


def times_of(steps: int) -> list[int]:
    """Evenly spaced times, the last first; TIMES - 1 and 0 are among them."""
    if steps == 1:
        return [TIMES - 1]
    return [round(i * (TIMES - 1) / (steps - 1)) for i in range(steps)][::-1]


@torch.no_grad()
def sample(
    model: nn.Module, draws: Draws, shape: tuple[int, int, int], count: int, steps: int, eta: float = 0.0
) -> Tensor:
    """`count` images of each lane in [-1, 1], float32 [L, count, H, W, C]. Every pass of the model is a step of its own
    for stochastic rounding."""
    images = []
    for number, first in enumerate(range(0, count, PASS)):
        size = (min(PASS, count - first), *shape)
        x = draws.normal(2 * number + 2, *size)
        times = times_of(steps)
        for t, u in zip(times, [*times[1:], None], strict=True):
            at = torch.full(x.shape[:2], t, dtype=torch.int64, device=x.device)
            clean, noise = _split_prediction(x, model((x, at)).to(torch.float32), t)
            draws.step.add_(1)
            x = clean if u is None else _next_sample(clean, noise, t, u, eta, draws, 2 * number + 3)
        images.append(x)
    return torch.cat(images, dim=1)


def _split_prediction(x: Tensor, noise: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """x̂_0 within [-1, 1], and the noise that it implies. By factors: a GPU divides by a number with its inverse."""
    share = alpha_bar()[t]
    clean = torch.clamp((x - noise * math.sqrt(1 - share)) * (1 / math.sqrt(share)), -1.0, 1.0)
    return clean, (x - clean * math.sqrt(share)) * (1 / math.sqrt(1 - share))


def _next_sample(clean: Tensor, noise: Tensor, t: int, u: int, eta: float, draws: Draws, site: int) -> Tensor:
    share, wanted = alpha_bar()[t], alpha_bar()[u]
    variance = eta**2 * (1 - wanted) / (1 - share) * (1 - share / wanted)
    x = clean * math.sqrt(wanted) + noise * math.sqrt(1 - wanted - variance)
    return x + draws.normal(site, *x.shape[1:]) * math.sqrt(variance) if eta else x
