"""Public names of a package that are imported when somebody asks for them: what is heavy stays out of whoever does not.

__getattr__ = lazy(__name__, catalogue=("TASKS", "get_task"), engine=("train",))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module


def lazy(package: str, /, **modules: Sequence[str]) -> Callable[[str], object]:
    """The `__getattr__` of a package (PEP 562): of each of its `modules`, these names."""
    home = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return find
