"""A Llama-shaped decoder with a lane axis (2302.13971): pre-norm blocks of attention and SwiGLU.

    h = E[tokens]
    h = h + Out · attention(RoPE(Q x), RoPE(K x), V x)         x = RMSnorm(h)
    h = h + Down · (silu(Gate x) ∘ Up x)                       x = RMSnorm(h), or the experts of experts.py
    logits = Head · RMSnorm(h)

Q, K and V are one product, and so are Gate and Up. Every product with a weight is a QuantLinear that knows its place;
the attention core and the look-up of embeddings are not quantized. Grouped heads, their norms (heads.py), biases of the
attention's products and a head tied to the embedding are there for models of others (folder.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from fp4dse.dse import ConfigError
from fp4dse.dse.layers.place import Place
from fp4dse.kernels import LaneNumerics, QuantLinear
from fp4dse.kernels.experts import expert_products, group_layers
from fp4dse.kernels.ops.embedding import embedding
from fp4dse.kernels.ops.philox import STREAMS, normal
from fp4dse.kernels.ops.rms_norm import EPS, added_rms_norm
from fp4dse.kernels.ops.rope import Rope, heads_apart, rope_tables
from fp4dse.kernels.ops.swiglu import swiglu
from fp4dse.kernels.recompute import recomputed
from fp4dse.tasks.draws import seed_keys
from fp4dse.tasks.language.experts import Experts, Mixture
from fp4dse.tasks.language.heads import equal_heads


class Shape(msgspec.Struct, frozen=True):
    """width: of the residual stream; ffn: of an MLP's inside; context: tokens in a window; experts: 0 for a dense MLP,
    else how many MLPs a block has, and mixture: which of them a token has.

    kv_heads: of keys and values, None: as many as of queries; head_width: None: width / heads; qkv_bias, out_bias: of
    the two products of attention; qk_norm: an RMS norm over each head's query and key; tied: the head's weight is the
    embedding's; rope: its angles; eps: of norms.
    """

    width: int
    ffn: int
    depth: int
    heads: int
    context: int
    experts: int = 0
    kv_heads: int | None = None
    head_width: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    rope: Rope = Rope()
    eps: float = EPS
    mixture: Mixture = Mixture()

    @property
    def of_heads(self) -> tuple[int, int, int]:
        """Heads of queries, heads of keys and of values, and the width of each."""
        return self.heads, self.kv_heads or self.heads, self.head_width or self.width // self.heads

    def parameters(self, vocabulary: int) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape of one lane. ConfigError for a mixture that cannot be."""
        if self.experts:
            self.mixture.check(self.experts)
        shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, self.width)}
        heads, kv_heads, size = self.of_heads
        for i in range(self.depth):
            shapes |= {f"block{i}.norm1": (self.width,), f"block{i}.qkv": ((heads + 2 * kv_heads) * size, self.width)}
            shapes |= {f"block{i}.out": (self.width, heads * size), f"block{i}.norm2": (self.width,)}
            shapes |= {f"block{i}.qkv_bias": ((heads + 2 * kv_heads) * size,)} if self.qkv_bias else {}
            shapes |= {f"block{i}.out_bias": (self.width,)} if self.out_bias else {}
            shapes |= {f"block{i}.{of}_norm": (size,) for of in "qk"} if self.qk_norm else {}
            if self.experts:
                shapes[f"block{i}.router"] = (self.experts, self.width)
            for mlp in [f"expert{e}." for e in range(self.experts)] or [""]:
                shapes[f"block{i}.{mlp}up"] = (2 * self.ffn, self.width)
                shapes[f"block{i}.{mlp}down"] = (self.width, self.ffn)
            if self.experts and self.mixture.shared:
                shapes[f"block{i}.shared.up"] = (2 * self.mixture.shared, self.width)
                shapes[f"block{i}.shared.down"] = (self.width, self.mixture.shared)
        shapes["norm"] = (self.width,)
        return shapes if self.tied else {**shapes, "head": (vocabulary, self.width)}

    def size(self, vocabulary: int) -> int:
        """Parameters of one lane."""
        return sum(prod(shape) for shape in self.parameters(vocabulary).values())

    def active(self, vocabulary: int) -> int:
        """Those of them that a token meets: of experts the chosen ones."""
        idle = self.depth * max(0, self.experts - self.mixture.chosen)
        return self.size(vocabulary) - idle * 3 * self.width * self.ffn

    def size_within(self, vocabulary: int) -> int:
        """Those of them between embedding and head, which scaling laws count; of experts all."""
        found = self.parameters(vocabulary)
        return self.size(vocabulary) - prod(found["embed"]) - (0 if self.tied else prod(found["head"]))

    def initial(self, vocabulary: int, seeds: Sequence[int]) -> dict[str, Tensor]:
        """Initial weights, float32 [S, …]: gains 1, biases 0, weights N(0, 1/fan_in), those that end a branch smaller
        by sqrt(2 · depth) (GPT-2), embeddings N(0, 1/16), the head N(0, 1/16 fan_in)."""
        keys = seed_keys(seeds)
        out = {}
        for site, (name, shape) in enumerate(self.parameters(vocabulary).items()):
            if len(shape) == 1:
                out[name] = torch.full((len(keys), *shape), 0.0 if name.endswith("bias") else 1.0)
                continue
            std = shape[1] ** -0.5
            if name.endswith((".out", "down")):
                std *= (2 * self.depth) ** -0.5
            std = 0.25 if name == "embed" else 0.25 * std if name == "head" else std
            out[name] = normal(keys, STREAMS["init"], 0, site, prod(shape), std).view(-1, *shape)
        return out


class Mlp(nn.Module):
    """Down · (silu(Gate x) ∘ Up x): x [L, …, D] -> [L, …, D]. Weights `up` (Gate above Up) and `down`."""

    def __init__(
        self, parameters: dict[str, Tensor], prefix: str, numerics: LaneNumerics, layers: Iterator[int], place: Place
    ) -> None:
        super().__init__()
        up, down = (f"{prefix}{role}" for role in ("up", "down"))
        self.up = QuantLinear(parameters[up], None, numerics, next(layers), place.within("up", up))
        self.down = QuantLinear(parameters[down], None, numerics, next(layers), place.within("down", down))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(swiglu(self.up(x), self.up.numerics.swiglu8))
        return out


class Mlps(nn.ModuleList):
    """MLPs of experts, multiplied together: x [L, E, C, D], of which so many of each C are filled (int64 [L, E]) and
    the others zeros, -> [L, E, C, D]."""

    def __init__(self, mlps: Sequence[Mlp]) -> None:
        super().__init__(mlps)
        self.ups, self.downs = [mlp.up for mlp in mlps], [mlp.down for mlp in mlps]
        group_layers(self.ups)
        group_layers(self.downs)

    def forward(self, x: Tensor, filled: Tensor) -> Tensor:
        inside = swiglu(expert_products(x, self.ups, filled), self.ups[0].numerics.swiglu8)
        return expert_products(inside, self.downs, filled)


class Routed(NamedTuple):
    """Tokens, int64 [L, B, T], and the experts of each in every block, int64 [L, B, T, depth, k]: -1 where the block's
    router chooses."""

    tokens: Tensor
    routes: Tensor


class Block(nn.Module):
    """One block: (h [L, B, T, D], branch, cos, sin, experts of each token or None) -> h, branch, balance loss [L].

    h is the residual stream. A branch is what has yet to be added to it, which the next norm does: on the way in the
    last block's, None for the first block; on the way out that of this block's MLP. The balance loss is None where
    there is none.
    """

    def __init__(
        self, shape: Shape, i: int, parameters: dict[str, Tensor], numerics: LaneNumerics, layers: Iterator[int]
    ) -> None:
        super().__init__()
        name, self.shape = f"block{i}.", shape
        self.norm1, self.norm2 = (nn.Parameter(parameters[f"{name}norm{n}"]) for n in (1, 2))
        place = Place("attention", i, shape.depth)
        qkv, out = f"{name}qkv", f"{name}out"
        of_qkv, of_out = (parameters.get(f"{of}_bias") for of in (qkv, out))
        self.qkv = QuantLinear(parameters[qkv], of_qkv, numerics, next(layers), place.within("qkv", qkv))
        self.out = QuantLinear(parameters[out], of_out, numerics, next(layers), place.within("attention-out", out))
        if shape.qk_norm:
            self.q_norm, self.k_norm = (nn.Parameter(parameters[f"{name}{of}_norm"]) for of in "qk")
        inside = Place("mlp", i, shape.depth, expert=shape.experts > 0)
        prefixes = [f"{name}expert{e}." for e in range(shape.experts)] or [name]
        mlps = [Mlp(parameters, prefix, numerics, layers, inside) for prefix in prefixes]
        self.experts: Experts | None = None
        if shape.experts:
            router = Place("router", i, shape.depth, name=f"{name}router")
            weight = QuantLinear(parameters[f"{name}router"], None, numerics, next(layers), router)
            everywhere = Place("mlp", i, shape.depth)
            has_shared = shape.mixture.shared > 0
            shared = Mlp(parameters, f"{name}shared.", numerics, layers, everywhere) if has_shared else None
            self.experts = Experts(weight, Mlps(mlps), shared, shape.mixture)
        else:
            self.mlp = mlps[0]

    def forward(
        self, h: Tensor, branch: Tensor | None, cos: Tensor, sin: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        eps = self.shape.eps
        h, x = added_rms_norm(h, branch, self.norm1, eps)
        h, x = added_rms_norm(h, self._attention(x, cos, sin), self.norm2, eps)
        y, balance = self.experts(x, given) if self.experts is not None else (self.mlp(x), None)
        return h, y, balance

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        lanes, batch, length, _ = x.shape
        of, heads = self.heads(self.qkv(x), cos, sin), self.shape.of_heads[0]
        mixed = self.qkv.numerics.attention(self.qkv.layer, *of, causal=True, heads=heads)
        out: Tensor = self.out(mixed.view(lanes, batch, length, -1))
        return out

    def heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [L·B·heads, T, d] each, of the output of the layer `qkv`, [L, B, T, ·]. Queries and
        keys are rotated by their position; fewer heads of keys and values are repeated to as many as queries have."""
        heads, kv_heads, _ = self.shape.of_heads
        if kv_heads < heads or self.shape.qk_norm:
            gains = (self.q_norm, self.k_norm) if self.shape.qk_norm else None
            qkv = equal_heads(qkv, heads, kv_heads, gains, self.shape.eps)
        return heads_apart(qkv, heads, cos, sin)


class Decoder(nn.Module):
    """tokens, int64 [L, B, T], or Routed -> logits [L, B, T, V] and the mean balance loss of the blocks, [L] (0 where
    there is none, and while numerics are not training). With `numerics.recompute` nothing of the inside of blocks is
    kept for the backward pass."""

    def __init__(self, shape: Shape, parameters: dict[str, Tensor], numerics: LaneNumerics) -> None:
        super().__init__()
        layers = iter(range(len(parameters)))
        self.embed = nn.Parameter(parameters["embed"])
        self.blocks = nn.ModuleList(Block(shape, i, parameters, numerics, layers) for i in range(shape.depth))
        self.norm = nn.Parameter(parameters["norm"])
        weight = parameters["embed" if shape.tied else "head"]
        self.head = QuantLinear(weight, None, numerics, next(layers), Place("head", name="head"))
        if shape.tied:
            if self.head.factors is not None:
                raise ConfigError("precise.head", False, "true (the head's factors would be taken off the embedding)")
            self.head.weight = self.embed
        self.numerics, self.eps = numerics, shape.eps
        self.cos, self.sin = rope_tables(shape.context, shape.of_heads[2], numerics.seeds.device, shape.rope)

    def forward(self, inputs: Tensor | Routed) -> tuple[Tensor, Tensor]:
        tokens, routes = inputs if isinstance(inputs, Routed) else (inputs, None)
        h, branch = embedding(self.embed, tokens).to(self.numerics.dtype), None
        balances = []
        for number, block in enumerate(self.blocks):
            given = None if routes is None else routes[..., number, :]
            of = h, branch, self.cos, self.sin, given
            h, branch, balance = recomputed(block, self.numerics, *of) if self.numerics.recompute else block(*of)
            balances += [] if balance is None else [balance]
        _, x = added_rms_norm(h, branch, self.norm, self.eps)
        logits = self.head(x)
        if not balances or not self.numerics.training:
            return logits, torch.zeros(len(tokens), device=tokens.device)
        return logits, sum(balances[1:], balances[0]) * (1.0 / len(balances))
