"""Arguments and options that several commands share, so that they are called and explained the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
StorePath = Annotated[
    str | None, typer.Option("--store", help="Folder or URL of the store. Default: the latest under runs/.")
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Jobs = Annotated[int | None, typer.Option(help="Workers at a time. Default: one a core, or one a GPU.")]
Budget = Annotated[str | None, typer.Option(help="Stop after 90s, 30m, 1h30m, with all that is finished saved.")]
Seeds = Annotated[str | None, typer.Option(help="How many (3), or which (0,1,2). Default: the space's, or 3.")]
Rates = Annotated[list[str], typer.Option(help="Learning rates: 1e-3,3e-3. Default: the space's, or the task's.")]
Rungs = Annotated[int, typer.Option(help="Rungs at which the worse lanes of a population are dropped.")]
Keep = Annotated[float | None, typer.Option(help="Share that goes on at a rung. Default: 0.5.")]
TaskNames = Annotated[list[str], typer.Option(help="TASK, TASK:PRESET, or FILE.py:NAME of your own; may be repeated.")]
ExecutorName = Annotated[str, typer.Option(help="local, ray or slurm.")]
ExecutorOptions = Annotated[list[str], typer.Option(help="KEY=VALUE for the executor; may be repeated.")]
SpaceName = Annotated[str, typer.Argument(metavar="SPACE", help="A .toml file, or the name of a shipped space.")]
RecipeName = Annotated[str, typer.Argument(help="A recipe's name, or a .toml file.")]
