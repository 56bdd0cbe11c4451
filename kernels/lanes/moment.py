"""The moment that numerics compute in: what a training loop sets from step to step and from pass to pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch

from fp4dse.kernels.quant.operand.records import Journal

MOMENT = ("step", "part", "training", "counting", "measuring", "evaluation", "precise_stages", "packed", "journal")
"""Attributes of numerics that a training loop sets, and that numerics of a layer follow."""

Evaluation = Literal["", "quantized", "bf16"]
"""The ways in which held-out data go through a model; empty: as in training."""

Other = TypeVar("Other", bound="Moment")


class Moment:
    """Attributes of numerics that a training loop sets:

    step       int64 scalar on the device, the number of the step
    part       number of the part of the batch, where gradients are accumulated over several
    training   False: no state that is carried from step to step changes
    counting   True: slots count what they lose (`LaneParts.lost`)
    measuring  False: no held maximum is due in this step (`LaneParts.measures`)
    evaluation empty in training. `quantized`: forward operands are rounded to nearest where training rounds by chance
               (`Recipe.evaluated`). `bf16`: every product is the BF16 baseline's
    packed     True: what the backward pass takes of the forward's quantized x is kept as codes (operand/stored.py)
    swiglu8    True: a SwiGLU keeps its input for the backward pass in MXFP8 (ops/swiglu), whatever the recipe
    recompute  True: a model with blocks has their inside made again in the backward pass
    journal    of a forward pass that is made again in the backward pass, None in others (recompute.py)
    precise_stages  stages that are in BF16 now, and as `fprop.w` those that are but for their weight
    """

    def __init__(self, device: torch.device) -> None:
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.part = 0
        self.training, self.counting, self.measuring = True, False, True
        self.evaluation: Evaluation = ""
        self.packed = self.swiglu8 = self.recompute = False
        self.journal: Journal | None = None
        self.precise_stages: frozenset[str] = frozenset()

    def at_present(self, other: Other) -> Other:
        """Other numerics, of some of the lanes, at the moment of these: they share what is carried from step to
        step."""
        now = copy.copy(other)
        for name in MOMENT:
            setattr(now, name, getattr(self, name))
        return now

    @contextmanager
    def temporarily(self, **values: Any) -> Iterator[None]:
        """In the block, attributes that a training loop sets (MOMENT) have these values; after it, those they had."""
        before = {name: getattr(self, name) for name in values}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)
