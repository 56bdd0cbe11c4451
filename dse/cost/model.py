"""The shape of a model's training step on one GPU, as data: what its products, traffic and parameters are.

`models/` has one TOML file for each. Every product with a weight has a place in the model, so that a recipe which keeps
some layers precise is priced with exactly these in BF16. Everything else (attention core, norms, optimizer) stays as in
BF16 training and is priced once for all recipes. What several GPUs say to each other is not part of it, but for tokens
that are sent to experts (exchange.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from fp4dse.dse.cost.chip import Number, load_data
from fp4dse.dse.layers.place import Kind, Place, Role
from fp4dse.dse.layers.precision import Precise
from fp4dse.dse.layers.rule import LayerRule


class Linear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` layers [outputs, inputs]. Layers of one input (q, k and v) are one: their input is quantized once.

    kind, role   what the layer is to a recipe that treats layers differently (place.py); head and embedding are outside
                 of blocks
    at           the letter of Model.pattern of the blocks that it stands in; empty: in every block
    tokens       rows of each layer, relative to the micro-batch's tokens: below 1 of experts that few of them choose
    together     layers that are multiplied and quantized in one launch
    expert       True for the layers of experts
    keeps        the input is kept for the backward pass; False: it is made again of what is kept beside
    """

    name: str
    inputs: int
    outputs: int
    count: int = 1
    kind: Kind = "linear"
    role: Role = ""
    at: str = ""
    tokens: float = 1.0
    together: int = 1
    expert: bool = False
    keeps: bool = True

    @property
    def launches(self) -> float:
        """Launches of one product of all layers."""
        return self.count / self.together


class Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` attention cores over `context` tokens, causal or not, with heads of `head` channels, `width` in all.
    kv: channels of all keys, where heads share them; 0: as many as queries have."""

    width: int
    head: int
    context: int
    count: int
    causal: bool = True
    kv: int = 0


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Element-wise work: `passes` reads and writes of BF16 [tokens, width], forward and backward, `count` times."""

    name: str
    width: int
    passes: float
    count: int = 1


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor kept for the backward pass beside inputs of layers: [tokens, width], `count` times, in so many bits an
    element, 0: in those of the recipe's layers."""

    name: str
    width: float
    count: int = 1
    bits: float = 16.0


class Exchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens [width] that are sent to experts on `gpus` GPUs, `copies` of each, `count` times forward and backward.
    exposed: share of the time that nothing else hides, and where that is from."""

    width: int
    copies: float
    gpus: int
    count: int
    exposed: Number


class Model(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """One micro-batch of `tokens` rows on one GPU, `micro_batches` of them to an optimizer step.

    blocks      repeated blocks of the model
    pattern     a letter for each block, where blocks differ
    parameters  that the optimizer updates, embeddings among them
    bytes_per_parameter  what an optimizer step reads and writes
    state_bytes  of a parameter, gradients and optimizer state included, in memory
    kept         for the backward pass, beside inputs of layers
    residual     width of what passes between blocks: all that a block keeps which is made again
    in_flight    micro-batches that wait for their backward pass at once, as in a pipeline of GPUs
    exchange     of tokens between GPUs
    copies       weights of experts are copied side by side for their products, and the copies wait for the backward
                 pass: in FP32 where the recipe quantizes, in BF16 where it does not
    """

    name: str
    summary: str
    source: str
    tokens: int
    micro_batches: int
    blocks: int
    linears: list[Linear]
    parameters: float
    bytes_per_parameter: float = 30.0
    attention: list[Attention] = []
    traffic: list[Traffic] = []
    pattern: str = ""
    state_bytes: float = 16.0
    kept: list[Kept] = []
    residual: int = 0
    in_flight: float = 1.0
    exchange: list[Exchange] = []
    copies: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "micro_batches", "blocks", "bytes_per_parameter", "state_bytes", "in_flight"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name):g}, but must be a finite number above 0")
        if not 0 <= self.parameters < math.inf:  # none where a layer is looked at without its optimizer
            raise ValueError(f"parameters is {self.parameters:g}, but must be a finite number, 0 or above")
        for linear in self.linears:
            for name in ("inputs", "outputs", "count", "together"):
                if getattr(linear, name) < 1:
                    raise ValueError(f"{linear.name}: {name} is {getattr(linear, name)}, but must be above 0")
            if not 0 < linear.tokens < math.inf:
                raise ValueError(f"{linear.name}: tokens is {linear.tokens:g}, but must be a finite number above 0")
        for exchange in self.exchange:
            if not 0 <= exchange.exposed.value <= 1:
                raise ValueError(f"exchange: exposed is {exchange.exposed.value:g}, but is a share, from 0 to 1")
            if exchange.gpus < 1:
                raise ValueError(f"exchange: gpus is {exchange.gpus}, but must be 1 or more")
        if len(self.pattern) not in (0, self.blocks):
            raise ValueError(f"pattern has {len(self.pattern)} letters, blocks is {self.blocks}")
        for linear in self.linears:
            blocks = len(self._blocks(linear))
            if linear.kind not in OUTSIDE and (not blocks or linear.count % blocks):
                raise ValueError(f"{linear.name}: count is {linear.count}, the blocks that it stands in are {blocks}")

    def places(self, linear: Linear) -> list[Place]:
        """The positions of its `count` layers in the model. Names are as in this project's decoder: `block3.qkv`."""
        if linear.kind in OUTSIDE:
            return [Place(linear.kind, name=linear.kind)] * linear.count
        blocks, name = self._blocks(linear), _NAMES.get(linear.role, linear.name)
        name = f"expert.{name}" if linear.expert else name
        places = [
            Place(linear.kind, block, self.blocks, linear.role, linear.expert, f"block{block}.{name}")
            for block in blocks
        ]
        return places * (linear.count // len(blocks))

    def _blocks(self, linear: Linear) -> list[int]:
        return [i for i in range(self.blocks) if not linear.at or self.pattern[i : i + 1] == linear.at]


_NAMES: dict[str, str] = {"qkv": "qkv", "attention-out": "out", "up": "up", "down": "down"}
"""Role -> the last word of a layer's name."""
OUTSIDE = ("head", "embedding")
"""Kinds of layers that stand outside of blocks."""


@lru_cache(maxsize=4096)
def told_apart(model: Model, precise: Precise, rules: tuple[LayerRule, ...] = ()) -> tuple[tuple[Place, Model], ...]:
    """The model in parts whose layers `precise` and the rules treat alike, the precise ones last: a place of each part,
    and the model with these layers alone, as one block."""
    places: dict[tuple[bool, ...], Place] = {}
    counts: dict[tuple[bool, ...], dict[Linear, int]] = {}
    for linear in model.linears:
        for place in model.places(linear):
            group = precise.why(place) is not None, *(rule.matches(place) for rule in rules)
            places.setdefault(group, place)
            of = counts.setdefault(group, {})
            of[linear] = of.get(linear, 0) + 1
    return tuple((places[group], _part(model, counts[group])) for group in sorted(places))


def _part(model: Model, counts: Mapping[Linear, int]) -> Model:
    linears = [msgspec.structs.replace(linear, count=n, at="") for linear, n in counts.items()]
    return together(model, linears)


def together(model: Model, linears: list[Linear]) -> Model:
    """The model with these layers alone, as one block."""
    return msgspec.structs.replace(model, linears=linears, blocks=1, pattern="")


def model_names() -> list[str]:
    """The shapes that come with fp4dse."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


@cache
def load_model(source: str) -> Model:
    """A shape by name or from a `.toml` file; ConfigError if there is none or it is wrong."""
    return load_data(source, "model", _FOLDER, Model)


_FOLDER = Path(__file__).parent / "models"
