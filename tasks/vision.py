"""Vision: handwritten digits, classified by a small transformer over patch tokens.

Data: the 1,797 real 8×8 images that scikit-learn ships (UCI optical digits), a fixed fifth held out. Products with a
weight are quantized where the recipe does not keep them precise: patch embedding (`embedding`), query-key-value and
output projections (`attention`), both MLP products (`mlp`), and the head (`head`). The attention core stays in the
layer's own dtype. Normalisation has no learned gain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4dse.dse.place import Kind, Place
from fp4dse.kernels import LaneNumerics, QuantLinear, add_bias, lane_sum, silu
from fp4dse.kernels.arithmetic.philox import STREAMS, normal, random32
from fp4dse.tasks.task import Problem, Task

REV = 2
CLASSES = 10


class PatchClassifier(nn.Module):
    """Patch tokens -> embedding + position -> pre-norm blocks -> mean over tokens -> head. x: [L, B, T, patch]."""

    def __init__(self, depth: int, heads: int, parameters: dict[str, Tensor], numerics: LaneNumerics) -> None:
        super().__init__()
        self.sigmoid = numerics.backend.sigmoid
        self.depth, self.heads = depth, heads
        self.position = nn.Parameter(parameters["position"])  # [L, T·D]
        names = [name.removesuffix(".w") for name in parameters if name.endswith(".w")]
        self.linear = nn.ModuleDict(
            {
                name.replace(".", "_"): QuantLinear(
                    parameters[f"{name}.w"], parameters[f"{name}.b"], numerics, layer=i, place=place_of(name, depth)
                )
                for i, name in enumerate(names)
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear["embed"](x)
        lanes, batch, tokens, _ = h.shape
        h = add_bias(h.reshape(lanes, batch, -1), self.position).view_as(h)
        for i in range(self.depth):
            h = h + self._attention(i, _norm(h))
            hidden = self.linear[f"block{i}_up"](_norm(h))
            h = h + self.linear[f"block{i}_down"](silu(hidden, self.sigmoid))
        pooled = lane_sum(_norm(h), 2) / tokens  # [L, B, D]
        return self.linear["head"](pooled)

    def _attention(self, i: int, h: Tensor) -> Tensor:
        lanes, batch, tokens, width = h.shape
        size = width // self.heads
        qkv = self.linear[f"block{i}_qkv"](h).view(lanes * batch, tokens, 3, self.heads, size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).reshape(3, -1, tokens, size).unbind(0)  # lanes folded into the batch
        weights = torch.softmax(torch.bmm(q, k.mT) * size**-0.5, dim=-1)
        mixed = torch.bmm(weights, v).view(lanes, batch, self.heads, tokens, size)
        return self.linear[f"block{i}_out"](mixed.transpose(2, 3).reshape(lanes, batch, tokens, width))


KINDS: dict[str, Kind] = {"qkv": "attention", "out": "attention", "up": "mlp", "down": "mlp"}


def place_of(name: str, depth: int) -> Place:
    """Where the layer `embed`, `head` or `block0.qkv` … stands."""
    block, _, part = name.rpartition(".")
    if not block:
        return Place("embedding" if part == "embed" else "head")
    return Place(KINDS[part], int(block.removeprefix("block")), depth)


def _norm(h: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:])


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """out: [L, B, classes], y: int64 [L, B] -> [L, B]."""
    return -F.log_softmax(out, dim=-1).gather(-1, y[..., None])[..., 0]


def correct(out: Tensor, y: Tensor) -> Tensor:
    """1 where the largest output is the label."""
    return (out.argmax(dim=-1) == y).to(torch.float32)


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images float32 [1797, 8, 8], mean 0 and variance 1 over all pixels, and labels int64, in a fixed order."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.argsort(random32(torch.zeros(1, dtype=torch.int64), STREAMS["data"], 0, 0, len(images))[0])
    return images[order], labels[order]


@cache
def digits_digest() -> str:
    """Hash of the images, labels and their order."""
    images, labels = digits()
    return hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()[:16]


def patches(images: Tensor, size: int) -> Tensor:
    """[n, 8, 8] -> [n, T, size·size]."""
    n, height, width = images.shape
    cut = images.view(n, height // size, size, width // size, size)
    return cut.transpose(2, 3).reshape(n, -1, size * size)


def digit_problem(patch: int, width: int, depth: int, held_out: int, seeds: Sequence[int]) -> Problem:
    """Shared data; initial weights N(0, 1/fan_in) per seed, the last layer of each branch and the head smaller."""
    images, labels = digits()
    x = patches(images, patch)[None]
    tokens = x.shape[2]
    keys = torch.tensor(list(seeds), dtype=torch.int64)
    shapes = {"embed": (width, patch * patch)}
    for i in range(depth):
        shapes |= {f"block{i}.qkv": (3 * width, width), f"block{i}.out": (width, width)}
        shapes |= {f"block{i}.up": (2 * width, width), f"block{i}.down": (width, 2 * width)}
    shapes["head"] = (CLASSES, width)
    init = {"position": 0.1 * normal(keys, STREAMS["init"], 0, 1000, tokens * width)}
    for site, (name, (fan_out, fan_in)) in enumerate(shapes.items()):
        weight = normal(keys, STREAMS["init"], 0, site, fan_out * fan_in).view(-1, fan_out, fan_in)
        small = 0.5 if name.endswith((".out", ".down")) else 0.1 if name == "head" else 1.0
        init[f"{name}.w"] = weight * (small / fan_in**0.5)
        init[f"{name}.b"] = torch.zeros(len(keys), fan_out)
    split = len(images) - held_out
    return Problem(x[:, :split], labels[None, :split], x[:, split:], labels[None, split:], init)


def _task(preset: str, patch: int, width: int, depth: int, heads: int, batch: int, steps: int, lr: float) -> Task:
    return Task(
        name="vision",
        preset=preset,
        rev=REV,
        summary=f"digits, patch transformer {depth}×{width}, {patch}×{patch} patches",
        problem=partial(digit_problem, patch, width, depth, 360),
        model=partial(PatchClassifier, depth, heads),
        loss=cross_entropy,
        metrics={"accuracy": correct},
        digest_of=digits_digest,
        steps=steps,
        batch=batch,
        lr=lr,
        decay=0.9,
    )


PRESETS = {
    task.preset: task
    for task in (
        _task("smoke", 4, 16, 1, 2, 32, 60, 1e-2),
        _task("quickstart", 4, 32, 1, 2, 32, 240, 5e-3),
        _task("small", 2, 48, 2, 4, 64, 400, 3e-3),
    )
}
