"""Images in files of their own, a class per folder, and in Parquet as Hugging Face stores them.

All images become one size: they have it, or `size` scales each on its shorter side (bilinear, antialiased) and crops
the middle. Grey images stay of one channel if all are grey.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from fp4dse.dse import ConfigError
from fp4dse.tasks.data.image_source import Part, Source
from fp4dse.tasks.data.user_files import refuse_large_parquet

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
HELD_OUT = ("val", "valid", "validation", "test")
"""Names of the held-out part; the first that is there is taken."""


def folder(source: Source) -> tuple[Part, Part | None] | None:
    """A folder of images for each class, or images alone, which are one class. None if there are none."""
    if not source.path.is_dir():
        return None
    parts = [source.path / name for name in ("train", *HELD_OUT) if (source.path / name).is_dir()]
    if parts and parts[0].name == "train":
        train, *held_out = (_part(_labelled(part), source) for part in parts[:2])
        return train, held_out[0] if held_out else None
    files = list(_labelled(source.path))
    return (_part(files, source), None) if files else None


def _labelled(at: Path) -> Iterator[tuple[str, Path, str]]:
    """(name, file, class) of the images below, in order."""
    classes = sorted(entry for entry in at.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for of_class in classes or [at]:
        files = sorted(file for file in of_class.rglob("*") if file.suffix.lower() in ENDINGS)
        if classes and not files:
            raise ConfigError(f"images in {of_class}", None, f"files that end in {', '.join(ENDINGS)}")
        yield from ((str(file), file, of_class.name if classes else "") for file in files)


def parquet(source: Source) -> tuple[Part, Part | None] | None:
    """One Parquet file or a folder of them, named by their part (train-…, test-…). None if there are none."""
    if source.path.is_file():
        files = [source.path] if source.path.suffix == ".parquet" else []
    else:
        files = sorted(source.path.rglob("*.parquet"))
    if not files:
        return None
    of_part = {name: [f for f in files if f.name.startswith(name)] for name in ("train", *HELD_OUT)}
    held_out = next((of_part[name] for name in HELD_OUT if of_part[name]), [])
    train = of_part["train"] or [f for f in files if not any(f in part for part in of_part.values())]
    if not train:
        raise ConfigError(f"Parquet files in {source.path}", files[0].name, "a training part: train-….parquet")
    return _part(_rows(train, source), source), _part(_rows(held_out, source), source) if held_out else None


def _rows(files: list[Path], source: Source) -> Iterator[tuple[str, bytes | Path, int | str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in files:
        try:
            table = pq.ParquetFile(file)
            columns = table.schema_arrow
            refuse_large_parquet(file)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(str(file), str(error), "a Parquet file") from error
        image, label = source.image or "image", source.label or "label"
        for option, name in (("image", image), ("label", label)):
            if name not in columns.names:
                raise ConfigError(f"{option} column of {file}", name, f"one of {', '.join(columns.names)}")
        kind = columns.field(label).type
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ConfigError(f"label column of {file}", f"{label} of {kind}", "a column of integers or strings")
        kind = columns.field(image).type
        whole = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
        if not whole and not (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
            raise ConfigError(
                f"image column of {file}", f"{image} of {kind}", "a column of bytes or struct{bytes, path}"
            )
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=[image, label]):
            for pixels, name in zip(batch.column(image).to_pylist(), batch.column(label).to_pylist(), strict=True):
                content = pixels if whole or pixels is None else pixels["bytes"]
                if content is None or name is None:
                    raise ConfigError(
                        f"row {row} of {file}", None, "an image, whose bytes are in the file, and a label"
                    )
                yield f"in row {row} of {file}", content, name
                row += 1


def _part(named: Iterable[tuple[str, bytes | Path, int | str]], source: Source) -> Part:
    arrays: list[np.ndarray] = []
    labels: list[Any] = []
    first = ""
    for name, content, label in named:
        array = _pixels(name, content, source.size)
        if arrays and array.shape[:2] != arrays[0].shape[:2]:
            found, wanted = ("×".join(map(str, a.shape[1::-1])) for a in (array, arrays[0]))
            raise ConfigError(f"size of image {name}", found, f"{wanted} as {first}, or size=N, which makes all N×N")
        first = first or name
        arrays.append(array)
        labels.append(label)
    if not arrays:
        raise ConfigError(f"images in {source.path}", None, "one image or more in each part")
    channels = max(array.shape[2] for array in arrays)
    pixels = np.empty((len(arrays), *arrays[0].shape[:2], channels), dtype=np.uint8)
    for i, array in enumerate(arrays):
        pixels[i] = array  # a grey one among coloured ones is repeated
    return Part(torch.from_numpy(pixels), labels)


def _pixels(name: str, content: bytes | Path, size: int | None) -> np.ndarray:
    """uint8 [H, W, 1 or 3]."""
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as opened:
            image = opened.convert("L" if opened.mode in ("1", "L", "LA") else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigError(f"image {name}", str(error), "an image that is whole and that Pillow reads") from error
    if size is not None and image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    array = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]
