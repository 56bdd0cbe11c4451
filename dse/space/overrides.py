"""Finds axes of a space that overwrite what another axis or [fixed] wrote.

Axes are applied in the order written. One that changes a field of what stands above it refines it, which is what the
order is for. One that sets the same field, or a record around it, takes away what the upper one did: then the
upper axis varies nothing there, and what was to be one quantizer in all slots is a hybrid of several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.reading.paths import Chain, Fields, RecipePath, parse_path

Axes = Sequence[tuple[str, Any]]
"""The text of each path, and its Axis (space_file.py)."""


def written(path: RecipePath, values: Iterable[Any]) -> set[Chain]:
    """The fields that are set where `values` are written to the path; () is the whole recipe."""
    out: set[Chain] = set()
    for value in values:
        fields = [(name,) for name, _ in value.values] if isinstance(value, Fields) else [()]
        out |= {chain + field for chain in path.chains for field in fields}
    return out


def covered(upper: set[Chain], lower: set[Chain]) -> set[Chain]:
    """Those fields of `upper` that `lower` sets too, or a record around them."""
    return {chain for chain in upper if any(chain[: len(other)] == other for other in lower)}


def overridden(axes: Axes, where: str) -> list[str]:
    """A sentence for each axis that another one, which stands below it and holds everywhere, writes over."""
    paths = {text: parse_path(text, where) for text, _ in axes}
    chains = {text: written(paths[text], axis.values) for text, axis in axes}
    sentences = []
    for i, (upper, _) in enumerate(axes):
        for lower, by in axes[i + 1 :]:
            lost = covered(chains[upper], chains[lower])
            if not lost or by.when:
                continue
            if lost == chains[upper]:
                sentences.append(
                    f'axis "{upper}" has no effect: "{lower}" below it sets the same; put "{lower}" above it'
                )
                continue
            at = ", ".join(sorted(".".join(chain) for chain in lost))
            hint = f' (to refine it, vary its fields: "{lower}.block", say)' if paths[lower].type is Quantizer else ""
            sentences.append(
                f'axis "{upper}" varies nothing in {at}: "{lower}" below it sets that anew, so that recipes are '
                f"hybrids of both{hint}"
            )
    return sentences
