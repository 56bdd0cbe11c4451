"""Rules about channels that are treated apart (dse/channels.py): what they do not go together with, and why."""

from __future__ import annotations

from fp4dse.dse.channels import Channels, Corrected, Held
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.estimator import Through
from fp4dse.dse.outliers import outlier_words
from fp4dse.dse.quantizer import Quantizer, block_name, tile
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.rounding import Ema, Nearest, rounding_name, samples_of
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.stages import STAGES, rotation_name


def choice_fault(r: Recipe) -> ConfigError | None:
    """A share is of all channels, steps are whole, and what is held in a format has no errors in another."""
    channels = r.fprop.channels
    if channels is None:
        return None
    if channels.share >= 1:
        return ConfigError("fprop.channels.share", channels.share, "a number above 0, below 1")
    if isinstance(channels, Held) and channels.by == "error":
        return ConfigError("fprop.channels.by", "error", "norm, amax, mean (of channels that are held)")
    if channels.steps != int(channels.steps):
        return ConfigError("fprop.channels.steps", channels.steps, "a whole number of steps")
    return None


def forward_fault(r: Recipe) -> ConfigError | None:
    """A thing that the forward operands do not have beside channels that are treated apart."""
    channels = r.fprop.channels
    if channels is None:
        return None
    for operand in STAGES["fprop"]:
        if (error := _operand_fault(f"fprop.{operand}", r.slot(f"fprop.{operand}"), channels)) is not None:
            return error
        if (through := getattr(r.estimator, operand)) != Through():
            accepted = "ste, none (with fprop.channels: an operand in two parts is no function of one position)"
            return ConfigError(f"estimator.{operand}", through.label(), accepted)
    if isinstance(channels, Corrected) and r.fprop.rotation is not None:
        accepted = "none (with corrected fprop.channels: a rotation mixes channels)"
        return ConfigError("fprop.rotation", rotation_name(r.fprop.rotation), accepted)
    return _state_fault(channels.format) if isinstance(channels, Held) else None


def wgrad_fault(r: Recipe) -> ConfigError | None:
    """A thing that the operands of the weight's gradient do not have where a part of it is in another format."""
    channels = r.fprop.channels
    if not isinstance(channels, Held) or not channels.wgrad:
        return None
    faults = (_operand_fault(f"wgrad.{operand}", r.slot(f"wgrad.{operand}"), channels) for operand in STAGES["wgrad"])
    return next(filter(None, faults), None)


def product_fault(r: Recipe) -> ConfigError | None:
    """Products that take operands decoded would multiply the two errors as well."""
    channels = r.fprop.channels
    if isinstance(channels, Corrected) and channels.of == "both" and r.gemm == "bf16-rounded":
        return ConfigError("gemm", r.gemm, "exact (with errors of both operands in fprop.channels)")
    return None


def format_fault(r: Recipe) -> ConfigError | None:
    """The other format of channels must make sense, as any quantizer."""
    if isinstance(r.fprop.channels, Held):
        for _, error in quantizer_faults(r.fprop.channels.format):
            return ConfigError(f"fprop.channels.format.{error.where}", error.found, error.accepted)
    return None


def _operand_fault(slot: str, q: Quantizer, channels: Channels) -> ConfigError | None:
    """An operand in two parts is quantized in one way, each position by itself."""
    if q.is_plain:
        return None
    why = "with fprop.channels"
    if q.outliers is not None:
        return ConfigError(f"{slot}.outliers", outlier_words(q.outliers), f"none ({why})")
    if isinstance(q.rounding, Ema):
        return ConfigError(f"{slot}.rounding", "ema", f"nearest, stochastic ({why}: places move, averages do not)")
    if isinstance(channels, Corrected) and samples_of(q.rounding) > 1:
        return ConfigError(f"{slot}.rounding", rounding_name(q.rounding), f"one sample ({why})")
    if tile(q.block):
        return ConfigError(f"{slot}.block", block_name(q.block), f"a number, row, tensor ({why}: tiles span channels)")
    if channels is not None and channels.by == "error" and q.factors_over not in ("tensor", "row"):
        accepted = f"tensor, row ({why}: errors that stay in their places have no segments of their own)"
        return ConfigError(f"{slot}.tensor_scale.over", q.factors_over, accepted)
    return None


def _state_fault(q: Quantizer) -> ConfigError | None:
    """The other format is one of the moment, to nearest: it has neither random numbers nor state of its own."""
    where = "fprop.channels.format"
    if q.is_plain:
        return None
    if q.rounding != Nearest() or q.stochastic_scales:
        return ConfigError(f"{where}.rounding", rounding_name(q.rounding), "nearest, of elements and scales")
    if q.outliers is not None:
        return ConfigError(f"{where}.outliers", outlier_words(q.outliers), "none")
    if tile(q.block):
        return ConfigError(f"{where}.block", block_name(q.block), "a number, row, tensor")
    if q.tensor_scale is not None and q.tensor_scale.amax != "current":
        return ConfigError(f"{where}.tensor_scale.amax", q.tensor_scale.amax, "current")
    return None
