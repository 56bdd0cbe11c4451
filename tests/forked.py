"""Processes that tests start by a fork of their own process, in which torch and pandas are imported already. A new
interpreter takes one to three seconds of a core to import them.

For tests of what happens to a process, or of what it leaves. What a fresh one imports, or how it starts, needs a fresh
one. A fork copies one thread alone, so the child may wait for ever for those that torch has computed with: it may be
used where torch has one thread, as `make test` gives it, or where the child computes with one.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import IO, Any

HANDLED = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM
_PIPES: weakref.WeakSet[IO[Any]] = weakref.WeakSet()
"""The ends of the tests' process, of all processes that it has started."""


class Forked:
    """A process that calls `function` and ends, as much of subprocess.Popen as tests use.

    function: its integer is the exit code; so is that of a SystemExit, and 1 is that of any other exception, whose
    traceback goes to standard error. stdin: PIPE, or that of the tests; stdout: PIPE, DEVNULL or a file; stderr: a
    file; variables: added to its environment.
    """

    def __init__(
        self,
        function: Callable[[], object],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        variables: Mapping[str, str] | None = None,
        session: bool = False,
        text: bool = False,
    ) -> None:
        theirs: dict[int, int] = {}
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
        if stdin == subprocess.PIPE:
            theirs[0], mine = os.pipe()
            self.stdin = os.fdopen(mine, "w" if text else "wb", buffering=-1 if text else 0)
        if stdout == subprocess.PIPE:
            mine, theirs[1] = os.pipe()
            self.stdout = os.fdopen(mine, "r" if text else "rb", buffering=-1 if text else 0)
        elif stdout is not None:
            theirs[1] = os.open(os.devnull, os.O_WRONLY) if stdout == subprocess.DEVNULL else os.dup(stdout.fileno())
        if stderr is not None:
            theirs[2] = os.dup(stderr.fileno())
        _PIPES.update(pipe for pipe in (self.stdin, self.stdout) if pipe is not None)
        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on it warns of the parent's threads
            self.pid = os.fork()
        if self.pid:
            for file in theirs.values():
                os.close(file)
            return
        code = 1
        try:
            for pipe in _PIPES:  # or who reads from one never comes to its end
                pipe.close()
            code = _run(function, theirs, dict(variables or {}), session)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)  # without the clean-up of the tests' process

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                pipe.close()
        self.wait()

    def poll(self) -> int | None:
        """The exit code, or minus the number of a signal; None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. TimeoutExpired after so many seconds."""
        if timeout is None:
            code = self._wait(0)
        else:
            descriptor = -1
            if self.poll() is None:
                descriptor = os.pidfd_open(self.pid)
                select.select([descriptor], [], [], timeout)
                os.close(descriptor)
            code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return code

    def _wait(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(function: Callable[[], object], files: dict[int, int], variables: dict[str, str], session: bool) -> int:
    """In the child: its own files, signals and environment, then the function. Returns the exit code."""
    if session:
        os.setsid()
    for number in HANDLED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number, file in files.items():
        os.dup2(file, number)
        os.close(file)
    if 0 in files:
        sys.stdin = os.fdopen(0, closefd=False)
    if 1 in files:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ.update(variables)
    try:
        code = function()
    except SystemExit as ended:
        code = ended.code
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr)
    return 1
