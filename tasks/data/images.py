"""Labelled images: one record for every source, and the choice of who reads a path.

Pixels stay 8-bit, [n, H, W, C], until a batch of them is prepared: a data set then takes a quarter of the memory, and
its digest is that of the files' content. The format of a path follows from the files that it holds:

    data_batch_1 … 5, test_batch (.bin)     CIFAR-10     (the pickles of the Python version are read without executing)
    train, test (.bin)                      CIFAR-100    `PATH:coarse` for its 20 classes
    train-images-idx3-ubyte … (.gz)         MNIST, and whatever else is published in its format
    *.parquet                               images as Hugging Face stores them: struct{bytes, path} and a label
    folders                                 a class per folder, within train/ and val/ or test/ if there are such

A column of labels that is not called `label` follows a colon, options a question mark: `cache:fine_label`,
`photos?size=64`, `cache:kind?image=img&size=32`. Where the files have no held-out part, a
fixed fifth is held out.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.tasks.data import cifar_mnist, image_files
from fp4dse.tasks.data.image_source import Part, Source
from fp4dse.tasks.draws import fixed_order

OPTIONS = ("image", "size")


class Images(msgspec.Struct, frozen=True):
    """train, held_out: uint8 [n, H, W, C], values 0 … top. Labels: int64 [n], 0 … classes - 1. mean, std: per channel,
    in units of a pixel, what a model's inputs are centred and divided by. digest: 16 hex digits of all of it."""

    train: Tensor
    train_labels: Tensor
    held_out: Tensor
    held_out_labels: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: str
    top: int = 255

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        height, width, channels = self.train.shape[1:]
        return height, width, channels


@cache
def load_images(data: str, size: int | None = None) -> Images:
    """The images at `data`, a path with options. `size` holds where `data` does not state one.

    ConfigError for a path that is not there or holds none of the known formats, an image that cannot be read (named),
    a label or image column that does not exist, images of several sizes without `size`, fewer than two images.
    """
    source = parse_source(data, size)
    for read in (cifar_mnist.cifar, cifar_mnist.mnist, image_files.parquet, image_files.folder):
        if (parts := read(source)) is not None:
            if read in (cifar_mnist.cifar, cifar_mnist.mnist) and "size=" in data:
                raise ConfigError(f"option of data {source.path}", "size", "none: published images keep their size")
            return _images(source, *parts)
    raise ConfigError(
        "--data", data, "CIFAR-10/100 or MNIST files, Parquet files, or a folder of images for each class"
    )


def parse_source(data: str, size: int | None = None) -> Source:
    """`path:label?option=value&…` taken apart."""
    path, _, query = data.partition("?")
    head, colon, label = path.rpartition(":")
    if named := bool(colon) and not Path(path).exists():
        path = head
    options = {"size": size} | dict(part.partition("=")[::2] for part in query.split("&") if part)
    if unknown := [name for name in options if name not in OPTIONS]:
        raise ConfigError(f"option of data {path}", unknown[0], ", ".join(OPTIONS))
    if isinstance(given := options["size"], str):
        if not given.isdecimal() or not 1 <= int(given) <= 4096:
            raise ConfigError(f"size of data {path}", given, "a whole number of pixels, 1 to 4096")
        options["size"] = int(given)
    if not Path(path).exists():
        raise ConfigError("--data", path, "a file or folder that exists")
    return Source(Path(path), label=label if named else None, **options)  # type: ignore[arg-type]


def _images(source: Source, train: Part, held_out: Part | None) -> Images:
    names = sorted(set(train.labels))  # type: ignore[type-var]
    number = {name: i for i, name in enumerate(names)}
    if held_out is None:
        train, held_out = _fifth(train)
    if unseen := sorted(set(held_out.labels) - set(names), key=str):
        raise ConfigError(f"held-out label in {source.path}", unseen[0], f"a class of the training part: {names[:20]}")
    if train.pixels.shape[1:] != held_out.pixels.shape[1:]:
        found = "×".join(map(str, held_out.pixels.shape[1:]))
        wanted = "×".join(map(str, train.pixels.shape[1:]))
        raise ConfigError(f"held-out images in {source.path}", found, f"{wanted} as in training, or size=N for all")
    labels = [torch.tensor([number[name] for name in part.labels]) for part in (train, held_out)]
    mean, std = moments(train.pixels)
    digest = digest_of(train.pixels, labels[0], held_out.pixels, labels[1])
    return Images(train.pixels, labels[0], held_out.pixels, labels[1], len(names), mean, std, digest)


def _fifth(whole: Part) -> tuple[Part, Part]:
    """All but a fixed fifth, and that fifth."""
    n = len(whole.labels)
    if n < 2:
        raise ConfigError("images", n, "two or more: one to train on and one to hold out")
    order, split = fixed_order(n), n - max(1, n // 5)
    chosen = order[:split].sort().values, order[split:].sort().values
    most, fifth = (Part(whole.pixels[at], [whole.labels[i] for i in at.tolist()]) for at in chosen)
    return most, fifth


def moments(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 [n, H, W, C], from exact sums; 1 for a constant one."""
    values = range(256)
    means, stds = [], []
    for channel in pixels.unbind(-1):
        counts = torch.bincount(channel.reshape(-1).to(torch.int64), minlength=256).tolist()
        n = sum(counts)
        first = sum(v * c for v, c in zip(values, counts, strict=True))
        second = sum(v * v * c for v, c in zip(values, counts, strict=True))
        means.append(first / n)
        variance = (second * n - first * first) / (n * max(1, n - 1))
        stds.append(variance**0.5 or 1.0)
    return tuple(means), tuple(stds)


def digest_of(*tensors: Tensor) -> str:
    """16 hex digits of shapes and contents."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr(tuple(tensor.shape)).encode())
        found.update(tensor.contiguous().numpy().data)
    return found.hexdigest()[:16]
