"""The settings that torchao 0.18 trains with.

nvfp4_linear           three NVFP4 products as Transformer Engine's: tiles, stochastic gradients, Hadamard 16 on the
                       weight gradient with the signs that it is given (prototype; Blackwell)
QATConfig              NVFP4 or MXFP4 forward, BF16 backward from the decoded copies
MXFP8TrainingOpConfig  MXFP8 in all three products, or in two with the weight gradient in BF16
Float8LinearConfig     E4M3 and, for gradients, E5M2, one FP32 scale a tensor

Layers of different formats are converted one format after the other, each with a filter by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from fp4dse.dse.export import naming
from fp4dse.dse.export.listed import Settings, bf16_backward, call
from fp4dse.dse.export.pieces import Said
from fp4dse.dse.quantizer import BF16, Quantizer
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.scale import E8M0
from fp4dse.dse.stages import Dgrad, Fprop, Hadamard, Wgrad

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Those of Transformer Engine, which rotations with `fixed` signs have here, too."""

RANDOM = "random bits of stochastic rounding, and how many there are, are torchao's own"
DIALECT = "NVFP4 scales are computed in another order of operations: on BF16 data 0.03 to 0.2 % of them differ"
QAT = "torchao.quantization.qat"
QUANTIZE = "quantize_(model, config, filter_fn=fits)"


def settings() -> Iterator[Settings]:
    """All of them, defaults first."""
    yield Settings("config = None  # nothing to convert", Recipe.uniform(BF16).canonical())
    yield _training()
    yield from _nvfp4_qat()
    yield from _mxfp4_qat()
    yield from _mxfp8()
    fp8, wide = QUANTIZERS["fp8"], QUANTIZERS["fp8-e5m2"]
    text = (
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training\n\nconfig = Float8LinearConfig()\n"
    )
    recipe = Recipe(Fprop(x=fp8, w=fp8), Dgrad(g=wide, w=fp8), Wgrad(g=wide, x=fp8)).canonical()
    apply = "convert_to_float8_training(model, config=config, module_filter_fn=fits)"
    yield Settings(text + "# convert_to_float8_training(model, config=config)", recipe, apply=apply)


def render(said: Said[Settings], recipe: Recipe) -> Settings:
    """Python that converts the layers of a model. recipe: what they compute."""
    formats: dict[str, Settings] = {}
    for one in [*(settings for _, settings in said.entries), said.default]:
        if one.text not in {known.text for known in formats.values()}:
            formats[f"format{len(formats)}"] = one
    names = {settings.text: name for name, settings in formats.items()}
    rules = [(entry, names[settings.text]) for entry, settings in said.entries]
    lines = [*naming.IMPORTS, "", "import torch", "", *naming.text(rules, names[said.default.text])]
    for name, settings in formats.items():
        body = (
            [line for line in settings.text.splitlines() if line and not line.startswith("#")] if settings.apply else []
        )
        lines += ["", f"def convert_{name}(model, fits):"]
        lines += [f"    {line}" for line in (*body, *(settings.apply or "pass  # BF16: as it is").splitlines())] + [""]
    lines += ["", "def convert(model):"]
    for name in formats:
        of_name = f'isinstance(module, torch.nn.Linear) and setting(of) == "{name}"'
        lines.append(f"    convert_{name}(model, lambda module, of: {of_name})")
    notes = dict.fromkeys(note for settings in formats.values() for note in settings.notes)
    return Settings("\n".join(lines), recipe, notes=(*notes, *said.notes))


def _training() -> Settings:
    nvfp4, tiles = QUANTIZERS["nvfp4"], QUANTIZERS["nvfp4-2d"]
    g = msgspec.structs.replace(nvfp4, rounding=Stochastic())
    wgrad = Wgrad(g=g, x=nvfp4, rotation=Hadamard(size=16, signs="fixed"))
    text = (
        "from functools import partial\n\n"
        "from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear\n\n"
        f"linear = partial({call('nvfp4_linear', sign_vector=SIGNS).replace('(', ', ', 1)}\n"
        "# y = linear(x, weight, bias) in place of torch.nn.functional.linear"
    )
    recipe = Recipe(Fprop(x=nvfp4, w=tiles), Dgrad(g=g, w=tiles), wgrad).canonical()
    apply = (
        "for name, module in model.named_modules():\n"
        "    if fits(module, name):\n"
        "        module.forward = lambda x, of=module: linear(x, of.weight, of.bias)"
    )
    return Settings(text, recipe, notes=(RANDOM, "all sizes must be multiples of 128", DIALECT), apply=apply)


def _nvfp4_qat() -> Iterator[Settings]:
    for q, arguments in ((QUANTIZERS["nvfp4"], {}), (QUANTIZERS["e4m3-b16"], {"use_per_tensor_scale": False})):
        text = _qat("NVFP4FakeQuantizeConfig", (), arguments)
        recipe = bf16_backward(Fprop(x=q, w=q), True)
        yield Settings(text, recipe, notes=(DIALECT, "zero scales become 2^-6"), apply=QUANTIZE)


def _mxfp4_qat() -> Iterator[Settings]:
    for rule in ("rceil", "floor", "ceil", "even"):
        q = Quantizer(block=32, scale=E8M0(rule=rule))
        mode = {} if rule == "rceil" else {"scaling_mode": f"ScaleCalculationMode.{rule.upper()}"}
        more = ("from torchao.prototype.mx_formats import ScaleCalculationMode",) if mode else ()
        text = _qat("MXFakeQuantizeConfig", more, mode)
        yield Settings(text, bf16_backward(Fprop(x=q, w=q), True), apply=QUANTIZE)


def _qat(name: str, imports: tuple[str, ...], arguments: dict[str, Any]) -> str:
    lines = [
        *imports,
        f"from torchao.prototype.qat import {name}",
        "from torchao.quantization import quantize_",
        f"from {QAT} import QATConfig",
        "",
        f"fake = {call(name, **arguments)}",
        'config = QATConfig(activation_config=fake, weight_config=fake, step="prepare")',
        "# quantize_(model, config)",
    ]
    return "\n".join(lines)


def _mxfp8() -> Iterator[Settings]:
    for rule in ("rceil", "floor"):
        q = Quantizer(element="e4m3", block=32, scale=E8M0(rule=rule))
        for plain in (False, True):
            arguments: dict[str, object] = {"wgrad_with_hp": True} if plain else {}
            lines = ["from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig"]
            if rule != "rceil":
                lines.append("from torchao.prototype.mx_formats import ScaleCalculationMode")
                arguments["scale_calculation_mode"] = f"ScaleCalculationMode.{rule.upper()}"
            wgrad = Wgrad(g=BF16, x=BF16) if plain else Wgrad(g=q, x=q)
            lines += [
                "from torchao.quantization import quantize_",
                "",
                f"config = {call('MXFP8TrainingOpConfig', **arguments)}",
                "# quantize_(model, config, filter_fn=lambda module, name: isinstance(module, torch.nn.Linear))",
            ]
            recipe = Recipe(Fprop(x=q, w=q), Dgrad(g=q, w=q), wgrad).canonical()
            yield Settings("\n".join(lines), recipe, apply=QUANTIZE)
