"""Baseline of the speed benchmark: the same training, one lane at a time, in eager torch with quantizers in plain
torch.

It is frozen: simulations of FP4 training are commonly written like this, and it stays so whatever the engine becomes.
NVFP4 in six slots with a current tensor maximum, decoded into FP32, products in BF16 on a GPU and FP32 on a CPU,
torch.optim.AdamW. Rounding is to nearest; its bits are not the engine's, its work is.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from fp4dse.dse import Recipe
from fp4dse.kernels.lanes import Forward
from fp4dse.kernels.learned import Clips
from fp4dse.kernels.ops.attention import attention
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.engine.batches import Batches
from fp4dse.tasks.engine.lane_counts import wait_for
from fp4dse.tasks.task import Task

BLOCK, LARGEST, SCALE_LARGEST = 16, 6.0, 448.0


def nvfp4(x: Tensor) -> Tensor:
    """x [..., K] quantized and decoded along K: E2M1 in blocks of 16 with E4M3 scales under a tensor scale."""
    missing = -x.shape[-1] % BLOCK
    padded = nn.functional.pad(x, (0, missing)) if missing else x
    cut = padded.reshape(*padded.shape[:-1], -1, BLOCK)
    tensor_scale = (cut.abs().amax() / (LARGEST * SCALE_LARGEST)).clamp(min=1e-30)
    amax = cut.abs().amax(dim=-1, keepdim=True)
    scale = (amax / LARGEST / tensor_scale).clamp(max=SCALE_LARGEST).to(torch.float8_e4m3fn).to(x.dtype)
    scale = scale * tensor_scale
    y = torch.where(scale > 0, cut / scale, 0.0).clamp(-LARGEST, LARGEST)
    magnitude = y.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = torch.round(magnitude / step) * step * torch.sign(y)
    return (rounded * scale).reshape(padded.shape)[..., : x.shape[-1]]


class EagerNumerics:
    """Stands in for LaneNumerics where a single lane is trained by plain torch operations."""

    dtype = torch.float32
    recipes = (Recipe.named("bf16"),)  # no parameters beside the weights

    class backend:
        name = "eager torch"

    def __init__(self, device: str) -> None:
        self.seeds = torch.zeros(1, dtype=torch.int64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.lanes, self.training = 1, True

    def add_layer(self, *_: object) -> None:
        """Every layer is quantized."""

    def clips(self, _layer: int) -> dict[str, Clips]:
        """Nothing is learned."""
        return {}

    def clipped(self, _operand: str, _layer: int, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def gemm(
        self,
        stage: str,
        layer: int,
        a: Tensor,
        a_dim: int,
        b: Tensor,
        b_dim: int,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
        made: None = None,
    ) -> Tensor:
        a, b = (a if a_dim == 2 else a.mT), (b if b_dim == 2 else b.mT)
        a, b = nvfp4(a.contiguous()), nvfp4(b.contiguous())
        if a.is_cuda:
            product = torch.bmm(a.to(torch.bfloat16), b.to(torch.bfloat16).mT).to(torch.float32)
        else:
            product = torch.bmm(a, b.mT)
        return product if out is None else out.copy_(product)

    def both_of_gradient(self, *_: object) -> tuple[()]:
        """They are made apart."""
        return ()

    def split(self, _layer: int) -> None:
        """There is one lane."""

    def attention(self, _layer: int, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, heads: int = 1) -> Tensor:
        return attention(q, k, v, causal, heads)

    def input_dtype(self, stage: str, layer: int, dtype: torch.dtype) -> torch.dtype:
        """Nothing is rounded beforehand."""
        return dtype

    def common_dtype(self, operand: str, layer: int, dtype: torch.dtype) -> torch.dtype:
        """Nothing is rounded beforehand."""
        return dtype

    def needs_forward_x(self, layer: int) -> bool:
        """The backward pass needs nothing that the forward pass made of x."""
        return False

    def forward(
        self,
        layer: int,
        x: Tensor,
        w: Tensor,
        save: tuple[bool, bool] = (False, False),
        copy_x: bool = True,
        b: Tensor | None = None,
    ) -> Forward:
        y = self.gemm("fprop", layer, x, 2, w, 2)
        return Forward(y if b is None else y + b[:, None, :], x, w, None, None)

    def backward(self, operand: str, layer: int, g: Tensor, saved: object) -> Tensor:
        return g


def seconds_per_step(task: Task, device: str, steps: int = 20, warm_up: int = 3, rounds: int = 3) -> float:
    """Seconds of a step of one lane: the least of `rounds` rounds of `steps` steps."""
    problem = task.problem([0])
    numerics = EagerNumerics(device)
    model = task.model({name: value.to(device) for name, value in problem.init.items()}, numerics)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.lr, betas=task.betas, eps=task.eps, weight_decay=task.weight_decay
    )
    batches = Batches([0], problem.train_x.shape[1], task.batch, 10_000, device)
    x_all, y_all = problem.train_x[0].to(device), problem.train_y[0].to(device)
    draws = Draws(numerics.seeds, numerics.step)

    def one(step: int) -> None:
        numerics.step.fill_(step)
        rows = batches(numerics.step)[0]
        x, y = x_all[rows][None], y_all[rows][None]
        inputs, targets = task.prepare(x, y, draws) if task.prepare else (x, y)
        task.loss(model(inputs), targets).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    batches.prepare(0)
    for step in range(warm_up):
        one(step)
    times = []
    for _ in range(rounds):
        wait_for(device)
        begin = time.perf_counter()
        for step in range(steps):
            one(step)
        wait_for(device)
        times.append((time.perf_counter() - begin) / steps)
    return min(times)
