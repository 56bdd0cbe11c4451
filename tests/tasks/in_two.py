"""A training that is stopped and goes on from its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fp4dse.tasks import Lane, Task, train
from fp4dse.tasks.engine import Stopped
from fp4dse.tasks.job import LaneResult


def train_in_two(
    task: Task, lanes: Sequence[Lane], device: str = "cpu", *, file: Path, after: int, record: bool = False
) -> list[LaneResult]:
    """The results of a training that was asked to stop after so many steps, left `file` and was begun again with it."""
    asked = iter([False] * after + [True])
    with pytest.raises(Stopped):
        train(task, lanes, device, record=record, checkpoint=file, should_stop=lambda: next(asked))
    assert file.exists()
    return train(task, lanes, device, record=record, checkpoint=file).lanes
