"""The bytes that a forward pass keeps for the backward pass, by saved-tensor hooks.

A tensor that several operations keep counts once, and parameters do not count. What counts is a forward pass, as it
stands when the backward pass begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Kept:
    """Tensors that were kept so far."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    def bytes(self) -> int:
        """The sum over all tensors; forgets them."""
        found = sum(storage.nbytes() for storage in self.storages.values())
        self.storages.clear()
        return found


@contextmanager
def keeping(parameters: Iterable[Tensor]) -> Iterator[Kept]:
    """In the block, take note of what operations keep, other than these parameters. They keep it as ever."""
    own, found = {parameter.untyped_storage().data_ptr() for parameter in parameters}, Kept()

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found.storages[storage.data_ptr()] = storage
        return x.detach()  # or an output would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found
