"""Scenarios: named sets of assumptions about software, taken for all recipes at once. They make an overhead a band.

A chip file says what a GPU and its products reach. How well a library makes use of that differs, and decides more than
most techniques: how fast the kernels are that quantize, how fast FP4 products are, and how much of a step is outside of
all that. `scenarios.toml` has one table a scenario, from the best software to the worst:

    products   rate of FP4 products relative to the share in the chip's file
    passes     time of the kernels that quantize relative to the modelled one
    philox     rounds of the random generator
    rest       seconds of a step that are not modelled, a share of BF16's modelled step

They hold for BF16 as well: `rest` is the same for every recipe, so a long one makes all recipes alike.
"""

from __future__ import annotations

import tomllib
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from fp4dse.dse.cost.chip import Chip, Number


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One set of assumptions; `summary` says it in a clause."""

    name: str
    summary: str
    products: Number
    passes: Number
    philox: Number
    rest: Number


@cache
def scenarios() -> dict[str, Scenario]:
    """All of them by name, the best software first."""
    found = tomllib.loads((Path(__file__).parent / "scenarios.toml").read_text(encoding="utf-8"))
    return {name: msgspec.convert({"name": name, **table}, Scenario) for name, table in found.items()}


MID = "mid"
"""The scenario of the column `overhead` and of every single figure."""
ENDS = ("low", "high")
"""The scenarios at the ends of a band: software at its best and at its worst."""
BAND = tuple(f"overhead_{end}" for end in ENDS)
"""The columns of an overhead at ENDS."""


@lru_cache(maxsize=256)
def under(chip: Chip, name: str = MID) -> Chip:
    """The chip with the software of a scenario: what the model prices steps on. KeyError for an unknown name."""
    scenario = scenarios()[name]
    formats = dict(chip.achieved.formats)
    if "fp4" in chip.matrix:
        share = formats.get("fp4", chip.achieved.matrix)
        formats["fp4"] = Number(min(1.0, share.value * scenario.products.value), share.source)
    return msgspec.structs.replace(
        chip,
        achieved=msgspec.structs.replace(chip.achieved, formats=formats),
        philox_rounds=scenario.philox.value if chip.philox_rounds is None else chip.philox_rounds,
        passes=chip.passes * scenario.passes.value,
        rest=chip.rest + scenario.rest.value,
    )
