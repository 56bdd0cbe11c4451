"""Transformer Engine 2.20's classes with their signatures and no computation, for Python that is printed for it.

Signatures: transformer_engine/pytorch/tensor/{nvfp4,mxfp8,float8,hybrid,identity}_tensor.py, quantization.py and
common/recipe/__init__.py at commit d0067d0.
"""

import dataclasses
import sys
from types import ModuleType
from typing import Any

ROOT = "transformer_engine"


class Quantizer:
    """A quantizer; what it was made with are its attributes."""


class DType:
    """Names of dtypes."""

    kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = "e4m3", "e5m2", "e2m1"


@dataclasses.dataclass
class NVFP4Quantizer(Quantizer):
    fp4_dtype: str = DType.kFloat4E2M1
    rowwise: bool = True
    columnwise: bool = True
    with_amax_reduction: bool = False
    amax_reduction_group: Any = None
    with_rht: bool = False
    with_post_rht_amax: bool = False
    with_2d_quantization: bool = False
    stochastic_rounding: bool = False
    row_scaled_nvfp4: bool = False
    nvfp4_use_4over6: bool = False
    nvfp4_e4m3_max: int = 448
    nvfp4_4over6_err_mode: str = "MAE"
    with_random_sign_mask: bool = True

    def __post_init__(self) -> None:
        if self.nvfp4_e4m3_max not in (448, 256):
            raise ValueError("nvfp4_e4m3_max must be 448 or 256.")
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise ValueError("nvfp4_4over6_err_mode must be 'MAE' or 'MSE'.")
        if self.row_scaled_nvfp4 and (self.with_rht or self.with_2d_quantization or self.stochastic_rounding):
            raise ValueError("row-scaled NVFP4 has no RHT, 2D quantization or stochastic rounding")
        if self.nvfp4_use_4over6 and self.with_rht:
            raise ValueError("4over6 with RHT is not implemented")


class MXFP8Quantizer(Quantizer):
    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True, with_2d_quantization=False):
        self.dtype, self.with_2d_quantization = fp8_dtype, with_2d_quantization


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(self, fp8_dtype, device, *, force_pow_2_scales=False, amax_epsilon=0.0):
        self.dtype, self.device = fp8_dtype, device


class IdentityQuantizer(Quantizer):
    def __init__(self, *, dtype=None, rowwise=True, columnwise=True):
        self.dtype = dtype


class HybridQuantizer(Quantizer):
    def __init__(self, *, rowwise_quantizer, columnwise_quantizer, columnwise_source="original"):
        for one in (rowwise_quantizer, columnwise_quantizer):
            if not isinstance(one, Quantizer):
                raise TypeError("HybridQuantizer requires concrete Quantizer instances")
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError("HybridQuantizer requires distinct quantizer instances")
        if columnwise_source not in ("original", "rowwise_dequantized"):
            raise ValueError(columnwise_source)
        self.rows, self.columns, self.source = rowwise_quantizer, columnwise_quantizer, columnwise_source


@dataclasses.dataclass(frozen=True)
class QuantizerRole:
    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


@dataclasses.dataclass
class CustomRecipe:
    qfactory: Any
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    quantization_alignment: int = 128


def install(monkeypatch) -> None:
    """Makes them importable by Transformer Engine's names for one test."""
    tensors = {"nvfp4": NVFP4Quantizer, "mxfp8": MXFP8Quantizer, "float8": Float8CurrentScalingQuantizer}
    tensors |= {"hybrid": HybridQuantizer, "identity": IdentityQuantizer}
    modules = {ROOT: {}, f"{ROOT}.pytorch": {}, f"{ROOT}.common": {}, f"{ROOT}.pytorch.tensor": {}}
    modules[f"{ROOT}.common.recipe"] = {"CustomRecipe": CustomRecipe}
    modules[f"{ROOT}.pytorch.constants"] = {"DType": DType}
    modules |= {f"{ROOT}.pytorch.tensor.{name}_tensor": {of.__name__: of} for name, of in tensors.items()}
    for name, names in modules.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    for name in modules:
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, sys.modules[name])
