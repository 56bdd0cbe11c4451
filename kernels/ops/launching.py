"""Limits of a launch on a device, and the size of a lane whose elements 32 bits do not number.

A launch grid has up to 2^31 - 1 programs along its first axis and 65,535 along the two others, so that what may be
long (rows, tiles of a lane) stands first. Triton's launcher multiplies the three in 32 bits and, where the product does
not fit, launches nothing without a word. So every launch asks `launch_grid`.

Positions within a lane are computed in 32 bits, of which a device has twice as many units as of 64; where a lane
begins is added in 64. For lanes of NEAR numbers or more kernels are compiled anew with LARGE: positions are in 64 bits,
and what stands along the second axis else, to share the cache, stands along the first.
"""

from __future__ import annotations

FIRST, OTHERS = 2**31 - 1, 2**16 - 1
"""Most programs along the first axis, and in all; along the second and the third."""

TILE = 1024
FLAT = {"TILE": TILE, "num_warps": 4, "enable_fp_fusion": False}
"""Numbers of a program that goes over a tensor element by element, and how such a kernel is compiled."""

NEAR = 2**30
"""Half of what 32 bits hold, since tiles reach beyond the end of a lane."""


def launch_grid(first: int, second: int = 1, third: int = 1) -> tuple[int, int, int]:
    """The three numbers of programs as a launch grid. ValueError for one that no device takes."""
    if first * second * third > FIRST or max(second, third) > OTHERS:
        raise ValueError(
            f"launch grid: found {first:,} × {second:,} × {third:,} programs; "
            f"accepted: {FIRST:,} in all, {OTHERS:,} along the second and the third axis"
        )
    return first, second, third


def is_large(numbers: int) -> bool:
    """True if a lane of so many numbers takes the kernels with LARGE."""
    return numbers >= NEAR
