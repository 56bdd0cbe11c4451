"""The Python source that is installed on this machine, as bytes: hundreds of megabytes of real text, nothing to fetch.

Which packages there are, and in which versions, differs between machines, and a version's files may: builds write their
paths and flags into some, distributions patch others. So the digest is of the names and of the text itself, and losses
on different text are never compared. Packages are held out whole, a tenth of them: files of a package repeat each
other. Of several files with the same content one is kept.

The bytes are written once to the user's cache, in two files with their digest beside them, and read in place.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path

import numpy as np

from fp4dse.dse import ConfigError
from fp4dse.dse.program.cache import cache_folder
from fp4dse.dse.program.whole_file import whole_file
from fp4dse.tasks.data.text import BYTES, HELD_OUT, Corpus

REV = 2
"""Raised when other files are read, or cut in another way."""
SPLITS = ("train", "held_out")
LEAST = 1 << 20
"""Bytes below which a corpus is refused."""


@cache
def installed_python() -> Corpus:
    """The standard library and every installed distribution. ConfigError where that is less than a megabyte."""
    found = {name: files for name, files in _packages() if files}
    key = hashlib.sha256(f"python {REV} {sorted(found)}".encode()).hexdigest()[:16]
    folder = cache_folder() / f"python-{key}"
    if not (folder / "digest").exists():
        _write(found, folder)
    train, held_out = (np.memmap(folder / f"{name}.bin", np.uint8, "r") for name in SPLITS)
    digest = (folder / "digest").read_text()
    name, contents = f"Python source of {len(found)} packages", "; ".join(sorted(found))
    return Corpus(name, train, held_out, BYTES, 1.0, digest, contents)


def _packages() -> Iterator[tuple[str, list[Path]]]:
    """`name version` of each package, and its Python files, sorted."""
    yield f"python {platform.python_version()}", sorted(_of_folder(Path(sysconfig.get_path("stdlib"))))
    for each in sorted(distributions(), key=lambda each: (each.name or "").lower()):
        yield f"{(each.name or '').lower()} {each.version}", sorted(_of_distribution(each))


def _of_folder(folder: Path) -> Iterator[Path]:
    """The files of the standard library, without what is installed into it, and without its tests."""
    for file in folder.rglob("*.py"):
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(file.parts):
            yield file


def _of_distribution(found: Distribution) -> Iterator[Path]:
    """The files of an installed distribution; none of one that is installed in place."""
    for file in found.files or ():
        path = Path(str(file.locate()))
        if path.suffix == ".py" and ".." not in file.parts and path.is_file():
            yield path


def _write(packages: dict[str, list[Path]], folder: Path) -> None:
    """Both splits; their digest last, so that a folder that has it is whole."""
    seen: set[bytes] = set()
    texts = {name: b"".join(_new(files, seen)) for name, files in sorted(packages.items())}
    names = [name for name, text in sorted(texts.items(), key=lambda item: -len(item[1])) if text]
    splits: dict[str, list[str]] = {name: [] for name in SPLITS}
    for i, name in enumerate(names):
        splits["held_out" if i % HELD_OUT == HELD_OUT // 2 else "train"].append(name)
    sizes = {split: sum(len(texts[name]) for name in found) for split, found in splits.items()}
    if min(sizes["train"], HELD_OUT * sizes["held_out"]) < LEAST:
        raise ConfigError("--data", "python", f"{LEAST:,} bytes of installed Python source (found {sizes['train']:,})")
    folder.mkdir(parents=True, exist_ok=True)
    state = hashlib.sha256(folder.name.encode())
    for split, found in splits.items():
        with whole_file(folder / f"{split}.bin") as hidden:
            hidden.write_bytes(text := b"".join(texts[name] for name in found))
        state.update(hashlib.sha256(text).digest())
    with whole_file(folder / "digest") as hidden:
        hidden.write_text(state.hexdigest()[:16])


def _new(files: list[Path], seen: set[bytes]) -> Iterator[bytes]:
    """Yield the content of the files that is not in `seen`, with a newline after each; add it to `seen`."""
    for file in files:
        text = file.read_bytes()
        digest = hashlib.sha256(text).digest()
        if digest not in seen and text.strip():
            seen.add(digest)
            yield text + b"\n"
