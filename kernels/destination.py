"""Where the gradient of a weight goes: into one tensor of all gradients, by the product that makes it.

Autograd would leave it in a tensor of its own, from which an optimizer that wants one tensor of all has to copy it. A
weight with a destination gets no gradient from autograd while that is open: the first product writes there what it
makes, further ones (other uses of the weight) add to it, as autograd would.
"""

from __future__ import annotations

from torch import Tensor

_DESTINATION = "gradient_destination"
"""The attribute of a weight that has its destination."""


class Destination:
    """The destination of one weight's gradient, closed at first."""

    def __init__(self) -> None:
        self.view: Tensor | None = None
        self.is_written = False

    def open(self, view: Tensor) -> None:
        """Have gradients in `view`, float32 [L, …] of the weight's shape, which holds none yet."""
        self.view, self.is_written = view, False

    def close(self) -> bool:
        """Leave gradients to autograd again. True if the view has one."""
        written, self.view, self.is_written = self.is_written, None, False
        return written

    @property
    def free(self) -> Tensor | None:
        """The view that a product may write its result to; None if there is none, or has been one."""
        return None if self.is_written else self.view

    def take(self, gradient: Tensor) -> Tensor | None:
        """Write or add a gradient, which may be in `free` already. Returns what is left to autograd."""
        if self.view is None:
            return gradient
        if self.is_written:
            self.view.add_(gradient)
        elif gradient.data_ptr() != self.view.data_ptr():
            self.view.copy_(gradient)
        self.is_written = True
        return None


def set_destination(weight: Tensor, destination: Destination | None) -> None:
    """Give a weight a destination; None takes it away."""
    if destination is None:
        vars(weight).pop(_DESTINATION, None)
    else:
        setattr(weight, _DESTINATION, destination)


def destination_of(weight: Tensor) -> Destination | None:
    """The destination of a weight that has one."""
    found = getattr(weight, _DESTINATION, None)
    assert found is None or isinstance(found, Destination)
    return found
