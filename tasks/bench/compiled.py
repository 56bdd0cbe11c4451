"""The strongest peer of the speed benchmark: what somebody who knows torch.compile writes for the same training.

It is frozen. All lanes have one recipe: NVFP4 in six slots (to nearest, no tensor scale, decoded to BF16), or BF16.
Weights of all lanes are stacked, and a product of all is one `bmm`; everything between products is BF16, weights and
moments FP32. Functions are compiled in several ways, of which the fastest counts (in_time.py), blocks of a decoder all
by the same code: three functions, whatever its depth. Batches are gathered by rows, AdamW is torch's fused one,
gradients are set to None, and on a GPU the step is one CUDA graph. Nothing of the engine is in it but the task's data
and initial weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fp4dse.dse import ConfigError
from fp4dse.tasks import get_task
from fp4dse.tasks.bench.in_time import Compile
from fp4dse.tasks.engine.lane_counts import wait_for
from fp4dse.tasks.task import Problem, Task

BLOCK, LARGEST, SCALE_LARGEST, SCALE_LEAST = 16, 6.0, 448.0, 2.0**-9
EPS = 1e-5
"""Of norms."""

Quantized = Literal["nothing", "blocks", "all"]
"""Layers in NVFP4; `blocks` leaves embedding and head in BF16, as recipes do. All layers of an MLP are blocks."""
Parameters = dict[str, Tensor]
Loss = Callable[[Parameters, Tensor, Tensor], Tensor]
"""(parameters, rows of x, rows of y), [L, B, …] each -> the sum of the lanes' losses."""


def nvfp4(x: Tensor) -> Tensor:
    """x [..., K] in E2M1 with an E4M3 scale for every 16 along K, decoded to bfloat16."""
    length = x.shape[-1]
    padded = F.pad(x, (0, -length % BLOCK)) if length % BLOCK else x
    cut = padded.float().unflatten(-1, (-1, BLOCK))
    scale = (cut.abs().amax(-1, keepdim=True) / LARGEST).clamp(SCALE_LEAST, SCALE_LARGEST)
    scale = scale.to(torch.float8_e4m3fn).float()
    y = (cut / scale).clamp(-LARGEST, LARGEST)
    magnitude = y.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    decoded: Tensor = torch.round(y / step) * step * scale
    return decoded.flatten(-2)[..., :length].to(torch.bfloat16)


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


class _Product(torch.autograd.Function):
    """x [L, M, K] times wᵀ of w [L, N, K], bfloat16 [L, M, N]; both operands of all three products quantized."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, quantized: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.quantized = quantized
        q = nvfp4 if quantized else bf16
        return torch.bmm(q(x), q(w).mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        q = nvfp4 if ctx.quantized else bf16
        return torch.bmm(q(g), q(w.mT).mT), torch.bmm(q(g.mT), q(x.mT).mT).float(), None


def linear(x: Tensor, w: Tensor, quantized: bool) -> Tensor:
    """x [L, ..., K] by w [L, N, K]."""
    out: Tensor = _Product.apply(x.flatten(1, -2), w, quantized)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], w.shape[1])


def mlp(compiled: Compile, quantized: Quantized) -> Loss:
    """The student of `regression`: linear layers with SiLU between them."""

    def loss(parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        h = x.to(torch.bfloat16)
        for i, w in enumerate(parameters.values()):
            h = linear(F.silu(h) if i else h, w, quantized != "nothing")
        return (h.float() - y).square().mean((1, 2)).sum()

    return compiled(loss)


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """x [L, B, T, D], gain [L, D]."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (wide * gain[:, None, None]).to(x.dtype)


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), x.shape[-1:], eps=EPS).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x [..., T, d]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attention(qkv: Tensor, heads: int, turn: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The mixed values [L, B, T, D] of qkv [L, B, T, 3·D]; `turn` of queries and keys, and causal, if there is one."""
    lanes, batch, length, _ = qkv.shape
    q, k, v = (x.transpose(1, 2) for x in qkv.flatten(0, 1).unflatten(-1, (3, heads, -1)).unbind(2))
    if turn:
        q, k = turn(q), turn(k)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=turn is not None)
    return mixed.transpose(1, 2).reshape(lanes, batch, length, -1)


def decoder(shape: Any, compiled: Compile, quantized: Quantized) -> Loss:
    """A Llama decoder without experts, `shape` as tasks/language/decoder.py has it."""

    blocks = quantized != "nothing"

    def block(h: Tensor, cos: Tensor, sin: Tensor, norm1: Tensor, qkv: Tensor, out: Tensor, *mlp: Tensor) -> Tensor:
        norm2, up, down = mlp
        turn = partial(turned, cos=cos, sin=sin)
        mixed = attention(linear(rms_norm(h, norm1), qkv, blocks), shape.heads, turn)
        h = h + linear(mixed, out, blocks)
        gate, inside = linear(rms_norm(h, norm2), up, blocks).chunk(2, -1)
        return h + linear(F.silu(gate) * inside, down, blocks)

    def end(h: Tensor, norm: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = linear(rms_norm(h, norm), head, quantized == "all")
        return len(h) * F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def begin(embed: Tensor, tokens: Tensor) -> Tensor:
        offset = embed.shape[1] * torch.arange(len(tokens), device=tokens.device)[:, None, None]
        return F.embedding(tokens[..., :-1] + offset, embed.flatten(0, 1)).to(torch.bfloat16)

    @cache
    def tables(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        size = shape.width // shape.heads
        angle = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
        angle = torch.arange(length, device=device)[:, None] * angle
        return angle.cos(), angle.sin()

    first, each, last = compiled(begin), compiled(block), compiled(end)

    def loss(parameters: Parameters, tokens: Tensor, _y: Tensor) -> Tensor:
        h = first(parameters["embed"], tokens)
        cos, sin = tables(h.shape[2], h.device)
        for i in range(shape.depth):
            names = ("norm1", "qkv", "out", "norm2", "up", "down")
            h = each(h, cos, sin, *(parameters[f"block{i}.{name}"] for name in names))
        out: Tensor = last(h, parameters["norm"], parameters["head"], tokens[..., 1:].contiguous())
        return out

    return loss


def vit(patch: int, depth: int, heads: int, compiled: Compile, quantized: Quantized) -> Loss:
    """A vision transformer as tasks/vision/vit.py has it, of pixels that are standardized already."""

    def loss(parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        def layer(name: str, x: Tensor) -> Tensor:
            bias = parameters[f"{name}.b"].to(x.dtype)
            q = quantized == "all" or (quantized == "blocks" and name.startswith("block"))
            return linear(x, parameters[f"{name}.w"], q) + bias.view(len(x), *[1] * (x.dim() - 2), -1)

        lanes, batch, height, width, channels = x.shape
        cut = x.view(lanes, batch, height // patch, patch, width // patch, patch, channels).transpose(3, 4)
        h = layer("embed", cut.reshape(lanes, batch, -1, patch * patch * channels).to(torch.bfloat16))
        h = h + parameters["position"].to(h.dtype).view(lanes, 1, *h.shape[2:])
        for i in range(depth):
            h = h + layer(f"block{i}.out", attention(layer(f"block{i}.qkv", layer_norm(h)), heads))
            h = h + layer(f"block{i}.down", F.silu(layer(f"block{i}.up", layer_norm(h))))
        logits = layer("head", layer_norm(h).float().mean(2).to(h.dtype))
        return lanes * F.cross_entropy(logits.flatten(0, -2).float(), y.flatten())

    return compiled(loss)


def loss_of(task: Task, compiled: Compile, quantized: Quantized) -> Loss:
    """The peer's model of a task. ConfigError for a task that has none."""
    sizes: tuple[Any, ...] = getattr(task.model, "args", ())
    if task.name == "regression":
        return mlp(compiled, quantized)
    if task.name == "language" and not sizes[0].experts:
        return decoder(sizes[0], compiled, quantized)
    if task.name == "vision" and len(sizes) == 3:  # patch, depth, heads
        return vit(sizes[0], sizes[1], sizes[2], compiled, quantized)
    raise ConfigError("task", f"{task.name}:{task.preset}", "regression, language without experts, or vision's vit")


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, where none are compiled."""
    return function


@lru_cache(1)
def _problem(name: str, preset: str) -> Problem:
    """Data and initial weights of a seed, some 25 seconds for 350M: made once for all ways to compile."""
    return get_task(name, preset).problem([0])


class Peer:
    """A training of `lanes` equal lanes, its functions compiled by `compile_`."""

    def __init__(
        self,
        task: Task,
        lanes: int,
        device: str,
        quantized: Quantized,
        compile_: Compile = as_written,
        problem: Problem | None = None,
    ) -> None:
        problem = problem or task.problem([0])
        self.loss_of, self.task = loss_of(task, compile_, quantized), task
        self.parameters = {
            name: value.to(device).expand(lanes, *value.shape[1:]).clone().requires_grad_()
            for name, value in problem.init.items()
        }
        self.x, self.y = problem.train_x[0].to(device), problem.train_y[0].to(device)
        if task.name == "vision":
            assert task.prepare is not None
            self.x = task.prepare(self.x[None], self.y[None], None)[0][0]  # type: ignore[arg-type]
        self.x = self.x.long() if task.name == "language" else self.x
        self.rows = torch.zeros(lanes, task.batch, dtype=torch.int64, device=device)
        on_gpu = torch.device(device).type == "cuda"
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=task.lr,
            betas=task.betas,
            weight_decay=task.weight_decay,
            fused=True,
            capturable=on_gpu,
        )
        self.step = captured(self._step) if on_gpu else self._step
        """One step of all lanes; the sum of their losses."""

    def _step(self) -> Tensor:
        self.rows.random_(len(self.x))
        y = self.y[self.rows] if self.y.numel() else self.y
        loss = self.loss_of(self.parameters, self.x[self.rows], y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A step as one CUDA graph, captured after three of it; each call returns the same memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def step_us(
    task: tuple[str, str], lanes: int, device: str, quantized: Quantized, compile_: Compile, least_s: float = 0.3
) -> float:
    """Microseconds of a step of the peer of a task and preset, the least of three rounds of `least_s` seconds;
    compiling is not in it."""
    peer = Peer(get_task(*task), lanes, device, quantized, compile_, _problem(*task))

    def seconds(steps: int) -> float:
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(steps):
            peer.step()
        wait_for(device)
        return (time.perf_counter() - begin) / steps

    seconds(3)  # compiles
    steps = max(3, int(least_s / seconds(3)))
    return 1e6 * min(seconds(steps) for _ in range(3))
