"""Rows of populations on a GPU: beside BF16, beside fewer lanes, and beside one lane at a time in eager torch."""

from __future__ import annotations

from functools import cache, partial

import msgspec

from fp4dse.dse import Recipe
from fp4dse.kernels import dispatch
from fp4dse.tasks import get_task
from fp4dse.tasks.bench import baseline, side_by_side
from fp4dse.tasks.bench.recipes import APART, FORMATS, by_layer, uniform_recipe, with_amax, with_core
from fp4dse.tasks.bench.row import Measure
from fp4dse.tasks.bench.step_time import LEAST_S, WARM_UP, built_alone, step_us
from fp4dse.tasks.catalogue import BF16 as BETWEEN
from fp4dse.tasks.engine.lane_counts import lanes_of, peak_bytes, step_seconds


def mlp(device: str) -> list[Measure]:
    """An MLP: 64 lanes, each in microseconds, in ratio to one in eager torch, and their memory."""
    task, lanes = get_task("regression", "mlp"), 64

    @cache
    def eager() -> float:
        return 1e6 * baseline.seconds_per_step(task, device)

    @cache
    def step(name: str, amax: str = "current", between: str = "") -> float:
        found = get_task("regression", "mlp" + between)
        return step_us(found, with_amax(Recipe.named(name), amax), lanes, device)

    def memory() -> tuple[float, str]:
        recipe = [with_amax(Recipe.named("nvfp4"), "held")]
        one, many = (peak_bytes(task, recipe, device, n) for n in (1, lanes))
        further = (many - one) / (lanes - 1)
        note = f"{many / 2**20:.0f} MiB; a lane alone {one / 2**20:.1f}, each further one {further / 2**20:.1f}"
        return many / (1.1 * lanes * one + 2**28), note

    each, fp4 = "µs a lane and step", "nvidia-nvfp4"
    return [
        Measure("MLP 4×256, batch 512, one lane in eager torch", "µs", "", eager),
        Measure(f"MLP, bf16, L = {lanes}", each, "≤ 7.5", lambda: step("bf16") / lanes),
        Measure(f"MLP, nvfp4 held, L = {lanes}", each, "≤ 8.5", lambda: step("nvfp4", "held") / lanes),
        Measure(f"MLP{BETWEEN}, bf16, L = {lanes}", each, "≤ 7.5", lambda: step("bf16", between=BETWEEN) / lanes),
        Measure(
            f"MLP{BETWEEN}, nvfp4 held, L = {lanes}", each, "≤ 8.5", lambda: step("nvfp4", "held", BETWEEN) / lanes
        ),
        Measure(
            f"MLP, nvfp4 held, L = {lanes}, against eager torch",
            "×",
            "≥ 400",
            lambda: eager() * lanes / step("nvfp4", "held"),
        ),
        Measure(f"MLP, {fp4} held against bf16, L = {lanes}", "×", "≤ 1.25", lambda: step(fp4, "held") / step("bf16")),
        Measure(f"MLP, {fp4} current against bf16, L = {lanes}", "×", "≤ 1.40", lambda: step(fp4) / step("bf16")),
        Measure(f"MLP, memory at L = {lanes}, share of 1.1 · L · one lane + 256 MiB", "", "≤ 1", memory),
    ]


def decoders(device: str) -> list[Measure]:
    """Decoders in FP4 beside BF16, and many lanes of one beside one."""
    fp4 = with_amax(Recipe.named("nvidia-nvfp4"), "held")

    @cache
    def step(preset: str, recipe: Recipe, lanes: int) -> float:
        return step_us(get_task("language", preset), recipe, lanes, device, 10)

    def ratio(preset: str, lanes: int) -> float:
        return step(preset, fp4, lanes) / step(preset, Recipe.named("bf16"), lanes)

    def gain() -> float:
        return 16 * step("10M-256", fp4, 1) / step("10M-256", fp4, 16)

    def units() -> tuple[float, str]:
        mxfp4 = msgspec.structs.replace(Recipe.named("mxfp4"), gemm="fp8-exact")
        fp8, bf16 = (step("350M" + BETWEEN, recipe, 1) for recipe in (mxfp4, Recipe.named("bf16")))
        return fp8 / bf16, f"ms a step: {fp8 / 1000:.1f}, bf16 {bf16 / 1000:.1f}"

    what = "language:{}, nvidia-nvfp4 held against bf16, L = {}"
    return [
        Measure(what.format("10M", 16), "×", "≤ 1.10", lambda: ratio("10M", 16)),
        Measure(what.format("350M", 1), "×", "≤ 1.15", lambda: ratio("350M", 1)),
        Measure(f"language:350M{BETWEEN}, mxfp4 through FP8 units against bf16, L = 1", "×", "≤ 1", units),
        Measure("language:10M-256, L = 16 against L = 1, lanes per second", "×", "≥ 1.6", gain),
    ]


def layers(device: str) -> list[Measure]:
    """Rules for layers beside one format for all, and a quantized attention core beside a plain one."""
    task, lanes = get_task("language", "1M"), 64

    def rules() -> tuple[float, str]:
        uniform = {name: step_us(task, uniform_recipe(name), lanes, device, 10) for name in FORMATS}
        planned = sorted(lanes_of(task, by_layer(), lanes), key=lambda lane: [r.label() for r in lane.recipe.layers])
        us = 1e6 * step_seconds(built_alone(task, planned, device), LEAST_S, 10, WARM_UP)
        note = ", ".join(f"{name} {each / lanes:.1f}" for name, each in uniform.items())
        return us / max(uniform.values()), f"{us / lanes:.1f} µs a lane and step; {note}"

    def core(name: str) -> tuple[float, str]:
        task = get_task("language", "10M-256")
        dispatch.refusals()  # of what was measured before
        us = step_us(task, with_core(name), 16, device, 10)
        refused = [reason for reason in dispatch.refusals() if reason.startswith("attention_core")]
        how, why = dispatch.OPERATIONS["attention_core"].implementation(device)
        note = "; ".join(refused) or f"attention_core: computed by {how}{f' ({why})' if why else ''}"
        return us / step_us(task, Recipe.named("nvfp4"), 16, device, 10), note

    return [
        Measure(
            f"language:1M, eight rules for layers of {', '.join(FORMATS)}, L = {lanes}, against the dearest",
            "×",
            "≤ 1.10",
            rules,
        ),
        *(
            Measure(
                f"language:10M-256, nvfp4 with a core in {name} against a plain core, L = 16",
                "×",
                "≤ 1.25",
                partial(core, name),
            )
            for name in ("fp8", "nvfp4")
        ),
    ]


def images(device: str) -> list[Measure]:
    """Models of images, a patch transformer and a UNet, 32 lanes beside one at a time in eager torch."""

    def gain(name: str) -> float:
        task = get_task(name, "small")
        alone = 1e6 * baseline.seconds_per_step(task, device, steps=5)
        return 32 * alone / step_us(task, with_amax(Recipe.named("nvfp4"), "held"), 32, device, 50)

    what = "{}:small, nvfp4 held, L = 32 against one at a time in eager torch"
    return [Measure(what.format(name), "×", "≥ 50", partial(gain, name)) for name in ("vision", "diffusion")]


def workers(device: str) -> list[Measure]:
    """Ten populations at a time, a worker each, beside one."""
    task, lanes = ("language", "3M"), 4

    def share() -> tuple[float, str]:
        apart = side_by_side.tokens_per_second(task, APART, lanes, device)
        together = side_by_side.tokens_per_second(task, APART[:1], 36, device)
        return apart / together, f"M tokens a second: {apart / 1e6:.2f} of ten, {together / 1e6:.2f} of one"

    what = (
        f"language:3M, ten populations of {lanes} lanes in ten workers against one of 36 in {APART[0]}, tokens a second"
    )
    return [Measure(what, "×", "≥ 0.7", share)]
