"""The shape of a model's training step on one GPU, as data: what its products, traffic and parameters are.

`models/` has one TOML file for each. Products with the weights of `linears` are quantized; everything else (head,
attention core, norms, optimizer) stays as in BF16 training and is priced once for all recipes. What several GPUs say to
each other is not part of it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from fp4dse.dse.cost.chip import load_data


class Linear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` layers [outputs, inputs]. Layers of one input (q, k and v) are one: their input is quantized once.

    quantized: whether recipes apply to it.
    """

    name: str
    inputs: int
    outputs: int
    count: int = 1
    quantized: bool = True


class Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` attention cores over `context` tokens, causal or not, with heads of `head` channels, `width` in all."""

    width: int
    head: int
    context: int
    count: int
    causal: bool = True


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Element-wise work: `passes` reads and writes of BF16 [tokens, width], forward and backward, `count` times."""

    name: str
    width: int
    passes: float
    count: int = 1


class Model(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """One micro-batch of `tokens` rows on one GPU, `micro_batches` of them to an optimizer step.

    blocks      repeated blocks of the model, of which some may be left in BF16
    parameters  that the optimizer updates, embeddings among them
    bytes_per_parameter  what an optimizer step reads and writes
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

    @property
    def quantized(self) -> list[Linear]:
        return [linear for linear in self.linears if linear.quantized]


def model_names() -> list[str]:
    """The shapes that come with fp4dse."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


@cache
def load_model(source: str) -> Model:
    """A shape by name or from a `.toml` file; ConfigError if there is none or it is wrong."""
    return load_data(source, "model", _FOLDER, Model)


_FOLDER = Path(__file__).parent / "models"
