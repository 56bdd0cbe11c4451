"""The folder for what this program remembers and could find out again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from fp4dse.dse.program.whole_file import whole_file


def cache_folder() -> Path:
    """The user's, for this program. It may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp4dse"


def keep(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file of the folder, whole or not at all; where it cannot be written, its content is found out again next
    time. write: gets the path to write to."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as path:
            write(path)
