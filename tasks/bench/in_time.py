"""The time of a peer that is compiled, the least over several ways to compile it, in a limited time.

How long torch's compiler takes is mostly a matter of what it tries. As it comes it takes cuBLAS's products, and each of
its own kernels as heuristics have it. With `max_autotune` it also compiles some 21 Triton tilings of every product and
several of every kernel, which are hundreds for a decoder; with `coordinate_descent_tuning` it then tries neighbours of
the best of each kernel, one after the other. A row that waits for all of that may have no figure at all. And more
tuning is not always faster: cuBLAS is ahead of those tilings for large products.

So the ways are taken in this order, quickest first, each is timed when it is compiled, and the least counts: the peer
is as strong as in the last way, and has a figure from the first. All of it is in a process of its own, which is killed
when time is up. What was tuned until then stays in torch's cache on disk, where another run finds it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from fp4dse.dse.program.leash import die_with
from fp4dse.kernels.dispatch import by_device
from fp4dse.tasks.engine.lane_counts import give_back

LIMIT_S = 240.0
"""Seconds for all ways of a peer: starting a process, compiling and timing."""
ENDING_S = 10.0
"""Seconds that a process that has done all has to end by itself: of one that is killed, Python warns that semaphores
are left."""
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Work = Callable[[Compile], float]
"""Trains with functions that are compiled by its argument; microseconds. Its pickle goes to another process."""


class Way(NamedTuple):
    """A way to compile functions: its name, and options of torch.compile."""

    name: str
    options: Mapping[str, bool]


WAYS = (
    Way("as it comes", {}),
    Way("tilings tried", {"max_autotune": True}),
    Way("tilings tried and refined", {"max_autotune": True, "coordinate_descent_tuning": True}),
)
"""The last is what the mode `max-autotune-no-cudagraphs` stands for."""


class Tried(NamedTuple):
    """The fate of a way: microseconds, or why there are none, and the seconds that it took."""

    name: str
    us: float | None
    seconds: float
    why: str = ""

    def __str__(self) -> str:
        if self.us is None:
            return f"{self.name}: {self.why}"
        return f"{self.name} {self.us:.4g} µs after {self.seconds:.0f} s"


class Found(NamedTuple):
    """The fates of all ways that were begun."""

    tried: tuple[Tried, ...]

    @property
    def us(self) -> float:
        """The least microseconds. NotInTime where no way has any."""
        times = [each.us for each in self.tried if each.us is not None]
        if not times:
            raise NotInTime(str(self))
        return min(times)

    def __str__(self) -> str:
        return "; ".join(map(str, self.tried))


class NotInTime(Exception):
    """No way of a peer could be timed. Its text says what became of each."""


def least_us(work: Work, device: str, limit_s: float = LIMIT_S, ways: Sequence[Way] = WAYS) -> Found:
    """`work` by each of the ways, until `limit_s` seconds have passed."""
    give_back(device)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_try_all, args=(os.getpid(), theirs, work, device, tuple(ways)))
    end, found = time.monotonic() + limit_s, list[Tried]()
    try:
        child.start()
        theirs.close()  # the child alone has it, so that its end is the end of the pipe
        while len(found) < len(ways):
            name, begin = ways[len(found)].name, time.monotonic()
            if not ours.poll(max(0.0, end - begin)):
                took = time.monotonic() - begin
                found.append(Tried(name, None, took, f"not compiled in {took:.0f} s"))
                break
            found.append(ours.recv())
        else:
            child.join(ENDING_S)
    except EOFError:
        child.join()
        found.append(Tried(name, None, time.monotonic() - begin, f"its process ended with {child.exitcode}"))
    finally:
        _end(child)
    return Found(tuple(found))


def _end(child: BaseProcess) -> None:
    """Kill a process and those of its group, the compiler's workers among them."""
    if child.pid is None:
        return
    with suppress(ProcessLookupError):  # gone, or not yet the leader of a group
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.join()


def _try_all(parent: int, results: Connection, work: Work, device: str, ways: Sequence[Way]) -> None:
    """The process: sends a Tried for each way."""
    die_with(parent)
    os.setpgid(0, 0)
    on_gpu = by_device(device, cpu=False, cuda=True)
    with torch.cuda.device(device) if on_gpu else nullcontext():
        for way in ways:
            results.send(_try(work, way))
            torch.compiler.reset()
            give_back(device)


def _try(work: Work, way: Way) -> Tried:
    begin = time.monotonic()
    try:
        us = work(partial(torch.compile, options=dict(way.options) or None, dynamic=False))
        return Tried(way.name, us, time.monotonic() - begin)
    except Exception as error:  # a compiler's errors are of many kinds, and the other ways may do
        first = str(error).strip().partition("\n")[0]
        why = f"{type(error).__name__}: {' '.join(first.split())[:160]}"
        return Tried(way.name, None, time.monotonic() - begin, why)
