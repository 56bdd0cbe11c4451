"""Training a population: lanes of one task in lock-step, each with its own recipe, learning rate and seed.

Every tensor carries the lane axis first, nothing is reduced across lanes, and batches, initial weights and random bits
come from counters, so a lane's trajectory depends on its own (recipe, learning rate, task, preset, seed) alone. A lane
whose loss or gradient becomes NaN or Inf is frozen at that step; its neighbours do not notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels import LaneNumerics, lane_mean
from fp4dse.kernels.arithmetic.philox import STREAMS, random32
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.job import JobResult, Lane, LaneResult, Progress
from fp4dse.tasks.optimizer import LaneAdamW
from fp4dse.tasks.task import Finish, Problem, Task

REV = 2
"""Revision of what training computes apart from the quantizers; raised when a fix changes results."""

CURVE_POINTS = 64
EAGER_STEPS = 3
"""Steps before the step is captured as a CUDA graph: kernels are compiled and what is kept between steps exists."""


def train(
    task: Task,
    lanes: Sequence[Lane],
    device: str = "cpu",
    report: Callable[[Progress], None] = lambda _: None,
    every_s: float = 1.0,
) -> JobResult:
    """Train the lanes, which must share their structural signature, and evaluate them on held-out data.

    `report` is called about every `every_s` seconds. A single lane is given a dead companion (see LaneNumerics).
    """
    started = time.monotonic()
    report(Progress("setup", 0, task.steps, [None] * len(lanes)))
    wanted = len(lanes)
    lanes = [*lanes, lanes[0]] if wanted == 1 else list(lanes)
    population = _Population(task, lanes, device)
    ready = time.monotonic()
    last = ready
    for step in range(task.steps):
        population.train_step(step)
        if time.monotonic() - last > every_s:
            last = time.monotonic()
            report(Progress("train", step + 1, task.steps, population.losses_now(step)[:wanted]))
    report(Progress("evaluate", task.steps, task.steps, population.losses_now(task.steps - 1)[:wanted]))
    results = population.results()[:wanted]
    numerics = population.numerics
    gemms = list(numerics.gemms.values())
    return JobResult(
        lanes=results,
        train_s=time.monotonic() - ready,
        setup_s=ready - started,
        quantizer_backend=numerics.backend.name,
        gemm_backend=gemms[0] if len(set(gemms)) == 1 else " ".join(gemms),
        fallbacks=[*numerics.backend.why_not, *numerics.gemm_why_not, *population.fallbacks],
        peak_memory_bytes=_peak_memory(device),
    )


class _Population:
    """Tensors of a running population. All state has the lane axis first."""

    def __init__(self, task: Task, lanes: Sequence[Lane], device: str) -> None:
        self.task = task
        seeds = sorted({lane.seed for lane in lanes})
        problem = task.problem(seeds)
        data = {k: getattr(problem, k).to(device) for k in ("train_x", "train_y", "val_x", "val_y")}
        self.problem = Problem(**data, init={})
        of_lane = torch.tensor([seeds.index(lane.seed) for lane in lanes], device=device)
        self.seed_index = of_lane
        self.data_index = of_lane if len(problem.train_x) > 1 or len(seeds) == 1 else torch.zeros_like(of_lane)
        self.numerics = LaneNumerics([lane.recipe for lane in lanes], [lane.seed for lane in lanes], device)
        self.draws = Draws(self.numerics.seeds, self.numerics.step, self.numerics.backend.words)
        parameters = {name: value.to(device)[of_lane] for name, value in problem.init.items()}
        self.model = task.model(parameters, self.numerics)
        lr = torch.tensor([lane.lr for lane in lanes], dtype=torch.float32, device=device)
        self.optimizer = LaneAdamW(self.model, lr, task.betas, task.eps, task.weight_decay)
        self.schedule = self.optimizer.schedule([task.lr_factor(step) for step in range(task.steps)])
        self.order = batch_order(seeds, problem.train_x.shape[1], task.batch, task.steps).to(device)
        self.losses = torch.zeros(task.steps, len(lanes), device=device)
        self.alive = torch.ones(len(lanes), dtype=torch.bool, device=device)
        self.diverged = torch.full((len(lanes),), -1, dtype=torch.int64, device=device)
        self.stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.fallbacks: list[str] = []

    def train_step(self, step: int) -> None:
        """Step `step`; on a GPU, after the first few, by replaying the captured one."""
        self.numerics.step.fill_(step)
        if self.stream is None:
            self._step()
            return
        if step == EAGER_STEPS:
            self._capture(self.stream)
        if self.graph is not None:
            self.graph.replay()
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # on which it is going to be captured
            self._step()
        torch.cuda.current_stream().wait_stream(self.stream)

    def _capture(self, stream: torch.cuda.Stream) -> None:
        """Record the step as a CUDA graph. Nothing is computed: what a replay changes, it changes in place."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                self._step()
        except RuntimeError as error:  # what an operation must not do in a graph, the driver says
            self.fallbacks.append(f"CUDA graph not taken: {' '.join(str(error).split())[:200]}")
            self.model.zero_grad()
        else:
            self.graph = graph

    def _step(self) -> None:
        at = self.numerics.step.view(1)
        rows = self.order.index_select(0, at)[0][self.seed_index]  # [L, B]
        x = self.problem.train_x[self.data_index[:, None], rows]
        y = self.problem.train_y[self.data_index[:, None], rows]
        inputs, targets = self._prepared(x, y)
        loss = lane_mean(self.task.loss(self.model(inputs), targets))  # [L]
        loss.sum().backward()
        gradient = self.optimizer.gradient()
        finite = torch.isfinite(loss.detach()) & torch.isfinite(gradient).all(dim=1)
        self.diverged.copy_(torch.where(self.alive & ~finite, self.numerics.step, self.diverged))
        self.alive.logical_and_(finite)
        self.optimizer.step(gradient, self.alive, self.schedule.index_select(0, at)[0])
        self.losses.index_copy_(0, at, loss.detach()[None])

    def _prepared(self, x: Tensor, y: Tensor) -> tuple[Any, Any]:
        return self.task.prepare(x, y, self.draws) if self.task.prepare else (x, y)

    @torch.no_grad()
    def evaluate(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss and metrics on the held-out data, [L] each, with the quantizers on as in training, but for what
        they keep from step to step, which stays as it is."""
        self.numerics.training = False
        task, losses = self.task, []
        metrics: dict[str, list[Tensor]] = {name: [] for name in task.metrics}
        n = self.problem.val_x.shape[1]
        for start in range(0, n, task.eval_rows):
            self.numerics.step.fill_(task.steps + start)  # fresh random bits for every pass
            x = self.problem.val_x[self.data_index, start : start + task.eval_rows]
            y = self.problem.val_y[self.data_index, start : start + task.eval_rows]
            inputs, targets = self._prepared(x, y)
            out = self.model(inputs)
            weight = x.shape[1] / n
            losses.append(lane_mean(task.loss(out, targets)) * weight)
            for name, metric in task.metrics.items():
                metrics[name].append(lane_mean(metric(out, targets)) * weight)
        return _sum(losses), {name: _sum(parts) for name, parts in metrics.items()}

    @torch.no_grad()
    def finish(self, val_loss: Tensor) -> Finish:
        """What the task makes of the trained models."""
        if self.task.finish is None:
            return Finish()
        self.numerics.step.fill_(self.task.steps)
        return self.task.finish(self.model, self.problem, self.draws, val_loss)

    def losses_now(self, step: int) -> list[float | None]:
        values = torch.where(self.alive, self.losses[step], torch.nan).tolist()
        return [_number(v) for v in values]

    def results(self) -> list[LaneResult]:
        val_loss, metrics = self.evaluate()
        finish = self.finish(val_loss)
        metrics |= finish.metrics
        steps = self.task.steps
        self.diverged = torch.where(self.alive & ~torch.isfinite(val_loss), steps, self.diverged)
        points = curve_steps(steps)
        tail = max(1, steps // 20)
        out = []
        for lane, (losses, at) in enumerate(zip(self.losses.T.tolist(), self.diverged.tolist(), strict=True)):
            ended = at >= 0
            seen = losses[:at] if ended else losses
            shown = [p for p in points if p < len(seen)]
            out.append(
                LaneResult(
                    status="diverged" if ended else "done",
                    diverged_step=at if ended else None,
                    train_loss_min=min(seen, default=None),
                    train_loss_final=None if ended else sum(losses[-tail:]) / tail,
                    val_loss=None if ended else _number(val_loss[lane].item()),
                    metrics={} if ended else {name: _number(of[lane].item()) for name, of in metrics.items()},
                    pictures={} if ended else {name: of[lane] for name, of in finish.pictures.items()},
                    curve_step=[p + 1 for p in shown],
                    curve_loss=[seen[p] for p in shown],
                )
            )
        return out


def batch_order(seeds: Sequence[int], n: int, batch: int, steps: int) -> Tensor:
    """int64 [steps, S, batch]: rows of each batch. Every epoch is a new permutation per seed, a last short batch is
    dropped. Raises ValueError for a batch larger than the data."""
    if batch > n:
        raise ValueError(f"batch {batch} is larger than the {n} training samples")
    keys = torch.tensor(list(seeds), dtype=torch.int64)
    per_epoch = n // batch
    epochs = []
    for epoch in range(-(-steps // per_epoch)):
        draws = random32(keys, STREAMS["order"], epoch, 0, n)
        permutation = torch.argsort(draws, dim=1, stable=True)[:, : per_epoch * batch]
        epochs.append(permutation.view(len(keys), per_epoch, batch))
    return torch.cat(epochs, dim=1)[:, :steps].transpose(0, 1).contiguous()


def curve_steps(steps: int) -> list[int]:
    """At most CURVE_POINTS log-spaced step indices, first and last included."""
    spaced = torch.logspace(0, torch.tensor(float(steps)).log10().item(), min(CURVE_POINTS, steps), dtype=torch.float64)
    return sorted({min(steps, round(s)) - 1 for s in spaced.tolist()} | {0, steps - 1})


def _sum(parts: list[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])


def _number(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def _peak_memory(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
