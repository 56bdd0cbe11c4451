"""Layers of torch with quantized products: one class for each kind of layer, with another forward pass.

A converted layer keeps its parameters. Products are computed in float32 from whatever dtype comes in, and returned in
that dtype, or in autocast's where it is on. With a recipe that leaves every operand as it is, the layer computes what
it did before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4dse.dse.errors import ConfigError
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.layers import product
from fp4dse.kernels.ops.columns import Window

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Source(Protocol):
    """The provider of a layer's numerics in the present step."""

    off: bool
    """True if the recipe leaves every operand as it is."""

    def numerics(self, device: torch.device) -> LaneNumerics:
        """The numerics of one lane on this device."""


class Converted(nn.Module):
    """A layer with quantized products; its kind defines `compute`.

    fp4dse_layer, products: the numbers that key random bits are fp4dse_layer, …, fp4dse_layer + products - 1, one for
    each product with weights.
    """

    fp4dse: Source
    fp4dse_layer: int
    products: ClassVar[int] = 1
    weight: Tensor
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.fp4dse.off else self._in_float32(input, self.weight, self.compute)

    def compute(self, x: Tensor) -> Tensor:
        """The layer's output for x, both float32."""
        raise NotImplementedError

    def _in_float32(self, x: Tensor, weight: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """compute(x) in float32, converted to x's dtype or autocast's. ConfigError for a dtype not in DTYPES."""
        for name, tensor in (("input", x), ("weight", weight)):
            if tensor.dtype not in DTYPES:
                raise ConfigError(f"dtype of the {name}", tensor.dtype, ", ".join(map(str, DTYPES)))
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            return compute(x.to(torch.float32)).to(dtype)

    def _product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, number: int = 0, window: Window | None = None
    ) -> Tensor:
        """The quantized product [M, N] of x [1, …], a weight [N, K] and a bias [N]; `layers.product` has the rest."""
        bias = None if bias is None else bias.to(torch.float32)[None]
        numerics = self.fp4dse.numerics(x.device)
        return product(x, weight.to(torch.float32)[None], bias, numerics, self.fp4dse_layer + number, window)[0]

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, number: int = 0) -> Tensor:
        """x [..., K] -> [..., N]."""
        return self._product(x.reshape(1, -1, x.shape[-1]), weight, bias, number).view(*x.shape[:-1], -1)

    @staticmethod
    def why_not(_layer: Any) -> str | None:
        """The reason why a layer of this kind cannot be converted, None if it can."""
        return None


class ConvertedLinear(Converted, nn.Linear):
    """nn.Linear."""

    def compute(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)


class TransposedLinear(Converted):
    """A linear layer with its weight as [in, out]: Conv1D of Hugging Face's transformers, as in GPT-2."""

    def compute(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight.t().contiguous(), self.bias)


class ConvertedConv2d(Converted, nn.Conv2d):
    """nn.Conv2d as a product of the images' columns, the contraction ordered (kernel row, kernel column, channel)."""

    def compute(self, x: Tensor) -> Tensor:
        images = x if x.dim() == 4 else x[None]
        padding = 0 if self.padding == "valid" else int(self.padding[0])
        window = Window((self.kernel_size[0], self.kernel_size[1]), self.stride[0], padding)
        positions = window.positions(*images.shape[2:])
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)
        y = self._product(images.permute(0, 2, 3, 1)[None], weight, self.bias, window=window)
        y = y.view(len(images), *positions, -1).permute(0, 3, 1, 2)
        return y if x.dim() == 4 else y[0]

    @staticmethod
    def why_not(layer: Any) -> str | None:
        if layer.groups == layer.in_channels > 1:
            taps = layer.kernel_size[0] * layer.kernel_size[1]
            return f"depthwise: sums of {taps} products, shorter than a block of a scale"
        for field, fits in (
            ("groups", layer.groups == 1),
            ("dilation", layer.dilation == (1, 1)),
            ("stride", layer.stride[0] == layer.stride[1]),
            ("padding", layer.padding == "valid" or (layer.padding != "same" and len(set(layer.padding)) == 1)),
            ("padding_mode", layer.padding_mode == "zeros"),
        ):
            if not fits:
                return f"{field} {getattr(layer, field)} is not built"
        return None


class ConvertedMultiheadAttention(Converted, nn.MultiheadAttention):
    """nn.MultiheadAttention with quantized projections of queries, keys, values and output.

    Projections of the same tensor are one product. The attention core stays in the dtype that comes in.
    """

    products = 4

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self.fp4dse.off:
            masks = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return nn.MultiheadAttention.forward(self, query, key, value, *masks)
        if is_causal and attn_mask is None:
            raise ConfigError("attn_mask", None, "the mask that is_causal is a hint about")
        is_batch = query.dim() == 3
        alike = query is key, key is value
        if not is_batch:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            x.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2) for x in self._projected(query, key, value, alike)
        )  # [B, heads, tokens, width]
        mask = _added(attn_mask, key_padding_mask, q, k.shape[2])
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = (q / math.sqrt(q.shape[-1])) @ k.mT
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            weights, mixed = None, F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj
        mixed = mixed.transpose(1, 2).flatten(2)
        y = self._in_float32(mixed, out.weight, lambda x: self._linear(x, out.weight, out.bias, 3))
        if not is_batch:
            return y[0], None if weights is None else weights[0]
        return (y if self.batch_first else y.transpose(0, 1)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, alike: tuple[bool, bool]) -> list[Tensor]:
        """Queries, keys and values after their projections. alike: query is key, and key is value, the same tensor."""
        if self.in_proj_weight is None:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        else:
            weights = [*self.in_proj_weight.chunk(3)]
        biases = [None] * 3 if self.in_proj_bias is None else [*self.in_proj_bias.chunk(3)]
        uses = [query, key, value]
        groups = {(True, True): [(0, 3)], (False, True): [(0, 1), (1, 3)]}.get(alike, [(0, 1), (1, 2), (2, 3)])
        if self.in_proj_weight is None:
            groups = [(0, 1), (1, 2), (2, 3)]
        made: list[Tensor] = []
        for first, last in groups:
            weight = torch.cat(weights[first:last])
            bias = None if self.in_proj_bias is None else torch.cat(biases[first:last])
            compute = partial(self._linear, weight=weight, bias=bias, number=first)
            y = self._in_float32(uses[first], weight, compute)
            made += y.chunk(last - first, -1)
        return made

    @staticmethod
    def why_not(layer: Any) -> str | None:
        if layer.bias_k is not None:
            return "add_bias_kv is not built"
        return "add_zero_attn is not built" if layer.add_zero_attn else None


def _added(mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
    """The number to add to scores [B, heads, queries, keys] for the masks of nn.MultiheadAttention: one [queries, keys]
    or [B · heads, queries, keys], and one of the keys [B, keys]. True in a mask becomes -inf."""

    def number(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(q.dtype)
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)

    parts = []
    if mask is not None:
        parts.append(number(mask) if mask.dim() == 2 else number(mask).view(len(q), -1, *mask.shape[1:]))
    if padding is not None:
        parts.append(number(padding).view(len(q), 1, 1, keys))
    return sum(parts[1:], parts[0]) if parts else None


LAYERS: dict[type[nn.Module], type[Converted]] = {
    nn.Linear: ConvertedLinear,
    nn.Conv2d: ConvertedConv2d,
    nn.MultiheadAttention: ConvertedMultiheadAttention,
}
"""Class of a layer -> class of its conversion."""


def converted_class(kind: type) -> type[Converted] | None:
    """The class that a layer of this class is converted to, None if there is none."""
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return _transposed(kind)
    return LAYERS.get(kind)


@cache
def _transposed(kind: type) -> type[Converted]:
    return type("ConvertedConv1D", (TransposedLinear, kind), {"__module__": __name__, "__doc__": "Conv1D."})


def __getattr__(name: str) -> Any:
    """ConvertedConv1D, which pickles look up here: its base belongs to another library."""
    if name == "ConvertedConv1D":
        from transformers.pytorch_utils import Conv1D

        return _transposed(Conv1D)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
