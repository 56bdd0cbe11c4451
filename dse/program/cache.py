"""The folder for what this program remembers and could find out again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's, for this program. It may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp4dse"
