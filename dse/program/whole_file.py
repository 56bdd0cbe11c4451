"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """In the block, a hidden path beside this one to write to; at its end that file takes the place of `path`, so that
    whoever looks sees the old file or the new one, whenever the writer is killed."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    yield hidden
    hidden.replace(path)
