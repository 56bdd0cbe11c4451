"""All tasks: ours by name and preset, on bundled data or on the user's, and those of a user's file."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.tasks import diffusion, finetune, language, regression, rl, vision
from fp4dse.tasks.data import shapes
from fp4dse.tasks.data.user_files import absolute
from fp4dse.tasks.language.folder import THEIR_EMBEDDING
from fp4dse.tasks.own.loading import load_task
from fp4dse.tasks.start import ENDING
from fp4dse.tasks.start.weights import read_about, read_weights, start_from
from fp4dse.tasks.task import Task
from fp4dse.tasks.tuned import tuned

TASKS: dict[str, dict[str, Task]] = {
    "regression": regression.PRESETS,
    "vision": vision.PRESETS,
    "diffusion": diffusion.PRESETS,
    "language": language.PRESETS,
    "rl": rl.PRESETS,
    "finetune": finetune.PRESETS,
}
"""Task name -> preset name -> task."""

ON_DATA: dict[str, Callable[[str, str], Task]] = {
    "regression": regression.on_data,
    "vision": vision.on_data,
    "diffusion": diffusion.on_data,
    "language": language.on_data,
}
"""Task name -> (preset, path) -> the task on the user's data."""

ON_FOLDER: dict[str, Callable[[str, str | None, Path], tuple[Task, dict[str, Tensor]]]] = {
    "language": language.on_folder,
    "finetune": finetune.on_folder,
}
"""Task name -> (preset, data, folder) -> the task with the pretrained decoder of a folder, and its weights."""

NAMED_DATA: dict[str, Collection[str]] = {
    "vision": (shapes.NAME,),
    "diffusion": (shapes.NAME,),
    "language": language.NAMED,
}
"""Task name -> data that have a name and need no file. Options may follow a question mark."""

_WHY_NOT = {
    "rl": "; a problem of rl is written in some dozen tokens of its own, which are no text: start rl from "
    "a policy of `fp4dse weights make rl:…`, and ask what a folder loses on text with --task finetune"
}
"""Task name -> why it has no use for a folder, and what to do in its place."""

BF16 = "+bf16"
"""After the name of a preset: with BF16 between the layers. It is a preset of its own, and so are its rows."""

SWIGLU8 = "+swiglu8"
"""After that, of language: SwiGLUs keep their inputs for the backward pass in MXFP8. Gradients are others, of BF16 too:
it is a preset of its own, and so are its rows."""

PACKED, RECOMPUTE = "+packed", "+recompute"
"""After that: layers whose weight gradient takes the forward pass's quantized x keep it as codes; and, of language,
blocks keep their inputs for the backward pass and nothing in between, which is made again. The bits are those of the
preset without them, and so are its name and its rows."""

OF_LANGUAGE = SWIGLU8, RECOMPUTE


def get_task(name: str, preset: str = "small", data: str | None = None, start: str | None = None) -> Task:
    """The task at a preset, with `+bf16`, `+swiglu8`, `+packed`, `+recompute` behind it if wanted; on the user's data
    if `data` names some. For a file `….py`, its object called `preset`. start: a file of weights that all lanes start
    from (weights.py), or for ON_FOLDER the folder of a pretrained decoder. An empty text is as good as None.

    ConfigError names the known ones, or says what is wrong with the data or the weights.
    """
    path = Path(start).resolve() if start else None
    if path is not None and path.is_dir():
        task, weights = _pretrained(name, preset, data or None, path)
    else:
        task = _from_scratch(name, preset, data or None)
        if path is None:
            return task
        weights = read_weights(path)
        if THEIR_EMBEDDING in weights:
            raise ConfigError("--from", str(path), "the folder that this file is in, with its config.json")
    method = read_about(path).get("method")  # weights of `weights fit` say it
    origin = (*(task.origin or (name, preset)), "")[:3]
    started = start_from(task, weights, path.name)
    return msgspec.structs.replace(started, origin=(*origin, str(path)), start_method=method)


def _pretrained(name: str, preset: str, data: str | None, folder: Path) -> tuple[Task, dict[str, Tensor]]:
    """The task with the model in a folder, and its weights."""
    if name not in ON_FOLDER:
        accepted = f"a {ENDING} file (folders are for {' and '.join(ON_FOLDER)}{_WHY_NOT.get(name, '')})"
        raise ConfigError("--from", str(folder), accepted)
    known = _known(name, preset)
    if data is not None and data.partition("?")[0] in language.NAMED:
        raise ConfigError("--data", data, f"text for the tokenizer of {folder.name}, or its tokens (.bin)")
    path = None if data is None else absolute(data)
    task, weights = ON_FOLDER[name](known, path, folder)
    return msgspec.structs.replace(_at_preset(task, preset), origin=(name, preset, path or "")), weights


def _from_scratch(name: str, preset: str, data: str | None) -> Task:
    """The task without `start`."""
    if name.endswith(".py"):
        if data is not None:
            raise ConfigError("--data", data, f"nothing: {name} names its own data")
        task = load_task(name, preset)
        if task.name in TASKS:
            raise ConfigError(f"{name}: name", task.name, f"another name than {', '.join(TASKS)}")
        return task
    if name not in TASKS:
        raise ConfigError("task", name, f"{', '.join(TASKS)}, or FILE.py:NAME")
    known = _known(name, preset)
    if data is None:
        return _at_preset(_tuned(TASKS[name][known]), preset)
    if name not in ON_DATA:
        accepted = f"nothing with {name}; it is for {', '.join(ON_DATA)}"
        if name in ON_FOLDER:
            accepted = f"nothing with {name}, unless --from FOLDER names a model that reads it"
        raise ConfigError("--data", data, accepted)
    path = data if data.partition("?")[0] in NAMED_DATA.get(name, ()) else absolute(data)
    task = _tuned(ON_DATA[name](known, path), path)
    return msgspec.structs.replace(_at_preset(task, preset), origin=(name, preset, path))


def _known(name: str, preset: str) -> str:
    """The preset without `+bf16` and what may follow. ConfigError if the task has none of this name, or no blocks."""
    known, endings = _apart(preset)
    if name != "language" and (not_taken := [ending for ending in endings if ending in OF_LANGUAGE]):
        shorter = known + "".join(ending for ending in endings if ending not in OF_LANGUAGE)
        raise ConfigError(f"preset of {name}", preset, f"{shorter} ({' and '.join(not_taken)}: for language alone)")
    if known not in TASKS[name]:
        more = PACKED if name != "language" else f"{SWIGLU8}, {PACKED} and {RECOMPUTE}"
        accepted = f"{', '.join(TASKS[name])}, each with {BF16} or without, then {more} or without"
        raise ConfigError(f"preset of {name}", preset, accepted)
    return known


def _apart(preset: str) -> tuple[str, list[str]]:
    """A preset's name, and the endings that follow it in their order."""
    endings: list[str] = []
    for ending in (RECOMPUTE, PACKED, SWIGLU8, BF16):
        if preset.endswith(ending):
            preset, endings = preset.removesuffix(ending), [ending, *endings]
    return preset, endings


def _tuned(task: Task, data: str = "") -> Task:
    """The task with its tuned learning rates, if it has been tuned on these data."""
    found = tuned(task.name, task.preset, data)
    if found is None:
        return task
    return msgspec.structs.replace(task, lr=found.rates.get("bf16", task.lr), rates=found.rates)


def _at_preset(task: Task, preset: str) -> Task:
    """The task as the name of the preset that was asked for says: with what `+bf16` and `+swiglu8` mean, which stay in
    its name, and with what `+packed` and `+recompute` mean, which stand in its origin alone."""
    known, endings = _apart(preset)
    named = known + "".join(ending for ending in endings if ending in (BF16, SWIGLU8))
    if named != known:
        dtype = "bfloat16" if BF16 in endings else task.dtype
        task = msgspec.structs.replace(task, preset=named, dtype=dtype, swiglu8=SWIGLU8 in endings)
    if named == preset:
        return task
    more = {"packed": PACKED in endings, "recompute": RECOMPUTE in endings}
    return msgspec.structs.replace(task, **more, origin=(task.name, preset))
