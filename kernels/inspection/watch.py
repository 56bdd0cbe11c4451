"""Statistics of every operand that a model quantizes in a pass, layer by layer and slot by slot, of one lane.

Inside `watching`, stages also take note of each operand on its way into a product: before it is quantized (padded and
rotated, as the quantizer sees it) and after. Nothing that is computed changes. Only passes that count what is lost
(`LaneNumerics.counting`) are watched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.quant.operand.records import Operand, Rotation, Stored, Use
from fp4dse.kernels.stage import Stage


class SeenOperand(msgspec.Struct, frozen=True):
    """An operand as it was quantized once.

    layer, slot     number of the layer, and name of the slot (`wgrad.g`)
    scaled          False where it has no block scale: BF16, or left as it is
    finite          all of it was finite before it was quantized, and after
    energy, error   Σx² and Σ(x̂ − x)², x̂ with what clamping leaves to a product of its own
    gain            Σ x·x̂
    counts          sums by name: those of counters.COUNTERS and SQUARED_ERRORS, `elements` and `blocks`; empty where it
                    has no block scale
    """

    layer: int
    slot: str
    scaled: bool
    finite: tuple[bool, bool]
    energy: float
    error: float
    gain: float
    counts: dict[str, float]


class _WatchedStage(Stage, kw_only=True):
    """A stage that notes its operands in `seen`."""

    seen: list[SeenOperand]

    def operand(self, name: str, x: Tensor | Stored, use: Use, rotation: Rotation | None) -> Operand:
        slot = self.slots[name]
        if use.counting:
            slot.counts.clear()
        found = super().operand(name, x, use, rotation)
        if use.counting:
            before, after = found.raw.double(), found.decoded().double()
            after = after if found.rest is None else after + found.rest.double()
            self.seen.append(
                SeenOperand(
                    layer=use.layer,
                    slot=f"{self.name}.{name}",
                    scaled=slot.maxima is not None,
                    finite=(bool(torch.isfinite(before).all()), bool(torch.isfinite(after).all())),
                    energy=float(before.square().sum()),
                    error=float((after - before).square().sum()),
                    gain=float((after * before).sum()),
                    counts={key: float(value.sum()) for key, value in slot.counts.items()},
                )
            )
        return found


@contextmanager
def watching(numerics: LaneNumerics) -> Iterator[list[SeenOperand]]:
    """In the block the list grows by every operand, in the order in which products take them. numerics: of one lane;
    ValueError for more, whose operands would be added up."""
    if numerics.lanes != 1:
        raise ValueError(f"lanes: found {numerics.lanes}; accepted: 1")
    seen: list[SeenOperand] = []
    kept = [(of, {name: getattr(of, name) for name in _STAGES}) for of in numerics.parts()]
    grouped, numerics.groups_experts = numerics.groups_experts, False  # operands are those of a layer
    try:
        for of, every in kept:
            for name, stages in every.items():
                setattr(of, name, _watched(stages, seen))
        yield seen
    finally:
        for of, every in kept:
            for name, stages in every.items():
                setattr(of, name, stages)
        numerics.groups_experts = grouped
        numerics.forget_lost()


_STAGES = ("quantized", "baseline", "but_weights")
"""Attributes of numerics that have stages."""


def _watched(stages: dict[str, Stage], seen: list[SeenOperand]) -> dict[str, Stage]:
    return {name: _WatchedStage(**msgspec.structs.asdict(stage), seen=seen) for name, stage in stages.items()}
