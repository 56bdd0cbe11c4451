"""The simulated cluster loses nothing; its workers idle only where the driver or the end of the sweep makes them."""

import pytest

from fp4dse.dse import Recipe
from fp4dse.sweeps.bench.simulation import Draw, many_jobs, simulate
from fp4dse.tasks.job import Job, Lane

EVEN = Draw(spread=0.0, stragglers=0.0, losses=0.0, driver_s=0.0)


def jobs(count, lanes=4):
    return [Job("regression", "small", [Lane(Recipe.named("bf16"), 0.1, seed)] * lanes) for seed in range(count)]


def test_jobs_of_equal_length_that_fill_all_workers_leave_none_idle():
    done = simulate(jobs(30), 10, EVEN)
    assert (done.lanes, done.retried) == (120, 0)
    assert done.idle_all == pytest.approx(0.0, abs=1e-9)
    assert done.hours == pytest.approx(3 * (EVEN.start_s + 4 * EVEN.lane_s) / 3600)


def test_a_driver_that_is_busy_keeps_workers_waiting():
    busy = Draw(stragglers=0.0, losses=0.0, driver_s=4.0)
    done = simulate(jobs(100), 10, busy)
    assert done.worst_idle > 0.1


def test_lost_jobs_come_back():
    done = simulate(jobs(200), 8, Draw(losses=0.05))
    assert done.lanes == 800
    assert done.retried > 3


def test_the_real_plan_keeps_64_workers_busy_until_its_last_job_starts():
    planned = many_jobs(60_000, 64)
    done = simulate(planned, 64)
    assert done.lanes == sum(len(job.lanes) for job in planned) >= 60_000
    assert done.worst_idle <= 0.02
