"""Processes of the product that are forked from the tests' process, which has imported torch: two seconds each.

Where there is CUDA nothing is changed: it survives no fork, nor does autograd beside it. From Python 3.12 on a fork of
a process with threads is a warning, which tests let pass: `filterwarnings("ignore:.*fork:DeprecationWarning")`.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import start_processes

from fp4dse.dse.program.leash import die_with
from fp4dse.sweeps.executors import worker_process
from fp4dse.tasks import worker
from fp4dse.tasks.job import WORKER
from tests.forked import Forked


def fork_workers(patch: pytest.MonkeyPatch, module: ModuleType = worker_process) -> None:
    """Have a module that starts workers fork them from here."""
    if torch.cuda.is_available():
        return

    def start(
        command: Sequence[str], *, stdin: Any, stdout: Any, env: Mapping[str, str], stderr: Any = None, **more: Any
    ):
        if tuple(command[-len(WORKER) :]) != WORKER:
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, **more)
        return Forked(_work, stdin=stdin, stdout=stdout, stderr=stderr, variables=env, session=True)

    patch.setattr(module, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))


def fork_processes(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Have a module that starts processes of `multiprocessing` fork them, whatever context it asks for."""
    if not torch.cuda.is_available():
        context = multiprocessing.get_context("fork")
        patch.setattr(module, "multiprocessing", SimpleNamespace(get_context=lambda _: context))


def fork_ranks(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Have a module that starts ranks by torch's `spawn` fork them."""
    if not torch.cuda.is_available():
        patch.setattr(module, "spawn", partial(start_processes, start_method="fork"))


def _work() -> None:
    die_with(os.getppid())
    worker.main([])
