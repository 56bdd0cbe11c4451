"""The number of threads is set for a while and put back, an error or not."""

from pathlib import Path

import pytest
import torch

import fp4dse
from fp4dse.tasks.threads import torch_threads

ROOT = Path(fp4dse.__file__).parent


def test_the_number_of_threads_is_put_back_after_an_error():
    before = torch.get_num_threads()

    def fail():
        assert torch.get_num_threads() == before + 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), torch_threads(before + 1):
        fail()
    assert torch.get_num_threads() == before


def test_nobody_else_sets_it():
    rooms = ("kernels", "tasks", "sweeps", "results", "commands")
    found = {f for room in rooms for f in (ROOT / room).rglob("*.py") if "set_num_threads" in f.read_text()}
    assert found == {ROOT / "tasks" / "threads.py"}
