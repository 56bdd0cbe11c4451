"""Measures the size of jobs: the number of lanes that trains most lanes per second, once a device and task.

A sweep that will take long measures before its first job, for a minute at most, and remembers. All others go by
JOB_LANES. So do sweeps whose workers others hand out: this machine is none of theirs.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import msgspec

from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.sweeps.planning.plan import JOB_LANES, Plan
from fp4dse.sweeps.planning.setting import Setting
from fp4dse.tasks import TaskFacts
from fp4dse.tasks.job import Job
from fp4dse.tasks.remembered import recall, remember

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "fp4dse.tasks.measure")
LIMIT_S = 60.0
LONG = {"cpu": 500_000, "cuda": 100_000_000}
"""Lanes × steps a worker from which on it is worth it: ten minutes of a small task, in which to measure takes twenty
seconds."""
TOO_LONG = 0
"""Remembered where LIMIT_S was over before anything was known."""


def recall_sizes(setting: Setting) -> None:
    """Read what was measured before. On cards of several kinds the smallest number counts."""
    machine = setting.machine
    for task in setting.tasks:
        found = [recall(_question(machine, task, kind), int) for kind in _kinds(machine)]
        if found and None not in found:
            setting.sizes[task.name, task.preset] = min(n for n in found if n is not None)


def plan_measured(
    setting: Setting, make_plan: Callable[[], Plan], measure: bool, report: Callable[[Job], None] = lambda _: None
) -> Plan:
    """The plan; made once more where `measure` found sizes that are new."""
    plan = make_plan()
    return make_plan() if measure and measure_sizes(setting, plan, report) else plan


def measure_sizes(setting: Setting, plan: Plan, report: Callable[[Job], None] = lambda _: None) -> bool:
    """Measure for the tasks of a plan for which it matters; `report` is called before. True if any is new."""
    tasks = [task for task in setting.tasks if _matters(setting, plan, task)]
    for task in tasks:
        job = max(_jobs_of(plan, task), key=lambda job: (not job.lanes[0].recipe.is_plain, len(job.lanes)))
        report(job)
        for kind, variables in _kinds(setting.machine).items():
            try:
                remember(_question(setting.machine, task, kind), measure(job, variables, _sharing(setting.machine)))
            except RuntimeError as error:  # what is wrong with the task its jobs will say too
                log.warning("how many lanes are fastest could not be measured: %s", error)
                setting.sizes[task.name, task.preset] = TOO_LONG
    recall_sizes(setting)
    return bool(tasks)


def measure(job: Job, variables: dict[str, str], share: int) -> int:
    """The number of lanes that is best for a job's population on a worker with these variables, of which `share` share
    the device. TOO_LONG if it takes so; RuntimeError with the last words where it fails."""
    threads = {"OMP_NUM_THREADS": str(job.threads), "MKL_NUM_THREADS": str(job.threads)}
    command = [*COMMAND, *map(str, (*JOB_LANES[job.device], share))]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **threads, **variables},
    ) as process:
        try:
            output, errors = process.communicate(msgspec.json.encode(job), LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            return int(output.split()[-1]) if output.split() else TOO_LONG
    if process.returncode:
        words = errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        raise RuntimeError(f"{job.task}:{job.preset}: {words[-1]}")
    return int(output.split()[-1])


def explain_sizes(setting: Setting, plan: Plan) -> dict[str, str]:
    """Task -> how many lanes its jobs have at most and why, for people."""
    lines = {}
    for task in setting.tasks:
        most = JOB_LANES[setting.machine.device][1]
        size = setting.sizes.get((task.name, task.preset))
        if size:
            why = f"{size}: the fastest here, measured"
        elif size == TOO_LONG:
            why = f"{most}: the fastest could not be measured within {LIMIT_S:g} s"
        elif not setting.machine.kinds:
            why = f"{most}: not measured where others hand the workers out"
        elif _matters(setting, plan, task):
            why = f"{most}: the fastest is measured when the sweep starts"
        else:
            why = f"{most}: not measured for a sweep as short as this"
        lines[f"{task.name}:{task.preset}"] = f"at most {why}"
    return lines


def _matters(setting: Setting, plan: Plan, task: TaskFacts) -> bool:
    """True if the sweep will take long, and nothing is known yet."""
    if not setting.machine.kinds or (task.name, task.preset) in setting.sizes:
        return False
    left = sum(len(job.lanes) for job in _jobs_of(plan, task))
    return left * task.steps / len(setting.machine.slots) >= LONG[setting.machine.device]


def _jobs_of(plan: Plan, task: TaskFacts) -> list[Job]:
    return [job for job in plan.jobs if (job.task, job.preset) == (task.name, task.preset)]


def _question(machine: Machine, task: TaskFacts, kind: str) -> str:
    what = f"{task.name}:{task.preset} {task.digest} by {task.steps} steps of {task.batch}"
    return f"best lanes of {what} on {kind}, {machine.threads} threads, shared by {_sharing(machine)}"


def _kinds(machine: Machine) -> dict[str, dict[str, str]]:
    """Device class -> variables of its first worker."""
    return dict(reversed([*zip(machine.kinds, machine.slots, strict=False)]))


def _sharing(machine: Machine) -> int:
    """Most workers on one device."""
    return max(Counter(str(sorted(slot.items())) for slot in machine.slots).values())
