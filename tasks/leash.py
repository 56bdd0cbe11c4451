"""Ties a process's life to its parent's: whatever kills the parent, kill -9 included, the child does not live on.

    python leash.py PARENT_PID COMMAND …

is on the leash before it becomes the command. It is a program of its own because the usual place, code between fork and
exec, is unsafe in a parent with threads; so it imports nothing of fp4dse.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the Linux kernel for a SIGKILL when the parent dies. SystemExit if it is dead already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit("the parent is gone")


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with(parent)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
