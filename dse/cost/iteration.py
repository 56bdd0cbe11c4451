"""The modelled time of an iteration of reinforcement learning: a rollout, then the updates on what it sampled.

    rollout    answers · asked / at_once · tokens · the time of a token (decoding.py) in the middle of an answer, where
               prompt + tokens / 2 tokens have been. The time is linear in the tokens so far, so this is the mean
    update     answers · (prompt + tokens) · epochs · the time of a training step (step.py) for each of its tokens
    share      what the rollout takes of BF16's iteration

    iteration relative to BF16's = share · rollout relative to BF16's + (1 - share) · step relative to BF16's

Both are of the same model on the same chip with the same scenario, one after the other. Prompts cost nothing to read,
all answers have their full length and none waits; weights reach the rollout at no cost; and there is no second forward
pass, for probabilities under the policy before the update or under a reference.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from fp4dse.dse.cost.chip import Chip, load_chip, load_data
from fp4dse.dse.cost.decoding import token_seconds
from fp4dse.dse.cost.model import Model, load_model
from fp4dse.dse.cost.scenario import MID
from fp4dse.dse.cost.step import DEFAULT_CHIP, DEFAULT_MODEL, step_cost
from fp4dse.dse.recipe import Recipe


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shapes of an iteration on one GPU.

    answers  that are learned from, each of `tokens` tokens after a prompt of `prompt` tokens
    at_once  answers that are sampled at once
    asked    answers that are sampled for each one that is learned from: DAPO's dynamic sampling (2503.14476)
    epochs   times that each answer is learned from
    """

    name: str
    summary: str
    source: str
    answers: int
    prompt: int
    tokens: int
    at_once: int
    asked: float = 1.0
    epochs: float = 1.0

    def __post_init__(self) -> None:
        for name in ("answers", "tokens", "at_once", "epochs"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name):g}, but must be a finite number above 0")
        if self.prompt < 0:
            raise ValueError(f"prompt is {self.prompt}, but must be a number of tokens, 0 or above")
        if not 1 <= self.asked < math.inf:
            raise ValueError(f"asked is {self.asked:g}, but must be a finite number, 1 or above")
        if self.at_once > self.answers * self.asked:
            raise ValueError(f"at_once is {self.at_once}, but only {self.answers * self.asked:g} answers are sampled")


class Iteration(NamedTuple):
    """Seconds of a recipe's rollout and update, and of BF16's."""

    rollout: float
    update: float
    bf16_rollout: float
    bf16_update: float

    @property
    def share(self) -> float:
        """The rollout's part of BF16's iteration."""
        return self.bf16_rollout / (self.bf16_rollout + self.bf16_update)

    def overhead(self, share: float | None = None) -> float:
        """The iteration relative to BF16's, if rollouts took such a share of BF16's; None: the modelled one."""
        share = self.share if share is None else share
        return share * self.rollout / self.bf16_rollout + (1 - share) * self.update / self.bf16_update


DEFAULT_WORKLOAD = "reasoning"
"""Answers at once and tokens before the middle of one are those that `rollout_overhead` is of."""


def iteration(recipe: Recipe, model: Model, chip: Chip, workload: Workload, scenario: str = MID) -> Iteration:
    """The time of an iteration under a scenario, of a model that reads tokens one after another."""
    seconds = []
    for r in (recipe, Recipe.named("bf16")):
        seconds += [_rollout(r, model, chip, workload, scenario), _update(r, model, chip, workload, scenario)]
    return Iteration(*seconds)


def _rollout(recipe: Recipe, model: Model, chip: Chip, workload: Workload, scenario: str) -> float:
    so_far = workload.prompt + workload.tokens / 2
    each = token_seconds(recipe, model, chip, workload.at_once, so_far, scenario)
    return workload.answers * workload.asked / workload.at_once * workload.tokens * each


def _update(recipe: Recipe, model: Model, chip: Chip, workload: Workload, scenario: str) -> float:
    tokens = workload.answers * (workload.prompt + workload.tokens) * workload.epochs
    return tokens / model.tokens * step_cost(recipe, model, chip, scenario).total


@cache
def rollout_share() -> float:
    """The rollout's part of BF16's iteration of the default workload, for the model and the chip that rows hold the
    time of rollouts for."""
    model, chip, workload = load_model(DEFAULT_MODEL), load_chip(DEFAULT_CHIP), load_workload(DEFAULT_WORKLOAD)
    return iteration(Recipe.named("bf16"), model, chip, workload).share


def workload_names() -> list[str]:
    """The workloads that come with fp4dse."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


@cache
def load_workload(source: str) -> Workload:
    """A workload by name or from a `.toml` file; ConfigError if there is none or it is wrong."""
    return load_data(source, "workload", _FOLDER, Workload)


_FOLDER = Path(__file__).parent / "workloads"
