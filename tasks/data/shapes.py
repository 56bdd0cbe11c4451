"""Procedural images: figures with textures before a background, drawn from counters, without end.

A class is a figure with a texture (figures.py), which the eye tells apart. How low a loss can fall before doubtful
labels bound it has not been measured. Within a class differ place, size, rotation and tones of the figure, the texture
behind it, what lies before it, and noise: how much of each is the difficulty.

Image number i of a split follows from i alone, in integers: it is the same on every machine and beside any others. A
layer is a table that is looked up where the pixels are in the layer's own system,

    u = a (x - x0) + b (y - y0),   v = a (y - y0) - b (x - x0)

in 65,536ths of a cell, x and y in sixteenths of a pixel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fp4dse.dse import ConfigError
from fp4dse.kernels.ops.philox import STREAMS, random32, words
from fp4dse.tasks.data.figures import CELLS, CENTRED, FIGURES, TEXTURES, figures, textures
from fp4dse.tasks.data.images import Images, moments
from fp4dse.tasks.draws import seed_keys

NAME = "shapes"
"""Of `--data`, with options behind a question mark: `shapes?size=32&classes=16`."""
REV = 1
"""Raised when the images change."""
TRAIN, HELD_OUT = 0, 1
"""Splits, whose images come of different random numbers."""
HELD = 4096
"""Images that are held out."""
MOST = 4 << 30
"""Bytes of images to train on: a training that reads more than that meets them again."""

SEED = 1
COUNTERS = 8
"""Of an image: 64 draws of 16 bits."""
DRAWN, PIXELS = 1 << 12, 1 << 15
"""Images whose draws are made at once, and pixels that are: what those take stays in a processor's cache."""
OFFSETS = 1 << 16
"""Places in the table of noise where an image may begin."""
TURN = 1024
"""Angles."""

Ints = NDArray[np.int32]
Small = NDArray[np.int16]
RANGES: dict[str, tuple[int, ...] | range] = {
    "size": (16, 32, 64),
    "channels": (1, 3),
    "classes": range(2, len(FIGURES) * len(TEXTURES) + 1),
    "turn": range(101),
    "invert": range(101),
    "fade": range(91),
    "clutter": range(101),
    "occluders": range(4),
    "noise": range(51),
}
"""Field of Shapes -> what it may be."""


class Shapes(msgspec.Struct, frozen=True):
    """Procedural images of size × size pixels, grey or in colours. Difficulty: turn, percent of a half turn that a
    figure is rotated by at most, to either side; invert, percent of the images (in colours: of channels) whose tones
    are in any order, where in the others a light figure is on dark ground; fade, percent of the contrast that an image
    lacks at most; clutter, percent of the range that the background's tones differ by; occluders, small figures before
    all; noise, its standard deviation in percent of the range."""

    size: int = 16
    channels: int = 1
    classes: int = 64
    turn: int = 100
    invert: int = 50
    fade: int = 40
    clutter: int = 20
    occluders: int = 1
    noise: int = 4

    @property
    def name(self) -> str:
        """Name in a task's summary."""
        colour = "coloured" if self.channels == 3 else "grey"
        return f"procedural images ({self.size}×{self.size}, {colour}, {self.classes} classes)"

    @property
    def digest(self) -> str:
        """16 hex digits that stand for the images."""
        return hashlib.sha256(f"shapes {REV} {msgspec.structs.astuple(self)}".encode()).hexdigest()[:16]

    def most(self, wanted: int) -> int:
        """So many images of those that are wanted to train on as MOST allows."""
        return min(wanted, MOST // (self.size**2 * self.channels))

    def labels(self, first: int, count: int) -> NDArray[np.int64]:
        """Classes of the images number `first` to `first + count` of either split: one after the other, in turn."""
        return np.arange(first, first + count) % self.classes

    def images(self, split: int, first: int, count: int) -> NDArray[np.uint8]:
        """The images number `first` to `first + count` of a split, [count, size, size, channels]."""
        out = np.empty((count, self.size, self.size, self.channels), np.uint8)
        for rows in _slices(count, DRAWN):
            scene = self._scene(split, first + rows.start, rows.stop - rows.start)
            for part in _slices(rows.stop - rows.start, PIXELS // self.size**2):
                pixels = self._pixels(_Scene(*(each[part] for each in scene)))
                out[rows][part] = np.moveaxis(pixels, 1, -1)
        return out

    def _scene(self, split: int, first: int, count: int) -> _Scene:
        """All that the images consist of, but their pixels. Percentages below are of the image's edge."""
        draws, label = _Draws(split, first, count), self.labels(first, count)
        figure = label % len(FIGURES)
        texture = (figure + label // len(FIGURES)) % len(TEXTURES)
        shift = draws.below(CELLS * CELLS) * ~np.isin(texture, _CENTRED)
        clear = 128 * self.fade // 100
        contrast = 128 - draws.below(clear + 1)
        tones, swing = [], []
        for _ in range(self.channels):
            order = _ORDERS[np.where(draws.below(100) < self.invert, draws.below(len(_ORDERS)), 0)]
            levels = _LEVELS[order] + np.stack([draws.below(40) for _ in range(3)], 1) - 128
            tones.append(128 + (levels * contrast[:, None] >> 7))
            swing.append((2 * draws.below(2) - 1) * (255 * self.clutter // 100) * contrast >> 7)
        layers = [
            self._layer(draws, draws.below(len(TEXTURES)), (30, 60), 50, TURN // 2),
            self._layer(draws, figure, (39, 50), 8, TURN // 2 * self.turn // 100),
            *(self._layer(draws, draws.below(len(FIGURES)), (13, 20), 45, TURN // 2) for _ in range(self.occluders)),
        ]
        shades = [draws.below(256) for _ in range(self.channels * self.occluders)]
        return _Scene(
            np.stack(tones, 1).astype(np.int16),
            np.stack(swing, 1).astype(np.int16),
            np.array(shades, np.int16).reshape(self.occluders, self.channels, count).T,
            np.stack(layers, 1),
            (texture * CELLS * CELLS).astype(np.int32),
            shift.astype(np.int32),
            draws.below(OFFSETS),
        )

    def _layer(self, draws: _Draws, table: NDArray[np.int64], half: tuple[int, int], off: int, turn: int) -> Ints:
        """int32 [count, 5]: where its table begins, a, b, x0, y0. half: of its extent, from … to; off: of its centre
        from the image's at most, in percent; turn: its angle at most."""
        edge = 16 * self.size
        least, most = (edge * part // 100 for part in half)
        extent = least + draws.below(most - least + 1)
        angle = draws.within(turn)
        a, b = (wave[angle % TURN] * (CELLS // 2 * 4) // extent for wave in _circle())
        x, y = (edge // 2 + draws.within(edge * off // 100) for _ in range(2))
        return np.stack([table * CELLS * CELLS, a, b, x, y], 1).astype(np.int32)

    def _pixels(self, scene: _Scene) -> Small:
        """[n, channels, size, size]: each layer over those before it."""
        ground, figure, *before = scene.layers.swapaxes(0, 1)
        masks, shares = _masks(self.size), _shares()
        tones, swing, shades = (each[..., None, None] for each in (scene.tones, scene.swing, scene.shades))
        share = shares.take(self._cells(ground, wrapped=True))[:, None]
        pixels: Small = tones[:, :, 0] + ((share - 64) * swing >> 7)
        pixels.clip(0, 255, out=pixels)  # 16 bits hold a difference of pixels times a share, and no more
        at = self._cells(figure)
        cell = (at + (scene.shift - figure[:, 0])[:, None, None]) & (CELLS * CELLS - 1)
        share = shares.take(cell + scene.texture[:, None, None])[:, None]
        own = tones[:, :, 1] + ((tones[:, :, 2] - tones[:, :, 1]) * share >> 7)
        pixels += (own - pixels) * masks.take(at)[:, None] >> 7
        for i, layer in enumerate(before):
            pixels += (shades[:, :, i] - pixels) * masks.take(self._cells(layer))[:, None] >> 7
        pixels += sliding_window_view(_noise(self.noise), pixels[0].size)[scene.noise].reshape(pixels.shape)
        pixels.clip(0, 255, out=pixels)
        return pixels

    def _cells(self, layer: Ints, wrapped: bool = False) -> Ints:
        """[count, size, size]: places in the flat tables. What lies beyond a table is its rim, or itself again."""
        table, a, b, x0, y0 = layer.T[..., None]
        along = 16 * np.arange(self.size, dtype=np.int32) + 8
        x, y, middle = along - x0, along - y0, CELLS // 2 << 16
        u: Ints = (a * x + middle)[:, None, :] + (b * y)[:, :, None]
        v = (a * y + middle)[:, :, None] - (b * x)[:, None, :]
        if not wrapped:
            for each in (u, v):
                np.clip(each, 0, (CELLS << 16) - 1, out=each)
        u >>= 16
        v >>= 10
        u &= CELLS - 1
        v &= CELLS * (CELLS - 1)
        u |= v
        u += table[:, None]
        return u


SMALL, GREY, COLOURED, LARGE = Shapes(16, 1, 16, turn=10, invert=20), Shapes(32), Shapes(32, 3), Shapes(64, 3)
"""In place of the digits, of MNIST, of CIFAR-10 and of photographs."""
MANY = msgspec.structs.replace(SMALL, classes=64)
"""For a model with more outputs."""
HIDDEN = msgspec.structs.replace(SMALL, clutter=60, occluders=2, noise=20)
"""For longer training, which drives the loss on SMALL to a few hundredths, where recipes are not told apart."""


class _Scene(NamedTuple):
    """n images before they have pixels, int16 or int32.

    tones: [n, channels, 3], of the background, and the figure's first and second; swing: [n, channels], contrast of the
    background; shades: [n, channels, occluders]; layers: [n, 2 + occluders, 5], background, figure, occluders; texture,
    shift: [n], where that of the figure begins, and by how many cells it is moved; noise: [n], where it begins."""

    tones: NDArray[Any]
    swing: NDArray[Any]
    shades: NDArray[Any]
    layers: NDArray[Any]
    texture: NDArray[Any]
    shift: NDArray[Any]
    noise: NDArray[Any]


class _Draws:
    """Random numbers of images number `first` to `first + count`, 16 bits each, one after the other."""

    def __init__(self, split: int, first: int, count: int) -> None:
        index = [torch.tensor(i) for i in range(COUNTERS)]
        drawn = [words(seed_keys([SEED]), STREAMS["data"], i, torch.tensor(split), count, first)[0] for i in index]
        bits = torch.cat(drawn, 1).numpy().view(np.uint16)
        self.bits: Iterator[NDArray[np.int64]] = iter(bits.T.astype(np.int64))

    def below(self, n: int) -> NDArray[np.int64]:
        """Uniform in 0 … n - 1, [count]; n up to 65,536."""
        return next(self.bits) * n >> 16

    def within(self, n: int) -> NDArray[np.int64]:
        """Uniform in -n … n."""
        return self.below(2 * n + 1) - n


_CENTRED = np.flatnonzero([name in CENTRED for name in TEXTURES])
_LEVELS = np.array([20, 108, 196])
"""Dark, middle and light, each up to 39 lighter."""
_ORDERS = np.array([(0, 2, 1), (0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
"""Of background, first and second tone; the first is the usual one."""


def _slices(count: int, step: int) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


@cache
def _circle() -> tuple[NDArray[np.int64], ...]:
    """Cosine and sine of the angles, of 2^14."""
    angle = np.arange(TURN) * (2 * np.pi / TURN)
    return tuple(np.rint(wave * 2**14).astype(np.int64) for wave in (np.cos(angle), np.sin(angle)))


@cache
def _masks(size: int) -> Small:
    """Figures, flat; an edge is about a pixel wide."""
    return figures(2.4 / size).ravel()


@cache
def _shares() -> Small:
    return textures().ravel()


@cache
def _noise(percent: int) -> Small:
    """Sums of four bytes, less their mean, of that deviation."""
    most = 3 * max(RANGES["size"]) ** 2
    drawn = random32(seed_keys([SEED]), STREAMS["data"], COUNTERS, 0, OFFSETS + most)[0].numpy()
    total: NDArray[np.int64] = (drawn & 255) + (drawn >> 8 & 255) + (drawn >> 16 & 255) + (drawn >> 24) - 510
    return (total * (255 * percent) // (100 * 148)).astype(np.int16)  # 148: their deviation


@lru_cache(maxsize=1)
def load_shapes(shapes: Shapes, count: int) -> Images:
    """The first `count` images to train on, and the first HELD held out. Their mean and deviation are those of the
    latter, which do not depend on the count."""
    train, held_out = (torch.from_numpy(shapes.images(split, 0, n)) for split, n in ((TRAIN, count), (HELD_OUT, HELD)))
    labels = (torch.from_numpy(shapes.labels(0, n)) for n in (count, HELD))
    mean, std = moments(held_out)
    return Images(train, next(labels), held_out, next(labels), shapes.classes, mean, std, shapes.digest)


def parse_shapes(data: str, usual: Shapes) -> Shapes:
    """`shapes?field=value&…`, with what is not said as in `usual`. ConfigError names a field or value that there is
    not."""
    given = {}
    for part in filter(None, data.partition("?")[2].split("&")):
        field, _, value = part.partition("=")
        if field not in RANGES:
            raise ConfigError(f"option of data {NAME}", field, ", ".join(RANGES))
        accepted = RANGES[field]
        if not value.isdecimal() or int(value) not in accepted:
            span = f"{accepted[0]} to {accepted[-1]}" if isinstance(accepted, range) else _either(accepted)
            raise ConfigError(f"{field} of data {NAME}", value, span)
        given[field] = int(value)
    return msgspec.structs.replace(usual, **given)


def _either(accepted: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, accepted[:-1]))} or {accepted[-1]}"
