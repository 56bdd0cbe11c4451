"""The canonical form of a recipe: one spelling of all recipes that compute the same, and the id that follows from it.

What has no effect is removed: a rotation of operands that are not quantized, an estimator of a plain operand, a finish
that makes nothing more precise. Spaces make many recipes of few parts, so that what is found of a part is kept.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from fp4dse.dse.attention import Attention
from fp4dse.dse.channels import Held
from fp4dse.dse.estimator import Estimator, Through
from fp4dse.dse.formats import PLAIN
from fp4dse.dse.layers.precision import Finish, Precise
from fp4dse.dse.layers.rule import canonical_rules
from fp4dse.dse.outliers import LearnedClip, TrainedFactors, TrainedScales
from fp4dse.dse.own_formats import Element
from fp4dse.dse.quantizer import BF16, Quantizer
from fp4dse.dse.record import Part, plain_parts
from fp4dse.dse.rollout import Rollout
from fp4dse.dse.stages import STAGES, Dgrad, Wgrad
from fp4dse.dse.training import Training

if TYPE_CHECKING:
    from fp4dse.dse.recipe import GemmChoice, Recipe

AnyPart = TypeVar("AnyPart", bound=Part)

ID_VERSION = 1
"""Raised only if the canonical form itself changes meaning; it is part of the hash."""

_PLAIN_ATTENTION = Attention()


def canonical_of(recipe: Recipe) -> Recipe:
    """The one spelling of all recipes that compute the same."""
    if recipe.training.trains != "all" and (found := _as_trained(recipe)) is not recipe:
        return canonical_of(found)
    plain_x, plain_w = recipe.fprop.x.is_plain, recipe.fprop.w.is_plain
    precise, layers = canonical_rules(recipe.precise, recipe.layers) if recipe.layers else (recipe.precise, ())
    attention = recipe.attention if recipe.attention == _PLAIN_ATTENTION else recipe.attention.canonical()
    quantizes = bool(layers) or attention != _PLAIN_ATTENTION
    fprop = _canonical_channels(_canonical_stage(recipe.fprop, False), recipe.wgrad)
    dgrad = _canonical_stage(recipe.dgrad, recipe.fprop.w.element == "none")
    wgrad = _canonical_stage(recipe.wgrad, recipe.fprop.x.element == "none")
    estimator = _canonical_estimator(recipe.estimator, fprop)
    finish = recipe.finish
    if finish and finish.what == "all-but-weights" and plain_w and recipe.dgrad.w.is_plain and not quantizes:
        finish = msgspec.structs.replace(finish, what="all")
    around = _canonical_around(
        precise,
        finish,
        recipe.gemm,
        _without_oscillation(recipe.training) if plain_w and not layers else recipe.training,
        plain_x and plain_w and not quantizes,
        _elements(dgrad) | _elements(wgrad) <= PLAIN.keys() and not quantizes,
        _elements(fprop) | _elements(dgrad) | _elements(wgrad) == {"bf16"} and not quantizes,
    )
    changes = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad, "estimator": estimator}
    found = _replaced(recipe, **changes, layers=layers, attention=attention, **around)
    return found if found.training.rollout is None else _without_own_rollout(found)


def id_of(recipe: Recipe) -> str:
    """16 hex digits: SHA-256 of a canonical recipe as sorted JSON without defaults."""
    text = msgspec.json.encode([ID_VERSION, plain_parts(recipe)], order="sorted")
    return hashlib.sha256(text).hexdigest()[:16]


def _as_trained(recipe: Recipe) -> Recipe:
    """A recipe that does not train all parameters: none where nothing is learned beside the weights, and then without
    what training alone has."""
    training, operands = recipe.training, (recipe.fprop.x.canonical(), recipe.fprop.w.canonical())
    kinds = LearnedClip | TrainedFactors | TrainedScales
    learns = bool(recipe.layers) or any(isinstance(q.outliers, kinds) for q in operands)
    if training.trains == "learned" and learns:
        return recipe
    sides = {"dgrad": Dgrad(BF16, BF16), "wgrad": Wgrad(BF16, BF16), "estimator": Estimator()}
    untrained = Training(rollout=training.rollout, trains="none")
    return _replaced(recipe, training=untrained, **({} if recipe.layers else sides))


def _without_own_rollout(recipe: Recipe) -> Recipe:
    """A canonical recipe, without a rollout that computes as its forward pass does."""
    own = Rollout(recipe.fprop.x, recipe.fprop.w, recipe.fprop.rotation, recipe.precise).canonical()
    if own != recipe.training.rollout or recipe.layers or recipe.attention != _PLAIN_ATTENTION:
        return recipe
    return _replaced(recipe, training=msgspec.structs.replace(recipe.training, rollout=None))


@lru_cache(maxsize=4096)
def _without_oscillation(training: Training) -> Training:
    """The training side of a recipe whose weights are not quantized, and so do not oscillate."""
    return msgspec.structs.replace(training, reset=None, ramping=None)


@lru_cache(maxsize=65536)
def _canonical_stage(stage: Part, forward_is_untouched: bool) -> Part:
    """Cached, as spaces make many recipes of few stages."""
    operands = {
        name: q.canonical() for name in stage.__struct_fields__ if isinstance(q := getattr(stage, name), Quantizer)
    }
    changes: dict[str, object] = dict(operands)
    if all(q.is_plain for q in operands.values()):
        changes["rotation"] = None  # nothing is quantized: no effect
        if "channels" in stage.__struct_fields__:
            changes["channels"] = None
    if forward_is_untouched:
        changes["source"] = "master"  # the forward's copy is the operand itself
    return _replaced(stage, **changes)


def _canonical_channels(fprop: Any, wgrad: Wgrad) -> Any:
    """The forward product with the one spelling of its channels: where the weight's gradient is plain, nothing of it is
    in another format."""
    if not isinstance(fprop.channels, Held):
        return fprop
    of_wgrad = fprop.channels.wgrad and not (wgrad.g.is_plain and wgrad.x.is_plain)
    channels = msgspec.structs.replace(fprop.channels, format=fprop.channels.format.canonical(), wgrad=of_wgrad)
    return _replaced(fprop, channels=channels)


@lru_cache(maxsize=65536)
def _canonical_estimator(estimator: Estimator, fprop: Any) -> Estimator:
    """Nothing passes through the quantizer of a plain operand."""
    x, w = (
        Through() if (q := getattr(fprop, operand)).is_plain else getattr(estimator, operand).canonical(q.scale)
        for operand in STAGES["fprop"]
    )
    return _replaced(estimator, x=x, w=w)


def _replaced(part: AnyPart, **changes: object) -> AnyPart:
    """The part itself where nothing changes, which is found quickly in what was computed before."""
    for name, new in changes.items():
        if getattr(part, name) is not new and getattr(part, name) != new:
            return msgspec.structs.replace(part, **changes)
    return part


@lru_cache(maxsize=65536)
def _canonical_around(
    precise: Precise,
    finish: Finish | None,
    gemm: GemmChoice,
    training: Training,
    forward: bool,
    backward: bool,
    rounded: bool,
) -> dict[str, Any]:
    """The canonical fields beside the stages. forward, backward: their operands are plain; rounded: all to BF16."""
    if finish and (forward or backward):  # what is plain cannot become more precise
        left = {"forward": not forward, "backward": not backward}
        what = next((name for name, there in left.items() if there and finish.what in (name, "all")), None)
        what = "all-but-weights" if finish.what == "all-but-weights" and any(left.values()) else what
        finish = msgspec.structs.replace(finish, what=what) if what else None
    return {
        "precise": Precise() if forward and backward else precise,
        "finish": finish,
        "gemm": "exact" if rounded and gemm == "bf16-rounded" else gemm,
        "training": training.canonical(),
    }


@lru_cache(maxsize=65536)
def _elements(stage: Part) -> frozenset[Element]:
    """Of a stage's operands."""
    return frozenset(q.element for name in stage.__struct_fields__ if isinstance(q := getattr(stage, name), Quantizer))
