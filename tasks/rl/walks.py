"""Walks through a graph that the prompt shows.

    prompt   0>4 1>0 2>1 3>2 4>3  > > > . . = 2    an edge from each node, a sign a step, filled up with ends, one or
                                                   more, and the node to begin with
    answer   1 0 4 .                               the nodes that the walk passes

Each problem has a graph of its own: one cycle through all nodes, longer than any walk, so that no node comes twice and
walks from two nodes never meet. It has to be looked up in the prompt at each step, where the other kinds use what the
weights know: it is attention, and what it keeps, that is asked. An edge is one token, so that its key can be where it
begins and its value where it leads: one head finds it. With two tokens (`2`, `1`) a decoder must first learn to join
neighbours, in two layers. A fact is an edge, read and said.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.tasks.draws import Draws
from fp4dse.tasks.rl.problems import Flaws, Problems


class Walks(Problems, frozen=True, tag="walks"):
    """Walks of `least` to `most` steps among `nodes` nodes, of which there are more than steps. Tokens are the nodes,
    the edges from the first, those from the second …, and three signs."""

    nodes: int

    def __post_init__(self) -> None:
        assert self.nodes > self.most, "the walk would come back"

    @property
    def about(self) -> str:
        return f"walks of {self.least} to {self.most} steps among {self.nodes} nodes"

    @property
    def forward(self) -> int:
        """The token of a step."""
        return self.nodes + self.nodes**2

    @property
    def equals(self) -> int:
        """The token before the node to begin with."""
        return self.forward + 1

    @property
    def end(self) -> int:
        return self.forward + 2

    @property
    def prompt_length(self) -> int:
        return self.nodes + self.most + 3

    @property
    def answer_length(self) -> int:
        return self.most + 1

    @property
    def outcomes(self) -> int:
        return self.nodes

    def facts(self) -> list[list[bool]]:
        """A group: edges from a node after the other; none leads to its own node."""
        return [[a != b for a in range(self.nodes) for b in range(self.nodes)]]

    def prompts(self, draws: Draws, site: int, count: int) -> Tensor:
        there = self.steps_there(draws, site, count)
        start = draws.integers(site + 1, self.nodes, count, 1)
        place = _ranks(draws.integers(site + 2, 1 << 16, count, self.nodes))  # of each node in the cycle
        following = torch.remainder(place + 1, self.nodes)[..., None] == place[..., None, :]
        number = torch.arange(self.nodes, device=start.device)
        leads_to = torch.where(following, number, 0).sum(dim=-1)  # one term
        edges = self.nodes + number * self.nodes + leads_to
        signs = torch.where(there, self.forward, self.end)
        end, equals = (torch.full_like(start, token) for token in (self.end, self.equals))
        return torch.cat([edges, signs, end, equals, start], dim=-1)

    def answers(self, prompts: Tensor, flaws: Flaws | None = None) -> Tensor:
        leads_to, node, tokens = torch.remainder(prompts[..., : self.nodes], self.nodes), prompts[..., -1], []
        for step in range(self.most):
            there = prompts[..., self.nodes + step] == self.forward
            after = leads_to.gather(-1, node[..., None])[..., 0]
            if flaws is not None:
                after = torch.remainder(after + flaws.of(step, node * self.nodes + after), self.nodes)
            node = after  # behind the end, too: nobody sees it
            tokens.append(torch.where(there, node, self.end))
        return torch.stack([*tokens, torch.full_like(node, self.end)], dim=-1)


def _ranks(drawn: Tensor) -> Tensor:
    """The number of those of drawn [..., n] that are below each, or equal and earlier: a permutation of 0 … n - 1."""
    number = torch.arange(drawn.shape[-1], device=drawn.device)
    mine, other = drawn[..., :, None], drawn[..., None, :]
    return ((other < mine) | ((other == mine) & (number < number[:, None]))).sum(dim=-1)
