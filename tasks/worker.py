"""The process that trains jobs, each in a fork of its own: `python -m fp4dse.tasks.worker`.

Importing torch takes a second, and building the native code, where there is none yet, some more. The parent does both
once and never trains. A job's child starts with both done, and a crash of it affects no other job.

    standard input     for each job a line `["JOB.json", "OUT.json", "STDERR.txt"]`; the worker ends at end of file
    standard output    the child's Progress lines, then the parent's line Ended
    JOB.json           a Job
    OUT.json           its JobResult; it appears whole or not at all
    checkpoint.pt      the last saved state of the job, beside OUT.json, until the job is done
    STDERR.txt         standard error of parent and child is appended to it

A child exits with 0 when the result is written, OUT_OF_MEMORY when the population did not fit, NO_ROOM when it did not
beside other programs of the device, TOO_LARGE when it never will, STOPPED when it was asked to stop, ELSEWHERE when the
job is for another kind of device, else with a traceback.

With `--folder DIR` it works through the folders of jobs in DIR instead, each with a job.json and, when it is done, an
out.json: where nobody can give it lines. `--share 0/2` takes every second of them, for one of two workers. Jobs that
find no room beside other processes of a device are tried again after the others.

SIGTERM, SIGUSR1 and SIGUSR2 ask the worker to stop: the running job saves its checkpoint after the present step, and no
other job is started. `--budget SECONDS` does the same after so many seconds.

A job whose folder holds a checkpoint resumes from it, bit for bit, whatever ended the job before; delete the file to
start from the beginning. It is written every five minutes and on a request to stop, and deleted once the result is
written. A checkpoint of another job, or of other revisions or versions, is refused: the job fails and names the
difference.

A fork copies one thread alone, and a child would wait for ever for what its parent's other threads did: the parent has
none. Nor does CUDA survive a fork: the parent never touches it. All jobs of a worker are for one device.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch

from fp4dse.dse import ConfigError
from fp4dse.dse.program.leash import die_with
from fp4dse.dse.program.whole_file import whole_file
from fp4dse.kernels import backend
from fp4dse.tasks import environment
from fp4dse.tasks.catalogue import get_task
from fp4dse.tasks.engine import Pruning, Stopped, train
from fp4dse.tasks.engine.lane_counts import is_alone_on, why_not_fit
from fp4dse.tasks.job import (
    CHECKPOINT,
    ELSEWHERE,
    JOB,
    NO_ROOM,
    OUT_OF_MEMORY,
    RESULT,
    STDERR,
    STOPPED,
    TOO_LARGE,
    Ended,
    Job,
    Progress,
)
from fp4dse.tasks.rungs import keep_lanes
from fp4dse.tasks.task import Task
from fp4dse.tasks.threads import torch_threads

ROUNDS, PAUSE_S = 4, 20.0
"""Times that a job of a folder is tried which finds no room on its device, and seconds before it is tried again."""


class Stopping:
    """The request to stop, as signals leave it, and the child that it is passed on to."""

    asked = False
    child = 0
    idle = False

    @classmethod
    def ask(cls, *_: object) -> None:
        """Signal handler of the parent and, inherited, of the child."""
        cls.asked = True
        if cls.child:
            os.kill(cls.child, signal.SIGTERM)
        if cls.idle:
            sys.exit(STOPPED)


def main(arguments: list[str] | None = None) -> None:
    """Work through standard input."""
    parser = argparse.ArgumentParser(prog="python -m fp4dse.tasks.worker")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds after which it stops; 0: never")
    parser.add_argument("--folder", type=Path, help="jobs, a folder each, in place of standard input")
    parser.add_argument("--share", default="0/1", help="N/OF: every OF-th of them, from the N-th on")
    asked = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, Stopping.ask)
    signal.setitimer(signal.ITIMER_REAL, asked.budget)
    codes: dict[str, int] = {}
    for job_file, out_file, stderr_file in jobs_in(asked.folder, asked.share, codes) if asked.folder else jobs_given():
        with open(stderr_file, "ab") as stderr:
            os.dup2(stderr.fileno(), 2)
        job = msgspec.json.decode(Path(job_file).read_bytes(), type=Job)
        if job.device == "cpu":
            backend("cpu")
        environment("cpu", 1)  # what it asks of other programs is remembered, for all children
        codes[job_file] = code = run_in_child(job, Path(out_file))
        print(f"\n{msgspec.json.encode(Ended(code)).decode()}", flush=True)  # the child may have died within a line


def jobs_given() -> Iterator[tuple[str, str, str]]:
    """The files of each job that standard input names."""
    while line := next_line():
        yield msgspec.json.decode(line, type=tuple[str, str, str])


def jobs_in(folder: Path, share: str, codes: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    """The files of each job in a folder that has no result: those with a checkpoint first, then by their turn
    (`Job.turn`), the longest first; then, ROUNDS - 1 times, those that found no room beside other processes, since
    these may have ended. codes: the exit code of each job so far. SystemExit if a stop was asked for. ConfigError on a
    folder that is not there, or a share that is none."""
    if not folder.is_dir():
        raise ConfigError("--folder", str(folder), "a folder with jobs")
    first, _, of = (int(part) if part.isdigit() else part for part in share.partition("/"))
    if not (isinstance(first, int) and isinstance(of, int) and first < of):
        raise ConfigError("--share", share, "N/OF with N from 0 to OF - 1: 0/2, 1/2")
    waiting = [file for file in folder.glob(f"*/{JOB}") if not file.with_name(RESULT).exists()]
    waiting.sort(key=_turn)
    mine = sorted((file.parent for file in waiting[first::of]), key=lambda job: not (job / CHECKPOINT).exists())
    for turn in range(ROUNDS):
        if turn:
            mine = [job for job in mine if codes.get(str(job / JOB)) == NO_ROOM]
            rest(PAUSE_S if mine else 0.0)
        for job in mine:
            if Stopping.asked:
                sys.exit(STOPPED)
            yield str(job / JOB), str(job / RESULT), str(job / STDERR)


def rest(seconds: float) -> None:
    """Do nothing for so long. SystemExit if a stop is asked for meanwhile."""
    Stopping.idle = True
    if Stopping.asked:
        sys.exit(STOPPED)
    time.sleep(seconds)
    Stopping.idle = False


def _turn(file: Path) -> tuple[int, int, str]:
    """A key by which jobs are sorted: by their turn, then those of many lanes first; the same on all machines."""
    job = msgspec.json.decode(file.read_bytes(), type=Job)
    return job.turn, -len(job.lanes), file.parent.name


def next_line() -> str:
    """The next job's, empty when there is none. SystemExit if a stop was asked for."""
    Stopping.idle = True
    if Stopping.asked:
        sys.exit(STOPPED)
    line = sys.stdin.readline()
    Stopping.idle = False
    return line


def run_in_child(job: Job, out: Path) -> int:
    """Train the job in a fork of this process; returns its exit code, or minus the number of a signal."""
    parent = os.getpid()
    child = os.fork()
    if child:
        Stopping.child = child
        if Stopping.asked:  # between the last look and the fork
            os.kill(child, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        Stopping.child = 0
        return code
    code = 1
    try:
        die_with(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the next job's line is not for this one
        code = run(job, out)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without the parent's clean-up


def run(job: Job, out: Path) -> int:
    """Train the job and write its result; returns the exit code."""
    with torch_threads(job.threads):
        return _run(job, out)


def _run(job: Job, out: Path) -> int:
    here = environment(job.device, job.threads)
    if any(here[name] != wanted for name, wanted in job.only_on.items()):
        found = ", ".join(str(here[name]) for name in job.only_on)
        print(f"it is for {', '.join(job.only_on.values())}; here is {found}", file=sys.stderr)
        return ELSEWHERE
    checkpoint = out.with_name(CHECKPOINT)
    task = task_of(job)
    try:
        result = train(
            task,
            job.lanes,
            job.device,
            _report,
            record=job.record,
            pruning=Pruning(job.rungs, keep_lanes, job.overheads),
            checkpoint=checkpoint,
            should_stop=lambda: Stopping.asked,
        )
    except Stopped as error:
        print(error, file=sys.stderr)
        return STOPPED
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise  # that is what torch's CPU allocator says
        return _without_memory(task, job, error)
    result.environment = here
    with whole_file(out) as hidden:
        hidden.write_bytes(msgspec.json.encode(result))
    checkpoint.unlink(missing_ok=True)
    return 0


def _without_memory(task: Task, job: Job, error: BaseException) -> int:
    """Say what did not fit, as the last line; returns the exit code."""
    print(error, file=sys.stderr)
    print(why_not_fit(task, job.lanes, job.device), file=sys.stderr)
    if is_alone_on(job.device):
        return TOO_LARGE if len(job.lanes) == 1 else OUT_OF_MEMORY
    return OUT_OF_MEMORY if job.device == "cpu" else NO_ROOM


def task_of(job: Job) -> Task:
    """The job's task. ConfigError if its file or data are no longer what they were when the job was made."""
    task = get_task(*(job.origin or (job.task, job.preset)))
    if job.digest and task.digest != job.digest:
        changed = f"{':'.join(job.origin)} has changed since the sweep began"
        raise ConfigError("digest", task.digest, f"{job.digest} ({changed})")
    return task


def _report(progress: Progress) -> None:
    print(msgspec.json.encode(progress).decode(), flush=True)


if __name__ == "__main__":
    main()
