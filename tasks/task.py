"""A task at a preset as one record: its data, its model and its training numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from torch import Tensor, nn

from fp4dse.kernels import LaneNumerics
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.experience import Experience


class Problem(msgspec.Struct, frozen=True):
    """Data and initial weights for a list of S seeds.

    train_x, train_y, val_x, val_y: [D, n, …] with D = S where the data are drawn per seed, D = 1 where all seeds share
    them. init: parameter name -> float32 [S, …].
    """

    train_x: Tensor
    train_y: Tensor
    val_x: Tensor
    val_y: Tensor
    init: dict[str, Tensor]


class Finish(msgspec.Struct, frozen=True):
    """Results of a task's trained models beyond the held-out loss. metrics: name -> [L]; pictures: name -> a PNG file
    per lane."""

    metrics: dict[str, Tensor] = {}
    pictures: dict[str, list[bytes]] = {}


class Task(msgspec.Struct, frozen=True):
    """A task at a preset.

    problem     seeds -> Problem, on the CPU, from counters: the same for every recipe of a seed
    preview     the same with few samples, for a look at the model; None: `problem`
    prepare     (x, y, draws) -> (inputs, targets) of a batch x [L, B, …], y [L, B, …]: where a task draws noise, times
                or crops, the same for every recipe of a seed; None: the batch as it is
    model       (parameters [L, …], numerics) -> module from inputs to outputs, the lane axis first in every tensor
    loss        (outputs, targets) -> float32 [L, …]; the engine takes the mean over all but the lane axis. Outputs that
                are BF16 it makes float32 before, unless `takes_bf16`
    rounds_inputs  the model rounds its inputs to `dtype` before all else, and nothing prepares them: training data are
                kept so, and batches are gathered so
    takes_bf16  loss and metrics take outputs in BF16 as they are, and compute in FP32
    metrics     name -> (outputs, targets) -> float32 [L, …], averaged over the held-out data; the first one is shown
    finish      (model, problem, draws, val_loss [L]) -> Finish, once, after training
    digest_of   what identifies the data, and the weights where they are given: hashed into `digest`
    contents_of packages and versions that the data were made of, where the task's name and path do not say it
    lr          learning rate where nothing tells a better one; a lane may have another
    rates       class of recipes (dse/tuning.py) -> tuned learning rate; empty if the preset was never tuned
    betas, eps, weight_decay, clip (of the gradient's norm, None for none): of AdamW, where the recipe has no others
    shown       the metric that is shown beside the loss, if `finish` computes it
    better      the direction in which that metric is better; None: not stated. The loss is better the lower it is
    gap_unit    `points`: the loss is the share of what is not right, `accuracy` being the rest, and losses are compared
                by their difference, in points of accuracy; None: by their ratio
    warmup      share of the steps, at the start, over which the learning rate rises linearly from zero
    decay       share of the steps, at the end, over which the learning rate falls linearly to zero
    eval_rows   samples in one evaluation pass: part of the definition, because a tensor scale is taken over a pass
    parts       least number of parts, a power of two, into which a batch is cut: they pass through the model one by
                one, because the whole batch would not fit. A recipe's `accumulate` counts if it is larger
    dtype       of activations and their gradients between layers, the residual stream included. Operations compute in
                FP32 and round their result once
    size        parameters of one lane; 0 if unknown
    parameters  those of them that scaling laws count: without embeddings and head; None: the task does not say
    tokens      that a lane's training reads, repeated ones too; None: the task has none
    samples     number of training samples, where that depends on the user's data; None: always more than a batch
    pretrain    (seeds, device) -> initial weights as in Problem.init, on the CPU, of a task that starts from a trained
                model; None: those of `problem`
    experience  (model, numerics, draws) -> Experience, of a task that learns from what its own model does: batches come
                from there, and so do held-out losses. The loss is one of its batches'
    replays     its samples say which experts each token went to, and a trainer can send them there again
    packed      layers whose weight gradient takes the forward pass's quantized x keep codes of it for that
                (LaneNumerics.packed); no bit depends on it
    swiglu8     SwiGLUs keep their inputs for the backward pass in MXFP8 (LaneNumerics.swiglu8). Gradients are others,
                which the preset's name says
    recompute   blocks of a model that has some keep their inputs for the backward pass and nothing in between, which is
                made again; no bit depends on it
    logits      outputs -> logits float32 [L, …, classes], of a task whose loss is a cross-entropy: from trained weights
                on it can learn from a teacher (tasks/teacher.py); None: it cannot
    one_by_one  the model is a plain torch module, which lanes go through one after the other (one_by_one.py)
    origin      arguments of get_task for it, where name and preset are not all of them
    start       digest of the weights that all lanes start from; None: `problem` draws them by the seed
    start_method  by what these were fitted to a recipe's quantizers (fitted/), where their file says so
    """

    name: str
    preset: str
    rev: int
    summary: str
    problem: Callable[[Sequence[int]], Problem]
    model: Callable[[dict[str, Tensor], LaneNumerics], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    digest_of: Callable[[], str]
    steps: int
    batch: int
    lr: float
    contents_of: Callable[[], str | None] | None = None
    prepare: Callable[[Tensor, Tensor, Draws], tuple[Any, Any]] | None = None
    preview: Callable[[Sequence[int]], Problem] | None = None
    metrics: dict[str, Callable[[Any, Any], Tensor]] = {}
    finish: Callable[[nn.Module, Problem, Draws, Tensor], Finish] | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = None
    shown: str | None = None
    better: Literal["lower", "higher"] | None = None
    gap_unit: Literal["points"] | None = None
    warmup: float = 0.0
    decay: float = 0.0
    eval_rows: int = 512
    parts: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    size: int = 0
    parameters: int | None = None
    tokens: int | None = None
    samples: Callable[[], int] | None = None
    pretrain: Callable[[Sequence[int], str], dict[str, Tensor]] | None = None
    experience: Callable[[nn.Module, LaneNumerics, Draws], Experience] | None = None
    rounds_inputs: bool = False
    takes_bf16: bool = False
    replays: bool = False
    packed: bool = False
    swiglu8: bool = False
    recompute: bool = False
    logits: Callable[[Any], Tensor] | None = None
    one_by_one: bool = False
    origin: tuple[str, ...] = ()
    start: str | None = None
    start_method: str | None = None
    rates: dict[str, float] = {}

    def lr_factor(self, step: int) -> float:
        """Factor of the learning rate at a step."""
        rise = (step + 1) / (self.warmup * self.steps) if self.warmup else 1.0
        fall = (self.steps - step) / (self.decay * self.steps) if self.decay else 1.0
        return min(1.0, rise, fall)

    @property
    def metric_name(self) -> str | None:
        """The metric that stands beside the loss."""
        return self.shown or next(iter(self.metrics), None)

    @property
    def rolls_out(self) -> bool:
        """True if it learns from what its own model does."""
        return self.experience is not None

    @property
    def has_teacher(self) -> bool:
        """True if its lanes can learn from the model that they start from."""
        return self.logits is not None and (self.pretrain is not None or self.start is not None)

    @property
    def digest(self) -> str:
        """16 hex digits that stand for the data set, and for the weights of `start`."""
        return self.digest_of()

    @property
    def contents(self) -> str | None:
        """Packages and versions that the data were made of; None where the task's name and path say it."""
        return self.contents_of() if self.contents_of else None


def with_steps(task: Task, steps: int) -> Task:
    """The task, shortened or lengthened."""
    return msgspec.structs.replace(task, steps=steps)
