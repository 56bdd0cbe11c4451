"""The gradients of a model's parameters as one tensor [L, P], which products write those of their weights into.

What autograd leaves, the gradients of biases, norms and tables, is put beside them: small ones, which are many, at
once. Every gradient is the sum that autograd would have made, in its order; only what a weight gets elsewhere, by a
penalty on it, is added last.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fp4dse.kernels import QuantLinear
from fp4dse.kernels.destination import Destination, set_destination

ALIGNED = 4
"""Numbers in 16 bytes. Libraries may choose another product for a result that does not begin at a multiple of it."""
SMALL = 1 << 14
"""Numbers of a lane from which on a gradient is put into its place by itself."""


class Gradients:
    """The gradients of parameters, which have so many numbers in a lane of `flat` [L, P] each."""

    def __init__(self, model: nn.Module, sizes: Sequence[int], flat: Tensor) -> None:
        self.parameters, self.sizes, self.flat = list(model.parameters()), sizes, flat
        self.destinations: dict[int, Destination] = {}
        """Number of a parameter -> its destination, of weights whose products write their gradients."""
        starts, small = list(itertools.accumulate(sizes, initial=0)), []
        for i, (parameter, is_written) in enumerate(zip(self.parameters, written_by_products(model), strict=True)):
            if is_written and not (starts[i] % ALIGNED or starts[-1] % ALIGNED):
                self.destinations[i] = Destination()
            elif sizes[i] < SMALL:
                small.append(i)
            set_destination(parameter, self.destinations.get(i))
        self.small = frozenset(small)
        places = [torch.arange(starts[i], starts[i + 1]) for i in small]
        self.places = torch.cat([torch.zeros(0, dtype=torch.int64), *places]).to(flat.device)
        """Of the small ones' numbers in a lane."""
        self.made: Tensor | None = None

    def open(self) -> None:
        """Begin a backward pass, which has no gradients yet."""
        if not self.destinations:
            return
        self.made = torch.empty_like(self.flat)
        views = self.made.split(self.sizes, 1)
        for i, destination in self.destinations.items():
            destination.open(views[i].view(self.parameters[i].shape))

    def take(self) -> Tensor:
        """The gradients [L, P] of the backward passes since `open`, or of those by autograd alone; they are cleared."""
        written = {i for i, destination in self.destinations.items() if destination.close()}
        rest = {i: _of(p) for i, p in enumerate(self.parameters) if i not in written}
        by_autograd_too = {i: _of(p) for i in written if (p := self.parameters[i]).grad is not None}
        out, self.made = self.made, None
        for p in self.parameters:
            p.grad = None
        if out is None or not written:
            return torch.cat(list(rest.values()), dim=1)
        views = out.split(self.sizes, 1)
        for i, left in by_autograd_too.items():
            views[i].add_(left)
        for i in rest.keys() - self.small:
            views[i].copy_(rest[i])
        if self.small:
            out.index_copy_(1, self.places, torch.cat([rest[i] for i in sorted(self.small)], dim=1))
        return out


def _of(parameter: Tensor) -> Tensor:
    """The gradient that autograd left, [L, n]."""
    assert parameter.grad is not None
    return parameter.grad.reshape(len(parameter), -1)


def layers_with_whole_weights(model: nn.Module) -> Iterator[QuantLinear]:
    """The layers whose weight enters its products as it is. Left out are those that lanes compute in different ways,
    experts, and weights with learned clips or scales: what they multiply with is made of weights anew each time."""
    for layer in model.modules():
        if isinstance(layer, QuantLinear) and layer.block_scales is None:
            of, number = layer.numerics, layer.layer
            if number not in of.splits and number not in of.keys and ("w", number) not in of.learned:
                yield layer


def written_by_products(model: nn.Module) -> list[bool]:
    """True for each of the model's parameters whose gradient comes from products alone, in the order of `parameters()`:
    weights of layers that nothing else has, as an embedding table may that is a head, too."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    whole = {id(layer.weight) for layer in layers_with_whole_weights(model)}
    return [id(p) in whole and uses[id(p)] == 1 for p in model.parameters()]
