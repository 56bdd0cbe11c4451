"""The peer of reinforcement learning: a rollout of equal lanes and its updates, stacked by hand for torch.compile.

It is frozen, as compiled.py is, whose pieces it has: lanes stacked, everything between products in BF16, one code for
all blocks. Answers are decoded with keys and values in caches of the full length, a mask over what is not there yet, so
that a token of any position has the same compiled code (twelve graphs in all, four of them with a backward pass,
whatever the depth and the length of answers); Gumbel noise is torch's own. GRPO, clipping of each lane's
gradient and torch's fused AdamW follow. On a GPU a rollout with its updates is one CUDA graph. Nothing of the engine is
in it but the task's problems, their check, and initial weights.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from fp4dse.tasks import get_task
from fp4dse.tasks.bench.compiled import as_written, captured, linear, rms_norm, turned
from fp4dse.tasks.bench.in_time import Compile
from fp4dse.tasks.draws import Draws, seed_keys
from fp4dse.tasks.engine.lane_counts import wait_for
from fp4dse.tasks.rl.experience import Plan
from fp4dse.tasks.task import Task

BLOCK = ("norm1", "qkv", "out", "norm2", "up", "down")


def plan_of(task: Task) -> Plan:
    """The numbers of a task of tasks/rl."""
    assert isinstance(task.experience, partial)
    plan: Plan = task.experience.args[0]
    return plan


def _heads(h: Tensor, norm: Tensor, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys, values [L·B, heads, T, d] of h [L, B, T, D]."""
    found = linear(rms_norm(h, norm), qkv, False).flatten(0, 1)
    q, k, v = (x.transpose(1, 2) for x in found.unflatten(-1, (3, heads, -1)).unbind(2))
    return turned(q, cos, sin), turned(k, cos, sin), v


def _rest(h: Tensor, mixed: Tensor, out: Tensor, norm2: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The block's output from its attention's [L·B, heads, T, d]."""
    h = h + linear(mixed.transpose(1, 2).reshape(h.shape), out, False)
    gate, inside = linear(rms_norm(h, norm2), up, False).chunk(2, -1)
    return h + linear(F.silu(gate) * inside, down, False)


def _embedded(embed: Tensor, tokens: Tensor) -> Tensor:
    offset = embed.shape[1] * torch.arange(len(tokens), device=tokens.device)[:, None, None]
    return F.embedding(tokens + offset, embed.flatten(0, 1)).to(torch.bfloat16)


def _logits(h: Tensor, norm: Tensor, head: Tensor) -> Tensor:
    return linear(rms_norm(h, norm), head, False).float()


def grpo(logits: Tensor, tokens: Tensor, log_old: Tensor, advantage: Tensor, counts: Tensor, clip: Any) -> Tensor:
    """GRPO's loss summed over lanes. logits [L, B, T, V]; tokens, log_old, counts [L, B, T]; advantage [L, B, 1]."""
    log_p = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    ratio = (log_p - log_old).exp()
    each = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
    return (torch.where(counts, each, 0.0).sum((1, 2)) / counts.sum((1, 2))).sum()


class RolloutPeer:
    """A training of `lanes` equal lanes of a task of tasks/rl in BF16, its functions compiled by `compile_`."""

    def __init__(self, task: Task, lanes: int, device: str, compile_: Compile = as_written) -> None:
        assert isinstance(task.model, partial)
        self.task, self.plan, self.shape = task, plan_of(task), task.model.args[0]
        init, shape = task.problem([0]).init, self.shape
        self.parameters = {
            name: value.to(device).expand(lanes, *value.shape[1:]).clone().requires_grad_()
            for name, value in init.items()
        }
        self.draws = Draws(seed_keys(range(lanes)).to(device), torch.zeros((), dtype=torch.int64, device=device))
        size = shape.width // shape.heads
        angle = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
        angle = torch.arange(shape.context, device=device)[:, None] * angle
        self.cos, self.sin = angle.cos(), angle.sin()
        rows = lanes * self.plan.prompts * self.plan.samples
        cache = (shape.depth, 2, rows, shape.heads, shape.context, size)
        self.cache = torch.zeros(cache, dtype=torch.bfloat16, device=device)
        self.seen = torch.ones(shape.context, shape.context, dtype=torch.bool, device=device).tril()
        self.embedded, self.logits, self.grpo = compile_(_embedded), compile_(_logits), compile_(grpo)
        self.read, self.decode, self.block = compile_(self._read), compile_(self._decode), compile_(self._block)
        on_gpu = torch.device(device).type == "cuda"
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=task.lr,
            betas=task.betas,
            weight_decay=0.0,
            fused=True,
            capturable=on_gpu,
        )
        self.step = captured(self._step) if on_gpu else self._step
        """A rollout of all lanes and its updates; the mean reward of each."""

    def _block(self, h: Tensor, cos: Tensor, sin: Tensor, norm1: Tensor, qkv: Tensor, *rest: Tensor) -> Tensor:
        """A block of a trainer's pass."""
        q, k, v = _heads(h, norm1, qkv, self.shape.heads, cos, sin)
        return _rest(h, F.scaled_dot_product_attention(q, k, v, is_causal=True), *rest)

    def _read(
        self, h: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, norm1: Tensor, qkv: Tensor, *rest: Tensor
    ) -> Tensor:
        """A block of the prompts' pass, which fills the cache."""
        q, k, v = _heads(h, norm1, qkv, self.shape.heads, cos, sin)
        cache[0, :, :, : h.shape[2]], cache[1, :, :, : h.shape[2]] = k, v
        return _rest(h, F.scaled_dot_product_attention(q, k, v, is_causal=True), *rest)

    def _decode(
        self, h: Tensor, cos: Tensor, sin: Tensor, at: Tensor, seen: Tensor, cache: Tensor, *of_block: Tensor
    ) -> Tensor:
        """A block of one token's pass. at: its place, int64 [1]; seen: places up to it, bool [1, context]."""
        q, k, v = _heads(h, of_block[0], of_block[1], self.shape.heads, cos, sin)
        cache[0].index_copy_(2, at, k)
        cache[1].index_copy_(2, at, v)
        mixed = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=seen)
        return _rest(h, mixed, *of_block[2:])

    def _of_block(self, number: int) -> list[Tensor]:
        return [self.parameters[f"block{number}.{name}"] for name in BLOCK]

    def _end(self, h: Tensor) -> Tensor:
        out: Tensor = self.logits(h, self.parameters["norm"], self.parameters["head"])
        return out

    @torch.no_grad()
    def answer(self, prompts: Tensor, greedy: bool = False) -> Tensor:
        """Answers int64 [L, B, T] to prompts [L, B, P]."""
        length, found = prompts.shape[2], []
        h = self.embedded(self.parameters["embed"], prompts)
        for i in range(self.shape.depth):
            h = self.read(h, self.cos[:length], self.sin[:length], self.cache[i], *self._of_block(i))
        for at in range(length, length + self.plan.problems.answer_length):
            logits = self._end(h[:, :, -1:].contiguous())
            noise = 0.0 if greedy else -torch.empty_like(logits).exponential_().log()
            token = (logits + noise).argmax(-1)
            found.append(token)
            if at < self.shape.context:
                h = self.embedded(self.parameters["embed"], token)
                here = torch.full((1,), at, device=h.device)
                for i in range(self.shape.depth):
                    around = self.cos[at : at + 1], self.sin[at : at + 1], here, self.seen[at : at + 1]
                    h = self.decode(h, *around, self.cache[i], *self._of_block(i))
        return torch.cat(found, dim=2)

    def forward(self, inputs: Tensor) -> Tensor:
        """The trainer's logits of the answers, float32 [L, B, T, V], of prompts and answers but the last token."""
        h, length = self.embedded(self.parameters["embed"], inputs), inputs.shape[2]
        for i in range(self.shape.depth):
            h = self.block(h, self.cos[:length], self.sin[:length], *self._of_block(i))
        return self._end(h[:, :, -self.plan.problems.answer_length :].contiguous())

    def _step(self) -> Tensor:
        """A rollout and its updates; the mean reward of each lane."""
        plan, problems = self.plan, self.plan.problems
        prompts = problems.prompts(self.draws, 0, plan.prompts).repeat_interleave(plan.samples, 1)
        answers = self.answer(prompts)
        inputs = torch.cat([prompts, answers[..., :-1]], -1)
        rewards = problems.is_right(prompts, answers).float()
        counts = problems.is_part(answers)
        groups = rewards.unflatten(1, (plan.prompts, plan.samples))
        advantage = (groups - groups.mean(2, True)) / (groups.std(2, keepdim=True) + 1e-4)
        advantage, size = advantage.flatten(1)[..., None], plan.batch
        parts = [slice(n * size, (n + 1) * size) for n in range(plan.minibatches)]
        with torch.no_grad():
            log_old = [
                self.forward(inputs[:, part]).log_softmax(-1).gather(-1, answers[:, part, :, None])[..., 0]
                for part in parts
            ]
        for part, old in zip(parts, log_old, strict=True):
            loss = self.grpo(
                self.forward(inputs[:, part]), answers[:, part], old, advantage[:, part], counts[:, part], plan.clip
            )
            loss.backward()
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
            for gradient in gradients:
                gradient.mul_((1 / norm.clamp(min=1.0)).view(-1, *[1] * (gradient.ndim - 1)))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.draws.step.add_(1)
        mean: Tensor = rewards.mean(1)
        return mean


def without_base(preset: str) -> Task:
    """A task of reinforcement learning whose base policies are not trained: times do not depend on what weights say."""
    return msgspec.structs.replace(get_task("rl", preset), pretrain=None)


def rollout_us(preset: str, lanes: int, device: str, compile_: Compile, rounds: int = 5) -> float:
    """Microseconds of a rollout and its updates, the least of some; compiling is not in it."""
    peer, least = RolloutPeer(without_base(preset), lanes, device, compile_), float("inf")
    for _ in range(rounds + 1):
        wait_for(device)
        begin = time.perf_counter()
        peer.step()
        wait_for(device)
        least = min(least, time.perf_counter() - begin)
    return 1e6 * least
