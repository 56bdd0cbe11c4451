"""Figures and textures of procedural images: functions of the plane, sampled once into tables of small integers.

Only sums, products, quotients and square roots of float64 are taken, which round the same way on every machine, and the
results are rounded to 0 … 127.

A class of images is a pair of the two. Figures are told apart in any rotation, and so are textures, whichever of their
two tones is the lighter one: no figure is another's rotation, no texture another's negative.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.float64]
CELLS = 64
"""Rows and columns of a table."""
FULL = 127
"""A pixel that is all figure, or all of the second tone."""


def _box(x: Plane, y: Plane, across: float, down: float, width: float, height: float) -> Plane:
    """Rectangle of half-width and half-height: how far within it a place is, negative without; so of the others."""
    return np.minimum(width - np.abs(x - across), height - np.abs(y - down))


def _disc(x: Plane, y: Plane, across: float, down: float, radius: float) -> Plane:
    return radius - np.sqrt((x - across) * (x - across) + (y - down) * (y - down))


def _both(*parts: Plane) -> Plane:
    common: Plane = np.minimum.reduce(parts)
    return common


def _any(*parts: Plane) -> Plane:
    union: Plane = np.maximum.reduce(parts)
    return union


FIGURES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "disc": lambda x, y: _disc(x, y, 0, 0, 0.85),
    "square": lambda x, y: _box(x, y, 0, 0, 0.74, 0.74),
    "triangle": lambda x, y: _both(0.45 - y, 0.45 + 0.5 * y - 0.866 * x, 0.45 + 0.5 * y + 0.866 * x),
    "bar": lambda x, y: _box(x, y, 0, 0, 0.92, 0.38),
    "cross": lambda x, y: _any(_box(x, y, 0, 0, 0.92, 0.32), _box(x, y, 0, 0, 0.32, 0.92)),
    "ring": lambda x, y: _both(_disc(x, y, 0, 0, 0.92), -_disc(x, y, 0, 0, 0.4)),
    "frame": lambda x, y: _both(_box(x, y, 0, 0, 0.82, 0.82), -_box(x, y, 0, 0, 0.36, 0.36)),
    "half": lambda x, y: _both(_disc(x, y, 0, -0.42, 0.94), y + 0.42),
    "crescent": lambda x, y: _both(_disc(x, y, 0, 0, 0.94), -_disc(x, y, 0.5, 0, 0.62)),
    "L": lambda x, y: _any(_box(x, y, -0.36, 0, 0.34, 0.9), _box(x, y, 0, 0.56, 0.7, 0.34)),
    "T": lambda x, y: _any(_box(x, y, 0, -0.5, 0.86, 0.33), _box(x, y, 0, 0.15, 0.3, 0.72)),
    "Z": lambda x, y: _any(
        _box(x, y, -0.38, -0.55, 0.5, 0.33), _box(x, y, 0.38, 0.55, 0.5, 0.33), _box(x, y, 0, 0, 0.3, 0.85)
    ),
    "hourglass": lambda x, y: _both(_box(x, y, 0, 0, 0.86, 0.86), 0.8 * (np.abs(y) - np.abs(x)) + 0.16),
    "dumbbell": lambda x, y: _any(_disc(x, y, -0.5, 0, 0.44), _disc(x, y, 0.5, 0, 0.44), _box(x, y, 0, 0, 0.5, 0.2)),
    "clover": lambda x, y: _any(
        _disc(x, y, 0, -0.5, 0.42), _disc(x, y, 0.46, 0.34, 0.42), _disc(x, y, -0.46, 0.34, 0.42)
    ),
    "U": lambda x, y: _both(_box(x, y, 0, 0, 0.82, 0.82), -_box(x, y, 0, -0.4, 0.3, 0.8)),
}
"""Name -> (x, y in -1 … 1, y downwards) -> how far within the figure."""


def _wave(t: Plane) -> Plane:
    """Of period 1, from 0 to 1 and back, of two parabolas: close to a sine."""
    t = t - np.floor(t)
    half = np.minimum(t, 1 - t) * 4 - 1
    wave: Plane = 0.5 + half * (1 - 0.5 * np.abs(half))
    return wave


def _step(t: Plane) -> Plane:
    """From 0 to 1 around 1/2, the steep part of a wave cut off at both ends."""
    cut: Plane = np.clip(3 * t - 1, 0, 1)
    return cut


def _radius(x: Plane, y: Plane) -> Plane:
    return np.sqrt((x - 0.5) * (x - 0.5) + (y - 0.5) * (y - 0.5))


TEXTURES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "plain": lambda x, _: 0 * x,
    "wide stripes": lambda x, _: _step(_wave(2 * x)),
    "dots": lambda x, y: _step(1.5 * _wave(3 * x) * _wave(3 * y)),
    "ramp": lambda x, _: x,
    "narrow stripes": lambda x, _: _step(_wave(4 * x)),
    "target": lambda x, y: _step(_wave(4 * _radius(x, y))),
    "halves": lambda x, _: _step(4 * x - 1.5),
    "checks": lambda x, y: _step(2 * (_wave(2 * x) - 0.5) * (_wave(2 * y) - 0.5) + 0.5),
    "glow": lambda x, y: 2.2 * _radius(x, y),
    "net": lambda x, y: _any(_step(2 * _wave(3 * x) - 1), _step(2 * _wave(3 * y) - 1)),
    "quarters": lambda x, y: _step(0.5 + 16 * (x - 0.5) * (y - 0.5)),
    "beats": lambda x, _: _step(0.5 * (_wave(3 * x) + _wave(2 * x))),
    "line": lambda x, _: 1.5 - 6 * np.abs(x - 0.5),
    "slabs": lambda x, y: _step(_wave(2 * x + 0.5 * _step(_wave(2 * y)))),
    "sectors": lambda x, y: _step(0.5 + 30 * (x - 0.5) * ((x - 0.5) * (x - 0.5) - 3 * (y - 0.5) * (y - 0.5))),
    "zigzag": lambda x, y: _step(_wave(3 * x + 0.6 * _wave(2 * y))),
}
"""Name -> (x, y in 0 … 1) -> share of the second tone, cut off at 0 and 1. Neighbours differ most: a figure has the
first textures from its own place on."""

CENTRED = ("ramp", "target", "halves", "glow", "quarters", "line", "sectors")
"""Textures that stand at the centre of a figure; the others have a period of 1 and are shifted at random."""


def _grid() -> tuple[Plane, Plane]:
    """Places of the cells' centres in 0 … 1, x and y."""
    y, x = (np.indices((CELLS, CELLS)) + 0.5) / CELLS
    return x, y


def _levels(share: Plane) -> NDArray[np.int16]:
    return np.rint(np.clip(share, 0, 1) * FULL).astype(np.int16)


@cache
def figures(edge: float) -> NDArray[np.int16]:
    """[figure, CELLS, CELLS]: how much of a cell is figure, with edges that are so wide. No figure touches the rim."""
    x, y = (1.1 * (2 * at - 1) for at in _grid())
    return np.stack([_levels(draw(x, y) / edge + 0.5) for draw in FIGURES.values()])


@cache
def textures() -> NDArray[np.int16]:
    """[texture, CELLS, CELLS]: share of the second tone."""
    return np.stack([_levels(draw(*_grid())) for draw in TEXTURES.values()])
