"""A torch model of the user's own, its products with weights quantized by a recipe: `convert(model, recipe)`.

The model is converted in place. A converted layer is the same module with another forward: its parameters are the same
objects of the same names and shapes, so that state_dict, optimizers, hooks and DistributedDataParallel see what they
saw before. Products are computed in float32 from whatever dtype comes in, and given back in that dtype, or in that of
autocast where it is on.

There is one lane. Every forward pass of the whole model in train mode is a step, which keys the random bits and moves
on what is kept between steps (tensor maxima, moving averages); in eval mode nothing moves. A backward pass belongs to
the step of its forward pass, whatever was called in between.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.place import Kind, Place
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.training import Training
from fp4dse.kernels.columns import Window
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.layers import product

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Line(NamedTuple):
    """What became of a module. why_not: None if it was converted."""

    name: str
    kind: str
    place: Place
    why_not: str | None


class Report(NamedTuple):
    """What `convert` did: a line for every module with a weight of two or more dimensions, and notes on the rest."""

    recipe: Recipe
    lines: list[Line]
    notes: list[str]
    steps: Steps

    @property
    def converted(self) -> list[str]:
        """Names of the layers that are quantized."""
        return [line.name for line in self.lines if line.why_not is None]

    @property
    def fallbacks(self) -> list[str]:
        """Paths that were wanted and not taken on the devices used so far, one sentence each."""
        return self.steps.fallbacks

    def __str__(self) -> str:
        rows = [
            [line.name or "(model)", line.kind, line.why_not or f"quantized, as {line.place.kind}"]
            for line in self.lines
        ]
        wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
        text = [f"{name:<{wide[0]}}  {kind:<{wide[1]}}  {what}" for name, kind, what in rows]
        return "\n".join([self.recipe.label(), *text, *self.notes])


class Steps:
    """What the layers of a converted model share: the recipe, the step, and the numerics of each device.

    Copies and pickles of it begin without what is kept between steps.
    """

    def __init__(self, recipe: Recipe, seed: int, steps: int | None) -> None:
        self.recipe, self.seed, self.steps = recipe, seed, steps
        self.step, self.training = 0, True
        self._started = False
        self._numerics: dict[torch.device, LaneNumerics] = {}
        self._now: dict[torch.device, LaneNumerics] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_numerics": {}, "_now": {}}

    def advance(self, model: nn.Module, _: Any) -> None:
        """Begin a forward pass of the model."""
        if model.training and self._started:
            self.step += 1
        self._started = self._started or model.training
        self.training = model.training
        self._now = {}

    def numerics(self, device: torch.device) -> LaneNumerics:
        """Those of the present step. Later steps do not change them: a backward pass may come late."""
        if device not in self._now:
            if device not in self._numerics:
                self._numerics[device] = LaneNumerics([self.recipe], [self.seed], device, self.steps)
            now = copy.copy(self._numerics[device])
            now.step = torch.full((), self.step, dtype=torch.int64, device=device)
            now.training = self.training
            now.phase(self.step)
            self._now[device] = now
        return self._now[device]

    @property
    def fallbacks(self) -> list[str]:
        of = self._numerics.values()
        return [
            *dict.fromkeys(reason for n in of for reason in (*n.backend.why_not, *n.gemm_why_not, *n.through_why_not))
        ]


class Converted(nn.Module):
    """A layer whose three products are quantized, of a kind that says how it is such a product: `compute`."""

    fp4dse: Steps
    fp4dse_layer: int
    weight: Tensor
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        for name, tensor in (("input", input), ("weight", self.weight)):
            if tensor.dtype not in DTYPES:
                raise ConfigError(f"dtype of the {name}", tensor.dtype, ", ".join(map(str, DTYPES)))
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        with torch.autocast(device, enabled=False):
            return self.compute(input.to(torch.float32)).to(dtype)

    def compute(self, x: Tensor) -> Tensor:
        """The layer in float32."""
        raise NotImplementedError

    def product(self, x: Tensor, weight: Tensor, window: Window | None = None) -> Tensor:
        """`layers.product` of x [1, …], a weight [N, K] and the bias, with the recipe's quantizers: [M, N]."""
        bias = None if self.bias is None else self.bias.to(torch.float32)[None]
        numerics = self.fp4dse.numerics(x.device)
        return product(x, weight.to(torch.float32)[None], bias, numerics, self.fp4dse_layer, window)[0]

    @staticmethod
    def why_not(layer: Any) -> str | None:
        """Why a layer of this kind is not converted, None if it is."""
        return None


class ConvertedLinear(Converted, nn.Linear):
    """nn.Linear."""

    def compute(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(1, -1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class ConvertedConv2d(Converted, nn.Conv2d):
    """nn.Conv2d as the product of its columns, the contraction ordered (kernel row, kernel column, channel)."""

    def compute(self, x: Tensor) -> Tensor:
        images = x if x.dim() == 4 else x[None]
        window = Window((self.kernel_size[0], self.kernel_size[1]), self.stride[0], int(self.padding[0]))
        places = window.places(*images.shape[2:])
        y = self.product(images.permute(0, 2, 3, 1)[None], self.weight.permute(0, 2, 3, 1).flatten(1), window)
        y = y.view(len(images), *places, -1).permute(0, 3, 1, 2)
        return y if x.dim() == 4 else y[0]

    @staticmethod
    def why_not(layer: Any) -> str | None:
        for field, fits in (
            ("groups", layer.groups == 1),
            ("dilation", layer.dilation == (1, 1)),
            ("stride", layer.stride[0] == layer.stride[1]),
            ("padding", not isinstance(layer.padding, str) and layer.padding[0] == layer.padding[1]),
            ("padding_mode", layer.padding_mode == "zeros"),
        ):
            if not fits:
                return f"{field} {getattr(layer, field)} is not built"
        return None


LAYERS: dict[type[nn.Module], type[Converted]] = {nn.Linear: ConvertedLinear, nn.Conv2d: ConvertedConv2d}
"""Kind of layer -> what it becomes."""

BYPASSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that multiply with the weights of their layers without calling them, always or in eval mode."""

REASONS: dict[type[nn.Module], str] = {
    nn.Embedding: "a look-up, not a product",
    nn.EmbeddingBag: "a look-up, not a product",
    nn.MultiheadAttention: "its projections are inside its own code",
}


def convert(
    model: nn.Module, recipe: Recipe, seed: int = 0, steps: int | None = None, places: Mapping[str, Place] | None = None
) -> Report:
    """Quantize the layers of `model` as the recipe says, in place. Returns what was converted and what was not and why.

    seed     of the random bits; give the processes of a data-parallel training different ones
    steps    of the whole training, for a recipe whose last steps are precise
    places   name of a layer -> where it stands, for recipes that keep some layers precise; what is left out is guessed
             from the name (`guess_place`)

    The report is also `model.fp4dse_report`. ConfigError for an invalid recipe, an unknown name in `places`, a model
    that was converted before, or one in which there is nothing to convert.
    """
    for rule, reason in recipe.validate():
        raise ConfigError("recipe", rule, f"recipes that keep this rule: {reason}")
    if recipe.finish and steps is None:
        raise ConfigError("steps", None, f"the steps of the whole training (recipe.finish: {recipe.finish.label()})")
    modules = dict(model.named_modules())
    if any(isinstance(module, Converted) for module in modules.values()):
        raise ConfigError("model", "converted already", "a model that was not")
    found = _places(modules, places or {})
    shared = Steps(recipe.canonical(), seed, steps)
    lines = [
        Line(name, type(module).__name__, found[name], _why_not(name, modules, shared.recipe, found[name]))
        for name, module in modules.items()
        if any(p.dim() >= 2 for p in module.parameters(recurse=False))
    ]
    chosen = [modules[line.name] for line in lines if line.why_not is None]
    if not chosen:
        reasons = "; ".join(f"{line.name}: {line.why_not}" for line in lines[:4]) or "it has no weights"
        raise ConfigError("model", type(model).__name__, f"a model with a layer to quantize ({reasons})")
    for layer, module in enumerate(chosen):
        module.__class__ = LAYERS[type(module)]
        module.fp4dse, module.fp4dse_layer = shared, layer
    model.register_forward_pre_hook(shared.advance)
    notes = [] if recipe.training == Training() else [f"left to your training loop: {recipe.training.label()}"]
    report = Report(shared.recipe, lines, notes, shared)
    model.fp4dse_report = report  # type: ignore[assignment]
    return report


def _why_not(name: str, modules: Mapping[str, nn.Module], recipe: Recipe, place: Place) -> str | None:
    """Why a module is not converted, None if it is to be."""
    module, parent = modules[name], modules.get(name.rpartition(".")[0]) if name else None
    if type(module) in REASONS:
        return REASONS[type(module)]
    if isinstance(parent, BYPASSED):
        return f"{type(parent).__name__} takes its weight without calling it"
    if type(module) not in LAYERS:
        known = [kind.__name__ for kind in LAYERS if isinstance(module, kind)]
        other = f"a subclass of {known[0]}, which may compute something else" if known else None
        return other or f"not one of {', '.join(kind.__name__ for kind in LAYERS)}"
    why = None if recipe.is_plain else recipe.precise.why(place)
    return f"precise in the recipe ({why})" if why else LAYERS[type(module)].why_not(module)


def _places(modules: Mapping[str, nn.Module], given: Mapping[str, Place]) -> dict[str, Place]:
    """Name -> place of every module."""
    for name in given:
        if name not in modules:
            raise ConfigError("places", name, ", ".join(filter(None, modules)))
    last: dict[str, int] = {}
    for name in modules:
        if (split := _block(name)) is not None:
            last[split[0]] = max(last.get(split[0], 0), split[1])
    return {name: given.get(name) or guess_place(name, last) for name in modules}


WORDS: dict[Kind, tuple[str, ...]] = {
    "router": ("router",),
    "embedding": ("embed", "embedding", "embeddings", "embedder", "wte", "patch"),
    "attention": ("attn", "attention", "qkv", "q", "k", "v", "query", "key", "value"),
    "mlp": ("mlp", "ffn", "feed", "expert", "experts"),
    "head": ("head", "lmhead", "classifier", "unembed", "score"),
}
"""Kind -> words in the dotted name of a layer, split at dots and underscores; the first that fits."""


def guess_place(name: str, last_blocks: Mapping[str, int]) -> Place:
    """The place of a layer by its name: a word of it, and the first number in it, which counts the blocks of its list.

    last_blocks: what stands before the number -> the number of the last block.
    """
    words = name.lower().replace("_", ".").split(".")
    kind: Kind = next((kind for kind, known in WORDS.items() if not set(words).isdisjoint(known)), "linear")
    if words[-1] == "gate":  # of experts; a gated linear unit has a gate_proj
        kind = "router"
    if (split := _block(name)) is None:
        return Place(kind)
    return Place(kind, split[1], last_blocks[split[0]] + 1)


def _block(name: str) -> tuple[str, int] | None:
    """`model.layers.3.mlp.up` -> (`model.layers`, 3); None without a number before the last dot."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return None if at is None else (".".join(parts[:at]), int(parts[at]))
