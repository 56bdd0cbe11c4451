"""A recipe: how a linear layer computes in training, and what is done around it. Immutable, hashable.

Here is what it consists of, and the recipes that follow from it: of a layer, for held-out data, its baseline. Its
identity is in canonical.py, what lanes must share to train together in signature.py, its words in description.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeVar

import msgspec

from fp4dse.dse.attention import Attention
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.estimator import Estimator
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.precision import Finish, Precise
from fp4dse.dse.layers.rule import LayerRule
from fp4dse.dse.quantizer import BF16, Quantizer
from fp4dse.dse.recipe.canonical import canonical_of, id_of
from fp4dse.dse.recipe.description import columns_of, label_of
from fp4dse.dse.recipe.signature import Signature, signature_of
from fp4dse.dse.record import Part
from fp4dse.dse.stages import SLOTS, STAGES, Dgrad, Fprop, Hadamard, Wgrad, XSource
from fp4dse.dse.training import DEFAULT, Training

Function = TypeVar("Function", bound=Callable[..., Any])

_ABOVE: dict[str, Callable[..., Any]] = {}


def serves_recipes(function: Function) -> Function:
    """A function of a module above this one that a method of Recipe calls: `named` and `validate` find it by its
    name."""
    _ABOVE[function.__name__] = function
    return function


_SLOT: dict[str, Callable[[Recipe], Quantizer]] = {slot: operator.attrgetter(slot) for slot in SLOTS}

GemmChoice = Literal["exact", "bf16-rounded", "fp8-exact"]
"""Products that operands meet in: `exact`, the fastest that rounds no operand; `bf16-rounded`, operands decoded with
all their factors and rounded to BF16, as most simulations have them; `fp8-exact`, in FP8 on FP8 units."""


class Recipe(Part, frozen=True):
    """Three stages, the gradient estimator, the layers and steps that are not quantized, the layers that compute
    otherwise, the attention core, the products, and the training side. `config_id` is the identity of what is computed;
    learning rate and seed are not part of it."""

    fprop: Fprop
    dgrad: Dgrad
    wgrad: Wgrad
    estimator: Estimator = Estimator()
    precise: Precise = Precise()
    layers: tuple[LayerRule, ...] = ()
    attention: Attention = Attention()
    finish: Finish | None = None
    gemm: GemmChoice = "exact"
    training: Training = Training()

    @staticmethod
    def named(name: str) -> Recipe:
        """A recipe shipped as a data file in `dse/recipes/`; ConfigError names the known ones."""
        files = _ABOVE["recipe_files"]()
        if name not in files:
            raise ConfigError("recipe", name, ", ".join(files))
        found: Recipe = files[name].recipe
        return found

    @staticmethod
    def uniform(quantizer: Quantizer) -> Recipe:
        """The same quantizer in all six slots, no rotation."""
        q = quantizer
        return Recipe(fprop=Fprop(x=q, w=q), dgrad=Dgrad(g=q, w=q), wgrad=Wgrad(g=q, x=q))

    def slot(self, name: str) -> Quantizer:
        """The quantizer in slot `fprop.x` … `wgrad.x`."""
        return _SLOT[name](self)

    def rotation(self, stage: str) -> Hadamard | None:
        rotation: Hadamard | None = getattr(self, stage).rotation
        return rotation

    def source(self, stage: str) -> XSource:
        """Of the operand that stage `dgrad` or `wgrad` shares with the forward pass."""
        source: XSource = getattr(self, stage).source
        return source

    def copies(self, stage: str) -> bool:
        """True if that operand is made from the forward's quantized copy."""
        return self.source(stage) != "master"

    def changed(self, rule: LayerRule) -> Recipe:
        """The recipe of a layer with what a rule changes, without rules of its own."""
        changes: dict[str, dict[str, object]] = {}
        for field in rule.changes:
            part, _, of = field.partition("_")
            changes.setdefault(part, {})[of] = None if getattr(rule, field) == "none" else getattr(rule, field)
        new = {part: msgspec.structs.replace(getattr(self, part), **of) for part, of in changes.items()}
        return msgspec.structs.replace(self, layers=(), **new)

    def canonical(self) -> Recipe:
        """The one spelling of all recipes that compute the same."""
        return canonical_of(self)

    @property
    def config_id(self) -> str:
        """16 hex digits: the same for all spellings of a recipe, and for no other."""
        return id_of(self.canonical())

    @property
    def is_plain(self) -> bool:
        """True where no slot has a block scale, in any layer, and none of the attention core."""
        return not self.layers and all(self.slot(s).is_plain for s in SLOTS) and self.attention.is_plain

    @property
    def base(self) -> Recipe:
        """The recipe of layers that no rule concerns and that are not precise, canonical."""
        return _base(self)

    def at(self, place: Place) -> Recipe:
        """The recipe of the layer at this place, canonical: with what its rules change there, BF16 where it is precise
        and no rule says otherwise. It has no layers of its own."""
        return _at(self, place)

    def evaluated(self) -> Recipe:
        """The recipe that held-out data go through: rounding by chance in the forward pass is rounding to nearest
        (`Quantizer.evaluated`). Rotations and all else stay."""
        x, w = self.fprop.x.evaluated(), self.fprop.w.evaluated()
        fprop, layers = msgspec.structs.replace(self.fprop, x=x, w=w), tuple(rule.evaluated() for rule in self.layers)
        attention = self.attention.evaluated()
        return msgspec.structs.replace(self, fprop=fprop, layers=layers, attention=attention).canonical()

    def sampling(self) -> Recipe:
        """The recipe whose forward pass samples come from, where a task learns from its own: `training.rollout`, or as
        `evaluated`. Its backward pass is of no use."""
        rollout = self.training.rollout
        if rollout is None:
            return self.evaluated()
        found = msgspec.structs.replace(_BF16, fprop=rollout.fprop, precise=rollout.precise, gemm=self.gemm)
        return found.evaluated()

    def baseline(self) -> Recipe:
        """The recipe that this one's losses are compared with, canonical: BF16, with the training side of a recipe that
        quantizes, less what `Training.of_baseline` leaves out. So the gap of a recipe with another optimizer is what
        FP4 costs under that optimizer. One that does not quantize is compared with plain BF16."""
        return baseline_of(DEFAULT if self.is_plain else self.training)

    @property
    def is_baseline(self) -> bool:
        """True of what `baseline` returns: BF16 under some training side."""
        return self.is_plain and self.canonical() == baseline_of(self.training)

    def validate(self) -> list[tuple[str, str]]:
        """The rules that this recipe breaks, as (name, one line that says how); empty if it makes sense.

        What makes no sense within one part is unwritable or has no effect; rules concern several fields.
        """
        return [(rule, str(error)) for rule, error in _ABOVE["faults"](self)]

    def signature(self) -> Signature:
        """The part that fixes tensor shapes and control flow: lanes of equal signature share one compiled step."""
        return signature_of(self.canonical())

    def label(self) -> str:
        """The recipe in words: formats, where ranges and roundings apply, rotations, sources, estimators, and what is
        not the default of the rest."""
        return label_of(self.canonical())

    def columns(self) -> dict[str, str | int | float | None]:
        """Every axis as its own flat column, for the store: `fprop_x_scale`, `wgrad_rotation`, …"""
        return columns_of(self.canonical())


_BF16 = Recipe.uniform(BF16)
"""The recipe that is shipped as `bf16`."""


@lru_cache(maxsize=4096)
def baseline_of(training: Training) -> Recipe:
    """BF16 under this training side, canonical: the baseline of recipes that quantize and have it."""
    return msgspec.structs.replace(_BF16, training=training.of_baseline()).canonical()


@lru_cache(maxsize=4096)
def _base(recipe: Recipe) -> Recipe:
    return msgspec.structs.replace(recipe, layers=(), precise=Precise(), attention=Attention()).canonical()


@lru_cache(maxsize=4096)
def _at(recipe: Recipe, place: Place) -> Recipe:
    rules = [rule for rule in recipe.layers if rule.matches(place)]
    is_precise = not recipe.is_plain and recipe.precise.why(place) is not None
    here = _in_bf16(recipe.base) if is_precise else recipe.base
    for rule in rules:
        here = _in_bf16(here) if rule.is_bf16 else here.changed(rule)
    is_bf16 = rules and all(here.slot(slot).element == "bf16" for slot in SLOTS)
    return (_in_bf16(here) if is_bf16 else here).canonical()


def _in_bf16(recipe: Recipe) -> Recipe:
    """The recipe with BF16's products."""
    stages = {stage: getattr(_BF16, stage) for stage in STAGES}
    return msgspec.structs.replace(recipe, estimator=Estimator(), gemm="exact", **stages)
