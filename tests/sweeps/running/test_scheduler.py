"""What follows from how a job ended, on a clock that the test turns."""

from collections import deque
from pathlib import Path

import msgspec
import pytest

from fp4dse.dse import Recipe
from fp4dse.sweeps.executors import Outcome, Pace
from fp4dse.sweeps.running.scheduler import GIVE_UP_JOBS, RETRIES, Scheduler, error_kind
from fp4dse.tasks.job import Job, JobResult, Lane

RESULT = JobResult([], 0.0, 0.0, "", "", [], 0)


def job(lanes=1, lr=0.1) -> Job:
    return Job("regression", "small", [Lane(Recipe.named("nvfp4"), lr, seed) for seed in range(lanes)])


class Script:
    """An executor of one place, whose jobs end at once and as they are told."""

    def __init__(self, *ends):
        self.ends, self.started, self.running, self.capacity = list(ends), [], [], 1
        self.waiting: list[Job] = []

    @property
    def has_room(self):
        return not self.waiting

    def takes(self, job):
        return True

    def start(self, job, context):
        self.started.append(job)
        self.waiting.append(job)

    def poll(self, wait_s):
        ended, self.waiting = self.waiting, []
        return [self.end(job) for job in ended]

    def stop(self):
        return self.poll(0)

    def end(self, job):
        kind, reason = self.ends.pop(0) if self.ends else ("done", "")
        return Outcome(job, Path("x"), kind, Pace(0, 0, 0), RESULT if kind == "done" else None, reason)


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def run(jobs, *ends):
    """All verdicts, what was started, and when."""
    clock, script = Clock(), Script(*ends)
    scheduler = Scheduler(script, deque(jobs), now=clock, backoff_s=1.0)
    verdicts, times = [], []
    while not scheduler.is_over or script.waiting:
        before = len(script.started)
        scheduler.fill()
        times += [clock.time] * (len(script.started) - before)
        verdicts += scheduler.poll(0)
        clock.time += 0.5
    return scheduler, verdicts, times


def test_a_lost_job_is_tried_again_after_longer_and_longer_pauses_and_then_given_up():
    _, verdicts, times = run([job()], *[("lost", "node gone")] * 9)
    assert [verdict.action for verdict in verdicts] == ["retry"] * RETRIES["lost"] + ["give up"]
    assert times == [0.0, 1.0, 5.0, 21.0]


def test_an_error_is_tried_once_more():
    _, verdicts, _ = run([job()], *[("failed", "ValueError")] * 9)
    assert [verdict.action for verdict in verdicts] == ["retry", "give up"]


def test_a_job_that_waits_for_its_new_try_keeps_no_other_waiting():
    scheduler, _, _ = run([job(lr=1.0), job(lr=2.0)], ("lost", "gone"))
    assert [started.lanes[0].lr for started in scheduler.executor.started] == [1.0, 2.0, 1.0]


def test_what_does_not_fit_is_halved_down_to_one_lane_which_is_then_tried_again():
    scheduler, verdicts, _ = run([job(lanes=3)], ("memory", "big"), ("memory", "big"))
    assert [verdict.action for verdict in verdicts].count("retry") == 2
    assert [len(started.lanes) for started in scheduler.executor.started] == [3, 1, 2, 1]


class Small(Script):
    """A device that holds `fits` lanes of NVFP4."""

    fits = 2

    def end(self, job):
        large = len(job.lanes) > self.fits and job.lanes[0].recipe == Recipe.named("nvfp4")
        kind, result = ("memory", None) if large else ("done", RESULT)
        return Outcome(job, Path("x"), kind, Pace(0, 0, 0), result, "")


def test_what_did_not_fit_is_not_tried_again_with_jobs_like_it():
    plain = msgspec.structs.replace(job(16), lanes=[Lane(Recipe.named("bf16"), 0.1, seed) for seed in range(16)])
    script = Small()
    scheduler = Scheduler(script, deque([job(16, 0.1), job(16, 0.2), plain]))
    done = 0
    while not scheduler.is_over or script.waiting:
        scheduler.fill()
        done += sum(len(v.outcome.job.lanes) for v in scheduler.poll(0) if v.action == "store")
    assert done == 48
    assert [len(started.lanes) for started in script.started] == [16, 8, 4] + [2] * 16 + [16]


def test_what_fits_on_no_device_is_given_up_at_once():
    _, verdicts, _ = run([job()], ("large", "out of memory: one lane"))
    assert [verdict.action for verdict in verdicts] == ["give up"]


def test_a_timeout_is_given_up_and_a_result_stored():
    _, verdicts, _ = run([job(lr=1.0), job(lr=2.0)], ("timeout", "slow"))
    assert [verdict.action for verdict in verdicts] == ["give up", "store"]


def test_a_job_whose_time_was_up_goes_on_at_once_but_not_for_ever():
    _, verdicts, times = run([job()], *[("stopped", "time up")] * 9)
    assert [verdict.action for verdict in verdicts] == ["retry"] * RETRIES["stopped"] + ["give up"]
    assert times == [0.0, 0.5, 1.0, 1.5]


def test_a_job_that_waits_for_a_kind_of_device_is_tried_often_and_then_given_up_in_words():
    _, verdicts, times = run([job()], *[("elsewhere", "it is for B; here is A")] * 300)
    assert [verdict.action for verdict in verdicts] == ["retry"] * RETRIES["elsewhere"] + ["give up"]
    assert times[:5] == [0.0, 1.0, 5.0, 21.0, 37.0]
    assert verdicts[-1].outcome.reason == "it is for B; here is A"


class Choosy(Script):
    """Takes what is for the one kind that is free."""

    free = "A"

    def takes(self, job):
        return job.only_on.get("device_class", self.free) == self.free


def test_a_job_for_a_kind_that_is_busy_keeps_no_other_waiting():
    wanted = msgspec.structs.replace(job(lr=1.0), only_on={"device_class": "B"})
    script = Choosy()
    scheduler = Scheduler(script, deque([wanted, job(lr=2.0), job(lr=3.0)]))
    script.running = ["a job on B"]
    scheduler.fill()
    scheduler.poll(0)
    assert [started.lanes[0].lr for started in script.started] == [2.0]
    script.free = "B"
    scheduler.fill()
    assert [started.lanes[0].lr for started in script.started] == [2.0, 1.0]


def test_a_job_for_a_kind_that_is_not_there_is_not_waited_for():
    script = Choosy()
    scheduler = Scheduler(script, deque([msgspec.structs.replace(job(), only_on={"device_class": "B"})]))
    scheduler.fill()
    assert len(script.started) == 1  # a worker will say that it is elsewhere


def test_when_the_driver_stops_nothing_is_tried_again():
    script = Script(("lost", "killed"))
    scheduler = Scheduler(script, deque([job()]))
    scheduler.fill()
    assert [verdict.action for verdict in scheduler.stop()] == ["leave"]
    assert scheduler.waiting == []


@pytest.mark.parametrize(
    ("errors", "gives_up"),
    [
        (["KeyError: 7 at 0x7f01", "KeyError: 9 at 0x7fa2", "KeyError: 1 at 0xff"], True),
        (["No file /tmp/a/b", "No file /home/x", "No file /c"], True),
        (["KeyError: 7", "ValueError: 7", "KeyError: 7"], False),
        (["KeyError: 7"] * (GIVE_UP_JOBS - 1), False),
    ],
)
def test_the_same_error_of_the_first_different_jobs_ends_the_sweep(errors, gives_up):
    ends = [("timeout", error) for error in errors]
    scheduler, _, _ = run([job(lr=1.0 + n) for n in range(len(errors))], *ends)
    assert bool(scheduler.why_give_up()) == gives_up
    if gives_up:
        assert errors[0] in scheduler.why_give_up()


def test_one_job_that_came_back_proves_that_not_all_share_the_fault():
    ends = [("done", ""), *[("timeout", "KeyError")] * 5]
    scheduler, _, _ = run([job(lr=1.0 + n) for n in range(6)], *ends)
    assert scheduler.why_give_up() is None


def test_errors_are_compared_without_numbers_addresses_and_paths():
    assert error_kind("exit 1: /tmp/x.py line 3 at 0x7f") == error_kind("exit 2: /home/y.py line 44 at 0x81")
    assert error_kind("ValueError: a") != error_kind("KeyError: a")
