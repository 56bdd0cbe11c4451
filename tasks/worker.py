"""The process that trains one job: `python -m fp4dse.tasks.worker JOB.json OUT.json`.

Reads a Job, prints a Progress line as JSON now and then, writes a JobResult atomically. Exit code 0 when the result is
there, OUT_OF_MEMORY when the population did not fit, anything else is a crash with its traceback on standard error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from fp4dse.tasks.job import OUT_OF_MEMORY, Job, Progress


def main(job_file: str, out_file: str) -> int:
    """Train the job; returns the exit code."""
    import torch

    from fp4dse.tasks import get_task
    from fp4dse.tasks.engine import train

    job = msgspec.json.decode(Path(job_file).read_bytes(), type=Job)
    torch.set_num_threads(job.threads)
    try:
        result = train(get_task(job.task, job.preset), job.lanes, job.device, _print)
    except (MemoryError, torch.OutOfMemoryError) as error:
        print(f"out of memory: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # what torch's CPU allocator says
            raise
        print(f"out of memory: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    out = Path(out_file)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(result))
    temporary.replace(out)
    return 0


def _print(progress: Progress) -> None:
    print(msgspec.json.encode(progress).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
