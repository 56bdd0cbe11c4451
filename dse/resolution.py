"""Does a preset tell single recipes apart? As data: `resolution.json`, written by
`python -m fp4dse.tasks.tuned.resolved`.

A preset resolves if NVFP4's gap is RESOLVES times its standard deviation between seeds or more, paired by seed, and
SEEDS seeds tell NVFP4 from MXFP4. What a reader needs to know where it does not is one sentence: `warning`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from fp4dse.dse.reading.files import decode_json

FILE = Path(__file__).with_name("resolution.json")
RESOLVES = 10.0
"""Of `ratio`: a preset that resolves."""
SEEDS = 5
"""With which a preset that resolves tells NVFP4 from MXFP4 in 80 of 100 studies."""


class Resolved(msgspec.Struct, frozen=True):
    """A preset that was checked, at its tuned rates, on seeds that did not choose these.

    preset: TASK:PRESET; dataset_digest: of its data; rev: of the task; ratio: of NVFP4's gap to its standard deviation;
    tells_apart: NVFP4 and MXFP4, with SEEDS seeds; least: the difference in loss, as a share, that SEEDS seeds find in
    80 of 100 studies, of pairs as noisy as NVFP4 and BF16 are. ratio and least are None where a recipe diverged
    or one seed tells no deviation.
    """

    preset: str
    dataset_digest: str
    rev: int
    ratio: float | None
    tells_apart: bool
    least: float | None

    @property
    def resolves(self) -> bool:
        """True if single recipes may be judged by it."""
        return self.ratio is not None and self.ratio >= RESOLVES and self.tells_apart


@cache
def resolved() -> list[Resolved]:
    """Of the shipped file."""
    found: list[Resolved] = decode_json(FILE.read_bytes(), list[Resolved])
    return found


def warning(task: str, preset: str, dataset_digest: str, rev: int, found: list[Resolved] | None = None) -> str | None:
    """A sentence without a full stop, whose only numbers are shares in %, for who judges recipes by this preset; None
    where it resolves, and where nobody checked it on these data at this revision of the task. found: None for the
    shipped file."""
    asked = (f"{task}:{preset}", dataset_digest, rev)
    known = resolved() if found is None else found
    line = next((one for one in known if (one.preset, one.dataset_digest, one.rev) == asked), None)
    if line is None or line.resolves:
        return None
    if not line.ratio or line.least is None:
        return "this preset is not known to resolve single recipes: its check had one seed, or a recipe that diverged"
    smaller = f"differences in loss of {float(f'{100 * line.least:.2g}'):g} %, with more of them (--seeds) smaller ones"
    if line.tells_apart:  # of the deviation and what five seeds do, who judges recipes needs the second
        return f"single recipes: with five seeds this preset mostly finds {smaller}"
    shares = f"{100 / line.ratio:.3g} % of itself, where {100 / RESOLVES:g} % or less resolves"
    deviates = f"NVFP4's gap deviates from seed to seed by {shares}; " if line.ratio < RESOLVES else ""
    says = f"five seeds do not tell NVFP4 from MXFP4, and mostly find {smaller}"
    return f"this preset does not resolve single recipes: {deviates}{says}"
