"""A process that is forked from the tests' own ends, is ended, reads and writes as one that is started."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.forked import Forked

ENDS = {
    "nothing": (lambda: None, 0),
    "a number": (lambda: 3, 3),
    "an exit": (lambda: sys.exit(4), 4),
    "last words": (lambda: sys.exit("no room"), 1),
    "an error": (lambda: 1 / 0, 1),
    "a signal": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "an interrupt": (lambda: os.kill(os.getpid(), signal.SIGINT), 1),
}


@pytest.mark.parametrize("name", ENDS)
def test_its_exit_code_says_how_it_ended(name, tmp_path):
    function, code = ENDS[name]
    with open(tmp_path / "stderr", "wb") as stderr:
        assert Forked(function, stderr=stderr).wait(20) == code
    words = {"last words": "no room\n", "an error": "ZeroDivisionError", "an interrupt": "KeyboardInterrupt"}
    said = (tmp_path / "stderr").read_text()
    assert words[name] in said if name in words else said == ""


def shout() -> None:
    for line in sys.stdin:
        print(line.strip().upper(), flush=True)


def test_it_reads_to_the_end_of_its_input_whatever_is_started_meanwhile():
    with Forked(shout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        second = Forked(shout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print("one", file=first.stdin, flush=True)
        assert first.stdout.readline() == "ONE\n"
        first.stdin.close()
        assert first.wait(20) == 0
        with second:
            second.stdin.close()
            assert second.wait(20) == 0


def test_it_is_waited_for_so_long_and_may_be_stopped():
    with Forked(lambda: time.sleep(600)) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        assert process.poll() is None
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM


def test_it_has_variables_of_its_own():
    there = Forked(lambda: os.environ["FORKED"] != "yes", variables={"FORKED": "yes"})
    assert there.wait(20) == 0
    assert "FORKED" not in os.environ
