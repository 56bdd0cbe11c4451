"""Checkpoint: a population in a file, from which training resumes bit for bit on the same device.

The file appears whole or not at all. It names what it belongs to: the job, and the revisions and versions that the bits
depend on. Anything else is refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.dse.program.whole_file import whole_file
from fp4dse.tasks.environment import environment
from fp4dse.tasks.job import Lane, LaneResult, Rung
from fp4dse.tasks.task import Task

FORMAT = 1
"""Raised when files are read another way."""


class TrainingProgress(msgspec.Struct):
    """Progress of a training, apart from its tensors.

    done: steps so far; members: numbers of the lanes that are still in the population, in its order; outcomes: results
    of the others, by number; train_s: seconds of training so far.
    """

    done: int
    members: list[int]
    outcomes: dict[int, LaneResult]
    train_s: float


def identity(task: Task, lanes: Sequence[Lane], device: str, rungs: Sequence[Rung], record: bool) -> dict[str, str]:
    """Everything that the bits of a training depend on, as text by name."""
    here = environment(device, torch.get_num_threads())
    names = ("device_class", "torch_version", "rev_quantizers", "rev_engine")
    return {
        "format": str(FORMAT),
        "task": f"{task.name}:{task.preset} revision {task.rev}, data {task.digest}, {task.steps} × {task.batch}",
        "dtype": task.dtype,
        "lanes": msgspec.json.encode([(lane.recipe.config_id, lane.lr, lane.seed) for lane in lanes]).decode(),
        "rungs": msgspec.json.encode(rungs).decode(),
        "record": str(record),
        **{name: str(here[name]) for name in names},
    }


def save(path: Path, of: dict[str, str], progress: TrainingProgress, state: dict[str, Tensor]) -> None:
    """Write the file; after a crash at any moment it is the old one or the new one."""
    tensors = {name: value.detach().cpu() for name, value in state.items()}
    with whole_file(path) as hidden, open(hidden, "wb") as file:
        torch.save({"of": of, "standing": msgspec.json.encode(progress).decode(), "state": tensors}, file)
        file.flush()
        os.fsync(file.fileno())


def load(path: Path, of: dict[str, str]) -> tuple[TrainingProgress, dict[str, Tensor]]:
    """Read a file that `save` wrote. ConfigError names the first difference if it belongs to another training."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    for name, here in of.items():
        if (found := content["of"].get(name)) != here:
            raise ConfigError(f"{name} of the checkpoint {path}", _short(found), f"{_short(here)} (or delete the file)")
    return msgspec.json.decode(content["standing"], type=TrainingProgress), content["state"]


def _short(text: str | None) -> str:
    text = str(text)
    return text if len(text) <= 120 else f"{text[:117]}…"
