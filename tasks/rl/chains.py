"""Problems whose answers can be checked: chains of modular arithmetic, as many as one likes, with worked steps.

    prompt   7 + 3 * 9 - 4 . . . . =    a number, an operator and an operand a step, filled up with ends, two or more
    answer   3 0 9 0 4 6 .              a step after the other: its operand, and what it makes of the number so far

Each step begins with what the one before has made, and each maps the numbers onto one another (multipliers have an
inverse), so that an error never heals by itself. Difficulty is the number of steps. All problems have tensors of one
shape; where a step stands in the answer, it stood so many tokens before in the prompt, whatever the number of steps.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from fp4dse.tasks.draws import Draws

OPERATORS = 3
"""+, -, *: tokens behind the digits, in this order."""
HELD_OUT, EXAMPLES = 1 << 31, (1 << 31) + 1
"""Steps of the draws of held-out problems and of worked examples: no training has so many."""


class Chains(msgspec.Struct, frozen=True):
    """Chains of `least` to `most` steps, modulo `modulus` (4 to 11)."""

    least: int
    most: int
    modulus: int = 10

    @property
    def equals(self) -> int:
        """The token that ends a prompt."""
        return self.modulus + OPERATORS

    @property
    def end(self) -> int:
        """The token that ends an answer, and fills up prompts."""
        return self.equals + 1

    @property
    def vocabulary(self) -> int:
        """Tokens, filled up to a multiple of 16."""
        return 16 * math.ceil((self.end + 1) / 16)

    @property
    def prompt_length(self) -> int:
        return 2 * self.most + 4

    @property
    def answer_length(self) -> int:
        return 2 * self.most + 1

    @property
    def multipliers(self) -> list[int]:
        """Numbers that have an inverse, without 1."""
        return [n for n in range(2, self.modulus) if math.gcd(n, self.modulus) == 1]

    def prompts(self, draws: Draws, site: int, count: int) -> Tensor:
        """`count` prompts for each lane's seed, int64 [L, count, prompt_length]. Takes the sites from `site` on."""
        device = draws.seeds.device
        steps = self.least + draws.integers(site, self.most - self.least + 1, count, 1)
        start = draws.integers(site + 1, self.modulus, count, 1)
        operator = draws.integers(site + 2, OPERATORS, count, self.most)
        addend = 1 + draws.integers(site + 3, self.modulus - 1, count, self.most)
        chosen = draws.integers(site + 4, len(self.multipliers), count, self.most)
        multiplier = 2 + chosen
        for place, value in enumerate(self.multipliers):  # no tensor is made from a list: a step is captured
            multiplier = torch.where(chosen == place, value, multiplier)
        operand = torch.where(operator == 2, multiplier, addend)
        pairs = torch.stack([self.modulus + operator, operand], dim=-1)
        there = torch.arange(self.most, device=device) < steps  # [L, count, most]
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

    def values(self, prompts: Tensor) -> Tensor:
        """The value of each chain, int64 [...]."""
        value, operators, operands = self.parts(prompts)
        for step in range(self.most):
            value = self.apply(value, operators[..., step], operands[..., step])
        return value

    def is_right(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """True where the token before the first end of an answer [..., answer_length] is the value of its chain."""
        before = torch.cat([torch.full_like(answers[..., :1], self.end), answers[..., :-1]], dim=-1)
        last = torch.where(self.first_end(answers), before, 0).sum(dim=-1)  # 0 or one term: any order
        return self.ends(answers) & (last == self.values(prompts))

    def first_end(self, answers: Tensor) -> Tensor:
        """True at the first end of each answer."""
        is_end = answers == self.end
        return is_end & (is_end.to(torch.int64).cumsum(dim=-1) == 1)

    def ends(self, answers: Tensor) -> Tensor:
        """True for answers that have an end."""
        return (answers == self.end).any(dim=-1)

    def is_part(self, answers: Tensor) -> Tensor:
        """True for the tokens of each answer up to its first end, which is one of them."""
        is_end = (answers == self.end).to(torch.int64)
        return is_end.cumsum(dim=-1) - is_end == 0
