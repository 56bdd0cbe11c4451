"""Named quantizers, with the source of those that have one: what fills the tables of quantizer.py."""

from __future__ import annotations

from fp4dse.dse.quantizer import BF16, NAMES_OF, QUANTIZERS, Quantizer
from fp4dse.dse.rounding import Nearest, Stochastic
from fp4dse.dse.scale import E4M3, E5M2, E6M2, E8M0, FP32, UE5M3, One, TensorScale

__all__ = ["QUANTIZERS"]

_AMAX = TensorScale()
_DELAYED = TensorScale(amax="history", steps=1024.0)

_NAMED = {
    "none": Quantizer(element="none"),
    "bf16": BF16,
    "mxfp4": Quantizer(block=32, scale=E8M0()),  # OCP MX v1.0
    "mxfp4-ceil": Quantizer(block=32, scale=E8M0(rule="ceil")),
    "mxfp4-rceil": Quantizer(block=32, scale=E8M0(rule="rceil")),  # 2502.20853
    "mxfp4-even": Quantizer(block=32, scale=E8M0(rule="even")),
    "mxfp4-34": Quantizer(block=32, scale=E8M0(), range="3/4"),  # 2502.20586
    "mxfp4-2d": Quantizer(block="32x32", scale=E8M0(rule="rceil")),
    "mbs-mxfp4": Quantizer(block=32, scale=E8M0(rule="even"), scaling="macro"),  # 2603.08713
    "quest-mxfp4": Quantizer(block=32, scale=E8M0(), scaling="quest"),  # 2505.14669
    "blockdialect": Quantizer(block=32, scale=E8M0(), adapt="dialects"),  # 2501.01144
    "nvfp4": Quantizer(scale=E4M3(), tensor_scale=_AMAX),  # 2509.25149
    "nvfp4-1716": Quantizer(scale=E4M3(), tensor_scale=_AMAX, range="16/17"),
    "nvfp4-2d": Quantizer(block="16x16", scale=E4M3(), tensor_scale=_AMAX),
    "nvfp4-exact": Quantizer(scale=E4M3(), tensor_scale=_AMAX, arithmetic="exact"),
    "nvfp4-4over6-mse": Quantizer(
        scale=E4M3(), tensor_scale=TensorScale(target=256.0), adapt="4over6-mse"
    ),  # 2512.02010
    "nvfp4-4over6-mae": Quantizer(scale=E4M3(), tensor_scale=TensorScale(target=256.0), adapt="4over6-mae"),
    "nvint4": Quantizer(element="int4", scale=E4M3(), tensor_scale=_AMAX),  # 2603.28765
    "if4": Quantizer(scale=E4M3(), tensor_scale=_AMAX, adapt="if4"),  # 2603.28765
    "mixfp4": Quantizer(scale=E4M3(), tensor_scale=_AMAX, adapt="mixfp4"),  # 2605.31035
    "razer": Quantizer(scale=E4M3(), tensor_scale=_AMAX, adapt="razer"),  # 2501.04052
    "ms-eden": Quantizer(
        scale=E4M3(zero="one", rounding="stochastic"), tensor_scale=TensorScale(target=255.99), scaling="eden"
    ),  # 2601.22813
    "e4m3-b16": Quantizer(scale=E4M3()),
    "ue5m3": Quantizer(scale=UE5M3()),  # 2601.19026
    "ue5m3-t448": Quantizer(scale=UE5M3(), tensor_scale=_AMAX),  # 2609.02846
    "amxfp4": Quantizer(block=32, scale=E5M2(zero="one"), scaling="split"),  # 2411.09909
    "hif4": Quantizer(element="s1p2", block=64, scale=E6M2(), rounding=Nearest(ties="away")),  # 2602.11287
    "luq": Quantizer(element="e3m0", block="tensor", scale=FP32(), rounding=Stochastic()),  # 2112.10769
    "int4-sawb": Quantizer(element="int4", block="tensor", scale=FP32(), scaling="sawb"),  # Sun et al. 2020
    "radix4": Quantizer(element="radix4", block="tensor", scale=FP32()),  # Sun et al. 2020
    "radix4-odd": Quantizer(element="radix4-odd", block="tensor", scale=FP32()),
    "fp4-row": Quantizer(block="row", scale=FP32()),  # per token or channel, 2501.17116
    "mxfp8": Quantizer(element="e4m3", block=32, scale=E8M0()),  # OCP MX v1.0
    "mxfp8-ceil": Quantizer(element="e4m3", block=32, scale=E8M0(rule="ceil")),
    "mxfp8-rceil": Quantizer(element="e4m3", block=32, scale=E8M0(rule="rceil")),  # Transformer Engine, 2506.08027
    "mxfp8-e5m2": Quantizer(element="e5m2", block=32, scale=E8M0()),  # OCP MX v1.0
    "mxfp8-e5m2-ceil": Quantizer(element="e5m2", block=32, scale=E8M0(rule="ceil")),
    "mxfp8-e5m2-rceil": Quantizer(element="e5m2", block=32, scale=E8M0(rule="rceil")),
    "fp8": Quantizer(element="e4m3", block="tensor", scale=FP32()),
    "fp8-e5m2": Quantizer(element="e5m2", block="tensor", scale=FP32()),
    "fp8-current": Quantizer(element="e4m3", block="tensor", scale=One(), tensor_scale=_AMAX),  # Transformer Engine
    "fp8-e5m2-current": Quantizer(element="e5m2", block="tensor", scale=One(), tensor_scale=_AMAX),
    "fp8-delayed": Quantizer(element="e4m3", block="tensor", scale=One(), tensor_scale=_DELAYED),  # Transformer Engine
    "fp8-e5m2-delayed": Quantizer(element="e5m2", block="tensor", scale=One(), tensor_scale=_DELAYED),
    "fp8-row": Quantizer(element="e4m3", block="row", scale=One(), tensor_scale=TensorScale(over="row")),
    "fp8-1x128": Quantizer(
        element="e4m3", block=128, scale=One(), tensor_scale=TensorScale(over="segment")
    ),  # DeepSeek-V3's activations and gradients, 2412.19437
    "fp8-128x128": Quantizer(
        element="e4m3", block="128x128", scale=One(), tensor_scale=TensorScale(over="tile")
    ),  # its weights
}

QUANTIZERS.update(_NAMED)
NAMES_OF.update({q.canonical(): name for name, q in reversed(QUANTIZERS.items())})
