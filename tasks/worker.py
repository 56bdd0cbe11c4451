"""The process that trains jobs, each in a fork of its own: `python -m fp4dse.tasks.worker`.

Importing torch takes a second and tracing the compiled quantizer eight, for most jobs the same. The parent does both
once and never trains; a job's child finds them done, and whatever happens to it happens to no other job.

    standard input     a line `["JOB.json", "OUT.json", "STDERR.txt"]` a job; the end of it ends the worker
    standard output    the child's Progress lines, then the parent's line Ended
    JOB.json           a Job
    OUT.json           its JobResult; it appears whole or not at all
    STDERR.txt         standard error of both is added to it

A child ends with 0 when the result is there, OUT_OF_MEMORY when the population did not fit, else with a traceback.

A fork copies one thread alone, and a child would wait for ever for what its parent's other threads did: the parent has
none (`start_no_threads`), and a job on more threads compiles for itself. Nor does CUDA survive a fork: the parent never
touches it. All jobs of a worker are for one device.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import msgspec
import torch

from fp4dse.dse import ConfigError
from fp4dse.kernels import warm_up
from fp4dse.tasks.catalogue import get_task
from fp4dse.tasks.engine import train
from fp4dse.tasks.job import OUT_OF_MEMORY, Ended, Job, Progress
from fp4dse.tasks.leash import die_with
from fp4dse.tasks.task import Task


def main() -> None:
    """Work through standard input."""
    for line in sys.stdin:
        job_file, out_file, stderr_file = msgspec.json.decode(line, type=tuple[str, str, str])
        with open(stderr_file, "ab") as stderr:
            os.dup2(stderr.fileno(), 2)
        job = msgspec.json.decode(Path(job_file).read_bytes(), type=Job)
        if job.device == "cpu" and job.threads == 1:
            start_no_threads()
            warm_up([lane.recipe for lane in job.lanes])
        code = run_in_child(job, Path(out_file))
        print(f"\n{msgspec.json.encode(Ended(code)).decode()}", flush=True)  # the child may have died within a line


def start_no_threads() -> None:
    """Keep torch from starting threads where it computes and compiles on the CPU. This process then has no CUDA."""
    torch.set_num_threads(1)
    torch.hub.tqdm.monitor_interval = 0
    # The compiler asks about CUDA whatever it compiles for, and the driver cannot answer without a thread. So torch
    # becomes one that was built without CUDA.
    if hasattr(torch._C, "_cuda_getDeviceCount"):
        del torch._C._cuda_getDeviceCount
        torch._C._ensureCUDADeviceGuardSet = lambda: None


def run_in_child(job: Job, out: Path) -> int:
    """Train the job in a fork of this process; returns its exit code, or minus the number of a signal."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
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
    torch.set_num_threads(job.threads)
    try:
        result = train(task_of(job), job.lanes, job.device, _print)
    except (MemoryError, torch.OutOfMemoryError) as error:
        print(f"out of memory: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # what torch's CPU allocator says
            raise
        print(f"out of memory: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(result))
    temporary.replace(out)
    return 0


def task_of(job: Job) -> Task:
    """The job's task. ConfigError if its file or data are no longer what they were when the job was made."""
    task = get_task(*(job.origin or (job.task, job.preset)))
    if job.digest and task.digest != job.digest:
        changed = f"{':'.join(job.origin)} has changed since the sweep began"
        raise ConfigError("digest", task.digest, f"{job.digest} ({changed})")
    return task


def _print(progress: Progress) -> None:
    print(msgspec.json.encode(progress).decode(), flush=True)


if __name__ == "__main__":
    main()
