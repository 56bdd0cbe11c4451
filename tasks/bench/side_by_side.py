"""Populations side by side on one device, each in a process of its own, as the workers of a sweep have them.

Recipes of different signatures cannot share a population. A sweep with `--jobs 10` gives each to a worker, and what
these do together is what counts: all begin at the same moment, when everything is compiled and captured, and train for
the same time.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from threading import Barrier, BrokenBarrierError
from traceback import format_exception

import torch

from fp4dse.dse import Recipe
from fp4dse.dse.program.leash import die_with
from fp4dse.kernels.dispatch import by_device
from fp4dse.tasks import get_task
from fp4dse.tasks.engine.lane_counts import TIMED_STEPS, give_back, lanes_of, wait_for
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.task import with_steps
from fp4dse.tasks.threads import torch_threads

LEAST_S, WARM_UP, LIMIT_S = 10.0, 52, 900.0
"""Seconds that are timed, steps before them, and seconds after which a process no longer waits for the others."""

_together: Barrier | None = None
"""In a process that trains: where all wait for one another."""


def tokens_per_second(
    task: tuple[str, str],
    recipes: Sequence[str],
    lanes: int,
    device: str,
    least_s: float = LEAST_S,
    warm_up: int = WARM_UP,
) -> float:
    """Tokens a second of populations of `lanes` lanes that train at the same time, one of each named recipe.

    Processes share the machine's threads. torch.OutOfMemoryError of one of them is raised here, once all have ended; so
    is RuntimeError, with the traceback of anything else.
    """
    found = get_task(*task)
    assert found.tokens is not None, f"{found.name} counts no tokens"
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(len(recipes)), os.getpid()
    threads = max(1, len(os.sched_getaffinity(0)) // len(recipes))
    rate = partial(_steps_per_second, task, lanes, device, least_s, warm_up, threads)
    give_back(device)  # the processes want it all
    with ProcessPoolExecutor(len(recipes), context, _take, begin) as pool:
        tries = [pool.submit(rate, name) for name in recipes]
    failures = [failure for each in tries if (failure := each.exception())]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, BrokenBarrierError)):
        raise failure  # that of the process which made the others stop comes first
    return sum(each.result() for each in tries) * lanes * found.tokens / found.steps


def _take(barrier: Barrier, parent: int) -> None:
    """First thing in a process that trains."""
    global _together
    die_with(parent)
    _together = barrier


def _steps_per_second(
    task: tuple[str, str], lanes: int, device: str, least_s: float, warm_up: int, threads: int, name: str
) -> float:
    """Steps a second of one population, timed when all are ready."""
    assert _together is not None
    try:
        on_gpu = by_device(device, cpu=False, cuda=True)
        with torch.cuda.device(device) if on_gpu else nullcontext(), torch_threads(threads):
            found = get_task(*task)
            planned = lanes_of(found, [Recipe.named(name)], lanes)
            population = Population(with_steps(found, TIMED_STEPS), planned, device)
            done = 0
            for _ in range(warm_up):
                population.train_step(done)
                done += 1
            wait_for(device)
            _together.wait(LIMIT_S)
            begin, before = time.perf_counter(), done
            while (seconds := time.perf_counter() - begin) < least_s:
                population.train_step(done)
                done += 1
                wait_for(device)
            return (done - before) / seconds
    except (torch.OutOfMemoryError, BrokenBarrierError):
        _together.abort()  # nobody waits for this one
        raise
    except Exception as error:
        _together.abort()
        raise RuntimeError("".join(format_exception(error))) from None  # any error can be sent to the parent so
