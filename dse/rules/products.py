"""Rules about products: formats that they take, and operands that are made from codes."""

from __future__ import annotations

from msgspec.structs import replace

from fp4dse.dse.channels import channels_name
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.estimator import Through
from fp4dse.dse.exactness import FP8_BITS, significant_bits
from fp4dse.dse.outliers import outlier_words
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.rounding import Nearest, samples_of
from fp4dse.dse.stages import SLOTS, rotation_name


def fp8_fault(r: Recipe) -> ConfigError | None:
    """FP8 products take operands of few significant bits."""
    if r.gemm != "fp8-exact":
        return None
    for slot in SLOTS:
        bits = significant_bits(r.slot(slot))
        if bits is None or bits > FP8_BITS:
            what = f"{r.slot(slot).label()} in {slot} has {bits or 'more than 24'} significant bits, FP8 has {FP8_BITS}"
            return ConfigError("gemm", "fp8-exact", f"exact, bf16-rounded ({what})")
    return None


def conversion_fault(r: Recipe) -> ConfigError | None:
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
