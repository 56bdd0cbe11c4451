"""Problems whose answers can be checked: what reinforcement learning needs of a kind of them.

    prompt   what is to be done, step by step, and what it begins with
    answer   what comes out of each step, in order, then the token `end`

A kind is a class in a module of its own (chains, walks, edits, carries). It says which tokens there are, draws prompts
and writes the right answer; all else follows. To hold:

* each step needs what the one before has made, and maps what there can be one to one: an error never heals by itself;
* `least` to `most` steps are its difficulty, and all its problems have tensors of one shape, with `end` where a problem
  has fewer steps;
* problems are functions of seed and step alone (`Draws`), and nothing here has a shape or asks for a number that only
  the device knows, as a rollout is captured.

A step uses *facts*, things to be known such as `7 + 3 = 0`, which have numbers. Worked examples have some of them wrong
(`Flaws`; base.py says why): the same code writes right answers and those.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from fp4dse.tasks.draws import Draws

HELD_OUT, EXAMPLES = 1 << 31, (1 << 31) + 1
"""Steps of the draws of held-out problems and of worked examples: no training has so many."""


class Flaws(NamedTuple):
    """The facts that are stated wrongly in answers to prompts [S, n, …].

    away   how far the stated outcome of each fact is from the true one, 0 of a sound fact, int64 [S, facts]
    errs   true where an answer gets a flawed fact wrong at this use, bool [S, n, uses]
    """

    away: Tensor
    errs: Tensor

    def of(self, use: int, fact: Tensor) -> Tensor:
        """The number to add to the true outcome of fact [S, n], the number `use` of the answer: int64 [S, n]."""
        return torch.where(self.errs[..., use], self.away.gather(1, fact), 0)


class Problems(msgspec.Struct, frozen=True):
    """A kind of problems, of `least` to `most` steps."""

    least: int
    most: int

    @property
    def about(self) -> str:
        """Their name for people, with their numbers."""
        raise NotImplementedError

    @property
    def end(self) -> int:
        """The token that ends an answer and fills up prompts; the highest."""
        raise NotImplementedError

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt."""
        raise NotImplementedError

    @property
    def answer_length(self) -> int:
        """Tokens of the longest answer, with its end."""
        raise NotImplementedError

    @property
    def result_length(self) -> int:
        """Tokens before the end that have to be right."""
        return 1

    @property
    def outcomes(self) -> int:
        """Different outcomes of a fact; an outcome is a number modulo this."""
        raise NotImplementedError

    @property
    def uses(self) -> int:
        """Facts that the longest answer uses."""
        return self.most

    def facts(self) -> list[list[bool]]:
        """Groups of facts, in the order of their numbers; true for those that problems have. Of each group the same
        share is flawed."""
        raise NotImplementedError

    def prompts(self, draws: Draws, site: int, count: int) -> Tensor:
        """`count` prompts for each lane's seed, int64 [L, count, prompt_length]. Takes the sites from `site` on, 16 at
        most."""
        raise NotImplementedError

    def answers(self, prompts: Tensor, flaws: Flaws | None = None) -> Tensor:
        """The right answers, or with flaws those of worked examples, int64 [S, n, answer_length], to prompts [S, n,
        prompt_length]. `end` stands in all places behind the answer."""
        raise NotImplementedError

    @property
    def vocabulary(self) -> int:
        """Tokens, filled up to a multiple of 16."""
        return -(-(self.end + 1) // 16) * 16

    def steps_there(self, draws: Draws, site: int, count: int, unit: int = 1) -> Tensor:
        """True for the steps that problems have, or for each `unit` of them, of which none is cut: bool [L, count, most
        / unit]."""
        least, most = self.least // unit, self.most // unit
        steps = least + draws.integers(site, most - least + 1, count, 1)
        return torch.arange(most, device=steps.device) < steps

    def results(self, answers: Tensor) -> Tensor:
        """The tokens before the first end of answers [..., answer_length], int64 [..., result_length]; 0 if an answer
        has no end, `end` where it begins later."""
        first, found = self.first_end(answers), []
        for back in range(self.result_length, 0, -1):
            before = torch.cat([torch.full_like(answers[..., :back], self.end), answers[..., :-back]], dim=-1)
            found.append(torch.where(first, before, 0).sum(dim=-1))  # 0 or one term: any order
        return torch.stack(found, dim=-1)

    def is_right(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """True where an answer [S, n, answer_length] has an end, and before it the result of its prompt."""
        same = self.results(answers) == self.results(self.answers(prompts))
        return self.ends(answers) & same.all(dim=-1)

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
