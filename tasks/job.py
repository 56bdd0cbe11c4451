"""What a worker is given and what it gives back: plain records that travel as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from fp4dse.dse import Recipe

OUT_OF_MEMORY = 17
"""Exit code of a job whose population did not fit."""


class Lane(msgspec.Struct, frozen=True):
    """One recipe at one learning rate and one seed."""

    recipe: Recipe
    lr: float
    seed: int


class Job(msgspec.Struct, frozen=True):
    """One population for one worker: lanes of one task, preset and structural signature.

    origin, digest: of a task with the user's data or code, what get_task is asked for it, and the digest it had then.
    """

    task: str
    preset: str
    lanes: list[Lane]
    device: str = "cpu"
    threads: int = 1
    origin: tuple[str, ...] = ()
    digest: str = ""


class LaneResult(msgspec.Struct):
    """What became of a lane. Losses are means in the task's own unit (nats, squared error).

    `diverged`: a loss or a weight became NaN or Inf at `diverged_step`; losses that then do not exist are None.
    Curves are training losses at log-spaced steps, pictures PNG files.
    """

    status: Literal["done", "diverged"]
    diverged_step: int | None
    train_loss_min: float | None
    train_loss_final: float | None
    val_loss: float | None
    metrics: dict[str, float | None]
    curve_step: list[int]
    curve_loss: list[float]
    pictures: dict[str, bytes] = {}


class JobResult(msgspec.Struct):
    """Results in the order of the job's lanes, with what the population as a whole took and used.

    `gemm_backend`: one name where all three stages take the same, else three, in the order of STAGES.
    `fallbacks` holds one sentence for each path that was wanted and not taken.
    """

    lanes: list[LaneResult]
    train_s: float
    setup_s: float
    quantizer_backend: str
    gemm_backend: str
    fallbacks: list[str]
    peak_memory_bytes: int


class Progress(msgspec.Struct):
    """One line of a worker's standard output while it runs. `losses`: current training loss per lane, None if dead."""

    phase: Literal["setup", "train", "evaluate"]
    step: int
    steps: int
    losses: list[float | None]


class Ended(msgspec.Struct):
    """The last line of a job on a worker's standard output: exit code, or minus the number of the signal."""

    exit: int
