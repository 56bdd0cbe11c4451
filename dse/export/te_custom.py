"""Recipes of Transformer Engine made of parts: a factory of quantizers for each tensor of each layer.

Target: Transformer Engine 2.20 (2.20.0.dev0, commit d0067d0), `recipe.CustomRecipe(qfactory=…)`, experimental there.
The factory is called with a QuantizerRole (module_type, tensor_type, name). A quantizer makes a tensor's rowwise copy
and its columnwise one:

    input         rowwise fprop.x    columnwise wgrad.x
    weight        rowwise fprop.w    columnwise dgrad.w
    grad_output   rowwise dgrad.g    columnwise wgrad.g

HybridQuantizer has one quantizer for each; its columnwise source is the original tensor or the dequantized rowwise
copy: `master` and `forward` here. IdentityQuantizer leaves a tensor as it is. A Hadamard of 16 exists for the
columnwise copies of inputs and gradients.
"""

from __future__ import annotations

import msgspec

from fp4dse.dse.channels import channels_name
from fp4dse.dse.estimator import Estimator
from fp4dse.dse.export import naming
from fp4dse.dse.export.listed import Settings, call
from fp4dse.dse.export.pieces import Said
from fp4dse.dse.export.te import OLDER
from fp4dse.dse.quantizer import BF16, Quantizer
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.rounding import Nearest, Stochastic
from fp4dse.dse.scale import TensorScale
from fp4dse.dse.stages import SHARED, SLOTS, STAGES, Hadamard, rotation_name

VERSION = "Transformer Engine 2.20"
TENSORS = {
    "input": ("fprop.x", "wgrad.x", "wgrad"),
    "weight": ("fprop.w", "dgrad.w", "dgrad"),
    "grad_output": ("dgrad.g", "wgrad.g", None),
}
"""Tensor of a role -> its slot in rows, its slot in columns, and the stage whose `source` is that of the columns."""

_FP8 = {
    "mxfp8-rceil": ("MXFP8Quantizer", "kFloat8E4M3", ""),
    "mxfp8-e5m2-rceil": ("MXFP8Quantizer", "kFloat8E5M2", ""),
    "fp8-current": ("Float8CurrentScalingQuantizer", "kFloat8E4M3", ', device="cuda"'),
    "fp8-e5m2-current": ("Float8CurrentScalingQuantizer", "kFloat8E5M2", ', device="cuda"'),
    "fp8": ("Float8CurrentScalingQuantizer", "kFloat8E4M3", ', device="cuda"'),
    "fp8-e5m2": ("Float8CurrentScalingQuantizer", "kFloat8E5M2", ', device="cuda"'),
}
_PLAIN = "IdentityQuantizer()"
_RHT = {"with_rht": True, "with_post_rht_amax": True}
_MODULES = {
    "Float8CurrentScalingQuantizer": "float8_tensor",
    "HybridQuantizer": "hybrid_tensor",
    "IdentityQuantizer": "identity_tensor",
    "MXFP8Quantizer": "mxfp8_tensor",
    "NVFP4Quantizer": "nvfp4_tensor",
}

_NAMED = (
    "    if not role.name:",
    '        raise ValueError("a layer without a name: name_layers(model) comes before the first step")',
)
"""Lines of a factory under which layers differ."""

Factory = dict[str, str]
"""Tensor of a role -> Python that makes its quantizer."""


def factory(recipe: Recipe) -> tuple[Factory, list[str]]:
    """The quantizers of a layer's recipe, and what they cannot say."""
    cannot: list[str] = []
    if recipe.estimator != Estimator():
        cannot.append("estimator (it has straight through)")
    if recipe.fprop.channels is not None:
        cannot.append(f"fprop channels {channels_name(recipe.fprop.channels)} (it has none)")
    if recipe.wgrad.source == "converted":
        cannot.append("wgrad.x converted from the forward's codes (it has quantized from what they decode to)")
    if recipe.gemm != "exact":
        cannot.append(f"gemm {recipe.gemm} (it has exact)")
    rotations = {stage: recipe.rotation(stage) for stage in STAGES}
    cannot += [
        f"{at} rotation {rotation_name(of)} (it has none)" for at, of in rotations.items() if of and at != "wgrad"
    ]
    turn = rotations["wgrad"]
    if turn and (turn.size != 16 or turn.signs == "random" or turn.order != "sylvester"):
        cannot.append(f"wgrad rotation {rotation_name(turn)} (it has fixed16, hadamard16)")
        turn = None
    made = {slot: _quantizer(recipe.slot(slot), None) for slot in ("fprop.x", "fprop.w", "dgrad.g", "dgrad.w")}
    made |= {f"wgrad.{operand}": _quantizer(recipe.slot(f"wgrad.{operand}"), turn) for operand in STAGES["wgrad"]}
    cannot += [f"{slot} {recipe.slot(slot).label()} ({why})" for slot, (_, why) in made.items() if why]
    for stage, operands in STAGES.items():
        both = [made[f"{stage}.{operand}"][0].partition("(")[0] for operand in operands]
        if all(both) and both[0] != both[1]:
            labels = " and ".join(recipe.slot(f"{stage}.{operand}").label() for operand in operands)
            cannot.append(f"{stage} of {labels} (it has products of one format)")
    texts = {slot: text for slot, (text, _) in made.items()}
    if "row_scaled_nvfp4" in texts["wgrad.x"] + texts["wgrad.g"] + texts["dgrad.w"]:
        cannot.append("backward operands scaled by row (it has them in the forward pass)")
    return {tensor: _both(texts, recipe, *slots) for tensor, slots in TENSORS.items()}, cannot


def _quantizer(q: Quantizer, turn: Hadamard | None) -> tuple[str, str]:
    """Python of a quantizer, and why there is none."""
    if q == BF16:
        return _PLAIN, ""
    for name, (cls, dtype, more) in _FP8.items():
        if q == QUANTIZERS[name].canonical():
            return f"{cls}(fp8_dtype=DType.{dtype}{more})", "not rotated there" if turn else ""
    arguments: dict[str, object] = {}
    plain = {"rounding": Nearest(), "adapt": "none", "block": 16, "tensor_scale": TensorScale(target=448.0)}
    if msgspec.structs.replace(q, **plain) != QUANTIZERS["nvfp4"].canonical():
        return "", "no quantizer of that kind"
    if turn:
        arguments |= _RHT | ({} if turn.signs == "fixed" else {"with_random_sign_mask": False})
    if q.block == "16x16":
        arguments["with_2d_quantization"] = True
    if isinstance(q.rounding, Stochastic):
        arguments["stochastic_rounding"] = True
    if q.tensor_scale and q.tensor_scale.over == "row":
        arguments["row_scaled_nvfp4"] = True
    if q.adapt != "none":
        target = q.tensor_scale.target if q.tensor_scale else None
        arguments |= {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": int(target or 0)}
        arguments["nvfp4_4over6_err_mode"] = repr(q.adapt.removeprefix("4over6-").upper())
    return call("NVFP4Quantizer", **arguments), _faults(q, arguments)


def _faults(q: Quantizer, arguments: dict[str, object]) -> str:
    """The reason why an NVFP4Quantizer with these arguments is refused, or is not this one."""
    adapts = q.adapt.startswith("4over6")
    target = q.tensor_scale.target if q.tensor_scale else None
    if q.tensor_scale is None or q.tensor_scale.amax != "current" or q.tensor_scale.over not in ("tensor", "row"):
        return "it has one current maximum for the tensor or the row"
    if q.block not in (16, "16x16") or (q.adapt != "none" and not adapts):
        return "it has blocks of 16 or 16x16, with or without four-over-six"
    if target not in ((448.0, 256.0) if adapts else (448.0,)):
        return "its tensor target is 448, for four-over-six also 256"
    if not isinstance(q.rounding, Nearest | Stochastic) or (
        isinstance(q.rounding, Nearest) and q.rounding != Nearest()
    ):
        return "it rounds to nearest, or stochastically"
    apart = {"with_rht", "row_scaled_nvfp4", "with_2d_quantization", "stochastic_rounding", "nvfp4_use_4over6"}
    both = apart & arguments.keys()
    allowed: tuple[set[str], ...] = (
        {"with_rht", "stochastic_rounding"},
        {"row_scaled_nvfp4", "nvfp4_use_4over6"},
        {"with_2d_quantization", "nvfp4_use_4over6"},
    )
    if len(both) > 1 and not any(both <= one for one in allowed):
        return "not together: " + ", ".join(sorted(both))
    return ""


def _both(texts: dict[str, str], recipe: Recipe, rows: str, columns: str, stage: str | None) -> str:
    """The quantizer of a tensor that is read in rows and in columns."""
    row, column = texts[rows], texts[columns]
    from_rows = stage in SHARED and recipe.copies(str(stage))
    if row == _PLAIN and column == _PLAIN:
        return _PLAIN
    without = column.replace("with_rht=True, with_post_rht_amax=True", "").replace("with_random_sign_mask=False", "")
    if not from_rows and without.replace("(, ", "(").replace(", )", ")").replace("(, )", "()") == row:
        return column  # the Hadamard is of the columns alone
    source = ', columnwise_source="rowwise_dequantized"' if from_rows else ""
    return f"HybridQuantizer(rowwise_quantizer={row}, columnwise_quantizer={column}{source})"


def render(said: Said[Factory], recipe: Recipe) -> Settings:
    """Python with the factory for all layers. recipe: what it computes."""
    factories: dict[str, Factory] = {}
    for one in [*(made for _, made in said.entries), said.default]:
        if one not in factories.values():
            factories[f"format{len(factories)}"] = one
    names = {tuple(made.items()): name for name, made in factories.items()}
    rules = [(entry, names[tuple(made.items())]) for entry, made in said.entries]
    used = sorted(
        name for name in _MODULES if any(f"{name}(" in text for of in factories.values() for text in of.values())
    )
    used = sorted({*used, "IdentityQuantizer"})
    lines = [
        f'"""{VERSION}: a quantizer for each tensor of each layer, by fp4dse."""',
        "",
        *naming.IMPORTS,
        "",
        "import transformer_engine.pytorch as te",
        "from transformer_engine.common.recipe import CustomRecipe",
        "from transformer_engine.pytorch.constants import DType",
        *(f"from transformer_engine.pytorch.tensor.{_MODULES[name]} import {name}" for name in used),
        "",
        *naming.text(rules, names[tuple(said.default.items())]),
        "",
        "QUANTIZERS = {",
    ]
    for name, made in factories.items():
        lines += [f'    ("{name}", "{tensor}"): lambda: {text},' for tensor, text in made.items()]
    lines += [
        "}",
        "",
        "",
        "def qfactory(role):",
        '    if role is None or role.module_type not in ("linear", "grouped_linear"):',
        "        return IdentityQuantizer()",
        *([] if said.is_uniform else _NAMED),
        "    return QUANTIZERS[setting(role.name), role.tensor_type]()",
        "",
        "",
        "def name_layers(model):",
        "    for name, module in model.named_modules():",
        '        if hasattr(module, "get_quantizer_roles"):',
        "            module.name = name",
        "",
        "",
        "recipe = CustomRecipe(qfactory=qfactory)",
        "# name_layers(model)",
        "# with te.autocast(enabled=True, recipe=recipe): …",
    ]
    notes = [
        f"{VERSION} (2.20.0.dev0); CustomRecipe is experimental there",
        "random bits of stochastic rounding, and how many there are, are Transformer Engine's own",
    ]
    slots = [of.slot(slot) for of in (recipe, *(entry.recipe for entry, _ in said.entries)) for slot in SLOTS]
    older = (OLDER,) if any(QUANTIZERS[name].canonical() in slots for name in ("fp8", "fp8-e5m2")) else ()
    return Settings("\n".join(lines), recipe, notes=(*notes, *older, *said.notes))
