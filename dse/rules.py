"""Rules that reject senseless combinations, as data: each has a name, and says what it found and what it accepts.

What makes no sense within one part is unwritable, and what has no effect is removed by `canonical()`; rules concern
several fields. Sweeps count the recipes that a rule rejects; a recipe given by name or file that breaks one is an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import msgspec

from fp4dse.dse.attention import ATTENTION_SLOTS
from fp4dse.dse.channel_rules import choice_fault, forward_fault, product_fault, wgrad_fault
from fp4dse.dse.channels import Held
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.estimator import Through
from fp4dse.dse.exactness import significant_bits
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.layers.rule import check_rules
from fp4dse.dse.outliers import LearnedClip, LowRank, Mean, Residual, outlier_words
from fp4dse.dse.own_formats import element_name
from fp4dse.dse.quantizer import MACRO_BLOCK, Quantizer, block_name, tile
from fp4dse.dse.recipe import Recipe, serves_recipes
from fp4dse.dse.rounding import Ema, Nearest, Stochastic, rounding_name, samples_of
from fp4dse.dse.scale import E8M0, FP32, FloatScale, One, OwnScale, scale_format, scale_grid, scale_key, scale_name
from fp4dse.dse.stages import SLOTS, STAGES, rotation_name
from fp4dse.dse.training import SGD, AdamW

FP8_BITS = ELEMENTS["e4m3"].mantissa + 1
"""Significant bits that FP8 products take."""

Requirement = tuple[str, Callable[[Any], bool], str]
"""Field of a quantizer, what its value must be, and that in words."""

_E2M1: Requirement = ("element", lambda v: v == "e2m1", "e2m1")
_BLOCKS: Requirement = ("block", lambda v: isinstance(v, int), "8, 16, 32, 64, 128, 256")
_DECODE: Requirement = (
    "scale",
    lambda v: isinstance(v, FloatScale) and v.convention == "decode" and not v.hybrid,
    "a scale with a mantissa, decode convention, not hybrid",
)
_POWER: Requirement = ("scale", lambda v: isinstance(v, E8M0), "e8m0")
_NEAREST: Requirement = ("rounding", lambda v: v == Nearest(), "nearest")
_FULL: Requirement = ("range", lambda v: v == "full", "full")
_NO_ADAPTION: Requirement = ("adapt", lambda v: v == "none", "none")
_NO_TENSOR_SCALE: Requirement = ("tensor_scale", lambda v: v is None, "none")
_CURRENT: Requirement = ("tensor_scale", lambda v: v is None or v.policy == "current", "none, or the current maximum")
_NOT_EMA: Requirement = ("rounding", lambda v: not isinstance(v, Ema), "nearest, stochastic")

REQUIRES: dict[str, tuple[Requirement, ...]] = {
    "hif4": (
        ("element", lambda v: v == "s1p2", "s1p2"),
        ("block", lambda v: v == 64, "64"),
        ("rounding", lambda v: isinstance(v, Stochastic) or v == Nearest(ties="away"), "half-away, stochastic"),
        _NO_TENSOR_SCALE,
        _FULL,
    ),
    "table": (
        ("scale", lambda v: v != E8M0(rule="even"), "another scale (the rule even of e8m0 is about mantissa bits)"),
    ),
    "radix4": (_NOT_EMA, _NO_ADAPTION),
    "exact": (_NEAREST, _DECODE, _FULL, _NO_ADAPTION, _CURRENT),
    "split": (_BLOCKS, _DECODE, _NOT_EMA, _NO_ADAPTION),
    "macro": (_BLOCKS, _POWER, _NO_TENSOR_SCALE, _NOT_EMA, ("block", lambda v: v < MACRO_BLOCK, "8, 16, 32, 64")),
    "eden": (
        _BLOCKS,
        _DECODE,
        ("scale", lambda v: v.rounding == "stochastic", "a scale that is rounded stochastically"),
        ("tensor_scale", lambda v: v is not None, "a tensor scale, which leaves room for the correction"),
        _NEAREST,
        _FULL,
        _NO_ADAPTION,
    ),
    "quest": (_E2M1, _BLOCKS, _POWER, _NO_TENSOR_SCALE, _NOT_EMA, _FULL),
    "sawb": (
        ("element", lambda v: v == "int4", "int4"),
        ("block", lambda v: v in ("tensor", "row"), "tensor, row"),
        ("scale", lambda v: isinstance(v, FP32), "fp32"),
        _NO_TENSOR_SCALE,
        _NOT_EMA,
        _FULL,
        _NO_ADAPTION,
    ),
    "softmax": (_BLOCKS, _NO_ADAPTION),
    "if4": (_E2M1, _DECODE, _NOT_EMA),
    "mixfp4": (_E2M1, _DECODE, _NOT_EMA),
    "razer": (_E2M1, _DECODE, ("rounding", lambda v: isinstance(v, Nearest), "nearest")),
    "dialects": (_E2M1, _BLOCKS, ("scale", lambda v: v == E8M0(), "e8m0-floor"), _NO_TENSOR_SCALE, _NEAREST, _FULL),
}
"""Method (`Quantizer.methods`) -> what it requires of the other fields."""


_FOUND: dict[str, Callable[[Any], object]] = {
    "scale": lambda v: scale_name(v) if isinstance(v, OwnScale) else scale_format(v),
    "element": element_name,
}
"""Spellings of a field's values where it is not shown as it is."""


def _target(q: Quantizer) -> ConfigError | None:
    """A tensor-scale target above the largest block scale would always clip the largest blocks; one whose product with
    the largest element, under the encode convention the quotient, is beyond FP32 would make them infinite."""
    if q.tensor_scale is None or not (target := q.tensor_scale.target):
        return None
    if isinstance(q.scale, One):
        accepted = f"from 1 to {MOST_MARGIN:g}, by which the largest element is divided"
        return None if 1 <= target <= MOST_MARGIN else ConfigError("tensor_scale.target", target, accepted)
    encode = isinstance(q.scale, FloatScale) and q.scale.convention == "encode"
    reach = MOST_TARGET / q.val_max
    if isinstance(q.scale, FloatScale) and target > (largest := scale_grid(q.scale).max):
        accepted = f"at most {largest:g}, the largest {scale_key(q.scale)} block scale"
    elif encode and target * reach < 1:
        accepted = f"at least {1 / reach:g}, so that FP32 holds what the largest element stands for"
    elif not encode and target > reach:
        accepted = f"at most {reach:g}, so that FP32 holds what the largest element stands for"
    else:
        return None
    return ConfigError("tensor_scale.target", target, accepted)


MOST_TARGET = 2.0**126
"""Of a tensor-scale target times the largest element."""
MOST_MARGIN = 2.0**16
"""Of a target under the scale `one`."""


def _one(q: Quantizer) -> ConfigError | None:
    """Without a block scale there is nothing to choose, to make room in, or to derive."""
    if isinstance(q.scale, One):
        for field, only in (("adapt", "none"), ("scaling", "amax"), ("range", "full"), ("arithmetic", "fp32")):
            if getattr(q, field) != only:
                return ConfigError(field, getattr(q, field), f"{only} (for scale one)")
    return None


def _one_method(q: Quantizer) -> ConfigError | None:
    """Methods are different ways to find elements and scales; two of them at once are not defined."""
    return ConfigError("method", " with ".join(q.methods), "one of them alone") if len(q.methods) > 1 else None


def _method_parts(q: Quantizer) -> ConfigError | None:
    """The method's requirements of the other parts."""
    for method in q.methods:
        for field, fits, accepted in REQUIRES[method]:
            if not fits(getattr(q, field)):
                value = getattr(q, field)
                found = _FOUND[field](value) if field in _FOUND else value
                return ConfigError(field, found, f"{accepted} (for {method})")
    return None


def _row_factors(q: Quantizer) -> ConfigError | None:
    """A factor per row or segment needs blocks that lie within, one per tile a tile; rows come and go, so that theirs
    are current."""
    if q.tensor_scale and q.tensor_scale.over != "tensor":
        over, is_one = q.tensor_scale.over, isinstance(q.scale, One)
        if over == "tile" and not (is_one and tile(q.block) == MACRO_BLOCK):
            return ConfigError(
                "tensor_scale.over", over, "tensor, row, segment (tile: for scale one, blocks of 128x128)"
            )
        within = isinstance(q.block, int) or is_one
        if not within or (over == "segment" and isinstance(q.block, int) and q.block > MACRO_BLOCK):
            return ConfigError("tensor_scale.over", q.tensor_scale.over, f"tensor, for blocks of {q.block}")
        if q.tensor_scale.amax != "current":
            return ConfigError("tensor_scale.amax", q.tensor_scale.amax, f"current, for over {q.tensor_scale.over}")
    return None


def _s1p2(q: Quantizer) -> ConfigError | None:
    """S1P2 levels under another scale than HiFloat4's are E1M2's by another name."""
    if q.element == "s1p2" and "hif4" not in q.methods:
        return ConfigError("element", "s1p2", "e1m2, the same levels times two (s1p2 is HiFloat4's, scale e6m2)")
    return None


def _outliers(q: Quantizer) -> ConfigError | None:
    """A quantile is a share of the elements; the error of a quantizer, and singular vectors, have no moving average,
    and of several samples there are as many. Singular vectors are quantized one by one and are not rotated."""
    in_parts = isinstance(q.outliers, Residual | LowRank)
    if in_parts and (isinstance(q.rounding, Ema) or samples_of(q.rounding) > 1):
        found = outlier_words(q.outliers)
        return ConfigError("outliers", found, f"none, occ, clamp (with rounding {rounding_name(q.rounding)})")
    if isinstance(q.outliers, LowRank):
        if tile(q.block):
            return ConfigError("block", block_name(q.block), "a number, row, tensor (for outliers low-rank)")
        if q.codec == "eden":
            return ConfigError("scaling", "eden", "one that needs no rotation (for outliers low-rank)")
    quantile = getattr(q.outliers, "quantile", 0.75)
    if not 0.5 < quantile < 1:
        return ConfigError("outliers.quantile", quantile, "a number between 0.5 and 1")
    return None


def _ema(q: Quantizer) -> ConfigError | None:
    """A moving average has a share of the past below one."""
    if isinstance(q.rounding, Ema) and q.rounding.beta >= 1:
        return ConfigError("rounding.beta", q.rounding.beta, "a number between 0 and 1")
    return None


QUANTIZER_RULES: dict[str, Callable[[Quantizer], ConfigError | None]] = {
    "target-above-scale-format": _target,
    "one-method": _one_method,
    "scale-of-one": _one,
    "method-parts": _method_parts,
    "row-factors": _row_factors,
    "s1p2-is-hif4": _s1p2,
    "outliers": _outliers,
    "moving-average": _ema,
}
"""Rule name -> what breaks it in a canonical quantizer that is not plain, or None."""


def _ema_slot(r: Recipe) -> ConfigError | None:
    """Only the forward weight has a moving average."""
    for slot in SLOTS:
        if slot != "fprop.w" and isinstance(r.slot(slot).rounding, Ema):
            return ConfigError(f"{slot}.rounding", "ema", "nearest, stochastic (a moving average exists for fprop.w)")
    return None


def _mean_slot(r: Recipe) -> ConfigError | None:
    """A mean is over tokens, and weights have none."""
    for slot in SLOTS:
        if slot.endswith(".w") and isinstance(r.slot(slot).outliers, Mean):
            return ConfigError(
                f"{slot}.outliers", "mean", "none, residual, occ, clamp (a mean is over tokens: x and g)"
            )
    return None


def _learned_slot(r: Recipe) -> ConfigError | None:
    """A clip is learned for what the layer takes, before a rotation would mix it, by a gradient that the forward
    product alone has; and it is one number, so that parts of the tensor have no factors of their own."""
    for slot in SLOTS:
        q = r.slot(slot)
        if not isinstance(q.outliers, LearnedClip):
            continue
        found = outlier_words(q.outliers)
        if not slot.startswith("fprop."):
            return ConfigError(f"{slot}.outliers", found, "none, residual, occ, clamp (a clip is learned for fprop)")
        if r.fprop.rotation is not None:
            accepted = f"none (with {slot}.outliers {found}: a rotation mixes what is clamped)"
            return ConfigError("fprop.rotation", rotation_name(r.fprop.rotation), accepted)
        if q.tensor_scale is not None and q.tensor_scale.policy != "current":
            accepted = f"none, amax (with outliers {found}, which it follows)"
            return ConfigError(f"{slot}.tensor_scale", q.tensor_scale.policy, accepted)
        if q.outliers.start == "max" and slot != "fprop.w":
            return ConfigError(f"{slot}.outliers.start", "max", "a number (max is for weights)")
        if q.outliers.gradient == "lsq" and (error := _lsq(q, slot)):
            return error
    return None


def _lsq(q: Quantizer, slot: str) -> ConfigError | None:
    """The gradient of a scale holds where all elements have that scale and are rounded to the nearest."""
    found = {"block": block_name(q.block), "scale": scale_name(q.scale), "rounding": rounding_name(q.rounding)}
    for field, accepted in {"block": "tensor", "scale": "one", "rounding": "nearest"}.items():
        if found[field] != accepted:
            return ConfigError(f"{slot}.{field}", found[field], f"{accepted} (with the gradient of LSQ)")
    if q.tensor_scale is None:
        return ConfigError(f"{slot}.tensor_scale", "none", "amax (with the gradient of LSQ)")
    return None


def _eden_rotation(r: Recipe) -> ConfigError | None:
    """The correction makes a block unbiased only on average over random rotations of 128."""
    for stage, operands in STAGES.items():
        rotation = r.rotation(stage)
        if any(r.slot(f"{stage}.{o}").codec == "eden" for o in operands) and (
            rotation is None or (rotation.size, rotation.signs) != (128, "random")
        ):
            return ConfigError(f"{stage}.rotation", rotation_name(rotation), "rht128 (for scaling eden)")
    return None


ONE_GRID = ("block", "exact", "radix4", "split", "macro", "quest", "sawb", "softmax")
"""Codecs whose elements, relative to their scale, lie on the grid of one element format."""


def _passages(r: Recipe) -> Iterator[tuple[str, Through, Quantizer]]:
    """The forward operands whose gradient does not pass straight through, with their estimators and quantizers."""
    for operand in STAGES["fprop"]:
        if (through := getattr(r.estimator, operand)) != Through():
            yield operand, through, r.slot(f"fprop.{operand}")


def _estimator_grid(r: Recipe) -> ConfigError | None:
    """A surrogate is a function of the position on one grid, relative to the scale that elements are made with."""
    for operand, through, q in _passages(r):
        if q.codec not in ONE_GRID:
            return ConfigError(f"estimator.{operand}", through.label(), f"ste, none (fprop.{operand} is {q.codec})")
        if isinstance(q.scale, FloatScale) and q.scale.hybrid:
            return ConfigError(f"estimator.{operand}", through.label(), f"ste, none (fprop.{operand} is hybrid)")
    return None


def _estimator_outliers(r: Recipe) -> ConfigError | None:
    """With a second quantizer, a clamp, a mean or several samples the operand is no function of one position."""
    for operand, through, q in _passages(r):
        if samples_of(q.rounding) > 1:
            found = f"ste, none (fprop.{operand} has rounding {rounding_name(q.rounding)})"
            return ConfigError(f"estimator.{operand}", through.label(), found)
        if q.outliers is not None:
            return ConfigError(
                f"estimator.{operand}",
                through.label(),
                f"ste, none (fprop.{operand} has outliers {outlier_words(q.outliers)})",
            )
    return None


def _scale_gradient(r: Recipe) -> ConfigError | None:
    """Only a scale that follows from the block maximum alone, hard or soft, has a gradient that is defined."""
    for operand, through, q in _passages(r):
        method = q.codec if q.codec != "block" else q.adapt
        method = "of scale one" if isinstance(q.scale, One) else method
        accepted = ("none", "softmax-diagonal", "softmax") if method == "softmax" else ("none",)
        if method != "none" and through.scale not in accepted:
            found = f"{', '.join(accepted)} (fprop.{operand} is {method})"
            return ConfigError(f"estimator.{operand}.scale", through.scale, found)
    return None


def _whole_blocks(r: Recipe) -> ConfigError | None:
    """From one on, numbers of blocks are whole."""
    for end in ("first", "last"):
        number = getattr(r.precise, end)
        if number >= 1 and number != int(number):
            return ConfigError(f"precise.{end}", number, "a whole number of blocks, or below 1 a share of them")
    return None


def _shares(r: Recipe) -> ConfigError | None:
    """There are no more steps than all, and a running average has a share of the past below one."""
    if r.finish and r.finish.share > 1:
        return ConfigError("finish.share", r.finish.share, "a number above 0, at most 1")
    t = r.training
    found = {f"training.{name}": getattr(t, name) for name in ("beta1", "beta2")}
    found |= {f"training.optimizer.{name}": getattr(t.optimizer, name, None) for name in _RUNNING}
    for field, value in found.items():
        if value is not None and value >= 1:
            return ConfigError(field, value, "a number below 1")
    return None


def _fine_tuning(r: Recipe) -> ConfigError | None:
    """Channels are chosen and treated apart in both operands, of which one is plain in fine-tuning; and which stages
    have a quantized weight is asked of the recipe as a whole, not of layers with rules of their own."""
    if r.finish is None or not r.finish.stages_but_weights:
        return None
    beside = "fprop.channels" if r.fprop.channels is not None else "layers" if r.layers else ""
    return ConfigError("finish.what", r.finish.what, f"forward, backward, all (with {beside})") if beside else None


def _ramping(r: Recipe) -> ConfigError | None:
    """Rarer updates by more are defined for AdamW."""
    if r.training.ramping is None or isinstance(r.training.optimizer, AdamW | None):
        return None
    return ConfigError("training.optimizer", r.training.kind, "adamw or the task's, with training.ramping")


def _distill(r: Recipe) -> ConfigError | None:
    """The loss and the distance from a teacher share a weight of one."""
    if r.training.distill is None or r.training.distill.weight <= 1:
        return None
    return ConfigError("training.distill.weight", r.training.distill.weight, "a number above 0, at most 1")


def _trains(r: Recipe) -> ConfigError | None:
    """Weights stay where their gradients are zero, if the optimizer makes no step of that."""
    if r.training.trains != "learned" or isinstance(r.training.optimizer, AdamW | SGD | None):
        return None
    accepted = "adamw, sgd or the task's, with training.trains = learned"
    return ConfigError("training.optimizer", r.training.kind, accepted)


_RUNNING = ("momentum", "theta", "gamma1", "gamma2")


def _layers(r: Recipe) -> ConfigError | None:
    """Rules that say two things of the same layers; and what a rule makes of a layer is a recipe that must make sense:
    a rule by itself is asked about, as which rules meet in a layer is the model's."""
    if (error := check_rules(r.layers)) is not None:
        return error
    for number, rule in enumerate(r.layers):
        for _, error in faults(r.changed(rule)):
            return ConfigError(f"layers[{number}]: {error.where}", error.found, error.accepted)
    return None


def _attention(r: Recipe) -> ConfigError | None:
    """The core has neither rotations nor a product of what clamping cuts off, and no weight that has an average."""
    for slot in ATTENTION_SLOTS:
        q = r.attention.operand(slot).canonical()
        for _, error in quantizer_faults(q):
            return ConfigError(f"attention.{slot}.{error.where}", error.found, error.accepted)
        if q.outliers is not None:
            return ConfigError(f"attention.{slot}.outliers", outlier_words(q.outliers), "none")
        if q.codec == "eden" or isinstance(q.rounding, Ema):
            found = "eden" if q.codec == "eden" else "ema"
            return ConfigError(f"attention.{slot}", found, "quantizers that need neither a rotation nor an average")
    return None


def _rollout(r: Recipe) -> ConfigError | None:
    """The forward pass of a rollout is one of a recipe, which must make sense. It has nothing that training keeps from
    step to step or learns, and no correction that is right on average alone."""
    if (rollout := r.training.rollout) is None:
        return None
    for operand in (*STAGES["fprop"], "kv_cache"):
        q: Quantizer = getattr(rollout, operand)
        held = q.tensor_scale is not None and q.tensor_scale.amax != "current"
        if q.codec == "eden" or isinstance(q.rounding, Ema) or held or isinstance(q.outliers, LearnedClip):
            accepted = "quantizers without MS-EDEN's correction, moving averages, held maxima and learned clips"
            return ConfigError(f"training.rollout.{operand}", q.label(), accepted)
    cache = rollout.kv_cache
    if cache.outliers is not None:
        return ConfigError("training.rollout.kv_cache.outliers", outlier_words(cache.outliers), "none")
    if tile(cache.block):
        accepted = "blocks along the width of a head: a number, row or tensor"
        return ConfigError("training.rollout.kv_cache.block", block_name(cache.block), accepted)
    for _, error in quantizer_faults(cache):
        return ConfigError(f"training.rollout.kv_cache.{error.where}", error.found, error.accepted)
    for _, error in canonical_faults(r.sampling()):
        where = error.where.removeprefix("fprop.")
        return ConfigError(f"training.rollout.{where}", error.found, error.accepted)
    return None


def _fp8_operands(r: Recipe) -> ConfigError | None:
    """FP8 products take operands of few significant bits."""
    if r.gemm != "fp8-exact":
        return None
    for slot in SLOTS:
        bits = significant_bits(r.slot(slot))
        if bits is None or bits > FP8_BITS:
            what = (
                f"{r.slot(slot).label()} in {slot} has {bits or 'more than 24'} significant bits, e4m3 has {FP8_BITS}"
            )
            return ConfigError("gemm", "fp8-exact", f"exact, bf16-rounded ({what})")
    return None


def _channel_format(r: Recipe) -> ConfigError | None:
    """The other format of channels must make sense, as any quantizer."""
    if isinstance(r.fprop.channels, Held):
        for _, error in quantizer_faults(r.fprop.channels.format):
            return ConfigError(f"fprop.channels.format.{error.where}", error.found, error.accepted)
    return None


View = tuple[str, ...]
"""Fields of a recipe that a rule looks at together."""

_STAGES: tuple[View, ...] = tuple((stage,) for stage in STAGES)
_FORWARD: tuple[View, ...] = (("fprop", "estimator"),)

RECIPE_RULES: dict[str, tuple[tuple[View, ...], Callable[[Recipe], ConfigError | None]]] = {
    "ema-is-for-weights": (_STAGES, _ema_slot),
    "mean-is-over-tokens": (_STAGES, _mean_slot),
    "clip-is-learned-forward": (_STAGES, _learned_slot),
    "eden-needs-rht128": (_STAGES, _eden_rotation),
    "estimator-needs-one-grid": (_FORWARD, _estimator_grid),
    "estimator-with-outliers": (_FORWARD, _estimator_outliers),
    "scale-gradient-needs-block-maximum": (_FORWARD, _scale_gradient),
    "blocks-are-whole": ((("precise",),), _whole_blocks),
    "shares-and-averages": ((("finish", "training"),), _shares),
    "fp8-holds-operands": ((), _fp8_operands),
    "channels-are-a-share": ((("fprop",),), choice_fault),
    "channels-of-forward": (_FORWARD, forward_fault),
    "channels-of-wgrad": ((("fprop", "wgrad"),), wgrad_fault),
    "channels-in-a-product": ((("fprop", "gemm"),), product_fault),
    "channels-in-a-format": ((("fprop",),), _channel_format),
    "layers": ((), _layers),
    "attention": ((("attention",),), _attention),
    "fine-tuning": ((("fprop", "finish", "layers"),), _fine_tuning),
    "ramping-needs-adamw": ((("training",),), _ramping),
    "distill": ((("training",),), _distill),
    "trains": ((), _trains),
    "rollout": ((("training",),), _rollout),
}
"""Rule name -> what it looks at, and what breaks it in a canonical recipe, or None.

A rule is asked about each view by itself, with all else plain. So the answers are few, though recipes are many, and are
kept: spaces of 10⁵ recipes are made of some hundred stages. One without views is asked about every recipe.
"""

VIEWS = tuple(dict.fromkeys(view for views, _ in RECIPE_RULES.values() for view in views))
_WITHOUT_VIEWS = [(rule, check) for rule, (views, check) in RECIPE_RULES.items() if not views]
_PLAIN = Recipe.uniform(Quantizer(element="none"))


@lru_cache(maxsize=4096)
def quantizer_faults(q: Quantizer) -> tuple[tuple[str, ConfigError], ...]:
    """The rules that a quantizer breaks, with the errors; empty if it makes sense."""
    q = q.canonical()
    checks = {} if q.is_plain else QUANTIZER_RULES
    return tuple((rule, error) for rule, check in checks.items() if (error := check(q)))


@lru_cache(maxsize=65536)
def _seen_faults(view: View, *parts: Any) -> tuple[tuple[str, ConfigError], ...]:
    """The rules that a canonical recipe breaks by these parts."""
    recipe = msgspec.structs.replace(_PLAIN, **dict(zip(view, parts, strict=True)))
    asked = {rule: check for rule, (views, check) in RECIPE_RULES.items() if view in views}
    return tuple((rule, error) for rule, check in asked.items() if (error := check(recipe)))


@serves_recipes
def faults(recipe: Recipe) -> Iterator[tuple[str, ConfigError]]:
    """The rules that a recipe breaks, with the errors, which name the slot."""
    return canonical_faults(recipe.canonical())


def canonical_faults(recipe: Recipe) -> Iterator[tuple[str, ConfigError]]:
    """The same for a recipe that is canonical."""
    for slot in SLOTS:
        for rule, error in quantizer_faults(recipe.slot(slot)):
            yield rule, ConfigError(f"{slot}.{error.where}", error.found, error.accepted)
    for view in VIEWS:
        yield from _seen_faults(view, *[getattr(recipe, field) for field in view])
    for rule, check in _WITHOUT_VIEWS:
        if fault := check(recipe):
            yield rule, fault
