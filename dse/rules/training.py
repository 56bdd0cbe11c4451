"""Rules about the training side, and about the layers and steps that are precise."""

from __future__ import annotations

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.inject import inject_name
from fp4dse.dse.optimizer import SGD, AdamW
from fp4dse.dse.outliers import LearnedClip, TrainedFactors, TrainedScales, outlier_words
from fp4dse.dse.quantizer import Quantizer, block_name, tile
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.rounding import Ema, Nearest
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.stages import STAGES

_RUNNING = ("momentum", "theta", "gamma1", "gamma2")
"""Fields of optimizers that are the share of the past in a running average."""


def blocks_fault(r: Recipe) -> ConfigError | None:
    """From one on, numbers of blocks are whole."""
    for end in ("first", "last"):
        number = getattr(r.precise, end)
        if number >= 1 and number != int(number):
            return ConfigError(f"precise.{end}", number, "a whole number of blocks, or below 1 a share of them")
    return None


def shares_fault(r: Recipe) -> ConfigError | None:
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


def fine_tuning_fault(r: Recipe) -> ConfigError | None:
    """Channels are chosen and treated apart in both operands, of which one is plain in fine-tuning; and which stages
    have a quantized weight is asked of the recipe as a whole, not of layers with rules of their own."""
    if r.finish is None or not r.finish.stages_but_weights:
        return None
    beside = "fprop.channels" if r.fprop.channels is not None else "layers" if r.layers else ""
    return ConfigError("finish.what", r.finish.what, f"forward, backward, all (with {beside})") if beside else None


def ramping_fault(r: Recipe) -> ConfigError | None:
    """Rarer updates by more are defined for AdamW."""
    if r.training.ramping is None or isinstance(r.training.optimizer, AdamW | None):
        return None
    return ConfigError("training.optimizer", r.training.kind, "adamw or the task's, with training.ramping")


def distill_fault(r: Recipe) -> ConfigError | None:
    """The loss and the distance from a teacher share a weight of one."""
    if r.training.distill is None or r.training.distill.weight <= 1:
        return None
    return ConfigError("training.distill.weight", r.training.distill.weight, "a number above 0, at most 1")


def trains_fault(r: Recipe) -> ConfigError | None:
    """Weights stay where their gradients are zero, if the optimizer makes no step of that."""
    if r.training.trains != "learned" or isinstance(r.training.optimizer, AdamW | SGD | None):
        return None
    accepted = "adamw, sgd or the task's, with training.trains = learned"
    return ConfigError("training.optimizer", r.training.kind, accepted)


def rollout_fault(r: Recipe) -> ConfigError | None:
    """A rollout has nothing that training keeps from step to step or learns, and no correction that is right on average
    alone."""
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
    return None


def noise_fault(r: Recipe) -> ConfigError | None:
    """The first of its stages is without noise, so one is none."""
    if r.training.noise is None or r.training.noise.stages != 1:
        return None
    return ConfigError("training.noise.stages", 1, "0, or a whole number from 2 on (there is no noise in the first)")


def inject_fault(r: Recipe) -> ConfigError | None:
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
