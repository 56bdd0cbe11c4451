"""Noise on the parameters of the policy that samples: adaptive quantization noise (`dse.noise.Noise` says of what).

It is drawn by (seed, step), once a rollout: all answers of a rollout come from one policy. The policy that learns, and
that answers held-out problems, is without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.dse.noise import Noise
from fp4dse.kernels import QuantLinear, lane_mean
from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.language.decoder import Block, Decoder

SITE = 1024
"""The first of the draws; there is one for each parameter."""


class ParameterNoise:
    """The noise of lanes, one Noise or None a lane. steps: of the training; every: steps between two rollouts."""

    def __init__(self, noises: Sequence[Noise | None], model: Decoder, steps: int, every: int, draws: Draws) -> None:
        self.model, self.every, self.draws = model, every, draws
        rollouts, device = -(-steps // every), draws.seeds.device
        sizes = {of: [[0.0] * rollouts for _ in noises] for of in ("norms", "weights")}
        for lane, noise in enumerate(noises):
            if noise:
                sizes[noise.of][lane] = noise.sizes(rollouts)
        self.sizes = {noise.of: torch.tensor(sizes[noise.of], device=device) for noise in noises if noise}
        """Kind of parameter -> the noise of each rollout, [L, rollouts]."""

    def drawn(self) -> dict[str, Tensor]:
        """Name of a parameter -> its value with the noise of the present step, for the parameters that have any."""
        number = (self.draws.step // self.every).view(1)
        size = {of: sizes.index_select(1, number)[:, 0] for of, sizes in self.sizes.items()}
        norms, weights = parameters(self.model)
        out = {}
        for site, (name, value) in enumerate((norms | weights).items(), SITE):
            of = "norms" if name in norms else "weights"
            if of in size:
                scale = size[of] if of == "norms" else size[of] * sqrt(lane_mean(value * value))
                noise = self.draws.normal(site, *value.shape[1:])
                out[name] = value + scale.view(-1, *[1] * (value.ndim - 1)) * noise
        return out


def parameters(model: Decoder) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gains of the norms of blocks, and weights of their products, by name."""
    norms: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        norms |= {f"{number}.norm1": block.norm1.detach(), f"{number}.norm2": block.norm2.detach()}
        for name, layer in block.named_modules():
            if isinstance(layer, QuantLinear):
                weights[f"{number}.{name}"] = layer.weight.detach()
    return norms, weights
