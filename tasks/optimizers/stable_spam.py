"""Stable-SPAM (arXiv 2502.17055), for lanes: Adam on gradients made steady, per parameter tensor.

    AdaClip   top    <- θ · top + (1 - θ) · max|g|       entries beyond top/(1 - θ^t) are scaled by that over max|g|
    AdaGN     norm   <- γ1 · norm + (1 - γ1) · ‖g‖       square <- γ2 · square + (1 - γ2) · ‖g‖²
              g      <- g/‖g‖ · (norm/(1 - γ1^t)) / (sqrt(square/(1 - γ2^t)) + eps)
    MoRet     in steps `reset`, 2 · `reset` …, the first step being one, t is set to one before Adam's part, which still
              has the momenta, and these are set to zero after it. This is the released code; the algorithm as printed
              sets them to zero before

The optional decay of β1 and γ1 over training is not built: the paper's runs do not use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.dse.optimizer import StableSPAM
from fp4dse.kernels import lane_sum
from fp4dse.kernels.ops.adamw import adam
from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.tasks.optimizers import adamw
from fp4dse.tasks.optimizers.hyperparameters import Numbers, Tensors

STATE = {**adamw.STATE, "top": "tensor", "norm": "tensor", "norm_square": "tensor"}


def columns(n: Numbers) -> dict[str, float]:
    """Constants of a lane."""
    o = n.optimizer
    assert isinstance(o, StableSPAM)
    shares = {"theta": o.theta, "gamma1": o.gamma1, "gamma2": o.gamma2}
    return {**adamw.columns(n), **shares, **{f"past_{name}": 1 - share for name, share in shares.items()}}


def row(step: int, n: Numbers) -> list[float]:
    """Numbers of a step, counted from zero: corrections of top, norm, its square and both momenta; one where momenta
    are set to zero."""
    o = n.optimizer
    assert isinstance(o, StableSPAM)
    count = step + 1
    since = count % o.reset  # steps since a reset, which sets t to one after the corrections of the gradient
    of_momenta = since + 1 if count >= o.reset else count
    t = of_momenta if since else min(count, o.reset + 1)
    corrections = [1 - share**t for share in (o.theta, o.gamma1, o.gamma2)]
    return [*corrections, 1 - n.beta1**of_momenta, 1 - n.beta2**of_momenta, float(not since)]


def update(
    g: Tensor, state: dict[str, Tensor], c: dict[str, Tensor], numbers: Sequence[Tensor], tensors: Tensors
) -> tuple[Tensor, dict[str, Tensor]]:
    """The update before the learning rate, [L, P], and the new state."""
    over_top, over_norm, over_square, correction1, correction2, reset = numbers
    sizes, per_element = list(tensors.sizes), tensors.per_element
    largest = torch.stack([part.abs().amax(dim=1) for part in g.split(sizes, 1)], dim=1)  # [L, T]
    top = state["top"] * c["theta"] + largest * c["past_theta"]
    limit = per_element(top / over_top)
    g = torch.where(g.abs() > limit, g / per_element(largest) * limit, g)

    length = torch.stack([sqrt(lane_sum(part * part, 1)) for part in g.split(sizes, 1)], dim=1)
    norm = state["norm"] * c["gamma1"] + length * c["past_gamma1"]
    square = state["norm_square"] * c["gamma2"] + length * length * c["past_gamma2"]
    wanted = norm / over_norm / (sqrt(square / over_square) + c["eps"])
    g = torch.where(per_element(length) > 0, g / per_element(length) * per_element(wanted), g)

    corrections = {**c, "correction1": correction1, "correction2": correction2}
    out, mean, raw = adam(g, state["mean"], state["square"], corrections)
    mean, raw = (torch.where(reset > 0, 0.0, moment) for moment in (mean, raw))
    return out, {"mean": mean, "square": raw, "top": top, "norm": norm, "norm_square": square}
