"""Ties a worker's life to its driver's: whatever kills the driver, kill -9 included, the worker does not live on.

    python leash.py DRIVER_PID COMMAND …

asks the Linux kernel for a SIGKILL when the driver dies, then becomes the command. It is a program of its own because
the usual place, code between fork and exec, is unsafe in a driver with threads. It imports nothing of fp4dse.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    driver, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:  # it died before the kernel was asked
        sys.exit("the driver is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
