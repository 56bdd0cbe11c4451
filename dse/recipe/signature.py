"""The structural signature of a recipe: lanes that have the same share one compiled step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fp4dse.dse.estimator import STE
from fp4dse.dse.exactness import fp8_format, has_factor, product_format
from fp4dse.dse.layers.precision import Precise
from fp4dse.dse.own_formats import element_name
from fp4dse.dse.quantizer import BF16
from fp4dse.dse.record import unlabelled
from fp4dse.dse.rounding import Ema
from fp4dse.dse.scale import scale_key
from fp4dse.dse.stages import SHARED, SLOTS, STAGES, rotation_name

if TYPE_CHECKING:
    from fp4dse.dse.recipe import Recipe


class Signature(msgspec.Struct, frozen=True, order=True):
    """Structural signature: layout per slot (empty = plain), rotation and format of the operands per stage, and how the
    backward pass is made.

    Lanes whose operands need different formats take different GEMMs on a GPU. In one GEMM a lane's bits would depend on
    the other lanes.
    """

    layouts: tuple[str, ...]  # in the order of SLOTS
    rotations: tuple[str, ...]  # in the order of STAGES
    products: tuple[str, ...]  # in the order of STAGES: `bf16`, `tf32` or `fp32`, see exactness.py
    sources: tuple[str, ...] = ("master", "master")  # dgrad, wgrad
    estimators: tuple[str, ...] = ("", "")  # x, w, with the element; empty = straight through
    around: tuple[str, ...] = ("", "", "", "", "")  # precise, finish, gemm, optimizer, accumulate; empty = the default.
    # A sixth, `rollout`, where samples have a forward pass of their own, and the trainer's is not the same at all steps
    attention: str = ""  # layouts of the core's operands; empty = none is quantized
    channels: str = ""  # those that are treated apart; empty = none


def signature_of(recipe: Recipe) -> Signature:
    """The signature of a canonical recipe."""
    r: Recipe = unlabelled(recipe)
    return Signature(
        layouts=tuple(r.slot(s).layout for s in SLOTS),
        rotations=tuple(rotation_name(r.rotation(stage)) for stage in STAGES),
        products=tuple(_formats(r, stage) for stage in STAGES),
        sources=tuple(r.source(stage) for stage in SHARED),
        estimators=tuple(_passage(r, x) for x in STAGES["fprop"]),
        around=(
            "" if r.precise == Precise() else r.precise.label(),
            _finish(r),
            "" if r.gemm == "exact" else r.gemm,
            "" if r.training.optimizer is None else r.training.kind,
            "" if r.training.accumulate == 1 else str(r.training.accumulate),
            *(["rollout"] if r.training.rollout is not None and _forward_changes(r) else []),
        ),
        attention=r.attention.layout,
        channels="" if r.fprop.channels is None else repr(r.fprop.channels),
    )


def _formats(r: Recipe, stage: str) -> str:
    """The formats in which a stage's product may take its operands: that of both, and in FP8 that of each, and
    which have a factor: these take other ways."""
    quantizers = [r.slot(f"{stage}.{operand}") for operand in STAGES[stage]]
    of_each = [fp8_format(q) or "none" for q in quantizers] if r.gemm == "fp8-exact" else []
    of_each += [f"factor {n}" for n, q in enumerate(quantizers) if of_each and has_factor(q)]
    return " ".join([product_format(*quantizers), *of_each])


def _passage(r: Recipe, operand: str) -> str:
    """The estimator with the grids that it is a function of; empty for straight through."""
    through, q = getattr(r.estimator, operand), r.slot(f"fprop.{operand}")
    element = element_name(q.element)
    if through.scale_rounding == STE():
        return through.label() and f"{through.label()} on {element}"
    return f"{through.label()} on {element} {getattr(q.scale, 'convention', '')} {scale_key(q.scale)}"


def _forward_changes(r: Recipe) -> bool:
    """True where the forward pass depends on more than its operands and the step's random bits: on what slots keep,
    on what a layer's rule has, or on a finish."""
    q = r.fprop.x, r.fprop.w
    held = any(of.tensor_scale is not None and of.tensor_scale.amax != "current" for of in q)
    return held or isinstance(r.fprop.w.rounding, Ema) or bool(r.layers) or r.finish is not None


def _finish(r: Recipe) -> str:
    """The finish, with the formats that its weights meet BF16 in; empty without one."""
    if r.finish is None:
        return ""
    met = (product_format(BF16, r.slot(f"{stage}.w")) for stage in r.finish.stages_but_weights)
    return " ".join([r.finish.label(), *met])
