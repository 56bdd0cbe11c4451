"""The policy that reinforcement learning starts from: a decoder that was shown worked answers, some of them wrong.

A fact is a step's result, `7 + 3 = 0` (problems.py). A share of each group of facts (of each operator's, say), which
of them by the seed, is flawed: `wrong` of the times that an example uses one, it states another outcome, always the
same. So the policy solves some problems, the more the shorter they are, and for each flawed fact it still gives the
right outcome now and then, from which rewards can tell. How many it solves follows from the examples alone (a test
counts it): a decoder learns them well within the steps of a preset.

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
from fp4dse.tasks.rl.grpo import log_probability
from fp4dse.tasks.rl.problems import EXAMPLES, Flaws, Problems
from fp4dse.tasks.start.base_weights import base_weights
from fp4dse.tasks.task import Problem, Task

REV = 2


class Lessons(msgspec.Struct, frozen=True):
    """Numbers of the supervised training. flawed: share of each group's facts; wrong: how often an example has one
    wrong; examples: different ones that there are."""

    steps: int
    batch: int
    lr: float
    flawed: float
    wrong: float
    examples: int


def base_policy(
    problems: Problems, shape: Shape, lessons: Lessons, seeds: Sequence[int], device: str
) -> dict[str, Tensor]:
    """Weights, parameter name -> float32 [S, …] on the CPU, from the cache where they are there."""
    return base_weights(lessons_task(problems, shape, lessons), lessons.lr, seeds, device)


def lessons_task(problems: Problems, shape: Shape, lessons: Lessons) -> Task:
    """The supervised training as a task of the engine."""
    described = msgspec.json.encode([REV, problems, shape, lessons])
    return Task(
        name="rl-base",
        preset="base",
        rev=REV,
        summary=f"worked answers to {problems.about}",
        problem=partial(_problem, problems, shape, lessons),
        prepare=_prepare,
        model=partial(Decoder, shape),
        loss=partial(_balanced_loss if shape.experts else _loss, problems),
        digest_of=lambda: hashlib.sha256(described).hexdigest()[:16],
        steps=lessons.steps,
        batch=lessons.batch,
        lr=lessons.lr,
        warmup=0.05,
        decay=0.5,
        clip=1.0,
    )


def worked_answers(problems: Problems, lessons: Lessons, seeds: Tensor, prompts: Tensor, draws: Draws) -> Tensor:
    """Answers to prompts [S, n, P] as examples have them, int64 [S, n, T]: with flawed facts wrong by chance."""
    flawed = flawed_facts(problems, lessons.flawed, seeds)
    away = 1 + random32(seeds, STREAMS["data"], 0, 1, flawed.shape[1]) % (problems.outcomes - 1)
    errs = draws.integers(16, 65536, prompts.shape[1], problems.uses) < lessons.wrong * 65536
    return problems.answers(prompts, Flaws(torch.where(flawed, away, 0), errs))


def flawed_facts(problems: Problems, share: float, seeds: Tensor) -> Tensor:
    """True for the facts of each seed that are flawed, bool [S, facts]: of each group the same share, to one fact, of
    those that problems have."""
    used, end = torch.tensor(problems.facts(), device=seeds.device), 2**32  # [groups, facts of each]
    chance = random32(seeds, STREAMS["data"], 0, 0, used.numel()).view(len(seeds), *used.shape)
    rank = torch.where(used, chance, end).argsort(dim=2, stable=True).argsort(dim=2)
    return (rank < (share * used.sum(dim=1)).round()[:, None]).flatten(1)


def _problem(problems: Problems, shape: Shape, lessons: Lessons, seeds: Sequence[int]) -> Problem:
    keys = seed_keys(seeds)
    draws = Draws(keys, torch.full((), EXAMPLES, dtype=torch.int64))
    prompts = problems.prompts(draws, 0, lessons.examples)
    answers = worked_answers(problems, lessons, keys, prompts, draws)
    small = torch.int8 if problems.vocabulary <= 128 else torch.int16
    x, y = prompts.to(small), answers.to(small)
    return Problem(x, y, x[:, :1], y[:, :1], shape.initial(problems.vocabulary, seeds))


def _prepare(x: Tensor, y: Tensor, _draws: Draws) -> tuple[Tensor, Tensor]:
    """Tokens to read and answers to give, int64."""
    x, y = x.to(torch.int64), y.to(torch.int64)
    return torch.cat([x, y[..., :-1]], dim=-1), y


def _loss(problems: Problems, out: tuple[Tensor, Tensor], answers: Tensor) -> Tensor:
    """-log p of the tokens up to the end, [L, B, T]."""
    return torch.where(problems.is_part(answers), -log_probability(out[0], answers), 0.0)


def _balanced_loss(problems: Problems, out: tuple[Tensor, Tensor], answers: Tensor) -> Tensor:
    """The same with the weighted balance loss of experts, [L, B·T, 1]."""
    return with_balance(_loss(problems, out, answers), out[1])
