"""A job on disk: one folder under `<store>/jobs/`, and what a worker leaves there is not lost with the driver.

    job.json       what the worker is given
    context.json   what the driver knows and the worker does not: the rest of a result row
    out.json       what the worker gives back; it appears whole or not at all
    stderr.txt     what the worker said, with the reason if it failed
    checkpoint.pt  where the job stood when a stop was asked for, or some minutes ago; the same job goes on from it

The folder is deleted once the store has the rows. A folder with `out.json` that a new driver finds was finished by a
worker whose driver died in between. The folder of a job that was given up moves to `failed/` beside `jobs/`, where
`fp4dse run-one` finds it, until a sweep has trained its lanes.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse.reading.files import decode_json
from fp4dse.tasks.job import CHECKPOINT, JOB, RESULT, STDERR, Job, JobResult

OF_LANE = ("lanes", "overheads")
"""The fields of a job that have an entry a lane."""
STDERR_LINES = 3
"""Lines of a worker's standard error that are kept as the reason of a failure."""
STDERR_CHARACTERS = 600


def job_name(job: Job) -> str:
    """The same lanes on the same data have the same name, in whatever order, so that storing them twice writes one
    file."""
    lanes = sorted(msgspec.json.encode(lane) for lane in job.lanes)
    data_and_start = job.origin[2:]
    where = " ".join([job.task, job.preset, job.device, str(job.threads), *job.only_on.values(), *data_and_start])
    content = b"\n".join([where.encode(), *lanes])
    return f"{job.task}-{job.preset}-{hashlib.sha256(content).hexdigest()[:12]}"


def write_job(folder: Path, job: Job, context: dict[str, Any]) -> None:
    """A fresh folder for a job. Of an earlier attempt at the same job the checkpoint stays."""
    data = msgspec.json.encode(job)
    if (folder / CHECKPOINT).exists() and _is_same(folder, data):
        for entry in folder.iterdir():
            if entry.name != CHECKPOINT:
                entry.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    (folder / JOB).write_bytes(data)
    (folder / "context.json").write_bytes(msgspec.json.encode(context, enc_hook=str))  # torch's version is no plain str
    (folder / STDERR).touch()


def _is_same(folder: Path, data: bytes) -> bool:
    try:
        return (folder / JOB).read_bytes() == data
    except OSError:
        return False


def part_of(job: Job, lanes: Sequence[int]) -> Job:
    """The job with some of its lanes, by number."""
    of_lane = {name: values for name in OF_LANE if (values := getattr(job, name, None))}
    return msgspec.structs.replace(job, **{name: [values[i] for i in lanes] for name, values in of_lane.items()})


def read_result(folder: Path, job: Job) -> JobResult | None:
    """The worker's result, or None if there is none that fits the job."""
    try:
        result = decode_json((folder / RESULT).read_bytes(), JobResult)
    except (OSError, msgspec.DecodeError):
        return None
    return result if len(result.lanes) == len(job.lanes) else None


def read_job(folder: Path) -> tuple[Job, dict[str, Any]]:
    """A job and its context. OSError or msgspec.DecodeError if the folder does not hold them."""
    job = decode_json((folder / JOB).read_bytes(), Job)
    return job, decode_json((folder / "context.json").read_bytes(), dict)


def write_result(folder: Path, data: bytes) -> None:
    """Put a result that came from elsewhere into a job's folder, whole or not at all."""
    hidden = folder / f".{RESULT}"
    hidden.write_bytes(data)
    hidden.replace(folder / RESULT)


def leftovers(work: Path) -> Iterator[tuple[Path, Job, dict[str, Any], JobResult | None]]:
    """Jobs of a driver that is gone: finished ones that it did not store, and, without a result, those that have a
    checkpoint. Other folders are deleted."""
    for folder in sorted(work.glob("*")):
        try:
            job, context = read_job(folder)
        except (OSError, msgspec.DecodeError):
            result = None
        else:
            result = read_result(folder, job)
            if result or (folder / CHECKPOINT).exists():
                yield folder, job, context, result
                continue
        shutil.rmtree(folder, ignore_errors=True)


def last_words(folder: Path, count: int = STDERR_LINES) -> str:
    """The end of a worker's standard error, `count` lines at most."""
    try:
        with open(folder / STDERR, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 20_000))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-count:])[-STDERR_CHARACTERS:]


def failed_folder(work: Path) -> Path:
    """The folder that keeps the folders of jobs that were given up."""
    return work.with_name("failed")


def keep_failed(folder: Path) -> None:
    """Move the folder of a job that was given up to where it outlives the sweep, if nobody has deleted it."""
    target = failed_folder(folder.parent) / folder.name
    (folder / CHECKPOINT).unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        folder.replace(target)


def drop(folder: Path) -> None:
    """Delete a job's folder, and what was kept of an earlier failure of it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(failed_folder(folder.parent) / folder.name, ignore_errors=True)
