"""Rows of reinforcement learning on a GPU: rollouts in MXFP4 beside BF16's, and lanes beside those of torch.compile."""

from __future__ import annotations

from functools import cache, partial

import msgspec

from fp4dse.dse import Recipe
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.tasks.bench import compiled_rl
from fp4dse.tasks.bench.in_time import least_us
from fp4dse.tasks.bench.row import Measure
from fp4dse.tasks.bench.step_time import rollout_alone_us, step_us


def rollouts(device: str) -> list[Measure]:
    """Reinforcement learning: a rollout and its updates beside the same stacked by hand (compiled_rl.py), and with
    MXFP4 rollouts beside BF16's."""
    lanes = 64
    bf16 = Recipe.named("bf16")
    sampled = msgspec.structs.replace(bf16, training=Training(rollout=ROLLOUT_NAMES["mxfp4-rceil"]))

    @cache
    def ours(recipe: Recipe, preset: str) -> float:
        task = compiled_rl.without_base(preset)
        steps = compiled_rl.plan_of(task).minibatches
        return steps * step_us(task, recipe, lanes, device, 5 * steps)

    def gain() -> tuple[float, str]:
        found = least_us(partial(compiled_rl.rollout_us, "small", lanes, device), device)
        theirs, mine = found.us / lanes, ours(bf16, "small+bf16") / lanes  # BF16 between layers, as the peer has it
        return theirs / mine, f"µs a lane and rollout: {theirs:.0f} compiled, {mine:.0f} ours; all lanes {found}"

    def alone(preset: str) -> tuple[float, str]:
        task = compiled_rl.without_base(preset)
        plain, quantized = (rollout_alone_us(task, recipe, lanes, device) for recipe in (bf16, sampled))
        return (
            quantized / plain,
            f"ms a rollout of all lanes: {plain / 1000:.1f} bf16, {quantized / 1000:.1f} mxfp4-rceil",
        )

    def of(preset: str) -> list[Measure]:
        what = f"rl:{preset}, mxfp4-rceil rollouts, L = {lanes}, over bf16's"
        return [
            Measure(f"{what}, the rollout alone", "×", "≤ 1.15", lambda: alone(preset)),
            Measure(f"{what}, with its updates", "×", "≤ 1.15", lambda: ours(sampled, preset) / ours(bf16, preset)),
        ]

    return [  # the peer last: it takes minutes to compile
        *of("small"),
        *of("small+bf16"),
        Measure(f"rl:small+bf16, L = {lanes}, against equal lanes by torch.compile", "×", "≥ 1.5", gain),
    ]
