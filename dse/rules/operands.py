"""Rules about operands: which of them may be quantized how, in linear layers and in the attention core."""

from __future__ import annotations

from fp4dse.dse.attention import ATTENTION_SLOTS
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.outliers import LearnedClip, Mean, TrainedFactors, TrainedScales, outlier_words
from fp4dse.dse.quantizer import Quantizer, block_name
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.rounding import Ema, Nearest, rounding_name
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import FP32, FloatScale, scale_name
from fp4dse.dse.stages import SLOTS, STAGES, rotation_name


def ema_fault(r: Recipe) -> ConfigError | None:
    """Only the forward weight has a moving average."""
    for slot in SLOTS:
        if slot != "fprop.w" and isinstance(r.slot(slot).rounding, Ema):
            return ConfigError(f"{slot}.rounding", "ema", "nearest, stochastic (a moving average exists for fprop.w)")
    return None


def mean_fault(r: Recipe) -> ConfigError | None:
    """A mean is over tokens, and weights have none."""
    for slot in SLOTS:
        if slot.endswith(".w") and isinstance(r.slot(slot).outliers, Mean):
            return ConfigError(
                f"{slot}.outliers", "mean", "none, residual, occ, clamp (a mean is over tokens: x and g)"
            )
    return None


def learned_clip_fault(r: Recipe) -> ConfigError | None:
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


def factors_fault(r: Recipe) -> ConfigError | None:
    """Factors and scales are trained for the weight as the forward product takes it."""
    for slot in SLOTS:
        if slot != "fprop.w" and isinstance(of := r.slot(slot).outliers, TrainedFactors | TrainedScales):
            accepted = "none, residual, occ, clamp, low-rank (factors and scales are trained for fprop.w)"
            return ConfigError(f"{slot}.outliers", outlier_words(of), accepted)
    return None


def factors_beside_fault(r: Recipe) -> ConfigError | None:
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


def scales_fault(r: Recipe) -> ConfigError | None:
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


def eden_fault(r: Recipe) -> ConfigError | None:
    """The correction makes a block unbiased only on average over random rotations of 128."""
    for stage, operands in STAGES.items():
        rotation = r.rotation(stage)
        if any(r.slot(f"{stage}.{o}").codec == "eden" for o in operands) and (
            rotation is None or (rotation.size, rotation.signs) != (128, "random")
        ):
            return ConfigError(f"{stage}.rotation", rotation_name(rotation), "rht128 (for scaling eden)")
    return None


def attention_fault(r: Recipe) -> ConfigError | None:
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
