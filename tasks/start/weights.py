"""Weights in files: a start that all lanes of a population share, and the outcome of a training.

A file is safetensors. Its names are those of the model's `state_dict`, its shapes those of one lane; numbers are
float32, whatever precision a file has, and counters stay integers. Files that this program writes say under the
metadata key `fp4dse` what trained them. What quantizers learn (kernels/learned.py) is in them, and is taken up by
recipes that learn it; others leave it.

Weights have a digest over names, shapes and numbers, so that it does not depend on the file around them. It goes into
the task's digest: rows that began elsewhere are another setting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fp4dse.dse import ConfigError
from fp4dse.dse.program.whole_file import whole_file
from fp4dse.dse.reading.files import decode_json
from fp4dse.kernels import LaneNumerics, QuantLinear
from fp4dse.kernels.factors import is_factor
from fp4dse.kernels.learned import PREFIX, possible_clips
from fp4dse.tasks.counting import MOST_PARAMETERS, counting_numerics
from fp4dse.tasks.start import ENDING
from fp4dse.tasks.task import Task

OPTION = "--from"
ABOUT = "fp4dse"
"""Key of the metadata: JSON under a single key, because the order of several is not kept."""
ABOUT_FILE = "fp4dse.json"
"""The same of a folder (language/folder_out.py), as a file."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """Name -> tensor, on the CPU. ConfigError for a file that is missing, of another kind, broken, or not finite."""
    if path.suffix != ENDING or not path.is_file():
        raise ConfigError(OPTION, str(path), f"a {ENDING} file that exists")
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise ConfigError(OPTION, str(path), f"a whole {ENDING} file ({error})") from None
    for name, value in found.items():
        if value.is_floating_point():
            found[name] = value.to(torch.float32)
            if not torch.isfinite(found[name]).all():
                raise ConfigError(f"{OPTION} {path}: {name}", "NaN or infinity", "finite numbers")
    return found


def names_in(path: Path) -> list[str]:
    """Names of a file's tensors, none where it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError):
        return []


def read_about(path: Path) -> dict[str, Any]:
    """Facts that a file of `write_weights`, or a folder of `write_folder`, says of itself; empty for others.
    SafetensorError, or DecodeError, if it is broken."""
    if path.is_dir():
        file = path / ABOUT_FILE
        return decode_json(file.read_bytes(), dict) if file.exists() else {}
    with safe_open(path, framework="pt") as file:
        said = (file.metadata() or {}).get(ABOUT)
    return msgspec.json.decode(said) if said else {}


def write_weights(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a file, whole or not at all; equal weights and `about` make equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    said = msgspec.json.encode(about, order="sorted").decode()
    with whole_file(path) as hidden:
        save_file({name: value.contiguous().clone() for name, value in weights.items()}, hidden, {ABOUT: said})


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """16 hex digits over names, shapes and numbers."""
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(f"{name} {value.dtype} {list(value.shape)}|".encode())
        found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def start_from(task: Task, weights: Mapping[str, Tensor], where: str) -> Task:
    """The task, all of whose lanes start from the weights; `where` they are from is said in errors.

    Its rates were tuned for a start from scratch, and are left out. ConfigError names the first tensor that is missing,
    unknown or of another shape; a model too large to be built for this (MOST_PARAMETERS) is checked by its first job.
    """
    start = digest_of(weights)
    found = msgspec.structs.replace(
        task,
        model=partial(_started, task.model, weights, where),
        digest_of=partial(_joined, task.digest_of, start),
        start=start,
        pretrain=None,
        rates={},
    )
    if task.size <= MOST_PARAMETERS:
        found.model((task.preview or task.problem)([0]).init, counting_numerics(task))
    return found


def _joined(digest_of_data: Callable[[], str], start: str) -> str:
    return hashlib.sha256(f"{digest_of_data()} from {start}".encode()).hexdigest()[:16]


def _started(
    make: Callable[[dict[str, Tensor], LaneNumerics], nn.Module],
    weights: Mapping[str, Tensor],
    where: str,
    parameters: dict[str, Tensor],
    numerics: LaneNumerics,
) -> nn.Module:
    """The model that `make` makes of the parameters, with the weights in each of its lanes."""
    model = make(parameters, numerics)
    there, clips = model.state_dict(), possible_clips(model)
    there = {name: tensor for name, tensor in there.items() if not is_factor(name)}  # files have weights as wholes
    for name, tensor in there.items():
        if clips.get(name) is not None and name not in weights:
            continue  # what quantizers learn begins as their recipe says, where the file is of another
        wanted = f"{_shape(tensor[0])}, as the model has it"
        if name not in weights:
            raise ConfigError(f"{OPTION} {where}: {name}", None, wanted)
        if weights[name].shape != tensor.shape[1:]:
            raise ConfigError(f"{OPTION} {where}: {name}", _shape(weights[name]), wanted)
    for name, value in weights.items():
        if name not in there and name not in clips:
            raise ConfigError(f"{OPTION} {where}: {name}", _shape(value), f"tensors of the model: {', '.join(there)}")
    with torch.no_grad():
        for name in there.keys() & weights.keys():
            there[name].copy_(weights[name])  # into all lanes
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            layer.split()
    for name in there.keys() - weights.keys():  # clips, which may follow the weights
        of, _, operand = name.rpartition(f".{PREFIX}")
        layer = model.get_submodule(of)
        assert isinstance(layer, QuantLinear)
        layer.begin(operand)
    return model


def _shape(x: Tensor) -> str:
    return f"shape {list(x.shape)}"
