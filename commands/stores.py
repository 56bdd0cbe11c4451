"""`fp4dse store …`: commands that look after stores, say what they hold, and merge, mend, time or hide it."""

from __future__ import annotations

import math
import sys
from typing import Annotated

import typer

from fp4dse.commands.completing import offer
from fp4dse.commands.options import AsJson, Device, StorePath
from fp4dse.commands.printing import print_facts, print_json, print_rows, size_text
from fp4dse.commands.topics import new_app, open_given
from fp4dse.dse import ConfigError
from fp4dse.dse.cost import model_names

app = new_app()
store_app = new_app(help="Look after stores.")
app.add_typer(store_app, name="store", rich_help_panel="Read")


@store_app.command("info", epilog="Example: fp4dse store info --store runs/quickstart/store")
def store_info(store: StorePath = None, as_json: AsJson = False) -> None:
    """Contents of a store: runs by status, tasks, files, bytes, hidden and unreadable rows."""
    print_facts(open_given(store).info(), as_json)


@store_app.command("list", epilog="Example: fp4dse store list")
def store_list(as_json: AsJson = False) -> None:
    """The stores under runs/, the one that changed last first: what was swept into them, what they hold, their size."""
    import msgspec

    from fp4dse.dse.program.terminal import duration
    from fp4dse.sweeps.stores import RUNS, list_stores

    found = list_stores()
    if as_json:
        print_json([msgspec.to_builtins(one) for one in found])
        return
    rows = [
        {
            "store": one.store,
            "sweep": one.sweep,
            "rows": f"{one.rows:,}",
            "tasks": one.unreadable or ", ".join(one.tasks),
            "size": size_text(one.bytes),
            "last change": f"{duration(one.age_s)} ago",
            "state": one.state,
        }
        for one in found
    ]
    if rows:
        print_rows(list(rows[0]), rows)
    else:
        print(f"no store under {RUNS}/; `fp4dse quickstart` makes one")


@store_app.command("measure", epilog="Example: fp4dse store measure --store runs/quickstart/store --model mlp")
def store_measure(
    store: StorePath = None,
    model: Annotated[
        str,
        typer.Option(help="A model shape, as for cost. On a GPU take a large one.", autocompletion=offer(model_names)),
    ] = "mlp",
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Time this project's layers with every recipe of a store, relative to BF16's: the column `measured` of its runs.

    That is what emulating FP4 takes here, not the speed of FP4 hardware. Recipes that have a figure keep it.
    """
    from fp4dse.dse import Recipe
    from fp4dse.dse.cost import load_model
    from fp4dse.kernels.layer_time import layer_times, measured_overhead
    from fp4dse.results.store.measured import measure, series
    from fp4dse.results.text.frames import plain
    from fp4dse.results.text.ratios import counted
    from fp4dse.tasks import check_device, environment
    from fp4dse.tasks.threads import torch_threads

    check_device(device)
    shape, here = load_model(model), environment(device, 1)
    of, lines, unsteady = series(model, here), [], 0

    def timed(recipe: Recipe) -> float:
        with torch_threads(1):  # as workers train
            return measured_overhead(layer_times(recipe, shape, device))

    for line in measure(open_given(store), of, str(here["device_name"]), timed):
        lines.append(line)
        print(f"{line['measured']:8.3f}  {line['label']}", file=sys.stderr)
        unsteady += math.isnan(line["measured"])
    if as_json:
        print_json({"measured_of": of, "recipes": [{**line, "measured": plain(line["measured"])} for line in lines]})
    else:
        print(f"{counted(len(lines) - unsteady, 'recipe')} timed: {of}")
    if unsteady:
        hint = "the device does other work; run the command again when it is quiet"
        print(f"fp4dse: {counted(unsteady, 'recipe')} had no steady time, not stored: {hint}", file=sys.stderr)
        raise typer.Exit(1)


@store_app.command("merge", epilog="Example: fp4dse store merge runs/all/store runs/a/store runs/b/store")
def store_merge(
    into: Annotated[str, typer.Argument(help="The store that grows, a folder or URL; made if it is not there.")],
    others: Annotated[list[str], typer.Argument(metavar="OTHER…", help="Stores to take over; they stay as they are.")],
) -> None:
    """Take over what other stores have, once each: INTO, the first, grows by the rows of all that follow."""
    from fp4dse.results import open_store

    sources = [open_store(path) for path in others]
    target = open_store(into, create=True)
    for source in sources:
        taken = target.merge(source)
        print(f"{taken} rows from {source.path} into {target.path}, which has {len(target.runs(['run_id']))} now")


@store_app.command("mend", epilog="Example: fp4dse store mend --store runs/quickstart/store")
def store_mend(store: StorePath = None) -> None:
    """Verify every file of a store: set broken ones aside in torn/, bring back from there what is whole.

    To restore a broken file, copy an intact one over it in torn/ first.
    """
    found = open_given(store).mend()
    for name in found["returned"]:
        print(f"returned: {name}")
    for line in found["broken"]:
        print(f"broken: {line}")
    print(f"{len(found['returned'])} files returned, {len(found['broken'])} broken in torn/")
    if found["broken"]:
        raise typer.Exit(1)


@store_app.command("invalidate", epilog="Example: fp4dse store invalidate quantizers 2")
def store_invalidate(
    component: Annotated[str, typer.Argument(help="quantizers, engine, or a task.")],
    below: Annotated[int, typer.Argument(help="The first revision that counts.")],
    store: StorePath = None,
) -> None:
    """Hide rows that an old revision of a component made, so that a sweep trains them again."""
    if not 0 < below < 2**31:
        raise ConfigError("below", below, "a whole number above 0, the first revision that counts")
    print(f"{open_given(store).invalidate(component, below)} rows hidden")
