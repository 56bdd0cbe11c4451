"""Edits of a short list.

    prompt   +1 -1 +0  +1 +1 -2  . . . . = c a b    an edit a step: how many places further on each symbol was; then
                                                    the list to begin with
    answer   a c b  c b a  .                        the list after each edit

Edits are swaps of neighbours, rotations to the left and to the right, and reversal. They are written as distances, so
that where a symbol stands in the answer, that to its origin stood so many tokens before in the prompt, whatever the
number of steps: a decoder looks that up in one layer, and the symbol in the next. No edit replaces a symbol, as what
was wrong about that would be healed. A fact is a move: a distance and a symbol. The whole list has to be right in the
end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.tasks.draws import Draws
from fp4dse.tasks.rl.problems import Flaws, Problems


class Edits(Problems, frozen=True, tag="edits"):
    """`least` to `most` edits of a list of `length` (3 or more) of `symbols` different symbols. Tokens are symbols,
    distances, and two signs."""

    length: int
    symbols: int

    @property
    def about(self) -> str:
        return f"{self.least} to {self.most} edits of lists of {self.length}, {self.symbols} symbols"

    @property
    def equals(self) -> int:
        """The token before the list to begin with."""
        return self.symbols + 2 * self.length - 1

    @property
    def end(self) -> int:
        return self.equals + 1

    @property
    def prompt_length(self) -> int:
        return self.length * (self.most + 1) + 2

    @property
    def answer_length(self) -> int:
        return self.length * self.most + 1

    @property
    def result_length(self) -> int:
        return self.length

    @property
    def outcomes(self) -> int:
        return self.symbols

    @property
    def uses(self) -> int:
        return self.length * self.most

    @property
    def orders(self) -> list[list[int]]:
        """Of each edit, from which place the symbols come that it puts into the first place, the second …"""
        rest = list(range(self.length))
        swaps = [[*rest[:i], i + 1, i, *rest[i + 2 :]] for i in range(self.length - 1)]
        return [*swaps, [*rest[1:], rest[0]], [rest[-1], *rest[:-1]], rest[::-1]]

    def facts(self) -> list[list[bool]]:
        """Of each distance, the lowest first, the symbols."""
        return [[True] * self.symbols] * (2 * self.length - 1)

    def prompts(self, draws: Draws, site: int, count: int) -> Tensor:
        there = self.steps_there(draws, site, count)
        start = draws.integers(site + 1, self.symbols, count, self.length)
        chosen = draws.integers(site + 2, len(self.orders), count, self.most)
        distances = []
        for place in range(self.length):
            origin = chosen
            for number, order in enumerate(self.orders):  # no tensor is made from a list: a step is captured
                origin = torch.where(chosen == number, order[place], origin)
            distances.append(origin - place)
        edits = self.symbols + self.length - 1 + torch.stack(distances, dim=-1)
        edits = torch.where(there[..., None], edits, self.end)
        end, equals = (torch.full_like(start[..., :1], token) for token in (self.end, self.equals))
        return torch.cat([edits.flatten(2), end, equals, start], dim=-1)

    def answers(self, prompts: Tensor, flaws: Flaws | None = None) -> Tensor:
        edits = prompts[..., : self.length * self.most].unflatten(-1, (self.most, self.length))
        now, tokens = prompts[..., -self.length :], []
        place = torch.arange(self.length, device=now.device)
        for step in range(self.most):
            there = edits[..., step, :] != self.end
            distance = torch.where(there, edits[..., step, :] - self.symbols, self.length - 1)  # 0 is the lowest
            now = now.gather(-1, place + distance - (self.length - 1))  # behind the end, too: nobody sees it
            if flaws is not None:
                fact = distance * self.symbols + now
                off = [flaws.of(step * self.length + i, fact[..., i]) for i in range(self.length)]
                now = torch.remainder(now + torch.stack(off, dim=-1), self.symbols)
            tokens.append(torch.where(there, now, self.end))
        return torch.cat([*tokens, torch.full_like(now[..., :1], self.end)], dim=-1)
