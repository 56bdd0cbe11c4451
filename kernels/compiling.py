"""Running a C++ compiler: its output appears whole or not at all, and neither it nor the children that it has, being a
driver, outlive who asked for it (dse/program/leash.py).

The linker writes where it is told to, and a kill leaves what was written by then. So commands write to another name,
which becomes theirs when they are done; and since caches hold what others left, a library is looked at before it is
loaded: from one that is not whole a process can die.
"""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fp4dse.dse.program import leash

_ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian


def build(command: Sequence[str], cwd: str | None = None, timeout: float | None = None) -> None:
    """Run a command that makes the file after its `-o`, in a folder that exists.

    CalledProcessError with all that the command said in `stderr`; TimeoutExpired after `timeout` seconds; OSError.
    """
    at = list(command).index("-o") + 1
    target = Path(cwd or "", command[at])
    made = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        run([*command[:at], str(made), *command[at + 1 :]], cwd, timeout)
        with made.open("rb") as written:
            os.fsync(written.fileno())  # else a power cut can leave the new name with empty pages
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)


def run(command: Sequence[str], cwd: str | None = None, timeout: float | None = None) -> None:
    """Run a command that dies with this process, with whatever it starts; raises as `build` does."""
    supervised = [sys.executable, "-I", "-S", leash.__file__, "--group", str(os.getpid()), *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(supervised, cwd=cwd, text=True, errors="replace", start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            said, _ = process.communicate(timeout=timeout)
        except BaseException:  # a time limit, Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), stderr=said)


def is_there(file: Path) -> bool:
    """True if a compiled file is there, and whole; standard error says so if it is there and is not."""
    if not file.exists():
        return False
    if reason := why_not_whole(file):
        say_again(file, reason)
    return reason is None


def why_not_whole(file: Path) -> str | None:
    """The reason why this is not all that a compiler wrote, or None: its table of sections stands at the end."""
    size = file.stat().st_size
    if size == 0:
        return "it is empty"
    if sys.platform != "linux" or file.suffix not in (".o", ".so"):  # precompiled headers, which compilers check
        return None
    with file.open("rb") as opened:
        head = opened.read(64)
    if len(head) < 64 or not head.startswith(_ELF):
        return "it is no compiled file"
    start, each, count = struct.unpack_from("<Q", head, 40)[0], *struct.unpack_from("<HH", head, 58)
    end = start + each * count
    return None if end <= size else f"it has {size} of {end} bytes"


def say_again(file: Path, reason: object) -> None:
    """Say on standard error that a compiled file is built again, and why."""
    print(f"{file}: {reason}; it is built again", file=sys.stderr)
