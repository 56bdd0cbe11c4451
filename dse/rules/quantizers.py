"""Rules that reject quantizers whose parts do not go together, as data; those about a recipe are beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.outliers import LowRank, Residual, outlier_words
from fp4dse.dse.own_formats import element_name
from fp4dse.dse.quantizer import MACRO_BLOCK, Quantizer, block_name, tile
from fp4dse.dse.rounding import Ema, Nearest, Stochastic, rounding_name, samples_of
from fp4dse.dse.scale import E8M0, FP32, FloatScale, One, OwnScale, scale_format, scale_grid, scale_key, scale_name

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


@lru_cache(maxsize=4096)
def quantizer_faults(q: Quantizer) -> tuple[tuple[str, ConfigError], ...]:
    """The rules that a quantizer breaks, with the errors; empty if it makes sense."""
    q = q.canonical()
    checks = {} if q.is_plain else QUANTIZER_RULES
    return tuple((rule, error) for rule, check in checks.items() if (error := check(q)))
