"""What a convolution sees of an image."""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """What a convolution sees of an image: a kernel of (height, width) in steps of `stride`, with so many zeros around
    the image."""

    kernel: tuple[int, int]
    stride: int = 1
    padding: int = 0

    @property
    def is_pixel(self) -> bool:
        """Whether columns are the pixels themselves."""
        return self == ((1, 1), 1, 0)

    def places(self, height: int, width: int) -> tuple[int, int]:
        """(H', W'), how often it fits. ValueError for an image that is smaller than the kernel."""
        sizes = height + 2 * self.padding, width + 2 * self.padding
        if any(n < k for n, k in zip(sizes, self.kernel, strict=True)):
            raise ValueError(f"image of {height}×{width} with padding {self.padding}: kernel {self.kernel}")
        down, across = ((n - k) // self.stride + 1 for n, k in zip(sizes, self.kernel, strict=True))
        return down, across
