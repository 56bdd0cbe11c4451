"""Rows of populations on a CPU beside one lane at a time in eager torch: lanes a second, all ratios of 32 lanes."""

from __future__ import annotations

import time
from functools import partial

import torch

from fp4dse.dse import Recipe
from fp4dse.kernels.memory import keep_freed_memory
from fp4dse.tasks.bench import baseline
from fp4dse.tasks.bench.row import Measure
from fp4dse.tasks.engine.lane_counts import TIMED_STEPS, lanes_of, step_seconds
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.regression import teacher_task
from fp4dse.tasks.task import Task, with_steps
from fp4dse.tasks.threads import torch_threads


def mlps() -> list[Measure]:
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
