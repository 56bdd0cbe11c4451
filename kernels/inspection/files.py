"""Tensors out of a file that somebody else wrote: NumPy, PyTorch, safetensors. Nothing in a file is ever executed.

A file gives its tensors by name. One that a quantizer has no use for (integers, a single number, nothing at all) gives
the reason in its place, so that whoever asked can say what was left out.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.dse.reading.files import DEEPEST, decode_json

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
FLOATS = set(SAFETENSORS_DTYPES.values())
NO_ELEMENTS = "no elements"


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file; the offsets count from the header's end."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int]


def read_tensors(path: str | Path) -> dict[str, Tensor | str]:
    """Name -> a floating-point tensor with an axis and at least one element, or why it is none.

    Read by the ending of the name: .npy (one tensor, named after the file), .npz, .safetensors, .pt and .pth (a tensor,
    or dicts and lists of them, whose keys are joined by dots). Data is mapped, not copied, where the format allows.
    Raises ConfigError for a file that is missing, of another kind, broken, or without a single such tensor; OSError
    for one that the machine cannot read.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(str(path), path.suffix or None, f"a file that ends in {', '.join(READERS)}")
    if not path.is_file():
        raise ConfigError(str(path), None, f"a {path.suffix} file")
    found = {name: _usable(value) for name, value in reader(path)}
    if not any(isinstance(value, Tensor) for value in found.values()):
        inside = "; ".join(f"{name}: {why}" for name, why in found.items()) or "no tensors"
        raise ConfigError(str(path), inside, "a file with a floating-point tensor that has an axis")
    return found


def _usable(value: Tensor | str) -> Tensor | str:
    if isinstance(value, str):
        return value
    if value.layout != torch.strided:
        return f"layout {value.layout}".replace("torch.", "")
    if value.dtype not in FLOATS:
        return f"dtype {value.dtype}".replace("torch.", "")
    if value.ndim == 0:
        return "a single number"
    return value.detach() if value.numel() else NO_ELEMENTS


def _read_npy(path: Path) -> Iterator[tuple[str, Tensor | str]]:
    try:
        with path.open("rb") as file:
            _check_claim(file, path.stat().st_size)
        array = np.lib.format.open_memmap(path, mode="c")
    except (ValueError, OverflowError) as error:
        raise _broken(path, error) from None
    yield path.stem, _from_numpy(array)


def _read_npz(path: Path) -> Iterator[tuple[str, Tensor | str]]:
    """A member that is no plain array gives the reason in its place: the others may be."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                with archive.open(member) as file:
                    try:
                        _check_claim(file, member.file_size)
                        file.seek(0)
                        found = _from_numpy(np.lib.format.read_array(file, allow_pickle=False))
                    except (ValueError, OverflowError) as error:
                        found = str(error)
                yield member.filename.removesuffix(".npy"), found
    except (EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:  # or it is encrypted
        raise _broken(path, error) from None


def _check_claim(file: IO[bytes], size: int) -> None:
    """ValueError if an array that begins here claims more than the `size` bytes that it has. What claims less or is of
    another kind is left to NumPy."""
    form = np.lib.format
    first = form.read_magic(file) == (1, 0)
    shape, _, dtype = form.read_array_header_1_0(file) if first else form.read_array_header_2_0(file)
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"shape {shape} of {dtype}, but only {size} bytes")


def _from_numpy(array: Any) -> Tensor | str:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or array.dtype.itemsize > 8:
        return f"dtype {getattr(array, 'dtype', 'unknown')}"
    return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape))


def _read_safetensors(path: Path) -> Iterator[tuple[str, Tensor | str]]:
    """8 bytes with the length of the header, the header in JSON, the data: all little-endian."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise _broken(path, f"a header of {length} bytes in a file of {size}")
        header = file.read(length)
    start = 8 + length
    try:
        raw = decode_json(header, dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: decode_json(entry, _Entry) for name, entry in raw.items()}
    except msgspec.DecodeError as error:
        raise _broken(path, error) from None
    data = np.memmap(path, np.uint8, mode="c")
    for name, entry in entries.items():
        dtype = SAFETENSORS_DTYPES.get(entry.dtype)
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= size - start:
            raise _broken(path, f"{name} at bytes {begin} to {end} of {size - start}")
        if dtype is None:
            yield name, f"dtype {entry.dtype}"
        elif math.prod(entry.shape) * dtype.itemsize != end - begin:
            raise _broken(path, f"{name} with {end - begin} bytes for {entry.dtype} {entry.shape}")
        elif begin == end:
            yield name, NO_ELEMENTS
        else:
            content = torch.from_numpy(data[start + begin : start + end])
            aligned = content.clone() if content.data_ptr() % dtype.itemsize else content
            yield name, aligned.view(dtype).view(entry.shape)


def _read_torch(path: Path) -> Iterator[tuple[str, Tensor | str]]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError:
        raise
    except Exception as error:  # what a broken pickle raises has no bounds
        raise _broken(path, error) from None
    try:
        yield from _flat(saved, "" if isinstance(saved, Mapping | list | tuple) else path.stem)
    except RecursionError as error:
        raise _broken(path, error) from None


def _flat(value: object, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor | str]]:
    """Every leaf of nested dicts and lists, by its keys joined with dots. RecursionError where they are nested deeply,
    or hold themselves."""
    if depth > DEEPEST:
        raise RecursionError("too many levels")
    if isinstance(value, Mapping | list | tuple):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _flat(inner, f"{name}.{key}" if name else str(key), depth + 1)
    else:
        yield name, value if isinstance(value, Tensor) else f"{type(value).__name__}, not a tensor"


def _broken(path: Path, why: object) -> ConfigError:
    accepted = f"a {path.suffix.lower()} file, whole and without pickled code"
    return ConfigError(str(path), str(why).split(". ")[0] or type(why).__name__, accepted)


READERS = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
    ".pth": _read_torch,
}
"""Ending of a file -> function that reads it."""
