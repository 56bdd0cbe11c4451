"""Jobs of a worker and their results, plain records that travel as JSON; its command, and names of a job's files."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec

from fp4dse.dse import Recipe

WORKER = (sys.executable, "-P", "-m", "fp4dse.tasks.worker")
"""Command of a worker; worker.py says how to speak with it. -P: the working directory is no place to import from."""
JOB = "job.json"
"""Name of a file in a job's folder: of the Job itself."""
RESULT = "out.json"
"""Of its JobResult, once it is done."""
STDERR = "stderr.txt"
"""Of the standard error of its worker."""
CHECKPOINT = "checkpoint.pt"
"""Of its last saved state, until it is done."""

OUT_OF_MEMORY = 17
"""Exit code of a job whose population did not fit."""
NO_ROOM = 21
"""Exit code of a job whose population did not fit beside other programs of the device, and may fit later."""
TOO_LARGE = 20
"""Exit code of a job of one lane that did not fit into a device that it had for itself."""
ELSEWHERE = 19
"""Exit code of a job that is for another kind of device than this worker's."""
STOPPED = 18
"""Exit code of a job that was asked to stop before it was done; its checkpoint has the state."""


class Lane(msgspec.Struct, frozen=True):
    """One recipe at one learning rate and one seed."""

    recipe: Recipe
    lr: float
    seed: int


class Rung(msgspec.Struct, frozen=True):
    """After `step` steps the best share `keep` of the lanes that have not diverged trains on; the others are pruned."""

    step: Annotated[int, msgspec.Meta(ge=1)]
    keep: Annotated[float, msgspec.Meta(gt=0, le=1)]


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """One population for one worker: lanes of one task, preset and structural signature.

    overheads: of each lane, for the ranking at rungs; empty: none has any. record: see recorder.py.
    only_on: columns of the environment (environment.py) that a worker must have to train it; empty: any worker may.
    origin, digest: of a task with the user's data or code, what get_task is asked for it, and the digest it had then.
    """

    task: str
    preset: str
    lanes: list[Lane]
    device: str = "cpu"
    threads: int = 1
    rungs: list[Rung] = []
    overheads: list[float] = []
    record: bool = False
    origin: tuple[str, ...] = ()
    digest: str = ""
    only_on: dict[str, str] = {}

    @property
    def turn(self) -> int:
        """Rank in the order of start: 0 for baselines, without which no gap can be shown; 1 where nothing is trained,
        which is cheap and what others are measured against; 2 for the rest."""
        if self.lanes[0].recipe.is_baseline:
            return 0
        return 2 if any(lane.recipe.training.trains != "none" for lane in self.lanes) else 1


class LaneResult(msgspec.Struct):
    """Result of a lane. Losses are means in the task's own unit (nats, squared error).

    `diverged`: a loss or a weight became NaN or Inf at `diverged_step`; losses that then do not exist are None.
    `pruned`: dropped at a rung after `pruned_step` steps; held-out loss and metrics are those at the rung.
    val_loss and metrics are those of the quantized forward pass, val_loss_bf16 that of the same weights in BF16 (see
    evaluation.py), val_loss_merged that of weights with their trained factors added, where there are any; rungs have
    neither. train_loss_final: the mean over the last tenth of the steps.
    Curves are training losses at log-spaced steps, pictures PNG files; recorded: what recorder.py names, if asked for.
    """

    status: Literal["done", "diverged", "pruned"]
    diverged_step: int | None
    train_loss_min: float | None
    train_loss_final: float | None
    val_loss: float | None
    metrics: dict[str, float | None]
    curve_step: list[int]
    curve_loss: list[float]
    pictures: dict[str, bytes] = {}
    pruned_step: int | None = None
    val_loss_bf16: float | None = None
    val_loss_merged: float | None = None
    recorded: dict[str, list[float | None]] = {}


class JobResult(msgspec.Struct):
    """Results in the order of the job's lanes, with what the population as a whole took and used.

    `gemm_backend`: one name where all three stages take the same, else three, in the order of STAGES
    (`gemm.name_with_sums`).
    `kept_bytes`: what the first step's forward pass kept for the backward pass, None if that is not known.
    `fallbacks` holds one sentence for each path that was wanted and not taken. `environment`: the row columns that
    describe the machine that trained it, which need not be the driver's.
    """

    lanes: list[LaneResult]
    train_s: float
    setup_s: float
    quantizer_backend: str
    gemm_backend: str
    fallbacks: list[str]
    peak_memory_bytes: int
    environment: dict[str, str | int] = {}
    kept_bytes: int | None = None


class Progress(msgspec.Struct):
    """One line of a worker's standard output while it runs. `losses`: current training loss per lane, None if dead, or
    not known yet. `phase`: `setup`, until data and weights are on the device; `first step`, until the first report of
    training, when a GPU compiles kernels; …"""

    phase: Literal["setup", "first step", "train", "evaluate"]
    step: int
    steps: int
    losses: list[float | None]


class Ended(msgspec.Struct):
    """The last line of a job on a worker's standard output: exit code, or minus the number of the signal."""

    exit: int


def number(value: float) -> float | None:
    """The number, or None for what JSON does not have."""
    return value if value == value and abs(value) != float("inf") else None
