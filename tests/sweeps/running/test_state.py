"""The state of a sweep: whether its driver lives, how long it will take, and how it is shown."""

import os
import time
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from fp4dse.dse import Recipe, StoreError
from fp4dse.results.store.locks import birth
from fp4dse.sweeps.executors import Pace
from fp4dse.sweeps.running import progress
from fp4dse.sweeps.running.progress import WAITS, display, duration, headline, render
from fp4dse.sweeps.running.state import Clock, Failure, JobState, SweepState, read_state, write_state
from fp4dse.tasks.job import Job, Lane

TASK = ("regression", "small")
FAILURE = Failure("it broke", lanes=6, jobs=2, job="regression-small-0", recipe="NVFP4", command="fp4dse run-one x")


def job(lanes: int) -> Job:
    return Job(*TASK, [Lane(Recipe.named("nvfp4"), 0.1, seed) for seed in range(lanes)])


def state(**changes) -> SweepState:
    running = [JobState(*TASK, lanes=24, phase="train", step=50, steps=200, alive=23, loss=0.25)]
    fields = {"done": 40, "diverged": 2, "failed": 1, "jobs_waiting": 3, "running": running, "eta_s": 100.0, **changes}
    return SweepState(name="few", asked=120, stored=10, **fields)


def shown(of: SweepState, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(render(of))
        return console.export_text()


def test_a_state_is_read_as_it_was_written(tmp_path):
    written = state(failures={"why": FAILURE}, best=["vision +1 %"])
    write_state(tmp_path, written)
    assert read_state(tmp_path) == written


def test_a_store_without_a_sweep_has_no_state(tmp_path):
    with pytest.raises(StoreError, match="no sweep was run into it"):
        read_state(tmp_path)


def test_a_driver_on_this_host_lives_as_long_as_its_process_whatever_the_clock_says():
    for of in (state(), state(born=birth(os.getpid()))):
        assert of.driver_is_alive
        of.updated -= 3600
        assert of.driver_is_alive
        of.updated += 7200
        assert of.driver_is_alive
    assert not state(ended="finished").driver_is_alive
    assert not state(pid=2**22 + 1).driver_is_alive


def test_a_later_process_with_the_number_of_a_dead_driver_is_not_taken_for_it():
    assert not state(born=birth(os.getpid()) - 1).driver_is_alive
    assert not state(pid=2**22 + 1, born=birth(os.getpid())).driver_is_alive


def test_a_driver_elsewhere_lives_as_long_as_it_writes_whatever_its_clock_says(tmp_path, monkeypatch):
    elsewhere = state(host="elsewhere", pid=2**22 + 1)
    assert elsewhere.driver_is_alive
    write_state(tmp_path, elsewhere)
    data = msgspec.json.decode((tmp_path / "state.json").read_bytes())

    def written(seconds_ago):
        data["updated"] = time.time() - seconds_ago
        (tmp_path / "state.json").write_bytes(msgspec.json.encode(data))

    for behind in (120, 3600, -3600):
        written(behind)
        monkeypatch.setattr(time, "sleep", lambda _: None)
        assert not read_state(tmp_path).driver_is_alive
        monkeypatch.setattr(time, "sleep", lambda _, behind=behind: written(behind - 2))
        assert read_state(tmp_path).driver_is_alive


def test_everything_worth_knowing_is_shown():
    text = shown(state(best=["vision:small +1 % with nvfp4"], failures={"it broke": FAILURE}, retries={"too big": 2}))
    for words in ("52/120 lanes", "2 diverged", "1 failed", "1 job running, 3 waiting", "1m40s left", "train 50/200"):
        assert words in text
    for words in ("loss 0.25", "1 dead", "best so far: vision:small", "it broke", "too big", "run-one x"):
        assert words in text


def test_a_search_counts_trials_and_its_time_left_is_that_of_the_trials_to_come():
    searching = {"trials_asked": 30, "trials": 12, "trials_stored": 2, "elapsed_s": 50.0}
    of = state(**searching)
    assert headline(of).startswith("12/30 trials (2 from the store), 52/120 lanes, 2 diverged, 1 failed; 1 job running")
    assert "40 %" in shown(of)
    assert of.trials_eta_s == pytest.approx(18 * 50 / 10)
    assert state(**{**searching, "trials": 2}).trials_eta_s is None


def test_it_fits_a_terminal_of_80_columns():
    lines = shown(state(trials_asked=300, trials=120, trials_stored=20), width=80).splitlines()
    assert [line for line in lines if line.startswith("few")] == [lines[0]]
    assert len(lines) <= 4


def test_the_status_of_a_dead_driver_says_how_to_go_on():
    text = shown(state(pid=2**22 + 1))
    assert "is gone, the same command continues" in text
    assert "train 50/200" not in text


def test_plain_lines_come_when_there_is_news_and_not_at_every_call(capsys):
    with display(True) as show:
        for _ in range(10):
            show(state())
        show(state(ended="finished"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "median losses: regression 0.25" in lines[0]
    assert lines[1].startswith(f"few: {headline(state(ended='finished'))}")


def test_a_plain_line_says_what_a_job_without_a_loss_waits_for(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with display(True) as show:
        for now in range(0, 60, 5):
            phase = "setup" if now < 20 else "first step"
            show(state(running=[JobState(*TASK, lanes=1, phase=phase, step=0, steps=200, alive=0, loss=None)] * 2))
    first, second = capsys.readouterr().err.splitlines()
    name = ":".join(TASK)
    assert first.count(f"{name}: data and initial weights are made") == 1
    assert f"{name}: the first steps, for which a GPU compiles kernels" in second


def test_a_terminal_says_what_a_job_without_a_loss_waits_for_while_its_sweep_runs():
    waits = [JobState(*TASK, lanes=1, phase=phase, step=0, steps=200, alive=0, loss=None) for phase in WAITS] * 2
    text, name = shown(state(running=waits)), ":".join(TASK)
    assert [text.count(f"{name}: {sentence}") for sentence in WAITS.values()] == [1, 1, 1]
    for over in (state(running=waits, pid=2**22 + 1), state(running=waits, ended="finished")):
        assert not any(sentence in shown(over) for sentence in WAITS.values())


def test_nothing_is_shown_where_nothing_was_asked_for(capsys):
    with display(False) as show:
        show(state())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "text"), [(42.4, "42s"), (185, "3m05s"), (7800, "2h10m")])
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_the_time_left_counts_starts_and_steps_of_all_lanes_over_the_workers():
    clock = Clock({TASK: 100}, workers=2)
    assert clock.eta_s([job(10)], []) is None
    clock.add(job(10), Pace(start_s=6.0, seconds=20.0, steps=100))  # 0.02 s per lane and step
    assert clock.eta_s([job(10)], []) == pytest.approx((6 + 20) / 2)
    assert clock.eta_s([job(10), job(20)], []) == pytest.approx((6 + 20 + 6 + 40) / 2)
    assert clock.eta_s([], []) == 0
