"""Commands beside a sweep: watch it, stop it, repeat one of its jobs, replay it with rungs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fp4dse.commands.options import AsJson, Rungs, StorePath
from fp4dse.commands.printing import console, print_json, print_rows
from fp4dse.commands.topics import new_app, open_given, under

app = new_app()
command = under(app, "Train")


@command(epilog="Example: fp4dse status --watch")
def status(
    store: StorePath = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and follow it until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Progress of a sweep, from any terminal: lanes, rate, what runs, what failed and why, best so far, time left."""
    from fp4dse.sweeps import read_state
    from fp4dse.sweeps.running import progress
    from fp4dse.sweeps.stores import latest_store

    target = store or latest_store()
    state = progress.watch(lambda: read_state(target), console()) if watch else read_state(target)
    if as_json:
        print_json(state.facts())
    elif not watch:
        console().print(progress.render(state))


@command(epilog="Example: fp4dse stop --store runs/quickstart/store")
def stop(store: StorePath = None) -> None:
    """End a sweep from another terminal: running jobs stop, what is finished is stored, the same command continues."""
    from fp4dse.sweeps import stop_sweep
    from fp4dse.sweeps.running.progress import headline
    from fp4dse.sweeps.stores import latest_store

    print(headline(stop_sweep(store or latest_store())))


@command("run-one", epilog="Example: fp4dse run-one regression-small-1f0c2ab93d4e --store runs/zoo/store")
def run_one(
    job: Annotated[str, typer.Argument(help="A failed job's name, a failed lane's run_id, or a job.json.")],
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """Run one job again in the foreground, with all that it says, and store what comes of it."""
    from fp4dse.sweeps.running.progress import job_line
    from fp4dse.sweeps.running.rerun import find_job
    from fp4dse.sweeps.running.rerun import run_one as run

    opened = open_given(store)
    found, context = find_job(job, opened)
    results = run(found, context, opened, lambda progress: print(job_line(progress), file=sys.stderr))
    columns = ["recipe", "lr", "seed", "status", "val_loss"]
    lines = zip(found.lanes, results, strict=True)
    rows = [(lane.recipe.label(), lane.lr, lane.seed, result.status, result.val_loss) for lane, result in lines]
    print_rows(columns, [dict(zip(columns, row, strict=True)) for row in rows], as_json)


@command(epilog="Example: fp4dse rungs --replay runs/zoo/store --rungs 3 --keep 0.5")
def rungs(
    replay: Annotated[Path, typer.Option(help="A store with a finished sweep that had no rungs.")],
    rungs: Rungs = 3,
    keep: Annotated[float, typer.Option(help="Share that goes on at a rung.")] = 0.5,
    as_json: AsJson = False,
) -> None:
    """Replay rungs on a finished sweep: what they would have saved, how often they would have dropped the best."""
    import msgspec

    from fp4dse.results import open_store
    from fp4dse.results.text.ratios import change
    from fp4dse.sweeps.planning.halving import Halving, Replay
    from fp4dse.sweeps.planning.halving import replay as replay_store

    rows = [msgspec.to_builtins(row) for row in replay_store(open_store(replay), Halving(rungs, keep))]
    if not as_json:
        rows = [{**row, "regret": change(row["regret"])} for row in rows]
    print_rows(list(Replay.__struct_fields__), rows, as_json)
