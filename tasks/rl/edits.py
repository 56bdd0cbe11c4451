"""Edits of a short list.

    prompt   2 1 3  2 3 1  . . . . = c a b    an edit a step: from which place each symbol comes; then the list
    answer   a c b  c b a  .                  the list after each edit

Edits are swaps of neighbours, rotations to the left and to the right, and reversal. They are written as places, so that
where a symbol stands in the answer, its place of origin stood so many tokens before in the prompt, whatever the number
of steps. No edit replaces a symbol, as what was wrong about that would be healed. A fact is a move: from a place, to a
place, of a symbol. The whole list has to be right in the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.tasks.draws import Draws
from fp4dse.tasks.rl.problems import Flaws, Problems


class Edits(Problems, frozen=True, tag="edits"):
    """`least` to `most` edits of a list of `length` (3 or more) of `symbols` different symbols. Tokens are symbols,
    places, and two signs."""

    length: int
    symbols: int

    @property
    def about(self) -> str:
        return f"{self.least} to {self.most} edits of lists of {self.length}, {self.symbols} symbols"

    @property
    def equals(self) -> int:
        """The token before the list to begin with."""
        return self.symbols + self.length

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
        """A group: moves by place of origin, then place, then symbol."""
        pairs = [(a, b) for a in range(self.length) for b in range(self.length)]
        return [[any(of[b] == a for of in self.orders) for a, b in pairs for _ in range(self.symbols)]]

    def prompts(self, draws: Draws, site: int, count: int) -> Tensor:
        there = self.steps_there(draws, site, count)
        start = draws.integers(site + 1, self.symbols, count, self.length)
        chosen = draws.integers(site + 2, len(self.orders), count, self.most)
        places = []
        for place in range(self.length):
            origin = chosen
            for number, order in enumerate(self.orders):  # no tensor is made from a list: a step is captured
                origin = torch.where(chosen == number, order[place], origin)
            places.append(origin)
        edits = torch.where(there[..., None], self.symbols + torch.stack(places, dim=-1), self.end)
        end, equals = (torch.full_like(start[..., :1], token) for token in (self.end, self.equals))
        return torch.cat([edits.flatten(2), end, equals, start], dim=-1)

    def answers(self, prompts: Tensor, flaws: Flaws | None = None) -> Tensor:
        edits = prompts[..., : self.length * self.most].unflatten(-1, (self.most, self.length))
        now, tokens = prompts[..., -self.length :], []
        for step in range(self.most):
            there = edits[..., step, :] != self.end
            origin = torch.where(there, edits[..., step, :] - self.symbols, 0)
            now = now.gather(-1, origin)  # behind the end, too: nobody sees it
            if flaws is not None:
                fact = origin * self.length + torch.arange(self.length, device=now.device)
                fact = fact * self.symbols + now
                off = [flaws.of(step * self.length + i, fact[..., i]) for i in range(self.length)]
                now = torch.remainder(now + torch.stack(off, dim=-1), self.symbols)
            tokens.append(torch.where(there, now, self.end))
        return torch.cat([*tokens, torch.full_like(now[..., :1], self.end)], dim=-1)
