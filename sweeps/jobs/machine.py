"""The machine of a sweep, shared out among its workers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fp4dse.dse import ConfigError
from fp4dse.tasks import check_device, environment

REMOTE_JOBS = 64
"""Workers at a time that are asked of a cluster if nobody says."""


@dataclass
class Machine:
    """The machine that workers run on. `slots`: a worker's extra environment variables, one entry a worker. `kinds`:
    the device class of each; empty where they are not known beforehand, because others hand the workers out."""

    device: str
    threads: int
    slots: list[dict[str, str]]
    kinds: tuple[str, ...] = ()


def find_machine(device: str, jobs: int | None = None, local: bool = True) -> Machine:
    """Find how many workers run at a time and on what; `jobs = None` chooses. ConfigError on a device that is not
    there.

    On a CPU a worker a core, with one thread each whatever `jobs` is: results depend on the number of threads, and what
    is stored must be found again by a sweep with more or fewer workers and on a machine with more or fewer cores.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError("--jobs", jobs, "a whole number above 0")
    if not local:
        if device not in ("cpu", "cuda"):
            raise ConfigError("--device", device, "cpu, cuda")
        return Machine(device, 1, [{}] * (jobs or REMOTE_JOBS))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device == "cpu":
        slots = [{"CUDA_VISIBLE_DEVICES": ""}] * (jobs or cores)
        return Machine(device, 1, slots, (str(environment(device, 1)["device_class"]),) * len(slots))
    if device != "cuda":
        raise ConfigError("--device", device, "cpu, cuda")
    check_device(device)
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = listed.split(",") if listed else [str(i) for i in range(torch.cuda.device_count())]
    workers = jobs or len(cards)
    slots = [{"CUDA_VISIBLE_DEVICES": cards[i % len(cards)]} for i in range(workers)]
    kinds = tuple(torch.cuda.get_device_name(i % len(cards)) for i in range(workers))
    return Machine(device, max(1, cores // workers), slots, kinds)
