"""The rows of `fp4dse bench train`: how fast populations train and what they take, all ratios from one run.

What several rows need is measured once. Each row is yielded as soon as it is measured, so that a failure later on
loses none of them, and its memory is given back, so that the next one, and its processes, have the whole device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch

from fp4dse.dse import ConfigError
from fp4dse.tasks.bench import on_cpu, on_gpu
from fp4dse.tasks.bench.peers import against_compiled
from fp4dse.tasks.bench.rollouts import rollouts
from fp4dse.tasks.bench.row import Measure, Row, measured
from fp4dse.tasks.engine.lane_counts import give_back

ON_GPU = (on_gpu.mlp, on_gpu.decoders, on_gpu.layers, on_gpu.images, against_compiled, on_gpu.workers, rollouts)
"""Rows of a GPU, in their order."""


def bench(device: str, only: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of a device whose name holds one of the words, all if there is none, each as soon as it is measured.

    ConfigError if there is no such row.
    """
    measures = on_cpu.mlps() if torch.device(device).type == "cpu" else [row for rows in ON_GPU for row in rows(device)]
    chosen = [m for m in measures if not only or any(word.lower() in m.what.lower() for word in only)]
    if not chosen:
        raise ConfigError("--only", ", ".join(only), f"a part of one of {'; '.join(m.what for m in measures)}")
    return _rows(chosen, device)


def _rows(measures: Sequence[Measure], device: str) -> Iterator[Row]:
    on_cpu = torch.device(device).type == "cpu"
    for measure in measures:
        with nullcontext() if on_cpu else torch.cuda.device(device):
            row = measured(measure)
        yield row
        give_back(device)  # afterwards: what an earlier kernel did wrong is told here, and the row is out
