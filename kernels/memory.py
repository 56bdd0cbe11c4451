"""Memory that is freed stays with the process.

A step makes and frees the same tensors again and again. glibc gets each large one from the system and gives it back,
and what the system hands out it first fills with zeros, page by page: that takes longer than the arithmetic.
"""

from __future__ import annotations

import ctypes
from functools import cache

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # the names' numbers in malloc.h


@cache
def keep_freed_memory() -> None:
    """Have glibc take large tensors from the memory that it holds and give none back, in this process and its forks;
    nothing with another libc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
