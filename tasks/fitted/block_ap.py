"""Block-AP (EfficientQAT, 2407.11062): all weights of a transformer block are trained together, and what quantizers
learn beside them, so that the quantized block has the outputs that the block has in BF16.

    loss = mean (block(x̂; W) - block₁₆(x))²

x is what reaches the block in BF16, and x̂ what reaches it through the quantized blocks before it. Gradients pass
straight through. Adam without weight decay, two epochs in batches of two samples, the rate falling by half a cosine to
a twentieth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp4dse.dse import ConfigError
from fp4dse.kernels import QuantLinear
from fp4dse.kernels.learned import ClipParameter
from fp4dse.kernels.ops.embedding import embedding
from fp4dse.tasks.engine.evaluation import evaluating
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.language.decoder import Decoder

EPOCHS, BATCH, FLOOR = 2, 2, 0.05
RATE_OF_LEARNED = 10.0
"""Rate of what quantizers learn, over that of weights (1e-4 over 1e-5)."""


class _Stream(NamedTuple):
    """The residual stream [1, S, T, D], and the branch that has yet to be added to it, None before the first block."""

    h: Tensor
    branch: Tensor | None

    def rows(self, index: Tensor) -> _Stream:
        return _Stream(self.h[:, index], None if self.branch is None else self.branch[:, index])

    def total(self) -> Tensor:
        return self.h.float() if self.branch is None else self.h.float() + self.branch.float()


def block_ap(population: Population, batches: Sequence[Any], rate: float) -> None:
    """Train the blocks of a population's one model, one after the other, on these inputs. ConfigError for models that
    are no decoders."""
    model = population.model
    if not isinstance(model, Decoder):
        raise ConfigError("--method", "block-ap", f"others for {population.task.name}, whose model is no decoder")
    tokens = torch.cat(list(batches), dim=1)
    start = _Stream(embedding(model.embed, tokens).to(population.numerics.dtype).detach(), None)
    in_bf16, quantized, every = start, start, torch.arange(tokens.shape[1], device=tokens.device)
    order = torch.Generator().manual_seed(population.lanes[0].seed)
    for block in model.blocks:
        with torch.no_grad(), evaluating(population, "bf16"):
            in_bf16 = _through(model, block, in_bf16)
        _train(population, block, quantized, in_bf16.total(), rate, order)
        with torch.no_grad(), evaluating(population, "quantized"):
            quantized = _through(model, block, quantized.rows(every))


def _train(
    population: Population, block: nn.Module, x: _Stream, wanted: Tensor, rate: float, order: torch.Generator
) -> None:
    layers = [layer for layer in block.modules() if isinstance(layer, QuantLinear)]
    learned = [p for layer in layers for p in layer.parameters() if isinstance(p, ClipParameter)]
    groups = [{"params": [layer.weight for layer in layers], "factor": 1.0}]
    groups += [{"params": learned, "factor": RATE_OF_LEARNED}] if learned else []
    optimizer = torch.optim.Adam(groups, lr=rate)
    samples = wanted.shape[1]
    steps = EPOCHS * -(-samples // BATCH)
    rows = torch.cat([torch.randperm(samples, generator=order) for _ in range(EPOCHS)]).split(BATCH)
    assert isinstance(population.model, Decoder)
    for step, of in enumerate(rows):
        for group in optimizer.param_groups:
            share = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = rate * group["factor"] * share
        index = of.to(wanted.device)
        with evaluating(population, "quantized"):
            made = _through(population.model, block, x.rows(index))
            loss = (made.total() - wanted[:, index]).square().mean()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
    optimizer.zero_grad()


def _through(model: Decoder, block: nn.Module, x: _Stream) -> _Stream:
    h, branch, _ = block(x.h, x.branch, model.cos, model.sin)
    return _Stream(h, branch)
