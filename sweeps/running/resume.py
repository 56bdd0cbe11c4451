"""Takes over the jobs of a driver that is gone: finished ones are stored, unfinished ones go on from their checkpoints.

An unfinished job keeps its lanes, because its checkpoint is of that population. A new plan that has them all leaves
them out; else the job belongs to another sweep and waits for that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fp4dse.dse import StoreError
from fp4dse.results import Store
from fp4dse.sweeps.jobs.jobfolder import OF_LANE, drop, leftovers, part_of
from fp4dse.sweeps.jobs.rows import result_rows
from fp4dse.tasks.job import Job

log = logging.getLogger(__name__)


def store_leftovers(store: Store, work: Path) -> list[Job]:
    """Store the jobs that workers finished and a driver that died did not store; return those that were unfinished.

    A result that makes no row of today's schema, as an earlier version may have left it, is thrown away and logged.
    """
    unfinished = []
    for folder, job, context, result in leftovers(work):
        if result is None:
            unfinished.append(job)
            continue
        try:
            store.add(result_rows(job, result, context), folder.name)
        except StoreError as error:
            if isinstance(error.__cause__, OSError):  # the disk's fault, not the result's
                raise
            log.warning("%s: its result cannot be stored (%s); its lanes count as missing", folder, error)
        drop(folder)
    return unfinished


def with_leftovers(planned: Sequence[Job], unfinished: Sequence[Job]) -> list[Job]:
    """The jobs to run: unfinished ones first, then what is planned, less the lanes of the unfinished ones."""
    if not unfinished:
        return list(planned)
    terms = [_terms(job) for job in planned]
    where = {(terms[n], lane): (n, i) for n, job in enumerate(planned) for i, lane in enumerate(job.lanes)}
    left = {n: set(range(len(job.lanes))) for n, job in enumerate(planned)}
    front = []
    for job in unfinished:
        keys = [(_terms(job), lane) for lane in job.lanes]
        if all(key in where for key in keys):
            front.append(job)
            for n, i in map(where.pop, keys):
                left[n].discard(i)
    rest = [part_of(job, sorted(left[n])) if len(left[n]) < len(job.lanes) else job for n, job in enumerate(planned)]
    return [*front, *(job for job in rest if job.lanes)]


def _terms(job: Job) -> bytes:
    """All of a job but its lanes."""
    fields = msgspec.to_builtins(msgspec.structs.replace(job, lanes=[]))
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in OF_LANE})
