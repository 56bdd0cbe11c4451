"""Weights of other libraries in FP4, decoded: folders of compressed-tensors (llm-compressor) and of ModelOpt.

A packed weight [N, K] is three tensors: codes of E2M1, two a byte with the first one in the low half, [N, K / 2];
scales of the blocks of each row, [N, K / block]; and in NVFP4 a factor of the whole tensor. Each number is

    level · (scale · factor), or level · (scale / factor) where the factor is that of encoding

in FP32, in the libraries' order of operations: the same bits before they round to BF16. Scales of activations, and of a
cache of keys and values, are left out: a recipe's quantizers find their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.dse.formats import ELEMENTS

QUANTIZATION, OTHER_FILE = "quantization_config", "hf_quant_config.json"
"""Key of config.json that says how weights are packed, and ModelOpt's own file, which has less."""
OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Endings of tensors that are left out."""


class Packing(NamedTuple):
    """Elements of a block, and a format's names of the tensors of a weight, behind the layer's. factor: of the whole
    tensor, None where there is none; divides: the scale is divided by it."""

    block: int
    codes: str = "weight_packed"
    scale: str = "weight_scale"
    factor: str | None = None
    divides: bool = False


_MODELOPT = Packing(16, codes="weight", factor="weight_scale_2")
FORMATS: dict[str, tuple[str, dict[str, Packing]]] = {
    "compressed-tensors": (
        "format",
        {
            "nvfp4-pack-quantized": Packing(16, factor="weight_global_scale", divides=True),
            "mxfp4-pack-quantized": Packing(32),
        },
    ),
    "modelopt": ("quant_algo", {"NVFP4": _MODELOPT, "W4A16_NVFP4": _MODELOPT}),
}
"""quant_method -> the key that says the format, and the formats that are decoded."""


def packing_of(said: Any, where: str) -> Packing:
    """The packing of weights, by a `quantization_config` that stands at `where`. ConfigError for a method or a format
    that is not decoded, and for weights that only fit activations which are rotated as well."""
    said = said if isinstance(said, dict) else {}
    if (method := said.get("quant_method")) not in list(FORMATS):
        raise ConfigError(f"{where}: quant_method", method, f"{', '.join(FORMATS)} (others are not decoded)")
    key, formats = FORMATS[method]
    if (found := said.get(key)) not in list(formats):
        raise ConfigError(f"{where}: {key}", found, f"{', '.join(formats)} (others are not decoded)")
    if said.get("transform_config"):
        raise ConfigError(f"{where}: transform_config", "transforms", "none (the decoder does not rotate activations)")
    return formats[found]


def unpacked(tensors: dict[str, Tensor], packing: Packing, where: str) -> dict[str, Tensor]:
    """A folder's tensors with every packed weight as numbers, float32 [N, K], and without scales of activations; the
    others as they are. ConfigError names the first tensor that is missing, does not fit, or is not finite."""
    found = {name: value for name, value in tensors.items() if not name.endswith(OF_ACTIVATIONS)}
    for name in [name for name, value in found.items() if _is_packed(name, value, packing)]:
        layer, codes = name.removesuffix(packing.codes), found.pop(name)
        rows, inputs = len(codes), 2 * codes.shape[1]
        if f"{layer}weight" in found:
            raise ConfigError(f"{where}: {name}", f"{layer}weight, too", "one of them")
        if inputs % packing.block or not codes.numel():
            raise ConfigError(f"{where}: {name}", f"{inputs} inputs", f"whole blocks of {packing.block}")

        def take(of: str, shape: tuple[int, ...], layer: str = layer) -> Tensor:
            part = found.pop(layer + of, None)
            if part is None or (part if shape else part.squeeze()).shape != shape:
                shown = None if part is None else f"shape {list(part.shape)}"
                raise ConfigError(f"{where}: {layer}{of}", shown, f"shape {list(shape)}, as its codes want it")
            return part.view(shape)

        scale = take(packing.scale, (rows, inputs // packing.block))
        if scale.is_floating_point() != (packing.factor is not None):
            accepted = "FP8 (E4M3)" if packing.factor else "uint8 (E8M0)"
            raise ConfigError(f"{where}: {layer}{packing.scale}", str(scale.dtype), accepted)
        value = _decoded(codes, scale, take(packing.factor, ()) if packing.factor else None, packing.divides)
        if not torch.isfinite(value).all():
            raise ConfigError(f"{where}: {layer}{packing.scale}", "NaN or infinity", "scales of finite numbers")
        found[f"{layer}weight"] = value
    return found


def _is_packed(name: str, value: Tensor, packing: Packing) -> bool:
    return name.endswith(f".{packing.codes}") and value.dtype == torch.uint8 and value.ndim == 2


def _decoded(codes: Tensor, scale: Tensor, factor: Tensor | None, divides: bool) -> Tensor:
    """Numbers of codes, float32 [N, K]. scale: [N, blocks]; whole numbers are exponents, of E8M0."""
    magnitudes = torch.tensor(ELEMENTS["e2m1"].magnitudes())
    levels = torch.cat([magnitudes, -magnitudes])[torch.stack([codes & 15, codes >> 4], dim=2).int()]
    if not scale.is_floating_point():
        scale = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
    if factor is not None:
        scale = scale / factor if divides else scale * factor
    return (levels.view(*scale.shape, -1) * scale[:, :, None]).flatten(1)
