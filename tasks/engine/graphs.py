"""CUDA graphs of the steps of a population, by phase: a step whose kernels were captured is replayed.

A phase is a kind of step with its own sequence of kernels, and so its own graph: steps that measure tensor maxima anew,
steps that use the held ones, and both again during a recipe's finish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

import torch

from fp4dse.tasks.device_memory import total_memory

EAGER_STEPS = 3
"""Steps that run eagerly before one is captured: they compile kernels and create the state that is kept between
steps."""


class Graphs:
    """The graphs of one population on a GPU. Nothing is computed while one is captured: what a replay changes, it
    changes in place."""

    def __init__(self, device: str) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.captured: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self.warm: Counter[Hashable] = Counter()

    def prepare(self, phase: Hashable, function: Callable[[], None]) -> str | None:
        """Capture a function of this phase if it ran often enough; the reason if that cannot be."""
        if not self.warm[phase] or self.warm.total() < EAGER_STEPS or phase in self.captured:
            return None
        others = [other for other in self.captured.values() if other is not None]
        graph = torch.cuda.CUDAGraph()
        try:  # no tensor outlives a replay, so that graphs may share their memory
            with torch.cuda.graph(graph, stream=self.stream, pool=others[0].pool() if others else None):
                function()
        except RuntimeError as error:  # what an operation must not do in a graph, the driver says
            self.captured[phase] = None
            return f"CUDA graph not taken: {' '.join(str(error).split())[:200]}"
        self.captured[phase] = graph
        return None

    def run(self, phase: Hashable, function: Callable[[], None]) -> None:
        """Replay what was captured of this phase, or call the function."""
        if (graph := self.captured.get(phase)) is not None:
            graph.replay()
            return
        self.warm[phase] += 1
        self.make_room()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # on which it is going to be captured
            function()
        torch.cuda.current_stream().wait_stream(self.stream)

    def make_room(self) -> None:
        """Free the memory of graphs if an eager step might not fit beside them. They are captured again later."""
        if self.captured and is_crowded(self.device):
            torch.cuda.synchronize(self.device)
            self.captured.clear()
            torch.cuda.empty_cache()

    def forget(self) -> None:
        """Begin anew: the memory that graphs know is about to go."""
        self.captured.clear()
        self.warm.clear()


def is_crowded(device: str) -> bool:
    """True if this process holds so much of a GPU that another step might not fit."""
    return torch.cuda.memory_reserved(device) > total_memory(device) / 2
