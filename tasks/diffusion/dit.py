"""A small diffusion transformer (DiT, 2212.09748): patch tokens, blocks whose norms and branches the time modulates.

    h = h + gate · attention(norm(h) · (1 + scale) + shift),   the same for the MLP;   (shift, scale, gate) = linear(c)

Every product with a weight is quantized; the attention core is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from fp4dse.kernels import LaneNumerics, add_bias, silu
from fp4dse.kernels.ops.affine import affine
from fp4dse.kernels.ops.layer_norm import added_layer_norm
from fp4dse.kernels.ops.philox import STREAMS, normal
from fp4dse.tasks.data.images import Images
from fp4dse.tasks.diffusion.time import time_embedding, time_shapes
from fp4dse.tasks.draws import seed_keys
from fp4dse.tasks.image_preset import Model
from fp4dse.tasks.nn import initial_weights, make_layers, patches, self_attention, unpatched


def dit(patch: int, width: int, depth: int, heads: int) -> Model:
    """patch: pixels of a patch's edge; the hidden layers of the MLPs are 4·width wide."""
    name = f"DiT {depth}×{width}, {patch}×{patch} patches"
    return Model(name, partial(_init, patch, width, depth), partial(DiT, patch, width, depth, heads), patch)


class DiT(nn.Module):
    """(x_t [L, B, H, W, C], t int64 [L, B]) -> predicted noise [L, B, H, W, C]."""

    def __init__(
        self, patch: int, width: int, depth: int, heads: int, parameters: dict[str, Tensor], numerics: LaneNumerics
    ) -> None:
        super().__init__()
        self.patch, self.width, self.depth, self.heads = patch, width, depth, heads
        self.position = nn.Parameter(parameters["position"])  # [L, T·D]
        self.layer = make_layers(parameters, numerics, depth)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        height, columns, channels = inputs[0].shape[2:]
        return unpatched(self.layer["head"](self.features(inputs)), self.patch, (height, columns, channels))

    def features(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Inputs of the head, one vector a patch: [L, B, T, D]."""
        x, times = inputs
        c = time_embedding(times, self.layer, self.width)  # [L, B, D]
        h = self.layer["embed"](patches(x, self.patch))
        h = add_bias(h.flatten(2), self.position).view_as(h)  # [L, B, T, D]
        branch = None
        for i in range(self.depth):
            shift1, scale1, gate1, shift2, scale2, gate2 = self.layer[f"block{i}_mod"](c).chunk(6, dim=-1)
            h, normal = added_layer_norm(h, branch, 1.0 + scale1, shift1)
            mixed = self_attention(self.layer[f"block{i}_qkv"], normal, self.heads)
            h, normal = added_layer_norm(h, _gated(self.layer[f"block{i}_out"](mixed), gate1), 1.0 + scale2, shift2)
            hidden = self.layer[f"block{i}_up"](normal)
            branch = _gated(self.layer[f"block{i}_down"](silu(hidden)), gate2)
        shift, scale = self.layer["mod"](c).chunk(2, dim=-1)
        return added_layer_norm(h, branch, 1.0 + scale, shift)[1]


def _gated(h: Tensor, gate: Tensor) -> Tensor:
    """h [L, B, T, D] · gate [L, B, D], for each image its own."""
    return affine(h.flatten(0, 1), gate.flatten(0, 1)).view_as(h)


def _init(patch: int, width: int, depth: int, images: Images, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Weights N(0, 1/fan_in), the head's a tenth of that; gates begin at one half, scales and shifts at 0.

    Positions are N(0, 1), as large as the patches: the norm that comes next would take the brightness from a patch that
    stood almost alone.
    """
    height, columns, channels = images.shape
    tokens = height // patch * (columns // patch)
    pixels = patch * patch * channels
    shapes: dict[str, tuple[int, ...]] = {"embed": (width, pixels)} | time_shapes(width, width)
    for i in range(depth):
        shapes |= {
            f"block{i}.mod": (6 * width, width),
            f"block{i}.qkv": (3 * width, width),
            f"block{i}.out": (width, width),
            f"block{i}.up": (4 * width, width),
            f"block{i}.down": (width, 4 * width),
        }
    shapes |= {"mod": (2 * width, width), "head": (pixels, width)}
    made = initial_weights(seeds, shapes, {"mod": 0.1, "head": 0.1, "out": 0.5, "down": 0.5})
    for i in range(depth):
        for gate in (2, 5):
            made[f"block{i}.mod.b"][:, gate * width : (gate + 1) * width] = 0.5
    position = normal(seed_keys(seeds), STREAMS["init"], 0, 1000, tokens * width)
    return {"position": position} | made
