"""Chains of modular arithmetic.

    prompt   7 + 3 * 9 - 4 . . . . =    a number, an operator and an operand a step, filled up with ends, two or more
    answer   3 0 9 0 4 6 .              a step after the other: its operand, and what it makes of the number so far

Each maps the numbers onto one another (multipliers have an inverse). Where a step stands in the answer, it stood so
many tokens before in the prompt, whatever the number of steps. A fact is an operator, a number and an operand.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp4dse.tasks.draws import Draws
from fp4dse.tasks.rl.problems import Flaws, Problems

OPERATORS = 3
"""+, -, *: tokens behind the digits, in this order."""


class Chains(Problems, frozen=True):
    """Chains of `least` to `most` steps, modulo `modulus` (4 to 11)."""

    modulus: int = 10

    @property
    def about(self) -> str:
        return f"chains of {self.least} to {self.most} steps modulo {self.modulus}"

    @property
    def equals(self) -> int:
        """The token that ends a prompt."""
        return self.modulus + OPERATORS

    @property
    def end(self) -> int:
        return self.equals + 1

    @property
    def prompt_length(self) -> int:
        return 2 * self.most + 4

    @property
    def answer_length(self) -> int:
        return 2 * self.most + 1

    @property
    def outcomes(self) -> int:
        return self.modulus

    @property
    def multipliers(self) -> list[int]:
        """Numbers that have an inverse, without 1."""
        return [n for n in range(2, self.modulus) if math.gcd(n, self.modulus) == 1]

    def facts(self) -> list[list[bool]]:
        """An operator after the other, of each operator a number after the other, of each number the operands."""
        operands = [range(1, self.modulus), range(1, self.modulus), self.multipliers]  # as prompts draws them
        return [[operand in of for operand in range(self.modulus)] * self.modulus for of in operands]

    def prompts(self, draws: Draws, site: int, count: int) -> Tensor:
        there = self.steps_there(draws, site, count)
        start = draws.integers(site + 1, self.modulus, count, 1)
        operator = draws.integers(site + 2, OPERATORS, count, self.most)
        addend = 1 + draws.integers(site + 3, self.modulus - 1, count, self.most)
        chosen = draws.integers(site + 4, len(self.multipliers), count, self.most)
        multiplier = 2 + chosen
        for place, value in enumerate(self.multipliers):  # no tensor is made from a list: a step is captured
            multiplier = torch.where(chosen == place, value, multiplier)
        operand = torch.where(operator == 2, multiplier, addend)
        pairs = torch.stack([self.modulus + operator, operand], dim=-1)
        pairs = torch.where(there[..., None], pairs, self.end)
        end, equals = (torch.full_like(start, token) for token in (self.end, self.equals))
        return torch.cat([start, pairs.flatten(2), end, end, equals], dim=-1)

    def parts(self, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The start [...], operators (0 to 2) and operands [..., most] of prompts [..., prompt_length]; both hold the
        token `end` where there is no step."""
        pairs = prompts[..., 1:-3].unflatten(-1, (self.most, 2))
        operator = torch.where(pairs[..., 0] == self.end, self.end, pairs[..., 0] - self.modulus)
        return prompts[..., 0], operator, pairs[..., 1]

    def apply(self, value: Tensor, operator: Tensor, operand: Tensor) -> Tensor:
        """The number after a step; the number itself where there is no step."""
        out = torch.where(operator == 0, value + operand, value)
        out = torch.where(operator == 1, value - operand, out)
        out = torch.where(operator == 2, value * operand, out)
        return torch.remainder(out, self.modulus)

    def answers(self, prompts: Tensor, flaws: Flaws | None = None) -> Tensor:
        value, operators, operands = self.parts(prompts)
        tokens = []
        for step in range(self.most):
            operator, operand = operators[..., step], operands[..., step]
            there = operator != self.end
            fact = torch.where(there, (operator * self.modulus + value) * self.modulus + operand, 0)
            value = self.apply(value, operator, operand)
            if flaws is not None:
                value = torch.remainder(value + torch.where(there, flaws.of(step, fact), 0), self.modulus)
            tokens += [operand, torch.where(there, value, self.end)]
        return torch.stack([*tokens, torch.full_like(value, self.end)], dim=-1)
