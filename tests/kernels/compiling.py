"""A plugin of pytest that compiles every Triton kernel that a test launches, for an H100, instead of interpreting it:

    python -m pytest -p tests.kernels.compiling tests/kernels -k interpreter

It needs no GPU. Nothing is computed, so what a test asserts is not looked at; what the compiler or a static assertion
refuses fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

LAUNCHED: list[str] = []


class Absent:
    """The driver of a device that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def pytest_configure() -> None:
    driver.set_active(Absent())
    run = JITFunction.run

    def only_compile(self, *args, grid, warmup, **more):
        LAUNCHED.append(self.__name__)
        try:
            run(self, *args, grid=grid, warmup=True, **more)
        except AssertionError as error:
            raise RuntimeError(f"{self.__name__}: {error}") from error

    JITFunction.run = only_compile


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    outcome = yield
    if outcome.excinfo and issubclass(outcome.excinfo[0], AssertionError | pytest.fail.Exception):
        outcome.force_result(None)


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(f"{len(LAUNCHED)} launches of {len(set(LAUNCHED))} kernels were compiled, not run")
