"""Treatments of weights that oscillate between two values of their quantizer, as data."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fp4dse.dse.record import Part, Positive, Share, name_or_numbers


class OsciReset(Part, frozen=True, tag_field="kind", tag="osci-reset"):
    """Weights that oscillate are set to what the forward quantizer makes of them (TetraJet-v2, 2510.27527).

    From a share `start` of the steps on, in windows of 50 steps, one `every` so many: at the end of each, the weights
    of quantized layers whose ratio (tasks/optimizers/oscillation.py) is `threshold` or more.
    """

    start: Share = 0.64
    every: Annotated[int, msgspec.Meta(ge=50)] = 200
    threshold: Positive = 16.0


Reset = OsciReset | None
RESET_NAMES: dict[str, OsciReset] = {"osci-reset": OsciReset()}


class QRamping(Part, frozen=True, tag_field="kind", tag="q-ramping"):
    """Weights that oscillate are updated less often, by more at a time (TetraJet, 2502.20853).

    Every so many steps, the ratio R of each weight (tasks/optimizers/oscillation.py) over the next 30 steps, which are
    undone, gives the steps between its updates: min(every, ⌊⌊R / alpha⌋ · beta + 1⌋).
    """

    every: Annotated[int, msgspec.Meta(ge=31)] = 200
    alpha: Positive = 16.0
    beta: Positive = 5.0


Ramping = QRamping | None
RAMPING_NAMES: dict[str, QRamping] = {"q-ramping": QRamping()}


def reset_name(reset: Reset) -> str:
    """The key in RESET_NAMES, or the kind with its numbers, in full; `none` for none."""
    return "none" if reset is None else name_or_numbers(RESET_NAMES, reset, "=")


def ramping_name(ramping: Ramping) -> str:
    """The key in RAMPING_NAMES, or the kind with its numbers, in full; `none` for none."""
    return "none" if ramping is None else name_or_numbers(RAMPING_NAMES, ramping, "=")
