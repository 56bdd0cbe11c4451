"""Executors run jobs: in processes of this machine, on a Ray cluster, as arrays of SLURM, or on a machine far away."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from fp4dse.dse import ConfigError
from fp4dse.sweeps.executors.local import GRACE_S, LIMIT_S, SILENCE_S, LocalExecutor
from fp4dse.sweeps.executors.outcome import Executor, Outcome, Pace, Running
from fp4dse.sweeps.jobs.machine import Machine

EXECUTORS = {
    "local": "local.open_local",
    "ray": "ray.open_ray",
    "slurm": "slurm.open_slurm",
    "folder": "folder.open_folder",
}
"""Name -> module and function that opens it. It is imported when it is asked for: its package may be missing."""


def check_executor(name: str) -> None:
    """ConfigError if there is no such executor."""
    if name not in EXECUTORS:
        raise ConfigError("--executor", name, ", ".join(EXECUTORS))


def open_executor(
    name: str, work: Path, machine: Machine, command: tuple[str, ...], limit_s: float, options: Mapping[str, str]
) -> Executor:
    """An executor by name. ConfigError on an unknown one, on an unknown option, and where its package is missing."""
    check_executor(name)
    module, function = EXECUTORS[name].split(".")
    open_it = getattr(import_module(f"{__name__}.{module}"), function)
    executor: Executor = open_it(work, machine, command, limit_s, options)
    return executor


__all__ = [
    "EXECUTORS",
    "GRACE_S",
    "LIMIT_S",
    "SILENCE_S",
    "Executor",
    "LocalExecutor",
    "Outcome",
    "Pace",
    "Running",
    "check_executor",
    "open_executor",
]
