"""Rules that reject senseless combinations, as data: each has a name, and says what it found and what it accepts.

What makes no sense within one part is unwritable, and what has no effect is removed by `canonical()`; rules concern
several fields, here of a recipe, in quantizer_rules.py of one quantizer. Sweeps count the recipes that a rule rejects;
a recipe given by name or file that breaks one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import replace

from fp4dse.dse.attention import ATTENTION_SLOTS
from fp4dse.dse.channel_rules import choice_fault, forward_fault, product_fault, wgrad_fault
from fp4dse.dse.channels import Held, channels_name
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.estimator import Through
from fp4dse.dse.exactness import FP8_BITS, significant_bits
from fp4dse.dse.inject import inject_name
from fp4dse.dse.layers.rule import check_rules
from fp4dse.dse.outliers import LearnedClip, Mean, TrainedFactors, TrainedScales, outlier_words
from fp4dse.dse.quantizer import Quantizer, block_name, tile
from fp4dse.dse.quantizer_rules import quantizer_faults
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.recipe import Recipe, serves_recipes
from fp4dse.dse.rounding import Ema, Nearest, rounding_name, samples_of
from fp4dse.dse.scale import FP32, FloatScale, One, scale_name
from fp4dse.dse.stages import SLOTS, STAGES, rotation_name
from fp4dse.dse.training import SGD, AdamW


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


def _factors_slot(r: Recipe) -> ConfigError | None:
    """Factors and scales are trained for the weight as the forward product takes it."""
    for slot in SLOTS:
        if slot != "fprop.w" and isinstance(of := r.slot(slot).outliers, TrainedFactors | TrainedScales):
            accepted = "none, residual, occ, clamp, low-rank (factors and scales are trained for fprop.w)"
            return ConfigError(f"{slot}.outliers", outlier_words(of), accepted)
    return None


def _factors_beside(r: Recipe) -> ConfigError | None:
    """Factors, and scales, are parameters that all lanes of a population have in the same layers; a rollout of its own
    has no place for them, and without training there are none."""
    for number, rule in enumerate(r.layers):
        if rule.fprop_w is not None and isinstance(of := rule.fprop_w.outliers, TrainedFactors | TrainedScales):
            accepted = "none, residual, occ, clamp, low-rank (all layers have such parameters, or none)"
            return ConfigError(f"layers[{number}]: fprop.w.outliers", outlier_words(of), accepted)
    if not isinstance(r.fprop.w.outliers, TrainedFactors | TrainedScales):
        return None
    beside = {
        "layers": bool(r.layers),
        "training.rollout": r.training.rollout is not None,
        "training.trains": r.training.trains == "none",
    }
    if not any(beside.values()):
        return None
    names = ", ".join(name for name, is_there in beside.items() if is_there)
    accepted = f"none, residual, occ, clamp, low-rank (with {names})"
    return ConfigError("fprop.w.outliers", outlier_words(r.fprop.w.outliers), accepted)


def _scales_slot(r: Recipe) -> ConfigError | None:
    """A trained scale is rounded to its format and no code moves, where elements are rounded to nearest under one scale
    a block that follows its maximum and has a mantissa; a rotation would mix elements of different scales."""
    q = r.fprop.w
    if not isinstance(q.outliers, TrainedScales):
        return None
    policy = q.tensor_scale.policy if q.tensor_scale else "current"
    wrong = {
        "block": None if isinstance(q.block, int) else (block_name(q.block), "blocks along the contraction"),
        "scale": None if isinstance(q.scale, FloatScale | FP32) else (scale_name(q.scale), "one with a mantissa"),
        "rounding": None if q.rounding == Nearest() else (rounding_name(q.rounding), "nearest"),
        "scaling": None if q.codec == "block" and q.adapt == "none" else (q.codec, "amax, without adapt"),
        "tensor_scale": None if policy == "current" else (policy, "none, amax"),
    }
    for field, found in wrong.items():
        if found is not None:
            return ConfigError(f"fprop.w.{field}", found[0], f"{found[1]} (with trained scales)")
    if r.fprop.rotation is not None:
        return ConfigError("fprop.rotation", rotation_name(r.fprop.rotation), "none (with trained scales)")
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
        learns = isinstance(q.outliers, LearnedClip | TrainedFactors | TrainedScales)
        if q.codec == "eden" or isinstance(q.rounding, Ema) or held or learns:
            accepted = (
                "quantizers without MS-EDEN's correction, averages, held maxima, learned clips and trained factors"
            )
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


def _noise(r: Recipe) -> ConfigError | None:
    """The first of its stages is without noise, so one is none."""
    if r.training.noise is None or r.training.noise.stages != 1:
        return None
    return ConfigError("training.noise.stages", 1, "0, or a whole number from 2 on (there is no noise in the first)")


def _inject(r: Recipe) -> ConfigError | None:
    """Errors are added to weights that nothing else rounds, so that no other is there."""
    if (inject := r.training.inject) is None:
        return None
    forward = r.sampling().fprop
    if not (forward.x.is_plain and forward.w.is_plain):
        return ConfigError("training.inject", inject_name(inject), "none (with a rollout that is quantized)")
    if not isinstance(inject.of.rounding, Nearest) or inject.of.outliers is not None or inject.of.codec != "block":
        accepted = "one that rounds to nearest, with one scale a block and nothing done about outliers"
        return ConfigError("training.inject.of", inject.of.label(), accepted)
    return None


def _fp8_operands(r: Recipe) -> ConfigError | None:
    """FP8 products take operands of few significant bits."""
    if r.gemm != "fp8-exact":
        return None
    for slot in SLOTS:
        bits = significant_bits(r.slot(slot))
        if bits is None or bits > FP8_BITS:
            what = f"{r.slot(slot).label()} in {slot} has {bits or 'more than 24'} significant bits, FP8 has {FP8_BITS}"
            return ConfigError("gemm", "fp8-exact", f"exact, bf16-rounded ({what})")
    return None


def _channel_format(r: Recipe) -> ConfigError | None:
    """The other format of channels must make sense, as any quantizer."""
    if isinstance(r.fprop.channels, Held):
        for _, error in quantizer_faults(r.fprop.channels.format):
            return ConfigError(f"fprop.channels.format.{error.where}", error.found, error.accepted)
    return None


def _conversion(r: Recipe) -> ConfigError | None:
    """Codes of MXFP4 become FP8 by exponents alone where nothing but the quantizer stands between x and them."""
    if r.wgrad.source != "converted":
        return None
    x, beside = r.fprop.x, "with wgrad.source converted"
    if replace(x, rounding=Nearest()).canonical() != QUANTIZERS["mxfp4"].canonical() or samples_of(x.rounding) > 1:
        return ConfigError("fprop.x", x.label(), f"mxfp4, rounded to nearest or by chance ({beside})")
    if r.wgrad.x != QUANTIZERS["fp8-1x128"].canonical():
        return ConfigError("wgrad.x", r.wgrad.x.label(), f"fp8-1x128 ({beside})")
    for stage in ("fprop", "wgrad"):
        if (rotation := r.rotation(stage)) is not None:
            return ConfigError(f"{stage}.rotation", rotation_name(rotation), f"none ({beside})")
    if r.fprop.channels is not None:
        return ConfigError("fprop.channels", channels_name(r.fprop.channels), f"none ({beside})")
    if r.wgrad.g.outliers is not None:
        return ConfigError("wgrad.g.outliers", outlier_words(r.wgrad.g.outliers), f"none ({beside})")
    if r.estimator.x != Through():
        return ConfigError("estimator.x", r.estimator.x.label(), f"ste ({beside})")
    return None


View = tuple[str, ...]
"""Fields of a recipe that a rule looks at together."""

_STAGES: tuple[View, ...] = tuple((stage,) for stage in STAGES)
_FORWARD: tuple[View, ...] = (("fprop", "estimator"),)

RECIPE_RULES: dict[str, tuple[tuple[View, ...], Callable[[Recipe], ConfigError | None]]] = {
    "ema-is-for-weights": (_STAGES, _ema_slot),
    "mean-is-over-tokens": (_STAGES, _mean_slot),
    "clip-is-learned-forward": (_STAGES, _learned_slot),
    "factors-are-of-weights": (_STAGES, _factors_slot),
    "scales-are-of-one-grid": (_STAGES, _scales_slot),
    "factors-in-all-layers": ((("fprop", "layers", "training"),), _factors_beside),
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
    "conversion-of-codes": ((("fprop", "estimator", "wgrad"),), _conversion),
    "fine-tuning": ((("fprop", "finish", "layers"),), _fine_tuning),
    "ramping-needs-adamw": ((("training",),), _ramping),
    "distill": ((("training",),), _distill),
    "trains": ((), _trains),
    "rollout": ((("training",),), _rollout),
    "noise": ((("training",),), _noise),
    "inject": ((), _inject),
}
"""Rule name -> what it looks at, and what breaks it in a canonical recipe, or None.

A rule is asked about each view by itself, with all else plain. So the answers are few, though recipes are many, and are
kept: spaces of 10⁵ recipes are made of some hundred stages. One without views is asked about every recipe.
"""

VIEWS = tuple(dict.fromkeys(view for views, _ in RECIPE_RULES.values() for view in views))
_WITHOUT_VIEWS = [(rule, check) for rule, (views, check) in RECIPE_RULES.items() if not views]
_PLAIN = Recipe.uniform(Quantizer(element="none"))


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
