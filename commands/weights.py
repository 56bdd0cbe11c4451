"""Commands that make weights to start from."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fp4dse.commands import completing
from fp4dse.commands.completing import offer
from fp4dse.commands.options import AsJson, Data, Device, Start, only
from fp4dse.commands.printing import print_facts
from fp4dse.commands.topics import new_app
from fp4dse.dse import ConfigError, recipe_files
from fp4dse.tasks.job import Progress
from fp4dse.tasks.start import ENDING

app = new_app()
weights_app = new_app(help="Weights to start from (--from).")
app.add_typer(weights_app, name="weights", rich_help_panel="Train")

Seed = Annotated[int, typer.Option(help="Seed of the lane.")]
Rate = Annotated[float | None, typer.Option(help="Learning rate. Default: the task's for the recipe's class.")]
Out = Annotated[
    Path | None,
    typer.Option(
        help="A .safetensors file; of a model whose folder --from names, a new folder. "
        "Default: runs/weights/TASK-PRESET-RECIPE-SEED.safetensors, or the same as a folder."
    ),
]

FITTED_BY = ["gptq", "mr-gptq", "llm-fp4", "block-ap", "nearest"]
"""Methods of `fit`, named here so that --help needs no torch; a test compares tasks/fitted/fit.py."""


@weights_app.command("make", epilog="Example: fp4dse weights make language:smoke --out start.safetensors")
def make(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="TASK, TASK:PRESET, or FILE.py:NAME of your own.",
            autocompletion=offer(completing.tasks),
        ),
    ],
    recipe: Annotated[str, typer.Option(help="A name, or a .toml file.", autocompletion=offer(recipe_files))] = "bf16",
    seed: Seed = 0,
    lr: Rate = None,
    data: Data = None,
    start: Start = [],  # noqa: B006
    device: Device = "cpu",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Train one lane and write its weights: for --from of sweep, search and confirm. They are cached.

    Whoever repeats it on such a machine gets the same bytes.
    """
    from fp4dse.dse import load_recipe
    from fp4dse.sweeps.arguments import parse_lrs, parse_tasks
    from fp4dse.sweeps.weights import checkpoint
    from fp4dse.tasks import Lane, find_facts
    from fp4dse.tasks.facts import rate_of

    source = _check(out, only(start))
    begin = time.monotonic()
    [asked] = parse_tasks([task], None, data, only(start))
    found = load_recipe(recipe)
    [rate] = (parse_lrs([str(lr)]) if lr is not None else None) or [rate_of(find_facts(*asked), found)]
    _hand_out(checkpoint(asked, Lane(found, rate, seed), device, _report), recipe, out, source, begin, as_json)


@weights_app.command("fit", epilog="Example: fp4dse weights fit finetune:smoke --recipe mxfp4 --method gptq")
def fit(
    task: Annotated[
        str,
        typer.Argument(metavar="TASK", help="TASK or TASK:PRESET.", autocompletion=offer(completing.tasks)),
    ],
    recipe: Annotated[
        str, typer.Option(help="A name, or a .toml file: its forward quantizers.", autocompletion=offer(recipe_files))
    ] = "nvfp4",
    method: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(FITTED_BY)}.",
            autocompletion=offer(lambda: FITTED_BY),
        ),
    ] = "gptq",
    samples: Annotated[int, typer.Option(help="Samples of calibration, in whole batches.")] = 128,
    seed: Seed = 0,
    lr: Annotated[float | None, typer.Option(help="Rate of block-ap. Default: 0.0003.")] = None,
    data: Data = None,
    start: Start = [],  # noqa: B006
    device: Device = "cpu",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Fit the weights that a task starts from to the quantizers that will round them, on calibration data.

    For --from of sweep: with training.trains = none they are evaluated as they are, else trained on.
    """
    from fp4dse.dse import load_recipe
    from fp4dse.sweeps.arguments import parse_lrs, parse_tasks
    from fp4dse.sweeps.weights import fitted
    from fp4dse.tasks import Lane

    source = _check(out, only(start))
    begin = time.monotonic()
    [asked] = parse_tasks([task], None, data, only(start))
    [rate] = (parse_lrs([str(lr)]) if lr is not None else None) or [BLOCK_AP_RATE]
    path = fitted(asked, Lane(load_recipe(recipe), rate, seed), method, samples, device, _report_layers)
    name = f"{Path(recipe).stem}-{method}"
    shown = ("task", "preset", "recipe", "method", "samples", "seed", *_OF_FIT)
    _hand_out(path, name, out, source, begin, as_json, shown)


BLOCK_AP_RATE = 3e-4
"""The best of four on language:tiny, from 1e-5, the authors' for 7B parameters (docs/log.md)."""
_OF_FIT = ("loss_bf16", "loss_nearest", "loss_fitted", "recovered", "error_nearest", "error_fitted", "digest")


def _report_layers(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\rlayer {done + 1} of {of}\033[K", end="", file=sys.stderr, flush=True)


@weights_app.command("export", epilog="Example: fp4dse weights export runs/few/store --recipe bf16 --seed 0")
def export(
    store: Annotated[str, typer.Argument(metavar="STORE", help="Folder or URL of the store.")],
    recipe: Annotated[
        str,
        typer.Option(
            help="A name, a .toml file, or a label or config_id of the store.", autocompletion=offer(recipe_files)
        ),
    ] = "bf16",
    seed: Seed = 0,
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: the one that the store has.")] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Of the store's tasks, TASK:PRESET. Default: the only one.", autocompletion=offer(completing.tasks)
        ),
    ] = None,
    data: Data = None,
    start: Start = [],  # noqa: B006
    device: Device = "cpu",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a lane that a store has: they are trained again, and must come to the same loss.

    Rows hold no weights. A task with data or a start of its own is named as it was swept.
    """
    from fp4dse.results import open_store
    from fp4dse.sweeps.arguments import parse_tasks
    from fp4dse.sweeps.weights import checkpoint_of_row

    source = _check(out, only(start))
    begin = time.monotonic()
    for option, given in (("--data", data), ("--from", only(start))):
        if given is not None and task is None:
            raise ConfigError(option, given, "the --task that it is for, too")
    asked = None if task is None else parse_tasks([task], None, data, only(start))[0]
    path = checkpoint_of_row(open_store(store), recipe, seed, asked=asked, lr=lr, device=device, report=_report)
    _hand_out(path, recipe, out, source, begin, as_json)


def _check(out: Path | None, start: str | None) -> Path | None:
    """The folder that `--from` names, which the weights are to be a folder like; None for a file of weights."""
    if out is not None and out.suffix == ENDING:
        return None
    source = Path(start) if start is not None and Path(start).is_dir() else None
    if out is not None:
        if source is None:
            raise ConfigError("--out", str(out), f"a path that ends in {ENDING}, or the folder of a model for --from")
        from fp4dse.tasks.language.folder_out import check_target

        check_target(out, source)
    return source


def _report(progress: Progress) -> None:
    from fp4dse.sweeps.running.progress import job_line

    if sys.stderr.isatty():
        print(f"\r{job_line(progress)}\033[K", end="", file=sys.stderr, flush=True)


_OF_LANE = ("task", "preset", "recipe", "lr", "seed", "val_loss", "digest", "run_id")


def _hand_out(
    path: Path,
    recipe: str,
    out: Path | None,
    source: Path | None,
    begin: float,
    as_json: bool,
    shown: Sequence[str] = _OF_LANE,
) -> None:
    """Copy a checkpoint to where it was asked for, a file or a folder like `source`, and say what it is."""
    from fp4dse.results.store.atomic import write_atomic, writing
    from fp4dse.sweeps.weights import about, as_folder

    if sys.stderr.isatty():
        print(file=sys.stderr)
    said: dict[str, Any] = about(path)
    name = f"{said['task']}-{said['preset']}-{Path(recipe).stem}-{said['seed']}{'' if source else ENDING}"
    target = out or Path("runs") / "weights" / name.replace("/", "-")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if source is not None:
            as_folder(path, target, source)
    if source is None:
        write_atomic(target, path.read_bytes())
    facts = {
        "folder" if source else "file": str(target),
        **{key: said[key] for key in shown},
        "seconds": round(time.monotonic() - begin, 1),
    }
    print_facts(facts, as_json)
