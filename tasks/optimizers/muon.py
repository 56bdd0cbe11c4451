"""Muon (kellerjordan.github.io/posts/muon, arXiv 2502.16982), for lanes: momentum made orthogonal.

    mean    <- μ · mean + (1 - μ) · g
    ahead    = μ · mean + (1 - μ) · g               with Nesterov momentum, else the mean
    X        = ahead / max(‖ahead‖, 1e-7)           five times:  A = X Xᵀ,  X <- a · X + (b · A + c · A²) X
    update   = X · scale(outputs, inputs) · gain    scale: dse.optimizer.MUON_SCALES

The iteration (Newton–Schulz, with the coefficients of its users) moves the singular values of a matrix to about 1. It
is for the weights of hidden layers: all products but the embedding's and the head's. A convolution's is the matrix of
its product, outputs times the rest, as in the author's code; queries, keys and values are one matrix where the model
has them as one. Embeddings, head, biases, norms and positions are updated by AdamW. Weight decay is decoupled, at the
rate of the lane.

X, A and b · A + c · A² are rounded to BF16 where its users round them, and sums are FP32. X is rounded before both of
its uses: were the term a · X left in FP32, its rounding in the other term would no longer cancel. Matrices of one shape
are a batch over layers and lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from fp4dse.dse.optimizer import MUON_SCALES, Muon
from fp4dse.kernels import lane_sum
from fp4dse.kernels.ops.adamw import adam
from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.kernels.ops.products import bf16
from fp4dse.kernels.quant.spec.grid import round_bf16
from fp4dse.tasks.optimizers import adamw
from fp4dse.tasks.optimizers.hyperparameters import Numbers, Tensors

STATE = {"momentum": "hidden", "mean": "other", "square": "other"}
COEFFICIENTS = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
LEAST_NORM = 1e-7


def columns(n: Numbers) -> dict[str, float]:
    """Constants of a lane; of each scale whether it is the lane's, times the gain."""
    o = n.optimizer
    assert isinstance(o, Muon)
    ahead = (
        {"of_mean": o.momentum, "of_gradient": 1 - o.momentum} if o.nesterov else {"of_mean": 1.0, "of_gradient": 0.0}
    )
    scales = {name: o.gain * (name == o.scale) for name in MUON_SCALES}
    return {**adamw.columns(n), "momentum": o.momentum, "past": 1 - o.momentum, **ahead, **scales}


row = adamw.row


def update(
    g: Tensor, state: dict[str, Tensor], c: dict[str, Tensor], numbers: Sequence[Tensor], tensors: Tensors
) -> tuple[Tensor, dict[str, Tensor]]:
    """The update before the learning rate, [L, P], and the new state."""
    parts = dict(enumerate(g.split(list(tensors.sizes), 1)))
    hidden = {i: shape for i, shape in enumerate(tensors.matrices) if shape}
    others = [i for i in parts if i not in hidden]

    def gathered(of: Sequence[int]) -> Tensor:
        return torch.cat([g[:, :0], *(parts[i] for i in of)], dim=1)

    own = {**c, "correction1": numbers[0], "correction2": numbers[1]}
    out, mean, square = adam(gathered(others), state["mean"], state["square"], own)
    parts.update(zip(others, out.split([tensors.sizes[i] for i in others], 1), strict=True))

    gradient = gathered(list(hidden))
    momentum = state["momentum"] * c["momentum"] + gradient * c["past"]
    ahead = momentum * c["of_mean"] + gradient * c["of_gradient"]
    matrices = dict(zip(hidden, ahead.split([tensors.sizes[i] for i in hidden], 1), strict=True))
    for shape in dict.fromkeys(hidden.values()):
        same = [i for i, of in hidden.items() if of == shape]
        stacked = torch.stack([matrices[i].reshape(-1, *shape) for i in same], dim=1)  # [L, n, outputs, inputs]
        made = orthogonal(stacked.flatten(0, 1)).reshape(len(g), len(same), -1)
        scale = reduce(torch.add, [c[name] * rule(*shape) for name, rule in MUON_SCALES.items()])
        parts.update(zip(same, (made * scale[:, :, None]).unbind(1), strict=True))
    return torch.cat(list(parts.values()), dim=1), {"momentum": momentum, "mean": mean, "square": square}


def orthogonal(x: Tensor) -> Tensor:
    """Matrices [B, outputs, inputs] with the singular vectors of x and singular values of about 1."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT.contiguous()).mT
    a, b, c = COEFFICIENTS
    norm = sqrt(lane_sum((x * x).flatten(1), 1)).clamp(min=LEAST_NORM)
    x = round_bf16(x / norm[:, None, None])
    for _ in range(ITERATIONS):
        gram = round_bf16(bf16(x, x))
        x = round_bf16(x * a + bf16(gram * b + bf16(gram, gram) * c, x.mT))
    return x
