"""The stages of recipes, one recipe a lane: their slots, the GEMM backend that takes them, and channels held apart.

A backend takes operands by their quantizers: those that it may have in FP8, and those whose factors are all 1, follow
from these alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fp4dse.dse import SLOTS, STAGES, Hadamard, Quantizer, Recipe
from fp4dse.dse.channels import Corrected, Held
from fp4dse.dse.exactness import fp8_formats, has_factor, is_fp8_itself
from fp4dse.dse.quantizer import BF16
from fp4dse.kernels.gemm import GEMMS, pick
from fp4dse.kernels.ops.fp8 import DTYPES
from fp4dse.kernels.quant.backend import Backend
from fp4dse.kernels.quant.operand.choice import Choice
from fp4dse.kernels.quant.operand.kinds import make_slot, slot_of
from fp4dse.kernels.quant.operand.slot import Slot
from fp4dse.kernels.stage import Stage


def make_stages(recipes: Sequence[Recipe], gemm: str, device: torch.device, backend: Backend) -> dict[str, Stage]:
    """The three stages by name, for recipes of equal structural signature, one a lane, with the GEMM backend that is
    wanted (gemm.pick)."""
    stages = {}
    for name, operands in STAGES.items():
        a, b = ([recipe.slot(f"{name}.{operand}").canonical() for recipe in recipes] for operand in operands)
        slots = {operand: make_slot(recipes, f"{name}.{operand}", device, backend) for operand in operands}
        rotation = recipes[0].canonical().rotation(name)
        stages[name] = _stage(name, slots, (a, b), rotation, gemm, device)
    channels = recipes[0].canonical().fprop.channels
    if channels is None:
        return stages
    choice = Choice(channels, stages["fprop"].slots["x"].state)
    apart = ["fprop"] if isinstance(channels, Corrected) or not channels.wgrad else ["fprop", "wgrad"]
    for name in apart:
        held = _held_stage(name, recipes, channels, gemm, device, backend) if isinstance(channels, Held) else None
        stages[name].choice, stages[name].held = choice, held
        stages[name].gemm_why_not += held.gemm_why_not if held else ()
    return stages


def but_weights(
    recipes: Sequence[Recipe],
    own: Mapping[str, Stage],
    plain: Mapping[str, Stage],
    gemm: str,
    device: torch.device,
) -> dict[str, Stage]:
    """The stages that have a weight, with its slot and their rotation from `own`, and the other operand's slot from
    `plain`."""
    stages = {}
    for name in ("fprop", "dgrad"):
        slots = {of: own[name].slots[of] if of == "w" else plain[name].slots[of] for of in STAGES[name]}
        weights = [recipe.slot(f"{name}.w").canonical() for recipe in recipes]
        bf16 = [BF16] * len(recipes)
        stages[name] = _stage(name, slots, (bf16, weights), own[name].rotation, gemm, device)
    return stages


def _held_stage(
    name: str, recipes: Sequence[Recipe], channels: Held, gemm: str, device: torch.device, backend: Backend
) -> Stage:
    """The stage of channels that are held in another format: in it, but for operands that are plain. It takes no FP8:
    nothing carries what its slots would keep from step to step."""
    quantizers: dict[str, list[Quantizer]] = {}
    for operand in STAGES[name]:
        own = [recipe.slot(f"{name}.{operand}").canonical() for recipe in recipes]
        quantizers[operand] = own if own[0].is_plain else [channels.format.canonical()] * len(own)
    slots = {
        operand: slot_of(of, SLOTS.index(f"{name}.{operand}"), device, backend) for operand, of in quantizers.items()
    }
    a, b = quantizers.values()
    in_fp8 = gemm == "fp8-exact"
    stage = _stage(name, slots, (a, b), None, "exact" if in_fp8 else gemm, device)
    stage.gemm_why_not += (f"{gemm} not taken for channels that are held in another format",) if in_fp8 else ()
    return stage


def _stage(
    name: str,
    slots: dict[str, Slot],
    quantizers: tuple[Sequence[Quantizer], Sequence[Quantizer]],
    rotation: Hadamard | None,
    gemm: str,
    device: torch.device,
) -> Stage:
    """The stage with the backend that takes operands of these canonical quantizers, one a lane each."""
    chosen, why_not = pick(str(device), *quantizers, gemm)
    formats: dict[str, torch.dtype] = {}
    if GEMMS[chosen].fp8:
        found = fp8_formats(*quantizers)
        assert found is not None  # or the backend had a reason
        formats = {operand: DTYPES[form] for operand, form in zip(slots, found, strict=True)}
    pairs = list(zip(slots, quantizers, strict=True))
    itself = frozenset(x for x, of in pairs if formats and all(map(is_fp8_itself, of)))
    of_one = frozenset(x for x, of in pairs if not any(map(has_factor, of)))
    return Stage(name, slots, rotation, chosen, why_not, formats, itself, of_one)
