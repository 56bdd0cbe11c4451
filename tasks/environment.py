"""Description of this machine: the columns that make a row comparable with others, and the lines of `doctor`.

torch is imported within functions: planning a sweep on a CPU does not need it (remembered.py).
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fp4dse.dse import ConfigError
from fp4dse.tasks.device_memory import total_memory
from fp4dse.tasks.remembered import remembered

if TYPE_CHECKING:
    from fp4dse.tasks.facts import TaskFacts

ENGINE_REV = 9
"""Revision of what training computes apart from the quantizers; raised when a fix changes results."""

BYTES_PER_PARAMETER = 5 * 4
"""Of a lane: weight, two moments, gradient, and one more while a step is taken."""


class Software(msgspec.Struct, frozen=True):
    """Software on which the bits of results depend. vector: the vector instructions that torch uses here."""

    torch: str
    vector: str
    rev_quantizers: int
    rev_engine: int


def check_device(device: str) -> None:
    """ConfigError unless tensors can be put on `device`."""
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError("device", device, "cpu, cuda or cuda:N")
    if kind == "cuda" and not _cards():
        raise ConfigError("device", device, "cpu (this machine has no usable CUDA device)")


def check_task(task: TaskFacts, device: str) -> None:
    """ConfigError where training could not begin: the data are less than a batch, or not even one lane of the model
    fits (what its parameters take, without activations and data)."""
    what = f"{task.name}:{task.preset}"
    if task.samples is not None and task.samples < task.batch:
        found = (task.origin[2] or None) if len(task.origin) > 2 else None
        raise ConfigError(
            "--data", found, f"data with {task.batch} samples or more, a batch of {what} (found {task.samples})"
        )
    memory = total_memory(device)
    needed = task.size * BYTES_PER_PARAMETER
    if needed > memory:
        takes = f"a lane of its {task.size / 1e6:.0f}M parameters takes {needed / 2**30:.0f} GiB or more"
        raise ConfigError("--task", what, f"a model that fits in the {memory / 2**30:.0f} GiB of {device} ({takes})")


def environment(device: str, threads: int) -> dict[str, str | int]:
    """Device, versions and revisions as row columns.

    device_class and software_class are part of a row's identity: results are bitwise repeatable within them.
    """
    cpu = device.startswith("cpu")
    name = _cpu_name() if cpu else _card_name(device)
    software = remembered("software", _software, Software)
    return {
        "device": device,
        "device_name": name,
        "device_class": f"cpu {software.vector} {threads} thread{'s' if threads > 1 else ''}" if cpu else name,
        "software_class": "torch " + ".".join(software.torch.split(".")[:2]),
        "threads": threads,
        "torch_version": software.torch,
        "python_version": platform.python_version(),
        "fp4dse_version": version("fp4dse"),
        "git_commit": _git_commit(),
        "host": socket.gethostname(),
        "rev_quantizers": software.rev_quantizers,
        "rev_engine": software.rev_engine,
    }


def diagnose(device: str) -> list[tuple[str, str, str]]:
    """(topic, what was found, note) for `fp4dse doctor`."""
    import torch

    from fp4dse.kernels import backend, dispatch, why_not_compiled
    from fp4dse.kernels.gemm import GEMMS
    from fp4dse.kernels.quant.operand.paths import described

    reason = why_not_compiled(device)
    note = reason or "native code"
    unfused = dispatch.why_not_fused(device)
    gemms = {name: gemm.why_not(device, (), ()) for name, gemm in GEMMS.items()}
    cuda = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    vector = torch.backends.cpu.get_cpu_capability()
    return [
        ("python", platform.python_version(), ""),
        ("torch", str(torch.__version__), ""),
        ("cpu", _cpu_name(), f"{os.cpu_count()} cores, {vector}"),
        ("memory", f"{total_memory('cpu') / 2**30:.0f} GiB", ""),
        ("cuda", cuda, "" if cuda != "none" else "no CUDA device: lanes train on the CPU"),
        ("quantizer path", "eager" if reason else "compiled", note),
        ("fused GPU kernels", "no" if unfused else "triton", unfused or "operands are quantized by one fused kernel"),
        *(
            (f"operations by {how}", ", ".join(names), why or "")
            for (how, why), names in dispatch.implementations(device).items()
        ),
        *described(backend(device), unfused),
        *((f"gemm {name}", "no" if why else "yes", why or "") for name, why in gemms.items()),
    ]


def _software() -> Software:
    import torch

    from fp4dse.kernels import NUMERICS_REV

    return Software(str(torch.__version__), torch.backends.cpu.get_cpu_capability(), NUMERICS_REV, ENGINE_REV)


def _cards() -> int:
    """CUDA devices that can be used."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _card_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device)


@cache
def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def _git_commit() -> str:
    """The commit of a source checkout, `+dirty` if it was changed; empty for an installed package."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        git = ["git", "-C", str(root)]
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + ("+dirty" if dirty.stdout.strip() else "")
