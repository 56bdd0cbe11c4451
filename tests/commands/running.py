"""Running a command as a user would, and reading what it says."""

import sys
from pathlib import Path

import pytest

from fp4dse import cli
from fp4dse.sweeps import run_sweep
from fp4dse.sweeps.running.opening import Request

FAKE = (sys.executable, str(Path(__file__).parents[1] / "sweeps" / "fake_worker.py"))
FEW = """
summary = "few"
[axes]
"*" = ["mxfp4", "nvfp4"]
"wgrad.rotation" = ["none", "rht16"]
"""


class Answer:
    """What a command printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def call(*arguments: str) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return ended.value.code if isinstance(ended.value.code, int) else 0


def worker_mode(monkeypatch, mode):
    for function in (run_sweep, Request.__init__):
        monkeypatch.setitem(function.__kwdefaults__, "worker", (*FAKE, mode))


def short_reports(monkeypatch):
    """Pages that say only whose overheads the report would have had."""

    def write(store, page, **_):
        Path(page).write_text(f"<html>{store.cost.of}")

    monkeypatch.setattr("fp4dse.results.report.write_report", write)


def assert_one_line(answer: Answer, code: int, *words: str):
    assert answer.code == code
    assert len(answer.err.splitlines()) == 1
    assert not answer.out
    for word in words:
        assert word in answer.err


def swept(run, *more):
    return run("sweep", "few.toml", "--task", "regression:quickstart", "--seeds", "2", *more)
