"""Numbers that quantizers learn: the clip alpha of an operand, one number for each lane and layer (PACT, 1805.06085).

    x' = clamp(x, -alpha, alpha)            what the layer takes for x, in all its products
    dL/dx     = dL/dx' where |x| < alpha, else 0
    dL/dalpha = Σ dL/dx' · sign(x) where |x| >= alpha

LSQ (1902.08153) learns the scale s of a tensor, x̂ = s · Q(x/s), with the largest element P. That is the same clip,
alpha = P s, with a term more, from what rounding does inside, and a factor:

    dL/dalpha = 1/sqrt(n P) · Σ dL/dx' · (sign(x) where |x| >= alpha, else (x̂ - x) / alpha)         over n elements

It is a parameter of the layer, [L, 1], beside its weight; `Clips` says how each lane's moves. A tensor scale follows
alpha in place of the largest element (`Use.clip`), so that the operand's range is [-alpha, alpha] whatever is in it.
Another number that a quantizer learns would be one more name here, with its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4dse.dse import STAGES, Recipe
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.outliers import LearnedClip, outlier_words
from fp4dse.kernels.autograd import Function
from fp4dse.kernels.ops.sums import wide_sum

Clips = Sequence[LearnedClip | None]
"""One a lane, None for lanes that learn none."""

PREFIX = "clip_"
"""Before the name of an operand: the parameter of a layer that is its clip."""
LEAST = 2.0**-100
"""No clip falls below it."""


def learned_clips(here: Sequence[Recipe]) -> dict[str, Clips]:
    """Operand -> the clips that lanes with these recipes learn for it; without operands for which no lane does."""
    found = {of: [recipe.slot(f"fprop.{of}").outliers for recipe in here] for of in STAGES["fprop"]}
    learned = {of: [o if isinstance(o, LearnedClip) else None for o in outliers] for of, outliers in found.items()}
    return {of: clips for of, clips in learned.items() if any(clips)}


class ClipParameter(nn.Parameter):
    """The clip of an operand, float32 [L, 1]. By this type, not by its name, it is known among a model's parameters.

    of_lanes   how each lane's moves
    """

    of_lanes: Clips


def clip_parameter(clips: Clips, operand: Tensor) -> ClipParameter:
    """The parameter before the first step, of an operand that begins as this one, [L, …]."""
    alpha = ClipParameter(starts(clips, operand))
    alpha.of_lanes = clips
    return alpha


def possible_clips(model: nn.Module) -> dict[str, ClipParameter | None]:
    """Name of each clip that the layers of a model may have -> the clip, None where no lane learns it. Which names
    there are, and their order, does not depend on the lanes."""
    layers = [(path, layer) for path, layer in model.named_modules() if hasattr(layer, "place")]
    found = {
        (f"{path}." if path else "") + PREFIX + operand: getattr(layer, PREFIX + operand, None)
        for path, layer in layers
        for operand in STAGES["fprop"]
    }
    return {name: of if isinstance(of, ClipParameter) else None for name, of in found.items()}


class Inside(NamedTuple):
    """LSQ's part of the gradient, of an operand. decoded: x -> x̂; unit: 1/sqrt(P), float32 [L, 1], zero in lanes that
    have PACT's."""

    decoded: Callable[[Tensor], Tensor]
    unit: Tensor


def starts(clips: Clips, operand: Tensor) -> Tensor:
    """The parameter before the first step, float32 [L, 1]; one in lanes that learn none. operand: [L, …], of which a
    start of `max` is the largest."""
    largest = operand.detach().abs().flatten(1).amax(1).tolist()
    begins = [clip.start if clip else 1.0 for clip in clips]
    found = [top if begin == "max" else begin for begin, top in zip(begins, largest, strict=True)]
    return torch.tensor(found, device=operand.device)[:, None].clamp(min=LEAST)


def refuse(clips: dict[str, Clips], why: str) -> None:
    """ConfigError for operands that learn a clip where nothing can hold it."""
    for operand, of_lanes in clips.items():
        found = next(clip for clip in of_lanes if clip is not None)
        raise ConfigError(f"fprop.{operand}.outliers", outlier_words(found), f"none, residual, occ, clamp ({why})")


class _Clipped(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, inside: Inside | None) -> Tensor:
        ctx.save_for_backward(x, alpha)
        ctx.inside = inside
        return _clamped(x, alpha)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, alpha = ctx.saved_tensors
        bound, inside = _beside(alpha, x), ctx.inside
        is_cut = x.abs() >= bound
        of_alpha = torch.where(is_cut, g * torch.sign(x), 0.0)
        if inside is not None:
            rounds = ~is_cut & _beside(inside.unit > 0, x)
            of_alpha = torch.where(rounds, g * (inside.decoded(x) - x) / bound, of_alpha)
        total = wide_sum(of_alpha.flatten(1), 1)[:, None]
        if inside is not None:
            total = total * torch.where(inside.unit > 0, inside.unit * x[0].numel() ** -0.5, 1.0)
        return torch.where(is_cut, 0.0, g), total, None


def clipped(x: Tensor, alpha: Tensor | None, inside: Inside | None = None) -> Tensor:
    """x [L, …] clamped to [-alpha, alpha] of its lane, in x's dtype, with the gradients above. alpha: float32 [L, 1];
    None: x itself. inside: None where no lane has LSQ's gradient."""
    return x if alpha is None else _Clipped.apply(x, alpha, inside)


def _clamped(x: Tensor, alpha: Tensor) -> Tensor:
    bound = _beside(alpha, x)
    return torch.clamp(x.to(torch.float32), -bound, bound).to(x.dtype)


def _beside(alpha: Tensor, x: Tensor) -> Tensor:
    """alpha [L, 1] with as many dimensions as x."""
    return alpha.view(len(alpha), *[1] * (x.dim() - 1))
