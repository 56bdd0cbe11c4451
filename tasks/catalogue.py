"""All tasks: ours by name and preset, on bundled data or on the user's, and those of a user's file."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from fp4dse.dse import ConfigError
from fp4dse.tasks import diffusion, language, regression, rl, vision
from fp4dse.tasks.data import shapes
from fp4dse.tasks.data.user_files import absolute
from fp4dse.tasks.own import load_task
from fp4dse.tasks.task import Task
from fp4dse.tasks.tuned import tuned

TASKS: dict[str, dict[str, Task]] = {
    "regression": regression.PRESETS,
    "vision": vision.PRESETS,
    "diffusion": diffusion.PRESETS,
    "language": language.PRESETS,
    "rl": rl.PRESETS,
}
"""Task name -> preset name -> task."""

ON_DATA: dict[str, Callable[[str, str], Task]] = {
    "regression": regression.on_data,
    "vision": vision.on_data,
    "diffusion": diffusion.on_data,
    "language": language.on_data,
}
"""Task name -> (preset, path) -> the task on the user's data."""

NAMED_DATA: dict[str, Collection[str]] = {
    "vision": (shapes.NAME,),
    "diffusion": (shapes.NAME,),
    "language": language.NAMED,
}
"""Task name -> data that have a name and need no file. Options may follow a question mark."""


BF16 = "+bf16"
"""After the name of a preset: with BF16 between the layers. It is a preset of its own, and so are its rows."""


def get_task(name: str, preset: str = "small", data: str | None = None) -> Task:
    """The task at a preset, with `+bf16` behind it if wanted; on the user's data if `data` names some. For a file
    `….py`, its object called `preset`.

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
    known = preset.removesuffix(BF16)
    if known not in TASKS[name]:
        raise ConfigError(f"preset of {name}", preset, f"{', '.join(TASKS[name])}, each with {BF16} or without")
    if data is None:
        return _at_preset(_tuned(TASKS[name][known]), preset)
    if name not in ON_DATA:
        raise ConfigError("--data", data, f"nothing with {name}; it is for {', '.join(ON_DATA)}")
    path = data if data.partition("?")[0] in NAMED_DATA.get(name, ()) else absolute(data)
    task = _tuned(ON_DATA[name](known, path), path)
    return msgspec.structs.replace(_at_preset(task, preset), origin=(name, preset, path))


def _tuned(task: Task, data: str = "") -> Task:
    """The task with its tuned learning rates, if it has been tuned on these data."""
    found = tuned(task.name, task.preset, data)
    if found is None:
        return task
    return msgspec.structs.replace(task, lr=found.rates.get("bf16", task.lr), rates=found.rates)


def _at_preset(task: Task, preset: str) -> Task:
    """The task under the name of the preset that was asked for, with BF16 between layers if that ends in `+bf16`."""
    return msgspec.structs.replace(task, preset=preset, dtype="bfloat16") if preset.endswith(BF16) else task
