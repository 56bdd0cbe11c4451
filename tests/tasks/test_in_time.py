"""A peer that is compiled: each way is timed by itself, and what fails or takes too long costs no other its figure."""

import textwrap
import time
from pathlib import Path

import pytest
import torch

from fp4dse.tasks import get_task
from fp4dse.tasks.bench import compiled, in_time
from fp4dse.tasks.bench.in_time import WAYS, Found, NotInTime, Tried, Way, _try, least_us
from tests.forked_workers import fork_processes

THREE = (Way("plain", {}), Way("tuned", {"max_autotune": True}), Way("more", {"coordinate_descent_tuning": True}))


@pytest.fixture
def work(monkeypatch, tmp_path):
    """A function that other processes can import, from its body."""

    def write(body):
        name = f"work_{time.monotonic_ns()}"
        text = textwrap.indent(textwrap.dedent(body), "    ")
        (tmp_path / f"{name}.py").write_text(f"import os, subprocess, sys, time\n\ndef work(compile_):\n{text}\n")
        monkeypatch.syspath_prepend(tmp_path)
        return __import__(name).work

    return write


def test_the_least_of_the_ways_counts_and_one_that_fails_says_why():
    found = Found((Tried("a", 9.0, 3.0), Tried("b", 7.0, 4.0), Tried("c", None, 5.0, "KeyError: x")))
    assert found.us == 7.0
    assert str(found) == "a 9 µs after 3 s; b 7 µs after 4 s; c: KeyError: x"
    with pytest.raises(NotInTime, match=r"^c: KeyError: x$"):
        _ = Found(found.tried[2:]).us


def test_the_last_way_is_torchs_mode():
    modes = torch._inductor.list_mode_options()
    assert WAYS[-1].options == modes["max-autotune-no-cudagraphs"]
    assert not WAYS[0].options


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_ways_are_tried_in_turn_until_the_process_dies(work, monkeypatch):
    fork_processes(monkeypatch, in_time)
    body = """
    options = compile_.keywords["options"]
    if options is None:
        return 9.0
    if "max_autotune" in options:
        raise ValueError("no tiling   fits")
    os._exit(3)
    """
    found = least_us(work(body), "cpu", 300, THREE)
    assert found.us == 9.0
    assert [each.why for each in found.tried] == ["", "ValueError: no tiling fits", "its process ended with 3"]


@pytest.mark.heavy
def test_a_process_that_did_all_ends_by_itself(work, tmp_path):
    """Of one that is killed, Python warns that semaphores are left."""
    body = f"""
    import atexit
    atexit.register(lambda: open({str(tmp_path / "ended")!r}, "w").close())
    return 9.0
    """
    assert least_us(work(body), "cpu", 300, THREE[:1]).us == 9.0
    assert (tmp_path / "ended").exists()


def test_no_time_is_no_figure(work):
    found = least_us(work("return 9.0"), "cpu", 0.0, THREE)
    assert [each.why for each in found.tried] == ["not compiled in 0 s"]


@pytest.mark.slow
def test_when_time_is_up_the_process_and_its_workers_end(work, tmp_path):
    body = f"""
    if compile_.keywords["options"] is None:
        return 9.0
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open({str(tmp_path / "pids")!r}, "w") as file:
        print(os.getpid(), worker.pid, file=file)
    time.sleep(600)
    """
    found = least_us(work(body), "cpu", 30.0, THREE)
    assert found.us == 9.0
    assert [each.name for each in found.tried] == ["plain", "tuned"]
    assert found.tried[1].why.startswith("not compiled in")
    for pid in (tmp_path / "pids").read_text().split():
        assert not _lives(int(pid))


def _lives(pid):
    """Whether there is such a process, one that has ended but has not been waited for left out."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("name", "quantized"), [("regression", "all"), ("language", "nothing")])
def test_what_is_compiled_computes_what_is_written(name, quantized):
    """Where compiled code rounds to BF16 what is written so, which it else leaves in FP32 within a kernel."""

    def losses(compile_):
        torch.manual_seed(0)
        peer = compiled.Peer(get_task(name, "smoke"), 2, "cpu", quantized, compile_)
        return [peer.step().item() for _ in range(2)]

    plain = losses(compiled.as_written)
    seen = []
    tried = _try(
        lambda compile_: seen.extend(losses(compile_)) or 1.0, Way("rounded", {"emulate_precision_casts": True})
    )
    assert tried.why == ""
    assert seen == pytest.approx(plain, rel=2e-3)
