"""Ties a process's life to its parent's: whatever kills the parent, kill -9 included, the child does not live on.

    python leash.py PARENT_PID COMMAND …           becomes the command, which the kernel kills when the parent dies
    python leash.py --group PARENT_PID COMMAND …   runs the command, and kills the process group that it leads then:
                                                   for a command with children of its own, which would live on

It is a program because the usual place, code between fork and exec, is unsafe in a parent with threads; so it imports
nothing of fp4dse.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the Linux kernel for a signal when the parent dies. SystemExit if it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit("the parent is gone")


def main() -> None:
    if is_group := sys.argv[1] == "--group":
        del sys.argv[1]
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if is_group:
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
        die_with(parent, signal.SIGTERM)
        sys.exit(subprocess.call(command))
    die_with(parent)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
