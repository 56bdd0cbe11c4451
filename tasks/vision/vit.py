"""A small vision transformer: patch tokens -> embedding + position -> pre-norm blocks -> mean over tokens -> head.

Every product with a weight is quantized: patch embedding, query-key-value and output projections, both MLP products,
and the head. The attention core is not, and normalisation has no learned gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from fp4dse.kernels import LaneNumerics, add_bias, silu
from fp4dse.kernels.ops.layer_norm import added_layer_norm
from fp4dse.kernels.ops.philox import STREAMS, normal
from fp4dse.tasks.data.images import Images
from fp4dse.tasks.draws import seed_keys
from fp4dse.tasks.image_preset import Model
from fp4dse.tasks.nn import initial_weights, make_layers, mean_pool, patches, self_attention


def vit(patch: int, width: int, depth: int, heads: int) -> Model:
    """patch: pixels of a patch's edge; the hidden layers of the MLPs are 2·width wide."""
    name = f"patch transformer {depth}×{width}, {patch}×{patch} patches"
    return Model(name, partial(_init, patch, width, depth), partial(PatchClassifier, patch, depth, heads), patch)


class PatchClassifier(nn.Module):
    """Images [L, B, H, W, C] -> [L, B, classes]."""

    def __init__(
        self, patch: int, depth: int, heads: int, parameters: dict[str, Tensor], numerics: LaneNumerics
    ) -> None:
        super().__init__()
        self.patch, self.depth, self.heads = patch, depth, heads
        self.position = nn.Parameter(parameters["position"])  # [L, T·D]
        self.layer = make_layers(parameters, numerics, depth)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer["embed"](patches(x, self.patch))
        h = add_bias(h.flatten(2), self.position).view_as(h)  # [L, B, T, D]
        branch = None
        for i in range(self.depth):
            h, normal = added_layer_norm(h, branch)
            mixed = self_attention(self.layer[f"block{i}_qkv"], normal, self.heads)
            h, normal = added_layer_norm(h, self.layer[f"block{i}_out"](mixed))
            hidden = self.layer[f"block{i}_up"](normal)
            branch = self.layer[f"block{i}_down"](silu(hidden))
        logits: Tensor = self.layer["head"](mean_pool(added_layer_norm(h, branch)[1]))
        return logits


def _init(patch: int, width: int, depth: int, images: Images, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Weights N(0, 1/fan_in), the last layer of each branch and the head smaller."""
    height, columns, channels = images.shape
    tokens = height // patch * (columns // patch)
    shapes: dict[str, tuple[int, ...]] = {"embed": (width, patch * patch * channels)}
    for i in range(depth):
        shapes |= {f"block{i}.qkv": (3 * width, width), f"block{i}.out": (width, width)}
        shapes |= {f"block{i}.up": (2 * width, width), f"block{i}.down": (width, 2 * width)}
    shapes["head"] = (images.classes, width)
    gains = {"out": 0.5, "down": 0.5, "head": 0.1}
    position = 0.1 * normal(seed_keys(seeds), STREAMS["init"], 0, 1000, tokens * width)
    return {"position": position} | initial_weights(seeds, shapes, gains)
