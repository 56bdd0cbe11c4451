"""Where jobs run: in processes of this machine, on a Ray cluster, or as arrays of SLURM."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fp4dse.dse import ConfigError
from fp4dse.sweeps.executors.local import GRACE_S, LIMIT_S, SILENCE_S, WORKER, LocalExecutor
from fp4dse.sweeps.executors.outcome import Executor, Outcome, Pace, Running

if TYPE_CHECKING:
    from fp4dse.sweeps.setting import Machine

EXECUTORS = {"local": "local.open_local", "ray": "ray.open_ray", "slurm": "slurm.open_slurm"}
"""Name -> module and function that opens it. It is imported when it is asked for: its package may be missing."""


def open_executor(
    name: str, work: Path, machine: Machine, command: tuple[str, ...], limit_s: float, options: Mapping[str, str]
) -> Executor:
    """An executor by name. ConfigError on an unknown one, on an unknown option, and where its package is missing."""
    if name not in EXECUTORS:
        raise ConfigError("--executor", name, ", ".join(EXECUTORS))
    module, function = EXECUTORS[name].split(".")
    opened = getattr(import_module(f"{__name__}.{module}"), function)
    return opened(work, machine, command, limit_s, options)


def check_options(executor: str, options: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """The options with their defaults. ConfigError on one that the executor does not have."""
    for key in options:
        if key not in known:
            raise ConfigError(f"--option of {executor}", key, ", ".join(known) or "none")
    return {**known, **options}


__all__ = [
    "EXECUTORS",
    "GRACE_S",
    "LIMIT_S",
    "SILENCE_S",
    "WORKER",
    "Executor",
    "LocalExecutor",
    "Outcome",
    "Pace",
    "Running",
    "check_options",
    "open_executor",
]
