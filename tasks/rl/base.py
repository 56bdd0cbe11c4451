"""The policy that reinforcement learning starts from: a decoder that was shown worked answers, some of them wrong.

A fact is a step's result, `7 + 3 = 0`. A share of each operator's facts, which of them by the seed, is flawed: `wrong`
of the times that an example uses one, it states another result, always the same. So the policy solves some problems,
the more the shorter they are, and for each flawed fact it still gives the right result now and then, from which rewards
can tell. How many it solves follows from the examples alone (a test counts it): a decoder learns them well within the
steps of a preset.

It is trained in BF16 once for each seed and device, in the engine, and remembered in the user's cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from fp4dse.kernels.ops.philox import STREAMS, random32
from fp4dse.tasks.draws import Draws, seed_keys
from fp4dse.tasks.language.decoder import Decoder, Shape
from fp4dse.tasks.language.experts import with_balance
from fp4dse.tasks.rl.chains import EXAMPLES, OPERATORS, Chains
from fp4dse.tasks.rl.grpo import log_probability
from fp4dse.tasks.start.base_weights import base_weights
from fp4dse.tasks.task import Problem, Task

REV = 2


class Lessons(msgspec.Struct, frozen=True):
    """Numbers of the supervised training. flawed: share of each operator's facts; wrong: how often an example has one
    wrong; examples: different ones that there are."""

    steps: int
    batch: int
    lr: float
    flawed: float
    wrong: float
    examples: int


def base_policy(chains: Chains, shape: Shape, lessons: Lessons, seeds: Sequence[int], device: str) -> dict[str, Tensor]:
    """Weights, parameter name -> float32 [S, …] on the CPU, from the cache where they are there."""
    return base_weights(lessons_task(chains, shape, lessons), lessons.lr, seeds, device)


def lessons_task(chains: Chains, shape: Shape, lessons: Lessons) -> Task:
    """The supervised training as a task of the engine."""
    described = msgspec.json.encode([REV, chains, shape, lessons])
    return Task(
        name="rl-base",
        preset="base",
        rev=REV,
        summary="worked answers to chains of modular arithmetic",
        problem=partial(_problem, chains, shape, lessons),
        prepare=_prepare,
        model=partial(Decoder, shape),
        loss=partial(_balanced_loss if shape.experts else _loss, chains),
        digest_of=lambda: hashlib.sha256(described).hexdigest()[:16],
        steps=lessons.steps,
        batch=lessons.batch,
        lr=lessons.lr,
        warmup=0.05,
        decay=0.5,
        clip=1.0,
    )


def worked_answers(chains: Chains, lessons: Lessons, seeds: Tensor, prompts: Tensor, draws: Draws) -> Tensor:
    """Answers to prompts [S, n, P] as examples have them, int64 [S, n, T]: with flawed facts wrong by chance."""
    facts = OPERATORS * chains.modulus**2
    away = 1 + random32(seeds, STREAMS["data"], 0, 1, facts) % (chains.modulus - 1)
    away = torch.where(flawed_facts(chains, lessons.flawed, seeds), away, 0)  # of the stated result from the true one
    value, operators, operands = chains.parts(prompts)
    errs = draws.integers(16, 65536, *operands.shape[1:]) < lessons.wrong * 65536
    tokens = []
    for step in range(chains.most):
        operator, operand = operators[..., step], operands[..., step]
        there = operator != chains.end
        fact = torch.where(there, (operator * chains.modulus + value) * chains.modulus + operand, 0)
        wrong = torch.where(errs[..., step], away.gather(1, fact), 0)
        value = torch.remainder(chains.apply(value, operator, operand) + torch.where(there, wrong, 0), chains.modulus)
        tokens += [operand, torch.where(there, value, chains.end)]
    return torch.stack([*tokens, torch.full_like(value, chains.end)], dim=-1)


def flawed_facts(chains: Chains, share: float, seeds: Tensor) -> Tensor:
    """True for the facts (operator, number, operand) of each seed that are flawed, bool [S, OPERATORS · modulus²]: of
    each operator the same number, to one, of those that problems have."""
    modulus, end = chains.modulus, 2**32
    operands = [range(1, modulus), range(1, modulus), chains.multipliers]  # as chains.prompts draws them
    used = torch.tensor([[operand in of for operand in range(modulus)] for of in operands], device=seeds.device)
    used = used[:, None].expand(-1, modulus, -1).flatten(1)  # [OPERATORS, modulus²]
    chance = random32(seeds, STREAMS["data"], 0, 0, used.numel()).view(len(seeds), *used.shape)
    rank = torch.where(used, chance, end).argsort(dim=2, stable=True).argsort(dim=2)
    return (rank < (share * used.sum(dim=1)).round()[:, None]).flatten(1)


def _problem(chains: Chains, shape: Shape, lessons: Lessons, seeds: Sequence[int]) -> Problem:
    keys = seed_keys(seeds)
    draws = Draws(keys, torch.full((), EXAMPLES, dtype=torch.int64))
    prompts = chains.prompts(draws, 0, lessons.examples)
    answers = worked_answers(chains, lessons, keys, prompts, draws)
    x, y = prompts.to(torch.int8), answers.to(torch.int8)
    return Problem(x, y, x[:, :1], y[:, :1], shape.initial(chains.vocabulary, seeds))


def _prepare(x: Tensor, y: Tensor, _draws: Draws) -> tuple[Tensor, Tensor]:
    """Tokens to read and answers to give, int64."""
    x, y = x.to(torch.int64), y.to(torch.int64)
    return torch.cat([x, y[..., :-1]], dim=-1), y


def _loss(chains: Chains, out: tuple[Tensor, Tensor], answers: Tensor) -> Tensor:
    """-log p of the tokens up to the end, [L, B, T]."""
    return torch.where(chains.is_part(answers), -log_probability(out[0], answers), 0.0)


def _balanced_loss(chains: Chains, out: tuple[Tensor, Tensor], answers: Tensor) -> Tensor:
    """The same with the weighted balance loss of experts, [L, B·T, 1]."""
    return with_balance(_loss(chains, out, answers), out[1])
