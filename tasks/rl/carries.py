"""Long addition, digit by digit, with carries.

    prompt   + 7 ' 8  + 5 ' 0  . . . . . = 6 0 4 0    numbers to be added, a digit a place, the lowest first; then the
                                                      number to begin with, 46, with zeros for carries
    answer   3 1 3 1  8 0 3 0  .                      46 + 87 = 33, + 05 = 38: each digit of each sum and its carry

Numbers are modulo base^digits: the last carry is written and falls away. So adding maps numbers one to one, where
doubling would not. A step is a place of an addition: it needs the digit below by its carry, and the sum before. Where
a digit stands in the answer, the one to add stood so many tokens before in the prompt, whatever the number of steps. A
fact is a sum of two digits and a carry, from 0 to 2 · base - 1. The last sum has to be right, with its carries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.tasks.draws import Draws
from fp4dse.tasks.rl.problems import Flaws, Problems


class Carries(Problems, frozen=True, tag="carries"):
    """`least` to `most` steps, both whole additions of numbers of `digits` digits of `base`. Tokens are digits, the
    signs before the lowest and before other digits, and two more."""

    digits: int
    base: int = 10

    def __post_init__(self) -> None:
        assert self.least % self.digits == self.most % self.digits == 0, "a step is a digit of a whole addition"

    @property
    def about(self) -> str:
        of = f"{self.digits} digits" + (f" of base {self.base}" if self.base != 10 else "")
        return f"{self.least} to {self.most} steps of adding numbers of {of}"

    @property
    def additions(self) -> int:
        """The most of them."""
        return self.most // self.digits

    @property
    def plus(self) -> int:
        """The token before the lowest digit of a number; before the others it is the one behind."""
        return self.base

    @property
    def equals(self) -> int:
        """The token before the number to begin with."""
        return self.base + 2

    @property
    def end(self) -> int:
        return self.base + 3

    @property
    def prompt_length(self) -> int:
        return 2 * self.most + 2 + 2 * self.digits

    @property
    def answer_length(self) -> int:
        return 2 * self.most + 1

    @property
    def result_length(self) -> int:
        return 2 * self.digits

    @property
    def outcomes(self) -> int:
        return 2 * self.base

    def facts(self) -> list[list[bool]]:
        """Sums without a carry and with one: of each first digit the second ones."""
        return [[True] * self.base**2] * 2

    def prompts(self, draws: Draws, site: int, count: int) -> Tensor:
        there = self.steps_there(draws, site, count, self.digits)
        start = draws.integers(site + 1, self.base, count, self.digits)
        added = draws.integers(site + 2, self.base, count, self.additions, self.digits)
        sign = self.plus + (torch.arange(self.digits, device=start.device) > 0).to(torch.int64)
        pairs = torch.stack([sign.expand_as(added), added], dim=-1).flatten(3)
        pairs = torch.where(there[..., None], pairs, self.end).flatten(2)
        number = torch.stack([start, torch.zeros_like(start)], dim=-1).flatten(2)
        end, equals = (torch.full_like(start[..., :1], token) for token in (self.end, self.equals))
        return torch.cat([pairs, end, equals, number], dim=-1)

    def answers(self, prompts: Tensor, flaws: Flaws | None = None) -> Tensor:
        pairs = prompts[..., : 2 * self.most].unflatten(-1, (self.most, 2))
        now, tokens = list(prompts[..., -2 * self.digits :: 2].unbind(-1)), []
        none = torch.zeros_like(now[0])
        carry = none
        for step in range(self.most):
            place = step % self.digits
            there = pairs[..., step, 0] != self.end
            added = torch.where(there, pairs[..., step, 1], 0)
            carry = carry if place else none
            total = now[place] + added + carry
            if flaws is not None:
                fact = (carry * self.base + now[place]) * self.base + added
                total = torch.remainder(total + flaws.of(step, fact), 2 * self.base)
            now[place], carry = torch.remainder(total, self.base), total // self.base
            tokens += [torch.where(there, of, self.end) for of in (now[place], carry)]
        return torch.stack([*tokens, torch.full_like(carry, self.end)], dim=-1)
