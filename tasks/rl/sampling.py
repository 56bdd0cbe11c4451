"""Answers of a decoder, token by token: keys and values of earlier tokens are kept, all lanes and samples go at once.

Shapes are static and positions are known beforehand, so that a rollout can be captured as one CUDA graph. A token is
the largest of logits + Gumbel noise, which is a draw from their softmax; the noise comes from counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.kernels import LaneNumerics, QuantLinear, lane_sum
from fp4dse.kernels.experts import expert_products
from fp4dse.kernels.ops import elementary, philox
from fp4dse.kernels.ops.attention import attention
from fp4dse.kernels.ops.embedding import embedding
from fp4dse.kernels.ops.products import bf16
from fp4dse.kernels.ops.rms_norm import added_rms_norm
from fp4dse.kernels.ops.swiglu import swiglu
from fp4dse.tasks.draws import STREAM, Draws
from fp4dse.tasks.language.decoder import Block, Decoder, Mlp, Mlps
from fp4dse.tasks.language.experts import Experts
from fp4dse.tasks.rl.kv_cache import CacheFormats


class Sampled(NamedTuple):
    """Answers, int64 [L, B, T]; the log-probability of each of their tokens, and the entropy of what it was drawn from,
    float32 [L, B, T]; and the experts that the tokens that were read went to (the prompt's and all answered ones but
    the last), int64 [L, B, P + T - 1, depth, k], None without experts."""

    answers: Tensor
    log_p: Tensor
    entropy: Tensor
    routes: Tensor | None = None


def gumbel(draws: Draws, site: int, *shape: int) -> Tensor:
    """-log(-log u) of uniform u, float32 [L, *shape], the same bits on every device."""
    count = torch.Size(shape).numel()
    at = torch.full((), site, device=draws.seeds.device)
    half = philox.random16(draws.seeds, STREAM, draws.step, at, 2 * count)
    bits = half[:, 0::2] * 256 + (half[:, 1::2] >> 8)  # 24 bits, which float32 holds
    u = (bits.to(torch.float32) + 0.5) * 2.0**-24
    return -elementary.log(-elementary.log(u)).view(-1, *shape)


class CachedDecoder:
    """A decoder that reads tokens piece by piece, each in the light of all before it.

    numerics: of its products, which need not be the model's own. length: most tokens that are read. formats: of its
    keys and values, None: as they come. changed: parameters (names of noise.py) that have another value than the
    model's.
    """

    def __init__(
        self, model: Decoder, numerics: LaneNumerics, length: int, formats: CacheFormats | None = None
    ) -> None:
        self.model, self.numerics, self.length, self.formats = model, numerics, length, formats
        self.changed: dict[str, Tensor] = {}
        self.cache: list[tuple[Tensor, Tensor]] = []  # a block's keys and values, [L·B·heads, length, d]
        self.routes: list[Tensor] = []  # of each reading the experts of its tokens, [L, B, n, depth, k]

    def read(self, tokens: Tensor, at: int) -> Tensor:
        """Logits after the last of tokens [L, B, n], the first of which has position `at`: float32 [L, B, V]. n is 1
        unless `at` is 0."""
        model, end = self.model, at + tokens.shape[2]
        cos, sin = model.cos[at:end], model.sin[at:end]
        h, branch = embedding(model.embed, tokens).to(self.numerics.dtype), None
        routes: list[Tensor] = []
        for number, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            norm1, norm2 = (self.changed.get(f"{number}.{n}", getattr(block, n)) for n in ("norm1", "norm2"))
            h, x = added_rms_norm(h, branch, norm1, model.eps)
            mixed = self._attention(number, *block.heads(self._product(block.qkv, x, f"{number}.qkv"), cos, sin), at)
            mixed = mixed.view(*tokens.shape[:2], block.shape.of_heads[0], tokens.shape[2], -1).transpose(2, 3)
            mixed = mixed.reshape(*x.shape[:3], -1)
            h, x = added_rms_norm(h, self._product(block.out, mixed, f"{number}.out"), norm2, model.eps)
            if block.experts is None:
                branch = self._mlp(block.mlp, x, f"{number}.mlp")
            else:
                branch, chosen = self._experts(block.experts, x, f"{number}.experts")
                routes.append(chosen)
        assert branch is not None
        if routes:
            self.routes.append(torch.stack(routes, dim=3))
        _, x = added_rms_norm(h[:, :, -1:].contiguous(), branch[:, :, -1:].contiguous(), model.norm, model.eps)
        return self._product(model.head, x)[:, :, 0].to(torch.float32)

    def _product(self, layer: QuantLinear, x: Tensor, name: str = "") -> Tensor:
        rows = x.reshape(len(x), -1, x.shape[-1])
        y = layer.product(rows, numerics=self.numerics, weight=self.changed.get(name))
        return y.view(*x.shape[:-1], y.shape[-1])

    def _mlp(self, mlp: Mlp, x: Tensor, name: str) -> Tensor:
        return self._product(mlp.down, swiglu(self._product(mlp.up, x, f"{name}.up")), f"{name}.down")

    def _experts(self, experts: Experts, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """The sum that experts make of x [L, B, n, D], in its shape, and the numbers of the chosen, [L, B, n, k]."""
        tokens, mlps = x.reshape(len(x), -1, x.shape[-1]), experts.mlps
        assert isinstance(mlps, Mlps)
        probabilities = torch.softmax(self._product(experts.router, tokens, f"{name}.router").float(), dim=-1)
        chosen = experts.chosen(probabilities)

        def all_of(role: str, layers: Sequence[QuantLinear], rows: Tensor, filled: Tensor) -> Tensor:
            names = [f"{name}.mlps.{e}.{role}" for e in range(len(layers))]
            weights = [self.changed.get(of, layer.weight) for of, layer in zip(names, layers, strict=True)]
            return expert_products(rows, layers, filled, self.numerics, weights)

        def made(sent: Tensor, filled: Tensor) -> Tensor:
            return all_of("down", mlps.downs, swiglu(all_of("up", mlps.ups, sent, filled)), filled)

        y = experts.mix(tokens, probabilities, chosen, made)
        if experts.shared is not None:
            assert isinstance(experts.shared, Mlp)
            y = y + self._mlp(experts.shared, tokens, f"{name}.shared")
        return y.view(x.shape), chosen.view(*x.shape[:3], -1)

    def _attention(self, block: int, q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
        """Attention of q [N, n, d] to its own keys and those before, in v's dtype."""
        if self.formats is not None:
            k, v = (self.formats.held(x, block) for x in (k, v))
        if at == 0:
            room = [x.new_zeros(len(x), self.length - x.shape[1], x.shape[2]) for x in (k, v)]
            self.cache[block:] = [(torch.cat([k, room[0]], dim=1), torch.cat([v, room[1]], dim=1))]
            return attention(q, k, v, causal=True)
        keys, values = self.cache[block]
        keys[:, at : at + 1], values[:, at : at + 1] = k, v
        scores = bf16(q, keys[:, : at + 1]) * q.shape[-1] ** -0.5
        return bf16(torch.softmax(scores, dim=-1), values[:, : at + 1].mT).to(v.dtype)


@torch.no_grad()
def sample(decoder: CachedDecoder, prompts: Tensor, length: int, noise: Tensor | None = None) -> Sampled:
    """Answers of `length` tokens to prompts [L, B, P]. noise: Gumbel's, [L, length, B, V]; None: the most probable
    token each time. Answers go on behind their end."""
    logits, tokens, log_ps, entropies = decoder.read(prompts, 0), [], [], []
    for step in range(length):
        log_p = F.log_softmax(logits, dim=-1)
        token = (logits if noise is None else logits + noise[:, step]).argmax(dim=-1, keepdim=True)
        tokens.append(token)
        log_ps.append(log_p.gather(-1, token))
        entropies.append(-lane_sum(log_p.exp() * log_p, 2)[..., None])
        if step < length - 1:
            logits = decoder.read(token, prompts.shape[2] + step)
    routes = torch.cat(decoder.routes, dim=2) if decoder.routes else None
    decoder.cache.clear()  # where a step is captured, no tensor may outlive it
    decoder.routes.clear()
    answers, log_p, entropy = (torch.cat(parts, dim=-1) for parts in (tokens, log_ps, entropies))
    return Sampled(answers, log_p, entropy, routes)
