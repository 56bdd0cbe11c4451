"""CIFAR-10, CIFAR-100 and MNIST in the file formats in which they are published.

The Python version of CIFAR is a pickle, and a pickle is a program. It is read by an unpickler that knows four names,
those that arrays need, and refuses all others.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp4dse.dse import ConfigError
from fp4dse.dse.program.bounds import why_too_large
from fp4dse.tasks.data.image_source import Part, Source

TRAIN_10 = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR_FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary")
PIXELS = 3 * 32 * 32
MNIST_FILES = (("train-images", "train-labels"), ("t10k-images", "t10k-labels"))


def cifar(source: Source) -> tuple[Part, Part] | None:
    """CIFAR-10 or CIFAR-100, Python or binary version, at the path or one folder below. None if it is not there."""
    for at in (source.path, *(source.path / name for name in CIFAR_FOLDERS)):
        for train, test in ((TRAIN_10, "test_batch"), (("train",), "test")):
            for ending in ("", ".bin"):
                first = at / f"{train[0]}{ending}"
                if first.is_file():
                    label = _cifar_label(source, len(train) == 5)
                    files = [at / f"{name}{ending}" for name in (*train, test)]
                    parts = [_cifar_file(file, label, ending == ".bin") for file in files]
                    return _joined(parts[:-1]), parts[-1]
    return None


def _cifar_label(source: Source, ten: bool) -> str:
    """The name of the labels: `labels` in CIFAR-10; `fine` or `coarse` in CIFAR-100."""
    if ten:
        accepted, default = ["labels"], "labels"
    else:
        accepted, default = ["fine", "coarse"], "fine"
    label = (source.label or default).removesuffix("_labels").removesuffix("_label")
    if label not in accepted:
        raise ConfigError(f"label of data {source.path}", source.label, ", ".join(accepted))
    return label


def _cifar_file(file: Path, label: str, binary: bool) -> Part:
    content = _content(file)
    if binary:
        ahead = 1 if label == "labels" else 2
        if not content or len(content) % (ahead + PIXELS):
            raise ConfigError(str(file), f"{len(content)} bytes", f"a multiple of {ahead + PIXELS}")
        rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, ahead + PIXELS)
        pixels, labels = rows[:, ahead:], rows[:, {"labels": 0, "coarse": 0, "fine": 1}[label]].tolist()
    else:
        held = _unpickled(file, content)
        key = (label if label == "labels" else f"{label}_labels").encode()
        try:
            pixels, labels = np.asarray(held[b"data"]), [int(y) for y in held[key]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(str(file), f"{error!r}", f"a dictionary with data and {key.decode()}") from error
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXELS):
            found = f"{pixels.dtype} {pixels.shape} for {len(labels)} labels"
            raise ConfigError(str(file), found, f"uint8, {PIXELS} numbers an image")
    planes = torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy())
    return Part(planes.permute(0, 2, 3, 1).contiguous(), labels)


def _joined(parts: list[Part]) -> Part:
    labels: list[int] = [label for part in parts for label in part.labels]  # type: ignore[misc]
    return Part(torch.cat([part.pixels for part in parts]), labels)


def _latin1(text: str, _encoding: str) -> bytes:
    return text.encode("latin1")


_NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],  # type: ignore[dict-item]
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],  # type: ignore[dict-item]
    ("_codecs", "encode"): _latin1,
}


class _Arrays(pickle.Unpickler):
    """Reads containers, numbers, strings and arrays; any other name is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _NAMES[module, name]


def _unpickled(file: Path, content: bytes) -> Any:
    try:
        return _Arrays(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # of broken bytes, an unpickler may raise anything
        raise ConfigError(str(file), f"{error}", "the pickle of arrays that CIFAR is published as") from error


def mnist(source: Source) -> tuple[Part, Part] | None:
    """MNIST, or another set in its format, at the path or where torchvision puts it. None if it is not there."""
    for at in (source.path, source.path / "MNIST" / "raw", source.path / "raw"):
        if _idx_file(at, *_idx_names("train-images")) is not None:
            train, test = (
                Part(_idx(at, images, 3)[..., None], _idx(at, labels, 1).tolist()) for images, labels in MNIST_FILES
            )
            for part, (images, _) in zip((train, test), MNIST_FILES, strict=True):
                if len(part.pixels) != len(part.labels):
                    found = f"{len(part.pixels)} images, {len(part.labels)} labels"
                    raise ConfigError(str(at / images), found, "as many labels as images")
            return train, test
    return None


def _idx_names(name: str) -> tuple[str, ...]:
    dims = 3 if name.endswith("images") else 1
    plain = (f"{name}-idx{dims}-ubyte", f"{name}.idx{dims}-ubyte")
    return (*plain, *(f"{file}.gz" for file in plain))


def _idx_file(folder: Path, *names: str) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _idx(folder: Path, name: str, dims: int) -> torch.Tensor:
    """uint8 tensor of an IDX file: magic 0, 0, 8 (bytes), number of dimensions; sizes as 32-bit big-endian; data."""
    names = _idx_names(name)
    file = _idx_file(folder, *names) or folder / names[0]
    packed = file.suffix == ".gz"
    with _reading(file), gzip.open(file) if packed else open(file, "rb") as source:
        head = source.read(4 + 4 * dims)
        if head[:4] != bytes((0, 0, 8, dims)) or len(head) < 4 + 4 * dims:
            raise ConfigError(str(file), head[:4].hex(" "), f"an IDX file, which begins 00 00 08 {dims:02x}")
        shape = struct.unpack(f">{dims}I", head[4:])
        wanted, size = math.prod(shape), file.stat().st_size
        if packed and (reason := why_too_large(wanted, size)):
            raise ConfigError(str(file), f"{size} bytes", f"a file that takes less memory unpacked ({reason})")
        data = source.read(wanted + 1 if packed else -1)  # no more is unpacked than the head says, and a sign of more
    if len(data) != wanted:
        found = f"more than {wanted}" if packed and len(data) > wanted else str(len(data))
        accepted = f"{' × '.join(map(str, shape))} bytes, as its head says"
        raise ConfigError(str(file), f"{found} bytes of data", accepted)
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(shape).copy())


def _content(file: Path) -> bytes:
    with _reading(file):
        return file.read_bytes()


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """ConfigError where a file cannot be read or unpacked."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(str(file), f"{type(error).__name__}: {error}", "a file that can be read whole") from error
