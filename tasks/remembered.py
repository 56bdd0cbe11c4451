"""Answers that take torch, remembered from one command to the next: importing it takes longer than planning a sweep.

An answer follows from the source of this package and its tuned rates, from the versions of what it is computed with,
and from the processor. They are hashed into a stamp; a file of another stamp counts for nothing. A process that begins
with torch, as workers do, asks anew and reads nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import msgspec

from fp4dse.dse.program.cache import cache_folder, keep
from fp4dse.dse.reading.files import decode_json

T = TypeVar("T")

WITH_TORCH = "torch" in sys.modules
"""Of this process, from the start: then nothing is gained."""
PACKAGES = ("torch", "numpy", "scikit-learn", "msgspec")
ROOT = Path(__file__).parents[1]
PROCESSOR = ("vendor_id", "model name", "flags", "Features")
"""Lines of /proc/cpuinfo that say what a processor can do."""


class _File(msgspec.Struct):
    """Content of the file: answers by question, as JSON."""

    stamp: str
    answers: dict[str, msgspec.Raw]


def remembered(question: str, ask: Callable[[], T], type_: type[T]) -> T:
    """The answer to a question, from the file if it has it, else from `ask`. The question says all that it depends on
    beside the stamp."""
    if WITH_TORCH:
        return ask()
    with contextlib.suppress(KeyError, msgspec.DecodeError):
        return msgspec.json.decode(_read().answers[question], type=type_)
    answer = ask()
    remember(question, answer)
    return answer


def remember(question: str, answer: object) -> None:
    """Store an answer beside the others. If the file cannot be written, the question is asked again next time."""
    file, known = cache_folder() / "answers.json", _read()
    known.answers[question] = msgspec.Raw(msgspec.json.encode(answer))
    keep(file, lambda path: path.write_bytes(msgspec.json.encode(known)))


def recall(question: str, type_: type[T]) -> T | None:
    """An answer that was remembered, None if there is none."""
    with contextlib.suppress(KeyError, msgspec.DecodeError):
        return msgspec.json.decode(_read().answers[question], type=type_)
    return None


def _read() -> _File:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        found: _File = decode_json((cache_folder() / "answers.json").read_bytes(), _File)
        if found.stamp == stamp():
            return found
    return _File(stamp(), {})


@cache
def stamp(root: Path = ROOT) -> str:
    """16 hex digits of all that answers depend on."""
    digest = hashlib.sha256()
    code = [file for room in ("dse", "kernels", "tasks") for file in (root / room).rglob("*.py")]
    for file in sorted([*code, *(root / "tasks" / "tuned").glob("*.json")]):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    versions = [platform.python_version(), *map(_version, PACKAGES)]
    settings = [os.environ.get("ATEN_CPU_CAPABILITY", ""), platform.machine()]
    digest.update("\n".join([*versions, *settings, *_processor()]).encode())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> list[str]:
    """Lines of /proc/cpuinfo that describe the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in lines if line.startswith(PROCESSOR)]
