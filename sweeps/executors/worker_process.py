"""A worker process as its driver sees it: it gets a line for each job, is read line by line, and is ended with all that
it started.

It has a session of its own, so that an end reaches everything it started and Ctrl-C reaches the driver alone, and it
dies with the driver (dse/program/leash.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from fp4dse.dse.program import leash

_MAX_LINE = 1 << 20
_LEASH = (sys.executable, "-I", "-S", leash.__file__)


class Worker:
    """A process that runs `command`; `variables` are added to its environment, its standard error to a file."""

    def __init__(self, command: Sequence[str], variables: dict[str, str], stderr: Path) -> None:
        with open(stderr, "ab") as file:
            self.process = subprocess.Popen(
                [*_LEASH, str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                start_new_session=True,
                env={**os.environ, **variables},
            )
        os.set_blocking(self.stdout.fileno(), False)
        self._rest = b""

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send_job(self, *files: Path) -> None:
        """Hand over a job as a line with the names of its files. If the worker is dead, `alive` says so."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode([str(file) for file in files]) + b"\n")

    def read_lines(self) -> list[bytes] | None:
        """The lines it has written since, which may be none; None when it has closed its standard output."""
        data = self.stdout.read(_MAX_LINE)
        if data == b"":
            return None
        *lines, rest = (self._rest + (data or b"")).split(b"\n")
        self._rest = rest[-_MAX_LINE:]
        return lines

    def ask_to_stop(self) -> None:
        """SIGTERM to it alone: it passes it on to its job, which stops and saves what it can."""
        if self.alive:
            self.process.terminate()

    def kill(self) -> None:
        """SIGKILL to it and to all that it started, if there is anyone left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill, clean up, return its exit code, or minus the number of the signal that ended it."""
        self.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return code
