"""The rows of `fp4dse bench train`: how fast populations train and what they take, all ratios from one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import torch

from fp4dse.dse import SLOTS, STAGES, ConfigError, Recipe
from fp4dse.kernels.memory import keep_freed_memory
from fp4dse.tasks import get_task
from fp4dse.tasks.bench import baseline
from fp4dse.tasks.engine.population import Population, with_steps
from fp4dse.tasks.engine.sizes import BEGUN, lanes_of, peak_bytes, step_seconds
from fp4dse.tasks.regression import teacher_task
from fp4dse.tasks.task import Task

WARM_UP = 52
"""Steps after which held maxima were taken twice, so that both kinds of steps are captured."""


class Row(msgspec.Struct, frozen=True):
    """One row: what was measured, its value and unit, what it is to reach (`≤ 28`), and why it was not measured."""

    what: str
    value: float | None
    unit: str
    reach: str
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the value is what it is to be; None where there is none, or nothing is asked."""
        if self.value is None or not self.reach:
            return None
        sign, bound = self.reach.split()
        return self.value <= float(bound) if sign == "≤" else self.value >= float(bound)


def bench(device: str) -> Iterator[Row]:
    """All rows of a device, one after the other."""
    if torch.device(device).type == "cpu":
        yield from _on_cpu()
        return
    with torch.cuda.device(device):
        for group in (_mlp, _decoders, _eager):
            yield from group(device)


def with_amax(recipe: Recipe, amax: str) -> Recipe:
    """The recipe with tensor maxima that are `current`, `previous` or `held`."""
    changes: dict[str, dict] = {stage: {} for stage in STAGES}
    for slot in SLOTS:
        q, (stage, operand) = recipe.slot(slot), slot.split(".")
        if q.tensor_scale:
            scale = msgspec.structs.replace(q.tensor_scale, amax=amax)
            changes[stage][operand] = msgspec.structs.replace(q, tensor_scale=scale)
    stages = {stage: msgspec.structs.replace(getattr(recipe, stage), **new) for stage, new in changes.items()}
    return msgspec.structs.replace(recipe, **stages)


def step_us(
    task: Task, recipe: Recipe, lanes: int, device: str, steps: int = 100, warm_up: int = WARM_UP, least_s: float = 0.3
) -> float:
    """Microseconds of a step of so many lanes."""
    population = Population(with_steps(task, BEGUN), lanes_of(task, [recipe], lanes), device)
    return 1e6 * step_seconds(population, least_s, steps, warm_up)


def _mlp(device: str) -> Iterator[Row]:
    task, lanes = get_task("regression", "mlp"), 64
    eager = 1e6 * baseline.seconds_per_step(task, device)
    yield Row("MLP 4×256, batch 512, one lane in eager torch", eager, "µs", "")
    plain = step_us(task, Recipe.named("bf16"), lanes, device)
    yield Row(f"MLP, bf16, L = {lanes}", plain / lanes, "µs a lane and step", "")
    held = step_us(task, with_amax(Recipe.named("nvfp4"), "held"), lanes, device)
    yield Row(f"MLP, nvfp4 held, L = {lanes}", held / lanes, "µs a lane and step", "≤ 28")
    yield Row(f"MLP, nvfp4 held, L = {lanes}, against eager torch", eager * lanes / held, "×", "≥ 400")
    for amax, reach in (("held", "≤ 1.25"), ("current", "≤ 1.40")):
        taken = step_us(task, with_amax(Recipe.named("nvidia-nvfp4"), amax), lanes, device)
        yield Row(f"MLP, nvidia-nvfp4 {amax} against bf16, L = {lanes}", taken / plain, "×", reach)
    recipe = [with_amax(Recipe.named("nvfp4"), "held")]
    four, eight, many = (peak_bytes(task, recipe, device, n) for n in (4, 8, lanes))
    lane = (eight - four) / 4
    what = f"MLP, memory at L = {lanes}, share of 1.1 · L · one lane + 256 MiB"
    yield Row(
        what, many / (1.1 * lanes * lane + 2**28), "", "≤ 1", f"{many / 2**20:.0f} MiB, a lane {lane / 2**20:.1f}"
    )


def _decoders(device: str) -> Iterator[Row]:
    fp4 = with_amax(Recipe.named("nvidia-nvfp4"), "held")
    for preset, lanes, reach in (("9M", 16, "≤ 1.20"), ("350M", 1, "≤ 1.25")):
        what = f"language:{preset}, nvidia-nvfp4 held against bf16, L = {lanes}"

        def ratio(task: Task, lanes: int = max(2, lanes)) -> float:
            times = [step_us(task, recipe, lanes, device, 10) for recipe in (fp4, Recipe.named("bf16"))]
            return times[0] / times[1]

        yield _row(what, ("language", preset), ratio, reach, "two lanes: one and its companion" if lanes == 1 else "")

    def gain(task: Task) -> float:
        return 16 * step_us(task, fp4, 2, device, 10) / step_us(task, fp4, 16, device, 10)

    yield _row("language:9M, L = 16 against L = 1, lanes per second", ("language", "9M"), gain, "≥ 1.6")


def _eager(device: str) -> Iterator[Row]:
    for name in ("vision", "diffusion"):

        def gain(task: Task) -> float:
            alone = 1e6 * baseline.seconds_per_step(task, device, steps=5)
            return 32 * alone / step_us(task, with_amax(Recipe.named("nvfp4"), "held"), 32, device, 50)

        yield _row(
            f"{name}:small, nvfp4 held, L = 32 against one at a time in eager torch", (name, "small"), gain, "≥ 50"
        )


def _on_cpu() -> Iterator[Row]:
    """MLPs of four layers, batch 64, NVFP4 in all slots. The baseline, too, keeps the memory that it frees."""
    keep_freed_memory()
    for width, reach in ((64, "≥ 12"), (128, "≥ 5"), (256, "≥ 2.5")):
        task = teacher_task("bench", (width,) * 5, (1024, 256), 64, 1000)
        alone = 1e6 * baseline.seconds_per_step(task, "cpu", rounds=10)
        together = step_us(task, Recipe.named("nvfp4"), 32, "cpu", 3, 6, 2.0)
        note = f"{alone:.0f} µs alone, {together / 32:.0f} µs a lane in company"
        yield Row(
            f"MLP 4×{width}, L = 32 against one at a time in eager torch", 32 * alone / together, "×", reach, note
        )


def _row(what: str, task: tuple[str, str], measure: Callable[[Task], float], reach: str, note: str = "") -> Row:
    """The measurement of a task, or the reason why there is none."""
    try:
        return Row(what, measure(get_task(*task)), "×", reach, note)
    except ConfigError as error:
        return Row(what, None, "×", reach, f"skipped: {error}")
    except (torch.OutOfMemoryError, AttributeError, NotImplementedError) as error:
        return Row(what, None, "×", reach, f"skipped: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
