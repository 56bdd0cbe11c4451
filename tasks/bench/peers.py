"""Rows of populations beside equal lanes that torch.compile has compiled (compiled.py), on a GPU."""

from __future__ import annotations

from functools import cache, partial

import msgspec

from fp4dse.dse import Recipe
from fp4dse.dse.layers.precision import Precise
from fp4dse.tasks import get_task
from fp4dse.tasks.bench import compiled
from fp4dse.tasks.bench.in_time import Found, least_us
from fp4dse.tasks.bench.recipes import with_amax
from fp4dse.tasks.bench.row import Measure
from fp4dse.tasks.bench.step_time import step_us
from fp4dse.tasks.catalogue import BF16 as BETWEEN


def against_compiled(device: str) -> list[Measure]:
    """The strongest peer, of equal lanes (compiled.py), beside the engine: its time over ours, or for one large decoder
    ours over its. The peer has BF16 between layers; the engine as its presets have it, and with BF16."""
    held = with_amax(Recipe.named("nvfp4"), "held")
    everywhere = msgspec.structs.replace(Recipe.named("nvfp4-sr-rht"), precise=Precise(False, False, False))
    bf16 = Recipe.named("bf16")

    @cache
    def peer(task: str, lanes: int, quantized: compiled.Quantized) -> Found:
        name, preset = task.split(":")
        return least_us(partial(compiled.step_us, (name, preset), lanes, device, quantized), device)

    @cache
    def ours(task: str, lanes: int, recipe: Recipe) -> float:
        return step_us(get_task(*task.split(":")), recipe, lanes, device, 20)

    def gain(task: str, lanes: int, recipe: Recipe, between: str) -> tuple[float, str]:
        found = peer(task, lanes, "nothing" if recipe == bf16 else "blocks")
        theirs, mine = found.us / lanes, ours(task + between, lanes, recipe) / lanes
        return theirs / mine, f"µs a lane and step: {theirs:.1f} compiled, {mine:.1f} ours; all lanes {found}"

    def share(recipe: Recipe, quantized: compiled.Quantized) -> tuple[float, str]:
        found = peer("language:350M", 1, quantized)
        theirs, mine = found.us, ours("language:350M+bf16", 1, recipe)
        return mine / theirs, f"ms a step: {theirs / 1000:.1f} compiled, {mine / 1000:.1f} ours; {found}"

    populations = (
        ("regression:mlp", 64, "≥ 2", "≥ 1.2"),
        ("vision:small", 64, "≥ 1.5", ""),
        ("language:10M", 16, "≥ 1.5", ""),
    )
    rows = []
    for task, lanes, fp4, plain in populations:
        for between in ("", BETWEEN):
            for name, recipe, reach in (("nvfp4 held", held, fp4), ("bf16", bf16, plain)):
                what = f"{task}{between}, {name}, L = {lanes}, against equal lanes by torch.compile"
                rows.append(Measure(what, "×", reach, partial(gain, task, lanes, recipe, between)))
    nvidia = with_amax(Recipe.named("nvidia-nvfp4"), "held")
    what = "language:350M+bf16, {}, step over that of torch.compile in {}"
    return [
        *rows,
        Measure(what.format("bf16", "BF16"), "×", "≤ 1", partial(share, bf16, "nothing")),
        Measure(what.format("nvidia-nvfp4 held", "BF16"), "×", "≤ 1.15", partial(share, nvidia, "nothing")),
        Measure(
            what.format("nvfp4-sr-rht in all layers", "NVFP4 to nearest"), "×", "≤ 1", partial(share, everywhere, "all")
        ),
    ]
