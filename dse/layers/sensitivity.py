"""The recipes that tell which layers must stay in BF16: each part of a model quantized alone, and spared alone.

    alone     BF16, with one unit of layers as the recipe has it     its gap is what quantizing the unit costs
    spared    the recipe, with one unit in BF16                      what the gap falls by is what sparing it gains

A unit is the layers of a kind, or of a role within it, in a part of the blocks, with all of their products or some.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.layers.exceptions import with_exceptions_at
from fp4dse.dse.layers.place import Place
from fp4dse.dse.outliers import TrainedFactors, TrainedScales, outlier_words
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.record import Part
from fp4dse.dse.stages import STAGES

SCOPES: dict[str, tuple[str, ...]] = {
    "all": tuple(STAGES),
    "forward": ("fprop",),
    "backward": ("dgrad", "wgrad"),
    **{stage: (stage,) for stage in STAGES},
}
"""The products of a unit that are quantized, or spared, together."""
BF16 = Recipe.named("bf16")

By = Literal["kind", "role"]


class Unit(Part, frozen=True):
    """Layers and products that are looked at together.

    word    kind or role of the layers (place.py)
    part    of `parts` equal ones of the blocks, from 0; None: layers outside of blocks
    scope   of SCOPES
    """

    word: str
    part: int | None = None
    parts: int = 1
    scope: str = "all"

    @property
    def stages(self) -> frozenset[str]:
        """The products that are meant."""
        return frozenset(SCOPES[self.scope])

    def has(self, place: Place, by: By) -> bool:
        """True for a layer that belongs to it."""
        if word_of(place, by) != self.word or (place.block is None) != (self.part is None):
            return False
        return place.block is None or _part_of(place, self.parts) == self.part

    @property
    def layers(self) -> str:
        """Its layers in words: `mlp, part 2 of 3`."""
        if self.part is None or self.parts == 1:
            return self.word
        return f"{self.word}, part {self.part + 1} of {self.parts}"

    def label(self) -> str:
        """In words: `mlp, part 2 of 3: wgrad`."""
        return unit_label(self.layers, self.scope)


def unit_label(layers: str, scope: str) -> str:
    """Layers of a unit, in words, with those products that it has."""
    return layers if scope == "all" else f"{layers}: {scope}"


class Grain(Part, frozen=True):
    """The fineness with which a model is cut into units.

    by      layers of a kind together, or of a role (`qkv`, `up` …) where a layer has one
    parts   of the blocks, from the first to the last; 0: each block
    scopes  of SCOPES; a layer has a unit for each
    """

    by: By = "role"
    parts: int = 3
    scopes: tuple[str, ...] = ("all",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts < 0:
            raise ConfigError("parts", self.parts, "a number of parts of the blocks, or 0 for each block")
        if not self.scopes or not set(self.scopes) <= set(SCOPES):
            raise ConfigError("scopes", ",".join(self.scopes), f"one or more of {', '.join(SCOPES)}")


def word_of(place: Place, by: By) -> str:
    """The word by which a layer belongs to a unit."""
    return place.role or place.kind if by == "role" else place.kind


def units(recipe: Recipe, places: Iterable[Place], grain: Grain) -> list[Unit]:
    """The units of a model's layers in which the recipe quantizes something, in the order of the layers. ConfigError if
    there are none, or if the recipe takes no rules for layers."""
    if recipe.finish and recipe.finish.stages_but_weights:
        accepted = "forward, backward, all, or no finish (layers apart need rules, which it does not go with)"
        raise ConfigError("finish.what", recipe.finish.what, accepted)
    if isinstance(of := recipe.canonical().fprop.w.outliers, TrainedFactors | TrainedScales):
        accepted = "none, low-rank (layers apart need rules, which trained factors do not go with)"
        raise ConfigError("fprop.w.outliers", outlier_words(of), accepted)
    found: dict[Unit, None] = {}
    model = list(places)
    for place in model:
        here = recipe.at(place)
        parts = min(grain.parts or place.blocks, place.blocks) or 1
        part = None if place.block is None else _part_of(place, parts)
        for scope in grain.scopes:
            if not all(_is_plain(here, stage) for stage in SCOPES[scope]):
                found[Unit(word_of(place, grain.by), part, 1 if part is None else parts, scope)] = None
    if not found:
        words = ", ".join(dict.fromkeys(place.name or place.kind for place in model))
        raise ConfigError("recipe", recipe.label(), f"one that quantizes a layer of the model: {words}")
    return list(found)


Products = Mapping[Place, frozenset[str]]
"""Place -> the stages of it that are meant."""


def products(chosen: Iterable[Unit], places: Iterable[Place], by: By) -> Products:
    """The products of a model's layers that units mean."""
    model, found = list(places), dict[Place, frozenset[str]]()
    for unit in chosen:
        for place in model:
            if unit.has(place, by):
                found[place] = found.get(place, frozenset()) | unit.stages
    return found


def spared(recipe: Recipe, of: Products, places: Collection[Place]) -> Recipe:
    """The recipe with these products in BF16, canonical."""
    wanted = {place: _exchanged(recipe.at(place), BF16, of.get(place, frozenset())) for place in places}
    return with_exceptions_at(recipe, wanted)


def alone(recipe: Recipe, of: Products, places: Collection[Place]) -> Recipe:
    """BF16 with these products as the recipe has them, canonical; the training side is the recipe's, the attention core
    BF16's."""
    base = _exchanged(recipe, BF16, frozenset(STAGES))
    base = msgspec.structs.replace(base, layers=(), attention=BF16.attention)
    here = {place: recipe.at(place) for place in places}
    wanted = {
        place: _exchanged(of_place, BF16, frozenset(STAGES) - of.get(place, frozenset()))
        for place, of_place in here.items()
    }
    return with_exceptions_at(base, wanted)


def ends(places: Sequence[Place]) -> list[Place]:
    """Layers within blocks in the order in which sparing the first and last blocks reaches them: four blocks of the end
    for one of the beginning, as NVIDIA's recipe has it (2509.25149: the first two and the last eight)."""
    blocks = max((place.blocks for place in places), default=0)
    first, last, order = 0, blocks - 1, []
    while first <= last:
        for _ in range(4):
            if first <= last:
                order.append(last)
                last -= 1
        if first <= last:
            order.append(first)
            first += 1
    return [place for block in order for place in places if place.block == block]


def _part_of(place: Place, parts: int) -> int:
    """The part of the blocks, as equal as they can be, in which a layer within blocks stands."""
    assert place.block is not None
    edges = [round(i * place.blocks / parts) for i in range(parts + 1)]
    return next(i for i in range(parts) if edges[i] <= place.block < edges[i + 1])


def _is_plain(recipe: Recipe, stage: str) -> bool:
    return all(recipe.slot(f"{stage}.{operand}").is_plain for operand in STAGES[stage])


def _exchanged(recipe: Recipe, other: Recipe, stages: frozenset[str]) -> Recipe:
    """The recipe with these stages of another one, and what passes through their quantizers straight."""
    changes: dict[str, object] = {stage: getattr(other, stage) for stage in STAGES if stage in stages}
    if "fprop" in stages:
        changes["estimator"] = other.estimator
    return msgspec.structs.replace(recipe, **changes)
