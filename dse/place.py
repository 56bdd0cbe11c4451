"""The position of a layer in its model, by which a recipe can keep layers in high precision, as data."""

from __future__ import annotations

from typing import Literal

from fp4dse.dse.record import Part

Kind = Literal["linear", "embedding", "head", "attention", "mlp", "router", "conv"]
"""`embedding`: the first product with the input (patches, pixels, times); `head`: the last one; `attention`:
projections of queries, keys, values and output; `linear`: none of the others."""


class Place(Part, frozen=True):
    """Kind of a layer, and its block (0 …) among the model's `blocks`; None outside of blocks."""

    kind: Kind = "linear"
    block: int | None = None
    blocks: int = 0
