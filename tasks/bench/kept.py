"""The bytes that a block of a decoder keeps for the backward pass (tasks/engine/kept.py); memory and speed of a step.

A block's are the difference between a decoder and one with a block more, so that embedding, head and loss are not in
them; and a token's that between one window and two, so that copies of weights, which are kept once, are not either.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from msgspec.structs import replace

from fp4dse.dse import ConfigError, Quantizer, Recipe
from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.dispatch import by_device
from fp4dse.tasks import get_task
from fp4dse.tasks.bench.step_time import step_us
from fp4dse.tasks.catalogue import PACKED, RECOMPUTE, SWIGLU8
from fp4dse.tasks.engine.kept import keeping
from fp4dse.tasks.engine.lane_counts import peak_bytes
from fp4dse.tasks.language.decoder import Decoder, Shape
from fp4dse.tasks.task import Task

LANES = 2
"""A CPU computes a product of one lane twice, and keeps both results."""


HOPPER = Recipe.named("hopper-moe-fp4")
FP8 = replace(HOPPER, fprop=replace(HOPPER.fprop, x=Quantizer.named("fp8-1x128")))
WAYS = {
    "BF16": (Recipe.named("bf16"), ""),
    "FP8 under factors of 128": (FP8, "+packed"),
    "MXFP4": (HOPPER, "+packed"),
    "MXFP4, and SwiGLU in MXFP8": (HOPPER, "+swiglu8+packed"),
    "MXFP4, decoded": (HOPPER, ""),
    "BF16, recomputed": (Recipe.named("bf16"), "+recompute"),
    "MXFP4, recomputed": (HOPPER, "+packed+recompute"),
}
"""The form in which linear layers keep inputs -> a recipe, and the ending of the preset: 2603.02731 and what it stands
beside. Weight gradients take the forward pass's copy, but in BF16. What SwiGLU keeps in MXFP8
changes gradients."""


class Row(NamedTuple):
    """Bytes of one way, and their ratios to BF16 and FP8; on a GPU also the peak memory of a training of two lanes, in
    MiB, its speed, in tokens a second, and why codes are not kept where they were to be."""

    what: str
    bytes_per_token_and_block: float
    of_bf16: float
    of_fp8: float
    peak_mib: float | None = None
    tokens_per_s: float | None = None
    note: str = ""


class Kept(NamedTuple):
    """Bytes a token: of a block, and of all that is not in a block."""

    block: float
    rest: float


def bench(preset: str, device: str = "cpu") -> Iterator[Row]:
    """A row for each of WAYS, for the blocks of a preset of language, such as `60M+bf16`. ConfigError for one that says
    itself what is kept."""
    endings = (SWIGLU8, PACKED, RECOMPUTE)
    for ending in endings:
        if ending in preset:
            shorter = preset
            for other in endings:
                shorter = shorter.replace(other, "")
            why = f"with and without {', '.join(endings)} is what is counted"
            raise ConfigError("preset", preset, f"{shorter} ({why})")
    kept = {what: kept_for_backward(preset + ending, recipe, device=device) for what, (recipe, ending) in WAYS.items()}
    bf16, fp8, *_ = (found.block for found in kept.values())
    for what, found in kept.items():
        recipe, ending = WAYS[what]
        measure = by_device(device, cpu=None, cuda=_of_training)
        more = measure(preset + ending, recipe, device) if measure else ()
        yield Row(what, found.block, found.block / bf16, found.block / fp8, *more)


def _of_training(preset: str, recipe: Recipe, device: str) -> tuple[float, float, str]:
    """The peak of a training of two lanes with the preset's batch, in MiB, tokens a second once its step is captured,
    and the reason why it keeps no codes."""
    task = get_task("language", preset)
    note = LaneNumerics([recipe], [0], device).why_not_packed() if task.packed else None
    peak = peak_bytes(task, [recipe], device, LANES) / 2**20
    tokens = LANES * task.batch * shape_of(task).context
    return peak, 1e6 * tokens / step_us(task, recipe, LANES, device), note or ""


def shape_of(task: Task) -> Shape:
    """The decoder of a preset of language."""
    assert isinstance(task.model, partial)
    [shape] = task.model.args
    assert isinstance(shape, Shape)
    return shape


def kept_for_backward(preset: str, recipe: Recipe, device: str = "cpu") -> Kept:
    """Of a preset of language, `+bf16` and the like included, trained by this recipe."""
    task = get_task("language", preset)
    shape = shape_of(task)
    tokens = LANES * shape.context

    def of_token(depth: int) -> float:
        of = replace(shape, depth=depth)
        one, two = (_kept(task, of, recipe, batch, device) for batch in (1, 2))
        return (two - one) / tokens

    one, two = of_token(1), of_token(2)
    return Kept(two - one, one - (two - one))


def _kept(task: Task, shape: Shape, recipe: Recipe, batch: int, device: str) -> int:
    """Bytes that a forward pass of the lanes keeps."""
    vocabulary, seeds = 256, range(LANES)
    parameters = {name: of.to(device) for name, of in shape.initial(vocabulary, seeds).items()}
    numerics = LaneNumerics([recipe] * LANES, seeds, device, dtype=getattr(torch, task.dtype))
    numerics.packed, numerics.swiglu8, numerics.recompute = task.packed, task.swiglu8, task.recompute
    model = Decoder(shape, parameters, numerics)
    tokens = torch.arange(batch * shape.context, device=device).view(1, batch, -1).expand(LANES, -1, -1) % vocabulary
    with keeping(model.parameters()) as kept:
        task.loss(model(tokens), tokens)
    return kept.bytes()
