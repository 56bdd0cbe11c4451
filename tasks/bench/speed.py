"""The rows of `fp4dse bench train`: how fast populations train and what they take, all ratios from one run.

What several rows need is measured once. Each row is yielded as soon as it is measured, so that a failure later on
loses none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import msgspec
import torch

from fp4dse.dse import QUANTIZERS, SLOTS, STAGES, ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.attention import ATTENTION_PRODUCTS, BF16
from fp4dse.dse.layers.precision import Precise
from fp4dse.dse.layers.rule import QUANTIZERS as QUANTIZER_FIELDS
from fp4dse.dse.layers.rule import LayerRule
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.kernels import dispatch
from fp4dse.kernels.memory import keep_freed_memory
from fp4dse.tasks import get_task
from fp4dse.tasks.bench import baseline, compiled, compiled_rl, side_by_side
from fp4dse.tasks.bench.in_time import Found, NotInTime, least_us
from fp4dse.tasks.catalogue import BF16 as BETWEEN
from fp4dse.tasks.engine.lane_counts import TIMED_STEPS, lanes_of, peak_bytes, step_seconds, wait_for
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.regression import teacher_task
from fp4dse.tasks.task import Task, with_steps
from fp4dse.tasks.threads import torch_threads

WARM_UP, LEAST_S = 52, 0.3
"""Steps after which held maxima were taken twice, so that both kinds of steps are captured, and seconds of a timing."""


class Row(msgspec.Struct, frozen=True):
    """One row: what was measured, its value and unit, the bound that it shall keep (`≤ 8.5`), and a remark."""

    what: str
    value: float | None
    unit: str
    reach: str
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """True if the value keeps its bound; None without a value or a bound."""
        if self.value is None or not self.reach:
            return None
        sign, bound = self.reach.split()
        return self.value <= float(bound) if sign == "≤" else self.value >= float(bound)


class Measure(msgspec.Struct, frozen=True):
    """A row that is still to be measured. `value` returns its value, or its value and a remark."""

    what: str
    unit: str
    reach: str
    value: Callable[[], float | tuple[float, str]]


def bench(device: str, only: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a device whose name holds one of the words, all if there is none, each as soon as it is measured.

    ConfigError if there is no such row.
    """
    measures = _on_cpu() if torch.device(device).type == "cpu" else [row for rows in ON_GPU for row in rows(device)]
    chosen = [m for m in measures if not only or any(word.lower() in m.what.lower() for word in only)]
    if not chosen:
        raise ConfigError("--only", ", ".join(only), f"a part of one of {'; '.join(m.what for m in measures)}")
    return _rows(chosen, device)


def _rows(measures: Sequence[Measure], device: str) -> Iterator[Row]:
    if torch.device(device).type == "cpu":
        yield from map(_row, measures)
        return
    for measure in measures:
        with torch.cuda.device(device):
            row = _row(measure)
        yield row


def with_amax(recipe: Recipe, amax: str) -> Recipe:
    """The recipe with tensor maxima that are `current`, `previous` or `held`."""
    changes: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}
    for slot in SLOTS:
        q, (stage, operand) = recipe.slot(slot), slot.split(".")
        if q.tensor_scale:
            scale = msgspec.structs.replace(q.tensor_scale, amax=amax)
            changes[stage][operand] = msgspec.structs.replace(q, tensor_scale=scale)
    stages = {stage: msgspec.structs.replace(getattr(recipe, stage), **new) for stage, new in changes.items()}
    return msgspec.structs.replace(recipe, **stages)


def step_us(task: Task, recipe: Recipe, lanes: int, device: str, steps: int = 100) -> float:
    """Microseconds of a step of a population of `lanes` lanes."""
    population = Population(with_steps(task, TIMED_STEPS), lanes_of(task, [recipe], lanes), device)
    return 1e6 * step_seconds(population, LEAST_S, steps, WARM_UP)


def rollout_alone_us(
    task: Task, recipe: Recipe, lanes: int, device: str, rounds: int = 10, warm_up: int = WARM_UP
) -> float:
    """Microseconds of a rollout of a population, without the updates that follow: the least of some."""
    population, least = Population(with_steps(task, TIMED_STEPS), lanes_of(task, [recipe], lanes), device), float("inf")
    for step in range(warm_up):
        population.train_step(step)
    for _ in range(rounds):
        wait_for(device)
        begin = time.perf_counter()
        population.roll_out(0)
        wait_for(device)
        least = min(least, time.perf_counter() - begin)
    return 1e6 * least


def _mlp(device: str) -> list[Measure]:
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


def _decoders(device: str) -> list[Measure]:
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


APART = (
    *("nvfp4", "nvfp4-sr-rht", "nvidia-nvfp4", "four-over-six", "te-nvfp4"),
    *("mxfp4", "mxfp4-sr-rht", "mxfp4-tiles", "te-mxfp8-nvfp4", "bf16"),
)
"""Recipes of which no two can share a population."""


def _populations(device: str) -> list[Measure]:
    task, lanes = ("language", "3M"), 4

    def share() -> tuple[float, str]:
        apart = side_by_side.tokens_per_second(task, APART, lanes, device)
        together = side_by_side.tokens_per_second(task, APART[:1], 36, device)
        return apart / together, f"M tokens a second: {apart / 1e6:.2f} of ten, {together / 1e6:.2f} of one"

    what = (
        f"language:3M, ten populations of {lanes} lanes in ten workers against one of 36 in {APART[0]}, tokens a second"
    )
    return [Measure(what, "×", "≥ 0.7", share)]


FORMATS = ("nvfp4", "mxfp4", "mxfp8", "bf16")
"""Of the rules for layers that are timed."""


def by_layer() -> list[Recipe]:
    """Eight recipes with a rule each for the first three fifths of the blocks, MLP and attention apart, so that a layer
    has lanes of up to four formats."""
    base = Recipe.named("nvfp4")
    recipes = []
    for number in range(8):
        first, second = (FORMATS[(number + turn) % 4] for turn in (number // 4, 2 + number // 4))
        rules = [LayerRule(("mlp",), first=0.6, **_all_slots(first)), LayerRule(("attention",), **_all_slots(second))]
        recipes.append(msgspec.structs.replace(base, layers=tuple(rules)))
    return recipes


def _all_slots(name: str) -> dict[str, Any]:
    return dict.fromkeys(QUANTIZER_FIELDS, QUANTIZERS[name] if name != "bf16" else BF16)


def _by_layer(device: str) -> list[Measure]:
    task, lanes = get_task("language", "1M"), 64

    def rules() -> tuple[float, str]:
        uniform = {name: step_us(task, uniform_recipe(name), lanes, device, 10) for name in FORMATS}
        planned = sorted(lanes_of(task, by_layer(), lanes), key=lambda lane: [r.label() for r in lane.recipe.layers])
        mixed = Population(with_steps(task, TIMED_STEPS), planned, device)
        us = 1e6 * step_seconds(mixed, LEAST_S, 10, WARM_UP)
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


def uniform_recipe(name: str) -> Recipe:
    """All six operands in one format."""
    return Recipe.uniform(QUANTIZERS[name] if name != "bf16" else BF16)


def with_core(name: str) -> Recipe:
    """NVFP4 with all twelve operands of the attention core in a format."""
    products = {product: dict.fromkeys(operands, name) for product, operands in ATTENTION_PRODUCTS.items()}
    return recipe_from_dict({**recipe_to_dict(Recipe.named("nvfp4")), "attention": products})


def _eager(device: str) -> list[Measure]:
    def gain(name: str) -> float:
        task = get_task(name, "small")
        alone = 1e6 * baseline.seconds_per_step(task, device, steps=5)
        return 32 * alone / step_us(task, with_amax(Recipe.named("nvfp4"), "held"), 32, device, 50)

    what = "{}:small, nvfp4 held, L = 32 against one at a time in eager torch"
    return [Measure(what.format(name), "×", "≥ 50", partial(gain, name)) for name in ("vision", "diffusion")]


def _against_compiled(device: str) -> list[Measure]:
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


def _rollouts(device: str) -> list[Measure]:
    """Reinforcement learning: a rollout and its updates beside the same stacked by hand (compiled_rl.py), and with
    MXFP4 rollouts beside BF16's."""
    task, lanes = compiled_rl.without_base("small"), 64
    bf16 = Recipe.named("bf16")
    sampled = msgspec.structs.replace(bf16, training=Training(rollout=ROLLOUT_NAMES["mxfp4-rceil"]))

    @cache
    def ours(recipe: Recipe) -> float:
        steps = compiled_rl.plan_of(task).minibatches
        return steps * step_us(task, recipe, lanes, device, 5 * steps)

    def gain() -> tuple[float, str]:
        found = least_us(partial(compiled_rl.rollout_us, "small", lanes, device), device)
        theirs, mine = found.us / lanes, ours(bf16) / lanes
        return theirs / mine, f"µs a lane and rollout: {theirs:.0f} compiled, {mine:.0f} ours; all lanes {found}"

    def alone() -> tuple[float, str]:
        plain, quantized = (rollout_alone_us(task, recipe, lanes, device) for recipe in (bf16, sampled))
        return (
            quantized / plain,
            f"ms a rollout of all lanes: {plain / 1000:.1f} bf16, {quantized / 1000:.1f} mxfp4-rceil",
        )

    what = f"rl:small, mxfp4-rceil rollouts, L = {lanes}, over bf16's"
    return [  # the peer last: it takes minutes to compile
        Measure(f"{what}, the rollout alone", "×", "≤ 1.15", alone),
        Measure(f"{what}, with its updates", "×", "≤ 1.15", lambda: ours(sampled) / ours(bf16)),
        Measure(f"rl:small, bf16, L = {lanes}, against equal lanes by torch.compile", "×", "≥ 1.5", gain),
    ]


ON_GPU = (_mlp, _decoders, _by_layer, _eager, _against_compiled, _populations, _rollouts)
"""Rows of a GPU, in their order."""


def _on_cpu() -> list[Measure]:
    """MLPs of four layers, batch 64, NVFP4 in all slots: by the clock with all threads, and by the CPU's seconds with
    one, which what else runs on the machine changes less. The baseline, too, keeps the memory that it frees."""
    keep_freed_memory()
    threads = torch.get_num_threads()
    rows = []
    for width, reach in ((64, "≥ 12"), (128, "≥ 5"), (256, "≥ 2.5")):
        task = teacher_task("bench", (width,) * 5, (1024, 256), 64, 1000)
        what = f"MLP 4×{width}, L = 32 against one at a time in eager torch"
        by_clock, of_cpu = f"{what}, threads: {threads}", f"{what}, threads: 1, seconds of CPU"
        rows.append(Measure(by_clock, "×", reach, partial(_by_clock, task)))
        rows.append(Measure(of_cpu, "×", reach, partial(_of_cpu, task)))
    return rows


def _by_clock(task: Task) -> tuple[float, str]:
    return _ratio(baseline.seconds_per_step(task, "cpu", rounds=10), step_seconds(_population_of_32(task), 2.0, 3))


def _of_cpu(task: Task) -> tuple[float, str]:
    with torch_threads(1):  # threads that wait for one another spin, which counts
        _cpu_of_baseline(task, 1, 1)  # what is done but once in a process
        few, many = _cpu_of_baseline(task, 1, 1), _cpu_of_baseline(task, 20, 5)
        return _ratio((many - few) / 99, step_seconds(_population_of_32(task), 2.0, 3, clock=time.process_time))


def _ratio(alone: float, population: float) -> tuple[float, str]:
    """Lanes per second of a population of 32 over those alone, from seconds of a step."""
    note = f"{1e6 * alone:.0f} µs alone, {1e6 * population / 32:.0f} µs a lane among 32"
    return 32 * alone / population, note


def _cpu_of_baseline(task: Task, steps: int, rounds: int) -> float:
    """Seconds of CPU of so many rounds of so many steps, and of what comes before them."""
    begin = time.process_time()
    baseline.seconds_per_step(task, "cpu", steps=steps, rounds=rounds)
    return time.process_time() - begin


def _population_of_32(task: Task) -> Population:
    return Population(with_steps(task, TIMED_STEPS), lanes_of(task, [Recipe.named("nvfp4")], 32), "cpu")


def _row(measure: Measure) -> Row:
    """The measurement, or the reason why there is none."""
    try:
        found = measure.value()
        value, note = found if isinstance(found, tuple) else (found, "")
        return Row(measure.what, value, measure.unit, measure.reach, note)
    except ConfigError as error:
        why = str(error)
    except NotInTime as error:
        why = f"torch.compile: {error}"
    except (torch.OutOfMemoryError, AttributeError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return Row(measure.what, None, measure.unit, measure.reach, f"skipped: {why}")
