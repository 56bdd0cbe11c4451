"""Rules that reject senseless combinations, as data: each has a name, and says what it found and what it accepts.

What makes no sense within one part is unwritable, and what has no effect is removed by `canonical()`; rules concern
several fields: of one quantizer in quantizers.py, of a recipe in the other modules, a subject each. Here they are
listed and asked. Sweeps count the recipes that a rule rejects; a recipe given by name or file that breaks one is an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.layers.rule import check_rules
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import Recipe, serves_recipes
from fp4dse.dse.rules import channels, estimators, operands, products, training
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.stages import SLOTS, STAGES


def _layers_fault(r: Recipe) -> ConfigError | None:
    """Rules that say two things of the same layers; and what a rule makes of a layer is a recipe that must make sense:
    a rule by itself is asked about, as which rules meet in a layer is the model's."""
    if (error := check_rules(r.layers)) is not None:
        return error
    for number, rule in enumerate(r.layers):
        for _, error in faults(r.changed(rule)):
            return ConfigError(f"layers[{number}]: {error.where}", error.found, error.accepted)
    return None


def _rollout_fault(r: Recipe) -> ConfigError | None:
    """Beside its own rules, the forward pass of a rollout is one of a recipe, which must make sense."""
    if r.training.rollout is None:
        return None
    if (error := training.rollout_fault(r)) is not None:
        return error
    for _, error in canonical_faults(r.sampling()):
        where = error.where.removeprefix("fprop.")
        return ConfigError(f"training.rollout.{where}", error.found, error.accepted)
    return None


View = tuple[str, ...]
"""Fields of a recipe that a rule looks at together."""

_STAGES: tuple[View, ...] = tuple((stage,) for stage in STAGES)
_FORWARD: tuple[View, ...] = (("fprop", "estimator"),)

RECIPE_RULES: dict[str, tuple[tuple[View, ...], Callable[[Recipe], ConfigError | None]]] = {
    "ema-is-for-weights": (_STAGES, operands.ema_fault),
    "mean-is-over-tokens": (_STAGES, operands.mean_fault),
    "clip-is-learned-forward": (_STAGES, operands.learned_clip_fault),
    "factors-are-of-weights": (_STAGES, operands.factors_fault),
    "scales-are-of-one-grid": (_STAGES, operands.scales_fault),
    "factors-in-all-layers": ((("fprop", "layers", "training"),), operands.factors_beside_fault),
    "eden-needs-rht128": (_STAGES, operands.eden_fault),
    "estimator-needs-one-grid": (_FORWARD, estimators.grid_fault),
    "estimator-with-outliers": (_FORWARD, estimators.outliers_fault),
    "scale-gradient-needs-block-maximum": (_FORWARD, estimators.scale_gradient_fault),
    "blocks-are-whole": ((("precise",),), training.blocks_fault),
    "shares-and-averages": ((("finish", "training"),), training.shares_fault),
    "fp8-holds-operands": ((), products.fp8_fault),
    "channels-are-a-share": ((("fprop",),), channels.choice_fault),
    "channels-of-forward": (_FORWARD, channels.forward_fault),
    "channels-of-wgrad": ((("fprop", "wgrad"),), channels.wgrad_fault),
    "channels-in-a-product": ((("fprop", "gemm"),), channels.product_fault),
    "channels-in-a-format": ((("fprop",),), channels.format_fault),
    "layers": ((), _layers_fault),
    "attention": ((("attention",),), operands.attention_fault),
    "conversion-of-codes": ((("fprop", "estimator", "wgrad"),), products.conversion_fault),
    "fine-tuning": ((("fprop", "finish", "layers"),), training.fine_tuning_fault),
    "ramping-needs-adamw": ((("training",),), training.ramping_fault),
    "distill": ((("training",),), training.distill_fault),
    "trains": ((), training.trains_fault),
    "rollout": ((("training",),), _rollout_fault),
    "noise": ((("training",),), training.noise_fault),
    "inject": ((), training.inject_fault),
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
