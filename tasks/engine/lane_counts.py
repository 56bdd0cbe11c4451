"""Sizes of populations: the number of lanes that fit into a device, and the one that trains most lanes per second.

A population takes fixed + L · per_lane bytes. Both follow from the peaks of two small ones, which train a few steps and
evaluate, or from the peak of one lane where these do not fit; what does not fit all the same is split by the sweep.
More lanes are faster until a step is bound by the device and not by launches, so that the best number is found by
doubling.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from fp4dse.dse import Recipe
from fp4dse.tasks.device_memory import total_memory
from fp4dse.tasks.engine.evaluation import evaluate
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.job import Lane
from fp4dse.tasks.task import Task, with_steps

PAIR = (2, 4)
"""Lanes of the first two populations that are measured …"""
LARGEST, LEAST_GROWTH = 128, 1.2
"""… and how far they grow until the larger one takes so many times the smaller one's memory."""
SHARE = 0.85
"""Of the memory, what is planned with: allocators waste some, and graphs have pools of their own."""
GAIN = 1.05
"""Least factor in lanes per second for which a doubling is worth it."""
STEPS, LEAST_S = 8, 0.2
OTHER_PROGRAMS = 0.1
"""Share of a GPU that contexts, libraries and desktops may take: who has more is another program that trains."""
MOST_PARTS = 64
"""Of a batch (training.accumulate)."""
TIMED_STEPS = 20_000
"""Length of a training of which only the first steps are run, to time them."""


class Memory(msgspec.Struct, frozen=True):
    """Bytes that a population takes: fixed + L · per_lane."""

    fixed: int
    per_lane: int

    def lanes(self, memory: float) -> int:
        """Number of lanes that fit into `memory` bytes; 0 if not even one does."""
        return max(0, int((memory * SHARE - self.fixed) // max(1, self.per_lane)))


def plan_lanes(task: Task, recipes: Sequence[Recipe], device: str = "cpu", memory: float | None = None) -> int:
    """Number of lanes of a task that fit, 0 if not even one does. Recipes share their structural signature.

    memory: bytes, None for what is free.
    """
    of = memory_of(task, recipes, device)
    return 0 if of is None else of.lanes(free_memory(device) if memory is None else memory)


def search_lanes(
    task: Task, recipes: Sequence[Recipe], device: str, memory: float | None, most: int, least: int
) -> Iterator[int]:
    """Yield the number of lanes with the best lanes per second so far, whenever another number was measured.

    Numbers are `least` times a power of two, or as many as fit. memory: bytes, None for what is free. Takes from
    seconds to minutes; sweeps/planning/job_sizes.py remembers.
    """
    fit = min(most, plan_lanes(task, recipes, device, memory))
    lanes, best, rate = least, max(1, min(least, fit)), 0.0
    yield best
    while lanes <= fit:
        try:
            now = lanes_per_second(task, recipes, device, lanes)
        except torch.OutOfMemoryError:
            break
        if now < rate * GAIN:
            break
        best, rate, lanes = lanes, now, lanes * 2
        yield best


def memory_of(task: Task, recipes: Sequence[Recipe], device: str) -> Memory | None:
    """The memory model of a population; None where one lane does not fit."""
    if (found := _memory_of_several(task, recipes, device)) is not None:
        return found
    try:
        return Memory(0, peak_bytes(task, recipes, device, 1))  # all of it counts as the lane's own
    except torch.OutOfMemoryError:
        return None


def _memory_of_several(task: Task, recipes: Sequence[Recipe], device: str) -> Memory | None:
    """None where they do not fit."""
    small, large = PAIR
    try:
        peaks = [peak_bytes(task, recipes, device, lanes) for lanes in (small, large)]
        while peaks[1] < LEAST_GROWTH * peaks[0] and 4 * large <= LARGEST:  # what does not grow hides what does
            small, large = large, 4 * large
            peaks = [peaks[1], peak_bytes(task, recipes, device, large)]
    except torch.OutOfMemoryError:
        return None
    per_lane = max(0, peaks[1] - peaks[0]) // (large - small)
    return Memory(max(0, peaks[0] - small * per_lane), per_lane)


def peak_bytes(task: Task, recipes: Sequence[Recipe], device: str, lanes: int, steps: int = 5) -> int:
    """Peak memory of so many lanes over a few steps and an evaluation, above what was taken before."""
    before = reset_peak(device)
    population = Population(with_steps(task, steps + 1), lanes_of(task, recipes, lanes), device)
    for step in range(steps):
        population.train_step(step)
    evaluate(population)
    return max(0, peak(device) - before)


def lanes_per_second(task: Task, recipes: Sequence[Recipe], device: str, lanes: int) -> float:
    """Steps of all lanes per second, once everything is compiled and captured."""
    give_back(device)
    return lanes / step_seconds(Population(with_steps(task, TIMED_STEPS), lanes_of(task, recipes, lanes), device))


def step_seconds(
    population: Population,
    least_s: float = LEAST_S,
    steps: int = STEPS,
    warm_up: int = 6,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of a step, after a warm-up, over at least so many seconds in rounds of so many steps.

    Their mean on a GPU, where now and then a step takes longer; the least on a CPU, which others use too.
    """
    done = 0
    times: list[float] = []
    for _ in range(warm_up):
        population.train_step(done)
        done += 1
    while sum(times) < least_s:
        wait_for(population.device)
        begin = clock()
        for _ in range(steps):
            population.train_step(done)
            done += 1
        wait_for(population.device)
        times.append(clock() - begin)
    on_gpu = population.graphs is not None
    return (sum(times) / len(times) if on_gpu else min(times)) / steps


def lanes_of(task: Task, recipes: Sequence[Recipe], count: int, seeds: int = 4) -> list[Lane]:
    """`count` lanes of the recipes in turn, with few seeds, so that making their data takes little."""
    return [Lane(recipes[i % len(recipes)], task.lr * 2.0 ** -(i // seeds % 8), i % seeds) for i in range(count)]


def why_not_fit(task: Task, lanes: Sequence[Lane], device: str) -> str:
    """One line about lanes for which memory did not suffice: what was taken of what there is, and what takes less."""
    what = f"{task.name}:{task.preset}"
    room = f"{gib(total_memory(device))} of {_name(device)}"
    if torch.device(device).type == "cuda":
        room += f" (taken: {gib(_reserved(device))} by this job, {gib(taken_by_others(device))} by others)"
    if len(lanes) > 1:
        return f"out of memory: {len(lanes)} lanes of {what} want more than the {room}"
    narrow = f"{what.removesuffix('+swiglu8')}+bf16{'+swiglu8' if task.swiglu8 else ''}"
    less = [] if task.dtype == "bfloat16" else [f"--task {narrow}"]
    less += [f"--task {what}+recompute"] if task.name == "language" and not task.recompute else []
    parts = 2 * max(lanes[0].recipe.training.accumulate, task.parts)
    if parts <= MOST_PARTS and task.batch % parts == 0:
        less.append(f"training.accumulate = {parts} or more (batches in parts of {task.batch // parts})")
    takes_less = ", ".join([*less, "a device with more memory"])
    return f"out of memory: one lane of {what} wants more than the {room}; what would help: {takes_less}"


def _name(device: str) -> str:
    """Name of a device in messages."""
    return torch.cuda.get_device_properties(device).name if torch.device(device).type == "cuda" else "this machine"


def gib(count: float) -> str:
    """Bytes as text in GiB."""
    return f"{count / 2**30:.1f} GiB"


def is_alone_on(device: str) -> bool:
    """True if no other program uses much of a GPU, so that a population that does not fit now will not fit later."""
    return torch.device(device).type == "cuda" and taken_by_others(device) < OTHER_PROGRAMS * total_memory(device)


def taken_by_others(device: str) -> int:
    """Bytes of a GPU that this process has not."""
    return max(0, total_memory(device) - free_memory(device) - _reserved(device, now=True))


def _reserved(device: str, now: bool = False) -> int:
    """Bytes of a GPU that this process has, or had at most."""
    return torch.cuda.memory_reserved(device) if now else torch.cuda.max_memory_reserved(device)


def free_memory(device: str) -> int:
    """Bytes that are free on a device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def wait_for(device: str) -> None:
    """Wait until a GPU has done all that was asked of it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def give_back(device: str) -> None:
    """Free the memory of populations that nobody holds any more, for the next one and for other processes. A population
    refers to itself: without this it stays, with its graphs, until Python happens to look for cycles."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def reset_peak(device: str) -> int:
    """Bytes in use; the peak is counted from here."""
    give_back(device)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    return peak(device)


def peak(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status: no VmHWM")
