"""Time on a CUDA device: that of the kernels alone, and of a copy; and which rows are wanted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CALLS, REPEATS = 10, 20
"""Calls in a graph, and times that it is replayed."""


def named(what: str, only: Sequence[str]) -> bool:
    """True if a row's name holds one of these words, or there are none."""
    return not only or any(word.lower() in what.lower() for word in only)


def copy_us(x: Tensor) -> float:
    """The fastest of three ways to copy."""
    out = torch.empty_like(x)

    def copy() -> Tensor:
        return out.copy_(x)

    def copies() -> None:
        for _ in range(CALLS):
            copy()

    def clones() -> None:
        for _ in range(CALLS):
            x.clone()

    return min(median_us(call) for call in (copies, clones, graph(copy))) / CALLS


def graph(call: Callable[[], object]) -> Callable[[], None]:
    """CALLS calls as one CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def median_us(call: Callable[[], object]) -> float:
    """Median time of a call on the device."""
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)
