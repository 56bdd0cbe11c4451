"""Workers of this machine that are forked from the tests' process, which has imported torch: two seconds each."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp4dse.dse.program.leash import die_with
from fp4dse.sweeps.executors import WORKER, worker_process
from fp4dse.tasks import worker
from tests.forked import Forked


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Have local executors fork their workers from here. Not where there is CUDA, which survives no fork."""
    if torch.cuda.is_available():
        return

    def start(command: Sequence[str], *, stdin: Any, stdout: Any, stderr: Any, env: Mapping[str, str], **more: Any):
        if tuple(command[-len(WORKER) :]) != WORKER:
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, **more)
        return Forked(_work, stdin=stdin, stdout=stdout, stderr=stderr, variables=env, session=True)

    patch.setattr(worker_process, "subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))


def _work() -> None:
    die_with(os.getppid())
    worker.main([])
