"""What the plain functions give on the CPU beside what they give with kernels, forward and backward."""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp4dse.kernels.dispatch import OPERATIONS


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(here: torch.Tensor, there: torch.Tensor) -> bool:
    """The same bits, but for the kind of NaN and the sign of zero."""
    there = there.cpu()
    both_nan = here.isnan() & there.isnan()
    return here.dtype == there.dtype and here.shape == there.shape and bool((both_nan | (here == there)).all())


def outcome(function, inputs):
    """Outputs and the gradients of the inputs, where those of the outputs are random."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    outputs = out if isinstance(out, tuple) else (out,)
    given = [randn(*y.shape, seed=10 + i, dtype=y.dtype).to(y.device) for i, y in enumerate(outputs)]
    differentiable = [i for i, y in enumerate(outputs) if y.requires_grad]
    outputs_, given = [outputs[i] for i in differentiable], [given[i] for i in differentiable]
    return [y.detach() for y in outputs], torch.autograd.grad(outputs_, inputs, given)


def take_kernels(patch, *operations: str, taken: bool = True) -> None:
    """Have these operations taken by their kernels, or not."""
    for name in operations:
        patch.setattr(OPERATIONS[name], "has_kernels", lambda _: taken)


def comparer(place, monkeypatch, *operations: str) -> Callable:
    """Compares a function on the CPU with itself where the kernels of these operations run; gives back what it found
    with them."""

    def compare(function, *inputs):
        expected = outcome(function, inputs)
        with monkeypatch.context() as patch:
            take_kernels(patch, *operations)
            found = outcome(function, [x.to(place.device) for x in inputs])
        for here, there in zip([*expected[0], *expected[1]], [*found[0], *found[1]], strict=True):
            assert same(here, there)
        return found

    return compare


class Operators(TorchDispatchMode):
    """Notes the names of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.names.append(function._schema.name.partition("::")[2])
        return function(*args, **(kwargs or {}))
