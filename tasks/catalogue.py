"""Which tasks there are: ours by name and preset, on bundled data or on the user's, and those of a user's file."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fp4dse.dse import ConfigError
from fp4dse.tasks import diffusion, language, regression, vision
from fp4dse.tasks.data.files import absolute
from fp4dse.tasks.own import load_task
from fp4dse.tasks.task import Task

TASKS: dict[str, dict[str, Task]] = {
    "regression": regression.PRESETS,
    "vision": vision.PRESETS,
    "diffusion": diffusion.PRESETS,
    "language": language.PRESETS,
}
"""Task name -> preset name -> task."""

ON_DATA: dict[str, Callable[[str, str], Task]] = {
    "regression": regression.on_data,
    "vision": vision.on_data,
    "diffusion": diffusion.on_data,
    "language": language.on_data,
}
"""Task name -> (preset, path) -> the task on the user's data."""


def get_task(name: str, preset: str = "small", data: str | None = None) -> Task:
    """The task at a preset; on the user's data if `data` names some. For a file `….py`, its object called `preset`.

    ConfigError names the known ones, or says what is wrong with the data.
    """
    if name.endswith(".py"):
        if data is not None:
            raise ConfigError("--data", data, f"nothing: {name} names its own data")
        task = load_task(name, preset)
        if task.name in TASKS:
            raise ConfigError(f"{name}: name", task.name, f"another name than {', '.join(TASKS)}")
        return task
    if name not in TASKS:
        raise ConfigError("task", name, f"{', '.join(TASKS)}, or FILE.py:NAME")
    if preset not in TASKS[name]:
        raise ConfigError(f"preset of {name}", preset, ", ".join(TASKS[name]))
    if data is None:
        return TASKS[name][preset]
    if name not in ON_DATA:
        raise ConfigError("--data", data, f"nothing with {name}; it is for {', '.join(ON_DATA)}")
    path = absolute(data)
    return msgspec.structs.replace(ON_DATA[name](preset, path), origin=(name, preset, path))
