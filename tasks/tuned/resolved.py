"""Writes dse/resolution.json, by which reports know whether a preset resolves: `python -m fp4dse.tasks.tuned.resolved`.

The numbers are those of the tuned files, which only tasks can read, with the digests that rows have of their data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from fp4dse.dse.resolution import FILE, SEEDS, Resolved
from fp4dse.tasks.catalogue import get_task
from fp4dse.tasks.tuned import Tuned, all_tuned
from fp4dse.tasks.tuned.resolution import least_found, resolution


def resolved_presets(tunings: Sequence[Tuned]) -> list[Resolved]:
    """A line for each that was checked, in their order. Reads the data of their tasks."""
    return [_line(one) for one in tunings if one.check]


def _line(found: Tuned) -> Resolved:
    of = resolution(found)
    return Resolved(
        preset=f"{found.task}:{found.preset}",
        dataset_digest=get_task(found.task, found.preset, found.data or None).digest,
        rev=found.rev,
        ratio=_rounded(of.ratio),
        tells_apart=of.tells_apart(SEEDS),
        least=_rounded(math.expm1(least_found(SEEDS, of.gap_sd))),
    )


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")


def encoded(lines: Sequence[Resolved]) -> bytes:
    """The file of these lines, each on one of its own."""
    return b"[\n " + b",\n ".join(msgspec.json.encode(line) for line in lines) + b"\n]\n"


if __name__ == "__main__":
    FILE.write_bytes(encoded(resolved_presets(all_tuned())))
    print(FILE)
