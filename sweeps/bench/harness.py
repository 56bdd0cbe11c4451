"""Measures what the harness itself costs: `fp4dse bench sweep`. Where training is not the point, workers only wait.

A row is what was done, what was measured, the target and whether it was met. Times depend on the machine, and on what
else it does.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fp4dse.dse import SLOTS, ConfigError, Space
from fp4dse.results import open_store
from fp4dse.sweeps.bench.planning import Row, bench_plan
from fp4dse.sweeps.bench.simulation import many_jobs, simulate
from fp4dse.sweeps.executors import LocalExecutor
from fp4dse.sweeps.jobs.rows import result_rows
from fp4dse.sweeps.planning.setting import find_setting
from fp4dse.sweeps.running.store_writer import COMPACT_FILES
from fp4dse.sweeps.sweep import run_sweep
from fp4dse.tasks.job import Job, JobResult

WORKER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("waiting_worker.py")))
TASK = ("regression", "smoke")
JOB_S = 5.0


def bench(only: Sequence[str] = ()) -> list[Row]:
    """The rows whose name holds a word of `only`; all without one."""
    measures: dict[str, Callable[[], list[Row]]] = {
        "plan": bench_plan,
        "harness": lambda: [harness_cost(2000)],
        "resume": lambda: resume(100_000),
        "simulate": lambda: simulation(1_000_000, 64),
    }
    for word in only:
        if word not in measures:
            raise ConfigError("--only", word, ", ".join(measures))
    return [row for name, measure in measures.items() if not only or name in only for row in measure()]


def space_of(recipes: int) -> Space:
    """A space of so many recipes: 6 × 4 × 3³ × 2^n combinations, all different."""
    rounding = {
        f"{slot}.rounding": ["nearest", "stochastic"] for slot in SLOTS[: max(0, round(math.log2(recipes / 648)))]
    }
    rotation = {f"{stage}.rotation": ["none", "rht16", "rht32"] for stage in ("fprop", "dgrad", "wgrad")}
    scales = {"*.scale": ["e4m3", "ue5m3", "e5m2", "ue4m4", "bf16", "fp32"], "*.block": [16, 32, 64, 128]}
    return Space.from_dict({"name": "bench", "axes": {**scales, **rotation, **rounding}})


def harness_cost(lanes: int) -> Row:
    """Wall time of a sweep whose jobs wait JOB_S seconds, against that of its jobs alone on as many workers.

    It begins with the call, so that planning and the store are in it; importing the package is not.
    """
    with tempfile.TemporaryDirectory() as folder:
        space = space_of(648)
        recipes = list(space.recipes())[: lanes // 4 - 1]
        begin = time.monotonic()
        worker = (*WORKER, str(JOB_S), f"{folder}/log")
        result = run_sweep(recipes, tasks=[TASK], seeds=range(4), store=f"{folder}/store", jobs=2, worker=worker)
        wall_s = time.monotonic() - begin
        jobs = len(Path(f"{folder}/log").read_text().splitlines())
    alone_s = math.ceil(jobs / 2) * JOB_S
    cost = wall_s / alone_s - 1
    what = f"harness cost: {result.done:,} lanes in {jobs} jobs of {JOB_S:g} s on 2 workers"
    return Row(what, f"{100 * cost:.1f} % of {wall_s:.0f} s", "≤ 5 %", cost <= 0.05)


RESUME = """
import sys, time
from fp4dse.sweeps.bench.harness import TASK, resume_space
from fp4dse.sweeps import run_sweep
from fp4dse.sweeps.executors import LocalExecutor
start, started = LocalExecutor.start, []
def noted(*job):
    start(*job)
    started.append(time.process_time())
LocalExecutor.start = noted
folder, lanes = sys.argv[1], int(sys.argv[2])
run_sweep(resume_space(lanes), tasks=[TASK], seeds=range(10), store=f"{folder}/store", worker=sys.argv[3:], jobs=2)
# VmHWM is of this program alone, where ru_maxrss begins with what its parent had
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) / 2**20, started[0])
"""


def resume_space(lanes: int) -> Space:
    """With ten seeds, about so many lanes."""
    return space_of(lanes // 10)


def resume(lanes: int) -> list[Row]:
    """A store as kill -9 leaves it, with all but the last jobs of a sweep, and a new driver process: the time from its
    start to that of its first job, its own CPU time until then (of which a busy machine does not make more), and the
    memory that it had at most when the sweep is over."""
    with tempfile.TemporaryDirectory() as folder:
        stored = fill(Path(folder) / "store", lanes)
        command = [sys.executable, "-c", RESUME, folder, str(lanes), *WORKER, "0.1", f"{folder}/log"]
        begin = time.time()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        first_s = float(Path(f"{folder}/log").read_text().split()[0]) - begin
        memory, cpu_s = map(float, done.stdout.split())
    what = f"resume after kill -9 with {stored:,} lanes stored, until the first job starts"
    size = f"memory of that driver at the end, {stored:,} lanes"
    return [
        Row(what, f"{first_s:.1f} s ({cpu_s:.1f} s of CPU)", "≤ 3 s", first_s <= 3),
        Row(size, f"{memory:.2f} GiB", "≤ 1.5 GiB", memory <= 1.5),
    ]


def fill(path: Path, lanes: int) -> int:
    """Store all but the last two jobs of the sweep as a driver would have; returns the lanes."""
    setting = find_setting([TASK], jobs=2)
    store = open_store(path, create=True)
    planned = setting.plan(resume_space(lanes), range(10), None, set())
    result = one_result(planned.jobs[0], path.with_name("waiting"))
    stored = 0
    with store.lock():
        for number, job in enumerate(planned.jobs[:-2], 1):
            result.lanes = [result.lanes[0]] * len(job.lanes)
            store.add(result_rows(job, result, setting.context(job)), f"job-{number}")
            stored += len(job.lanes)
            if number % COMPACT_FILES == 0:
                store.compact()
    return stored


def one_result(job: Job, path: Path) -> JobResult:
    """The result that the waiting worker gives back."""
    executor = LocalExecutor(path, [{}], (*WORKER, "0", "/dev/null"))
    executor.start(job, {})
    while not (outcomes := executor.poll(1.0)):
        pass
    executor.stop()
    assert outcomes[0].result, outcomes[0].reason
    return outcomes[0].result


def simulation(lanes: int, workers: int) -> list[Row]:
    """The real plan and scheduler on simulated workers (simulation.py)."""
    begin = time.monotonic()
    jobs = many_jobs(lanes, workers)
    done = simulate(jobs, workers)
    seconds = time.monotonic() - begin
    what = f"simulate {done.lanes:,} lanes in {done.jobs:,} jobs, {done.retried} lost, on {workers} workers"
    measured = f"{100 * done.worst_idle:.3f} % idle (the worst worker), {100 * done.idle_all:.1f} % with the tail"
    return [Row(f"{what} ({seconds:.0f} s)", measured, "≤ 2 % before the last job", done.worst_idle <= 0.02)]
