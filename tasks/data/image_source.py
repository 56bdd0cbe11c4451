"""Records that readers of image files share: the source that they read and the part that they return."""

from __future__ import annotations

from pathlib import Path

import msgspec
from torch import Tensor


class Part(msgspec.Struct, frozen=True):
    """Images uint8 [n, H, W, C] with what the source calls their classes."""

    pixels: Tensor
    labels: list[int] | list[str]


class Source(msgspec.Struct, frozen=True):
    """A path with its options. size: images are scaled to it on their shorter side, and cropped to a square."""

    path: Path
    size: int | None = None
    image: str | None = None
    label: str | None = None
