"""Trains jobs in several workers of this machine (worker.py), for programs that have no sweep."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from fp4dse.dse.program import leash
from fp4dse.dse.reading.files import decode_json
from fp4dse.tasks.job import JOB, RESULT, STDERR, WORKER, Ended, Job, JobResult


def train_in_workers(jobs: Sequence[Job], work: Path, workers: int) -> Iterator[JobResult]:
    """The result of each job, once all are done, those of many lanes first. work: the folder of jobs; those that are
    finished in it are not trained again, those with a checkpoint go on. RuntimeError with the last words of a job that
    came to nothing."""
    folders = [work / _name(job) for job in jobs]
    for folder, job in zip(folders, jobs, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JOB).write_bytes(msgspec.json.encode(job))
        (folder / STDERR).touch()
    order = sorted(zip(folders, jobs, strict=True), key=lambda pair: -len(pair[1].lanes))
    waiting = deque(folder for folder, _ in order if not (folder / RESULT).exists())
    cards = _cards() if jobs and jobs[0].device == "cuda" else [""]
    workers = min(workers, len(waiting))
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        served = [pool.submit(_serve, waiting, cards[number % len(cards)]) for number in range(workers)]
        for one in served:
            one.result()
    for folder in folders:
        try:
            yield decode_json((folder / RESULT).read_bytes(), JobResult)
        except FileNotFoundError:
            words = (folder / STDERR).read_text(errors="replace").strip().splitlines() or ["no word"]
            raise RuntimeError(f"{folder}: {words[-1]}") from None


def _serve(waiting: deque[Path], card: str) -> None:
    """Hand the jobs that wait to a worker of a GPU, one after the other, until none waits or the worker is dead."""
    command = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *WORKER]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": card, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while True:
            try:
                folder = waiting.popleft()
            except IndexError:
                return
            files = [str(folder / name) for name in (JOB, RESULT, STDERR)]
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(files) + b"\n")
                process.stdin.flush()
            if not any(_is_end(line) for line in process.stdout):
                return


def _is_end(line: bytes) -> bool:
    """True for the last line of a job; libraries may print other lines that are no reports."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        msgspec.json.decode(line, type=Ended)
        return True
    return False


def _name(job: Job) -> str:
    """The same for the same job, so that its folder is found again."""
    return f"{job.task}-{job.preset}-{hashlib.sha256(msgspec.json.encode(job)).hexdigest()[:12]}"


def _cards() -> list[str]:
    """The GPUs that there are, as CUDA_VISIBLE_DEVICES names them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",") if listed else [str(i) for i in range(torch.cuda.device_count())]
