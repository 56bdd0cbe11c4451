"""The position of a layer in its model, by which a recipe can treat layers differently, as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from fp4dse.dse.record import Part

Kind = Literal["linear", "embedding", "head", "attention", "mlp", "router", "conv"]
"""`embedding`: the first product with the input (patches, pixels, times); `head`: the last one; `attention`:
projections of queries, keys, values and output; `linear`: none of the others."""

Role = Literal["", "qkv", "attention-out", "up", "down", "pointwise", "spatial"]
"""Within attention and MLP: the products that begin them, and those that end them; `up` is with the gate, if any. Of
convolutions: `pointwise`, those of 1×1, which see one pixel at a time, and `spatial`, all others."""

WORDS: tuple[str, ...] = (*get_args(Kind), "expert", *filter(None, get_args(Role)))
"""Words by which a recipe speaks of layers."""


class Place(Part, frozen=True):
    """Kind of a layer, and its block (0 …) among the model's `blocks`; None outside of blocks.

    role     finer than the kind, where it is known
    expert   True for the layers of an expert
    name     of the layer in its model: `block3.qkv`
    """

    kind: Kind = "linear"
    block: int | None = None
    blocks: int = 0
    role: Role = ""
    expert: bool = False
    name: str = ""

    def within(self, role: Role, name: str) -> Place:
        """The place of a layer of this kind with this role and name."""
        return msgspec.structs.replace(self, role=role, name=name)

    @property
    def words(self) -> set[str]:
        """Those of WORDS that a layer here has."""
        return {self.kind, *filter(None, (self.role, "expert" if self.expert else ""))}


def conv_role(kind: Kind, kernel: Sequence[int]) -> Role:
    """The role of a layer of this kind with a kernel of these sizes; none of layers that are no `conv`."""
    if kind != "conv":
        return ""
    return "pointwise" if set(kernel) == {1} else "spatial"
