"""Arguments and options that several commands share, so that they are called and explained the same everywhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from fp4dse.commands import completing
from fp4dse.commands.completing import offer, offer_several
from fp4dse.dse import ConfigError, recipe_files
from fp4dse.dse.cost import chip_names, model_names, workload_names

EXECUTOR_NAMES = ["local", "ray", "slurm", "folder"]
SAMPLER_NAMES = ["tpe", "nsga2", "nsga3", "gp", "random"]
OBJECTIVE_NAMES = ["gap", "overhead", "loss", "metric", "points", "bits"]
"""Named here so that --help imports nothing slow; a test compares the tables of `sweeps/`."""


def _given(param: typer.CallbackParam, value: str | None) -> str | None:
    """The value; ConfigError for an option with an empty text, which is what a shell makes of a variable that is not
    set."""
    if value == "":
        raise ConfigError(param.opts[0], value, "a text that is not empty, or the option left out")
    return value


def _once(param: typer.CallbackParam, values: list[str]) -> list[str]:
    """The values; ConfigError for a second one, which would be dropped in silence, and as of `_given`."""
    if len(values) > 1:
        accepted = "one, as all lanes start from the same weights; for others repeat the command with the same --store"
        raise ConfigError(param.opts[0], " and ".join(values), accepted)
    for value in values:
        _given(param, value)
        _say_of_folder(Path(value))
    return values


def _say_of_folder(path: Path) -> None:
    """Say what is read of a model's folder otherwise than it stands there; what is wrong with it is said elsewhere."""
    if not path.is_dir():
        return
    from fp4dse.tasks.language.folder import said_of

    with contextlib.suppress(ConfigError):
        if (sentence := said_of(path)) is not None:
            print(f"fp4dse: {sentence}", file=sys.stderr, flush=True)


def only(values: list[str]) -> str | None:
    """The text of an option that may stand once, None where it does not."""
    return values[0] if values else None


def _text(help: str, *names: str, offered: Callable[[], Iterable[str]] | None = None) -> Any:
    """An option that takes a text, which is not empty; `offered` are those that the tab key knows."""
    return typer.Option(*names, help=help, callback=_given, autocompletion=offer(offered) if offered else None)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
StorePath = Annotated[str | None, _text("Folder or URL of the store. Default: the latest under runs/.", "--store")]
NewStore = Annotated[str | None, _text("Folder or s3:// URL. Default: runs/SPACE/store.", "--store")]
Preset = Annotated[str | None, _text("Preset of tasks named without one. Default: small.")]
ConfirmSeeds = Annotated[int, typer.Option(help="Fresh seeds a candidate: half of them choose, the others estimate.")]
Data = Annotated[str | None, _text("Your data for the task: a PATH, or TABLE:COLUMN.")]
Start = Annotated[
    list[str],
    typer.Option("--from", help="Weights to start from: a .safetensors file, or a model's folder.", callback=_once),
]
"""A list, so that a second one is seen and refused; `only` is its text."""
Device = Annotated[str, typer.Option(help="cpu or cuda.", autocompletion=offer(lambda: ["cpu", "cuda"]))]
Jobs = Annotated[int | None, typer.Option(help="Workers at a time. Default: one a core, or one a GPU.")]
Budget = Annotated[str | None, typer.Option(help="Stop after 90s, 30m, 1h30m, with all that is finished saved.")]
Seeds = Annotated[
    str | None, typer.Option(help="Number of seeds (3), or seeds (0,1,2 or 40-71). Default: the space's, or 3.")
]
Rates = Annotated[
    list[str],
    typer.Option(help="Learning rates: 1e-3,3e-3. Default: the space's, or the task's for the recipe's class."),
]
Rungs = Annotated[int, typer.Option(help="Rungs at which the worse lanes of a population are dropped.")]
Keep = Annotated[float | None, typer.Option(help="Share that goes on at a rung. Default: 0.5.")]
TaskNames = Annotated[
    list[str],
    typer.Option(
        help="TASK, TASK:PRESET, or FILE.py:NAME of your own; may be repeated. `fp4dse tasks` lists them.",
        autocompletion=offer(completing.tasks),
    ),
]
ExecutorName = Annotated[
    str, typer.Option(help=f"{', '.join(EXECUTOR_NAMES)}.", autocompletion=offer(lambda: EXECUTOR_NAMES))
]
SamplerName = Annotated[
    str, typer.Option(help=f"{', '.join(SAMPLER_NAMES)}.", autocompletion=offer(lambda: SAMPLER_NAMES))
]
Objectives = Annotated[
    str,
    typer.Option(
        help=f"Of {', '.join(OBJECTIVE_NAMES)}, with commas. The best are sought.",
        autocompletion=offer_several(lambda: OBJECTIVE_NAMES),
    ),
]
ExecutorOptions = Annotated[list[str], typer.Option(help="KEY=VALUE for the executor; may be repeated.")]
Axes = Annotated[
    list[str],
    typer.Option(
        "--axis",
        "-a",
        help="PATH=VALUE,VALUE: an axis more, or other values for one; may be repeated. SPACE may then be a recipe.",
    ),
]
Model = Annotated[
    str | None,
    _text("Model shape that overheads are of, by name or .toml file. Default: llama-8b.", offered=model_names),
]
Chip = Annotated[
    str | None, _text("Chip that overheads are of, by name or .toml file. Default: gb200.", offered=chip_names)
]
Workload = Annotated[
    str,
    _text("Rollouts and updates of reinforcement learning, by name or .toml file.", offered=workload_names),
]
SpaceName = Annotated[
    str,
    typer.Argument(
        metavar="SPACE",
        help="A .toml file, or the name of a shipped space; with --axis a recipe, too.",
        autocompletion=offer(completing.spaces_and_recipes),
    ),
]
RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A name, a .toml file, or a label or config_id of a store.",
        autocompletion=offer(recipe_files),
    ),
]
