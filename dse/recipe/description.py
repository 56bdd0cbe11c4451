"""A recipe described: in words for people, and as flat columns for the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp4dse.dse.channels import channels_name
from fp4dse.dse.layers.precision import Precise
from fp4dse.dse.outliers import outlier_words
from fp4dse.dse.own_formats import element_name
from fp4dse.dse.quantizer import block_name
from fp4dse.dse.rounding import rounding_name
from fp4dse.dse.scale import scale_name
from fp4dse.dse.stages import SHARED, SLOTS, STAGES, grouped, rotation_name, with_exceptions
from fp4dse.dse.training import WORDS, Training

if TYPE_CHECKING:
    from fp4dse.dse.recipe import Recipe

_FROM = {"forward": "from forward", "converted": "converted from forward"}
"""Source of an operand -> words for it."""


def label_of(r: Recipe) -> str:
    """A canonical recipe in words: formats, where ranges and roundings apply, rotations, sources, estimators, and what
    is not the default of the rest.

    `nvfp4, gradients 16/17 SR, wgrad rht16`; words for slots or stages stand before all that is not everywhere.
    """
    words = with_exceptions({slot: r.slot(slot).format_label() for slot in SLOTS})
    words += grouped({slot: r.slot(slot).modifier_label() for slot in SLOTS})
    words += grouped({stage: rotation_name(of) if (of := r.rotation(stage)) else "" for stage in STAGES})
    words += [f"channels {channels_name(r.fprop.channels)}"] if r.fprop.channels else []
    words += grouped({slot: _FROM[r.source(stage)] for stage, slot in SHARED.items() if r.copies(stage)})
    passages = {x: text for x in STAGES["fprop"] if (text := getattr(r.estimator, x).phrase())}
    both = r.estimator.x == r.estimator.w
    words += [f"{x} {text}" for x, text in ({"forward": passages["x"]} if both and passages else passages).items()]
    words += [f"precise {r.precise.label()}"] if r.precise != Precise() else []
    words += [f"({rule.label()})" for rule in r.layers]
    words += [] if r.attention.is_plain else [f"attention core {r.attention.label()}"]
    words += [f"{r.finish.label()} precise"] if r.finish else []
    words += [r.gemm] if r.gemm != "exact" else []
    words += [text] if (text := r.training.label()) else []
    return ", ".join(words)


def columns_of(r: Recipe) -> dict[str, str | int | float | None]:
    """Every axis of a canonical recipe as its own flat column, for the store: `fprop_x_scale`, `wgrad_rotation`, …"""
    out: dict[str, str | int | float | None] = {}
    for slot in SLOTS:
        q, prefix = r.slot(slot), slot.replace(".", "_")
        block_scaled = not q.is_plain
        out[f"{prefix}_element"] = element_name(q.element)
        out[f"{prefix}_block"] = block_name(q.block) if block_scaled else None
        out[f"{prefix}_scale"] = scale_name(q.scale) if block_scaled else None
        out[f"{prefix}_tensor_scale"] = q.tensor_scale.target if q.tensor_scale else None
        out[f"{prefix}_tensor_amax"] = q.tensor_scale.policy if q.tensor_scale else None
        out[f"{prefix}_rounding"] = rounding_name(q.rounding) if block_scaled else None
        for field in ("range", "adapt", "scaling", "arithmetic"):
            out[f"{prefix}_{field}"] = getattr(q, field) if block_scaled else None
        out[f"{prefix}_outliers"] = (outlier_words(q.outliers) or "none") if block_scaled else None
    for stage in STAGES:
        out[f"{stage}_rotation"] = rotation_name(r.rotation(stage))
    out["fprop_channels"] = channels_name(r.fprop.channels)
    for stage in SHARED:
        out[f"{stage}_source"] = r.source(stage)
    for operand in STAGES["fprop"]:
        out[f"estimator_{operand}"] = getattr(r.estimator, operand).label() or "ste"
    out["layers"] = "; ".join(rule.label() for rule in r.layers) or "none"
    out["attention"] = r.attention.label()
    out |= {"precise": r.precise.label(), "finish": r.finish.label() if r.finish else "none", "gemm": r.gemm}
    out |= {name: getattr(r.training, name) for name in Training.__struct_fields__}
    return out | {name: name_of(getattr(r.training, name)) for name, (_, name_of) in WORDS.items()}
