"""The implementation that each operation takes: one registry, which every operation asks in one place.

An operation is a folder of `ops`. Its `__init__.py` defines it in torch, for every device, and `triton.py` beside it
has kernels for CUDA devices with the same bits; a few have a native function for the CPU, too. Where a kernel does not
take an operand its `why_not` gives the reason, which `refusals` keeps for the row. `fp4dse doctor` prints the registry.

Implementations know the definition that they equal; a definition knows none of them. They are imported by name here.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

OPERATIONS: dict[str, Operation] = {}
"""Name -> operation, of all that are imported."""

T = TypeVar("T")
_NATIVE = "fp4dse.kernels.native"
_REFUSED: dict[str, str] = {}


class Operation:
    """An operation with implementations that are faster than its definition.

    package: the folder, in which `triton.py` has functions of the definition's names. Its `why_not(*operands)`, if it
        has one, returns the reason why it does not take these operands, None if it does
    native: whether `native` has functions of these names for a CPU
    """

    def __init__(self, package: str, native: bool = False) -> None:
        self.name = package.rpartition(".")[2]
        self._native = native
        self._triton = f"{package}.triton"
        OPERATIONS[self.name] = self

    @staticmethod
    def has_kernels(x: Tensor) -> bool:
        """True if x lies where Triton kernels run."""
        return x.is_cuda and _takes(x.device)

    def kernels(self, x: Tensor, *more: object) -> ModuleType | None:
        """The module that computes it for operands like x; None if its definition is to do so.

        more: what `why_not` takes after x.
        """
        if not x.numel():
            return None
        if self.has_kernels(x):
            module = import_module(self._triton)  # without triton there are none
            reason = module.why_not(x, *more) if hasattr(module, "why_not") else None
            if reason is None:
                return module
            _REFUSED[self.name] = reason
        elif self._native and x.device.type == "cpu" and (native := import_module(_NATIVE)).takes(x):
            return native
        return None

    def implementation(self, device: str) -> tuple[str, str | None]:
        """Its fastest implementation on a device, `triton`, `native` or `torch`, and why it is not a faster one."""
        reason = why_not_fused(device)
        if reason is None:
            return "triton", None
        if self._native and torch.device(device).type == "cpu":
            reason = import_module(_NATIVE).why_not_native()
            return ("torch", reason) if reason else ("native", None)
        return "torch", reason


def implementations(device: str) -> dict[tuple[str, str | None], list[str]]:
    """(implementation, reason why it is not a faster one) -> the operations that have it on this device."""
    package = import_module("fp4dse.kernels.ops")
    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    found: dict[tuple[str, str | None], list[str]] = {}
    for name, operation in sorted(OPERATIONS.items()):
        found.setdefault(operation.implementation(device), []).append(name)
    return found


def refusals() -> tuple[str, ...]:
    """One sentence for each operation whose kernels did not take what they were given; forgets them."""
    found = tuple(f"{name}: computed by torch ({reason})" for name, reason in _REFUSED.items())
    _REFUSED.clear()
    return found


@cache
def _takes(device: torch.device) -> bool:
    return why_not_fused(str(device)) is None


def by_device(where: Tensor | torch.device | str, *, cpu: T, cuda: T) -> T:
    """The one of two ways to compute the same in torch, for this device or the device of this tensor.

    Libraries differ: what is exact, or fast, on one device is not so on the other.
    """
    device = where.device if isinstance(where, Tensor) else torch.device(where)
    return cuda if device.type == "cuda" else cpu


def why_not_fused(device: str) -> str | None:
    """The reason why Triton kernels are not taken on this device, or None if they are."""
    prefix = "Triton kernels not taken"
    if by_device(device, cpu=True, cuda=False):
        return f"{prefix} on {device}: they need a CUDA device"
    if os.environ.get("FP4DSE_EAGER"):
        return f"{prefix}: FP4DSE_EAGER is set"
    if find_spec("triton") is None:
        return f"{prefix}: triton is not installed (pip install 'fp4dse[gpu]')"
    reason = why_not_capable(device, (8, 0))
    return reason and f"{prefix}: they need {reason}"


def why_not_capable(device: str, least: tuple[int, int]) -> str | None:
    """The compute capability that a CUDA device lacks, as "compute capability 8.0, … has 7.5"; None if it does not."""
    if (found := torch.cuda.get_device_capability(device)) >= least:
        return None
    return f"compute capability {least[0]}.{least[1]}, {torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
