"""Microseconds of a population's step, and of its rollout alone, once everything is compiled and captured."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fp4dse.dse import Recipe
from fp4dse.tasks.engine.lane_counts import TIMED_STEPS, give_back, lanes_of, step_seconds, wait_for
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.job import Lane
from fp4dse.tasks.task import Task, with_steps

WARM_UP, LEAST_S = 52, 0.3
"""Steps after which held maxima were taken twice, so that both kinds of steps are captured, and seconds of a timing."""


def built_alone(task: Task, lanes: Sequence[Lane], device: str) -> Population:
    """A population to be timed, once the memory of those before it is free: the two of `language:10M` that a row
    compares do not fit into 80 GB together."""
    give_back(device)
    return Population(with_steps(task, TIMED_STEPS), lanes, device)


def step_us(task: Task, recipe: Recipe, lanes: int, device: str, steps: int = 100) -> float:
    """Microseconds of a step of a population of `lanes` lanes."""
    population = built_alone(task, lanes_of(task, [recipe], lanes), device)
    return 1e6 * step_seconds(population, LEAST_S, steps, WARM_UP)


def rollout_alone_us(
    task: Task, recipe: Recipe, lanes: int, device: str, rounds: int = 10, warm_up: int = WARM_UP
) -> float:
    """Microseconds of a rollout of a population, without the updates that follow: the least of some."""
    population, least = built_alone(task, lanes_of(task, [recipe], lanes), device), float("inf")
    for step in range(warm_up):
        population.train_step(step)
    for _ in range(rounds):
        wait_for(device)
        begin = time.perf_counter()
        population.roll_out(0)
        wait_for(device)
        least = min(least, time.perf_counter() - begin)
    return 1e6 * least
