"""A user's own task: an object of the class Task in a Python file, `my_task.py:NAME`, or a function there that
describes one in plain torch (plain.py), `my_task.py:build`.

The file is run by the command and again by every worker. Its bytes are part of the digest, so results of one version of
the file are never taken for those of another.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import msgspec

from fp4dse.dse import ConfigError
from fp4dse.tasks.own.plain import plain_task
from fp4dse.tasks.task import Task


def load_task(path: str, name: str) -> Task:
    """The task `name` of the file. ConfigError where there is none, or where the file does not run."""
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError("--task", path, "a Python file that exists, as FILE.py:NAME")
    source = file.read_bytes()
    found = vars(_run(file)).get(name)
    if isinstance(found, FunctionType):
        where = f"{file.name}:{name}"
        found = plain_task(_call(file, where, found), where, file.stem, name)
    if not isinstance(found, Task):
        wanted = f"the name of an object of class Task in {file.name}, or of a function that describes one"
        raise ConfigError("--task", f"{path}:{name}", wanted)
    for field in ("name", "preset"):
        if not re.fullmatch(r"[\w.-]+", getattr(found, field)):
            raise ConfigError(f"{file.name}: {field}", getattr(found, field), "letters, digits, and any of _ . -")
    if found.better not in (None, "lower", "higher"):
        raise ConfigError(f"{file.name}: better", found.better, "lower, higher, or nothing")
    if found.gap_unit not in (None, "points"):
        raise ConfigError(f"{file.name}: gap_unit", found.gap_unit, "points, or nothing")
    of_data = found.digest_of

    def digest_of() -> str:
        return hashlib.sha256(source + of_data().encode()).hexdigest()[:16]

    return msgspec.structs.replace(found, digest_of=digest_of, origin=(str(file), name))


def _run(file: Path) -> ModuleType:
    """The file as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"fp4dse_own_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where decorators of the standard library look for it
    _call(file, str(file), partial(spec.loader.exec_module, module))
    return module


def _call(file: Path, where: str, function: Callable[[], Any]) -> Any:
    """Call a function of the file and return its result. ConfigError at `where` names the line if it fails."""
    try:
        return function()
    except ConfigError:
        raise
    except Exception as error:
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(file)]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else "?")
        said = f"{type(error).__name__}: {error} in line {line}"
        raise ConfigError("--task", where, f"a Python file that runs ({said})") from None
