"""Schedules of the learning rate, as data: its course over the steps, relative to the lane's own
(tasks/optimizers/hyperparameters.py)."""

from __future__ import annotations

from fp4dse.dse.record import Part, Share, name_or_numbers


class Constant(Part, frozen=True, tag_field="kind", tag="constant"):
    """The learning rate rises linearly over the first `warmup` of the steps, and stays."""

    warmup: Share = 0.0


class Linear(Part, frozen=True, tag_field="kind", tag="linear"):
    """After its warm-up it falls linearly, to `floor` of itself after the last step."""

    warmup: Share = 0.0
    floor: Share = 0.0


class Cosine(Part, frozen=True, tag_field="kind", tag="cosine"):
    """After its warm-up it falls by half a cosine (1608.03983), to `floor` of itself after the last step."""

    warmup: Share = 0.0
    floor: Share = 0.0


class Triangle(Part, frozen=True, tag_field="kind", tag="triangle"):
    """As `cosine` before the last `share` of the steps, in which the learning rate rises linearly from `floor` to
    `peak` and falls back with the same slope (FNT of LUQ, 2112.10769)."""

    warmup: Share = 0.0
    floor: Share = 0.0
    share: Share = 0.1
    peak: Share = 0.1


Schedule = Constant | Linear | Cosine | Triangle | None
SCHEDULE_NAMES: dict[str, Constant | Linear | Cosine | Triangle] = {
    "constant": Constant(),
    "linear": Linear(),
    "cosine": Cosine(),
    "triangle": Triangle(),
}


def schedule_name(schedule: Schedule) -> str:
    """The key in SCHEDULE_NAMES, or the kind with its numbers, in full; `task` for none."""
    return "task" if schedule is None else name_or_numbers(SCHEDULE_NAMES, schedule, "=")
