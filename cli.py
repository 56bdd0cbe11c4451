"""The `fp4dse` command: arguments in, tables and exit codes out. What a command does is done by the rooms it calls.

Exit codes: 0 done, 1 some lanes failed or the machine did, 2 wrong input, 130 interrupted.
What is slow to import (torch, pandas, duckdb, plotly) is imported where it is used, so that --help answers at once.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from msgspec import to_builtins
from rich import box
from rich.console import Console
from rich.table import Table

from fp4dse.dse import ConfigError, StoreError

if TYPE_CHECKING:
    from fp4dse.results import Store
    from fp4dse.sweeps import SweepResult

_plain: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, **_plain)
recipe_app = typer.Typer(help="The recipes that come with fp4dse.", **_plain)
store_app = typer.Typer(help="Look after stores.", **_plain)
app.add_typer(recipe_app, name="recipe")
app.add_typer(store_app, name="store")
bench_app = typer.Typer(help="How fast this machine is.", **_plain)
app.add_typer(bench_app, name="bench")

Form = Literal["table", "csv", "json", "parquet", "latex"]
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
Keep = Annotated[float, typer.Option(help="Share that goes on at a rung.")]
SpaceName = Annotated[str, typer.Argument(metavar="SPACE", help="A .toml file, or the name of a shipped space.")]
RecipeName = Annotated[str, typer.Argument(help="A recipe's name, .toml file, or (for compare) config_id.")]


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run a command; wrong input becomes one line and an exit code."""
    try:
        app(arguments, prog_name="fp4dse")
    except (ConfigError, StoreError, OSError) as error:
        print(f"fp4dse: {error}", file=sys.stderr)
        machine = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
        sys.exit(1 if machine else 2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(metadata.version("fp4dse"))
        raise typer.Exit


@app.callback(epilog="Start with: fp4dse quickstart")
def root(
    show_version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Which FP4 training techniques buy the most model quality for the least overhead?"""


@app.command(epilog="Example: fp4dse sweep quickstart --task vision:small --seeds 5 --budget 30m")
def sweep(
    space: SpaceName,
    task: Annotated[
        list[str], typer.Option(help="TASK, TASK:PRESET, or FILE.py:NAME of your own; may be repeated.")
    ] = ["regression"],  # noqa: B006
    data: Annotated[str | None, typer.Option(help="Your data for the task: a PATH, or TABLE:COLUMN.")] = None,
    preset: Annotated[str | None, typer.Option(help="Preset of tasks named without one. Default: small.")] = None,
    seeds: Seeds = None,
    lr: Rates = [],  # noqa: B006
    store: Annotated[str | None, typer.Option(help="Folder or s3:// URL. Default: runs/SPACE/store.")] = None,
    device: Device = "cpu",
    jobs: Jobs = None,
    budget: Budget = None,
    rungs: Rungs = 0,
    keep: Keep = 0.5,
    executor: Annotated[str, typer.Option(help="local, ray or slurm.")] = "local",
    option: Annotated[list[str], typer.Option(help="KEY=VALUE for the executor; may be repeated.")] = [],  # noqa: B006
    rerun: Annotated[bool, typer.Option("--rerun", help="Train again what the store has.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Store gradient norms and what slots lose, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained; write nothing.")] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="With --dry-run: time and memory here, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train what the store lacks of a space: recipes × learning rates × seeds, with BF16 beside them.

    The same command continues a sweep that was stopped, and tries failed lanes again.
    """
    from fp4dse.sweeps import arguments, plan_sweep, run_sweep
    from fp4dse.sweeps.estimate import estimate as estimate_plan
    from fp4dse.sweeps.plan import count_space
    from fp4dse.sweeps.setting import find_setting

    found = arguments.find_space(space)
    asked: dict[str, Any] = {
        "tasks": arguments.parse_tasks(task, preset, data),
        "seeds": arguments.parse_seeds(seeds) if seeds else None,
        "lrs": arguments.parse_lrs(lr),
        "halving": arguments.parse_halving(rungs, keep),
        "store": store or arguments.default_store(found.name),
        "device": device,
        "jobs": jobs,
        "rerun": rerun,
        "executor": executor,
    }
    options = arguments.parse_options(option)
    budget_s = arguments.parse_duration(budget)
    if dry_run:
        plan = plan_sweep(found, **asked)
        more = (
            estimate_plan(plan, find_setting(asked["tasks"], device, jobs), asked["store"]).facts() if estimate else {}
        )
        _print_facts({**count_space(found), **plan.facts(), **more}, as_json)
    else:
        _conclude(run_sweep(found, **asked, budget_s=budget_s, options=options, record=record, progress=True), as_json)


@app.command(epilog="Example: fp4dse quickstart --budget 5m")
def quickstart(
    store: Annotated[str, typer.Option(help="Folder of the store.")] = "runs/quickstart/store",
    device: Device = "cpu",
    jobs: Jobs = None,
    budget: Budget = None,
    as_json: AsJson = False,
) -> None:
    """48 recipes × 3 seeds on two small real tasks, in a few minutes: table, store and report."""
    from fp4dse.sweeps import arguments, run_sweep

    result = run_sweep(
        arguments.find_space("quickstart"),
        tasks=arguments.parse_tasks(["regression", "vision"], "quickstart"),
        store=store,
        device=device,
        jobs=jobs,
        budget_s=arguments.parse_duration(budget),
        progress=True,
    )
    _conclude(result, as_json)


def _conclude(result: SweepResult, as_json: bool) -> NoReturn:
    """Print the trade-off and write the report; end the program with the sweep's exit code."""
    from fp4dse.kernels.inspection.gaussian import gaussian_statistics
    from fp4dse.results import noise_floor, open_store, summarize
    from fp4dse.results.report import write_report
    from fp4dse.results.tables import pareto_table, records
    from fp4dse.sweeps.arguments import report_path
    from fp4dse.sweeps.progress import conclusion

    store = open_store(result.store)
    runs = store.runs()
    summary = summarize(runs)
    page = report_path(store.path) if len(runs) else None
    if page:
        write_report(store, page, statistics=gaussian_statistics)
    if as_json:
        _print_json({**result.facts(), "report": page and str(page), "recipes": records(summary)})
    else:
        print(pareto_table(summary, noise_floor(runs)), conclusion(result), f"report: {page}", sep="\n\n")
    raise typer.Exit(result.exit_code)


@app.command(epilog="Example: fp4dse status --watch")
def status(
    store: StorePath = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and follow it until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """How far a sweep is, from any terminal: lanes, rate, what runs, what failed and why, best so far, time left."""
    from fp4dse.sweeps import arguments, progress, read_state

    place = store or arguments.latest_store()
    state = progress.watch(lambda: read_state(place), _console()) if watch else read_state(place)
    if as_json:
        _print_json(state.facts())
    elif not watch:
        _console().print(progress.render(state))


@app.command(epilog="Example: fp4dse stop --store runs/quickstart/store")
def stop(store: StorePath = None) -> None:
    """End a sweep from another terminal: running jobs stop, what is finished is stored, the same command continues."""
    from fp4dse.sweeps import arguments, read_state, stop_sweep
    from fp4dse.sweeps.progress import headline

    place = store or arguments.latest_store()
    stop_sweep(place)
    print(headline(read_state(place)))


@app.command("run-one", epilog="Example: fp4dse run-one regression-small-1f0c2ab93d4e --store runs/zoo/store")
def run_one(
    job: Annotated[str, typer.Argument(help="A failed job's name, a failed lane's run_id, or a job.json.")],
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """Run one job again in the foreground, with all that it says, and store what comes of it."""
    from fp4dse.sweeps.progress import job_line
    from fp4dse.sweeps.rerun import find_job
    from fp4dse.sweeps.rerun import run_one as run

    opened = _open(store)
    found, context = find_job(job, opened)
    results = run(found, context, opened, lambda progress: print(job_line(progress), file=sys.stderr))
    columns = ["recipe", "lr", "seed", "status", "val_loss"]
    lines = zip(found.lanes, results, strict=True)
    rows = [(lane.recipe.label(), lane.lr, lane.seed, result.status, result.val_loss) for lane, result in lines]
    _print_rows(columns, [dict(zip(columns, row, strict=True)) for row in rows], "json" if as_json else "table")


@app.command(epilog="Example: fp4dse report --store runs/quickstart/store --out front.html")
def report(
    store: StorePath = None,
    out: Annotated[Path | None, typer.Option(help="Default: report.html beside the store.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for front, effects, interactions and curves.")] = None,
    form: Annotated[Literal["png", "svg", "pdf"], typer.Option("--format", help="Of the figures.")] = "pdf",
) -> None:
    """Write a store's report: one HTML file that needs no network. With --figures, its pictures for a paper instead."""
    from fp4dse.kernels.inspection.gaussian import gaussian_statistics
    from fp4dse.results.report import write_figures, write_report
    from fp4dse.sweeps.arguments import report_path

    found = _open(store)
    if figures:
        print(*write_figures(found, figures, form), sep="\n")
    else:
        page = out or report_path(found.path)
        write_report(found, page, statistics=gaussian_statistics)
        print(page)


@app.command(epilog='Example: fp4dse query "SELECT recipe_label, avg(gap) FROM runs GROUP BY ALL" --format csv')
def query(
    sql: Annotated[str, typer.Argument(metavar="SQL", help="DuckDB SQL, or the name of a view.")],
    store: StorePath = None,
    form: Annotated[Form, typer.Option("--format")] = "table",
    out: Annotated[Path | None, typer.Option(help="Write the answer to a file.")] = None,
) -> None:
    """Ask a store in SQL. Views: runs (one row a lane), curves, recipes, front, effects and more (docs/results.md).

    `DESCRIBE runs` lists the columns of a view.
    """
    from fp4dse.results.files import write_atomic
    from fp4dse.results.formats import FORMATS
    from fp4dse.results.tables import records

    answer = _open(store).sql(f"FROM {sql}" if sql.isidentifier() else sql)
    if form == "table" and out is None:
        _print_rows([str(name) for name in answer.columns], records(answer), "table")
    elif form == "table":
        raise ConfigError("--format", form, f"{', '.join(FORMATS)} for a file")
    elif out:
        write_atomic(out, FORMATS[form](answer))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(FORMATS[form](answer))


@app.command(epilog="Example: fp4dse compare nvfp4 nvfp4-sr")
def compare(
    recipe_a: RecipeName,
    recipe_b: Annotated[str | None, typer.Argument(help="Another one. Default: all that differ in one factor.")] = None,
    store: StorePath = None,
    margin: Annotated[float, typer.Option(help="Losses this close count as the same; 0.005 is 0.5 %.")] = 0.005,
    as_json: AsJson = False,
) -> None:
    """Is one recipe better than another, are they the same, or how many more seeds would tell? Paired over seeds.

    With one recipe: what would each single change to it do?
    """
    from fp4dse.results import compare as compare_runs
    from fp4dse.results import neighbours
    from fp4dse.results.tables import records
    from fp4dse.sweeps.arguments import find_config_id

    runs, a = _open(store).runs(), find_config_id(recipe_a)
    if recipe_b is None:
        lines = neighbours(runs, a, margin)
        shown = ["task", "preset", "factor", "from_level", "level", "pairs", "difference", "low", "high", "verdict"]
        rows = records(lines if as_json else lines[[*shown, "more_seeds"]])
        _print_rows([*shown, "more_seeds"], rows, "json" if as_json else "table")
        return
    lines = compare_runs(runs, a, find_config_id(recipe_b), margin)
    if as_json:
        _print_json(records(lines))
    else:
        print(*lines["verdict"], sep="\n")


@app.command(epilog="Example: fp4dse space quickstart")
def space(space: SpaceName, as_json: AsJson = False) -> None:
    """Count a space: raw product, merged as equivalent, rejected and by which rule, left."""
    from fp4dse.sweeps.arguments import find_space
    from fp4dse.sweeps.plan import count_space

    _print_facts(count_space(find_space(space)), as_json)


@app.command(epilog="Example: fp4dse search paper-slice --sampler tpe --trials 200 --task vision:small")
def search(
    space: SpaceName,
    sampler: Annotated[str, typer.Option(help="tpe, nsga2, nsga3, gp or random.")],
    trials: Annotated[int, typer.Option(help="Recipes to try, those that the store knows included.")],
    objectives: Annotated[str, typer.Option(help="Of gap, overhead, loss, bits; all are minimized.")] = "gap,overhead",
    task: Annotated[str, typer.Option(help="TASK or TASK:PRESET.")] = "regression",
    seeds: Seeds = None,
    lr: Rates = [],  # noqa: B006
    store: Annotated[Path | None, typer.Option(help="Folder of the store. Default: runs/SPACE/store.")] = None,
    device: Device = "cpu",
    jobs: Jobs = None,
    batch: Annotated[
        int | None, typer.Option(help="Recipes trained together. Default: what fills the workers.")
    ] = None,
    sampler_seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    budget: Budget = None,
    rungs: Rungs = 0,
    keep: Keep = 0.5,
    as_json: AsJson = False,
) -> None:
    """Let a sampler propose recipes of a space in batches, and train them; what the store has is looked up.

    The same command continues a search that was stopped.
    """
    from fp4dse.sweeps import arguments, run_search

    found = arguments.find_space(space)
    result = run_search(
        found,
        sampler=sampler,
        trials=trials,
        objectives=[name.strip() for name in objectives.split(",")],
        task=arguments.parse_tasks([task])[0],
        seeds=arguments.parse_seeds(seeds) if seeds else None,
        lrs=arguments.parse_lrs(lr),
        store=store or arguments.default_store(found.name),
        device=device,
        jobs=jobs,
        batch=batch,
        sampler_seed=sampler_seed,
        budget_s=arguments.parse_duration(budget),
        halving=arguments.parse_halving(rungs, keep),
        progress=True,
    )
    facts = result.facts()
    front = facts.pop("front")
    if as_json:
        _print_json({**facts, "front": front})
    else:
        _print_rows(list(front[0]) if front else ["label"], front, "table")
        _print_facts(facts, False)
    raise typer.Exit(result.exit_code)


@app.command(epilog="Example: fp4dse dashboard --store runs/zoo/store")
def dashboard(
    store: StorePath = None,
    storage: Annotated[
        str | None, typer.Option(help="A journal file, postgresql://… or grpc://127.0.0.1:PORT.")
    ] = None,
    port: Annotated[int, typer.Option(help="Of 127.0.0.1; 0: any that is free.")] = 8080,
    follow: Annotated[bool, typer.Option(help="Stay in step with a sweep that runs.")] = True,
    mirror_only: Annotated[bool, typer.Option("--mirror-only", help="Bring the studies up to date and leave.")] = False,
    serve_grpc: Annotated[int | None, typer.Option(help="Instead offer the storage to other processes here.")] = None,
) -> None:
    """Show a store in optuna-dashboard: one study per task, one trial per recipe. It is made from the store's rows."""
    from fp4dse.sweeps import study as studies
    from fp4dse.sweeps.dashboard import check_dashboard, default_storage, serve, sweep_name

    check_dashboard()
    found = _open(store)
    place = storage or default_storage(found.path)
    if serve_grpc is not None:
        studies.serve_grpc(place, serve_grpc)
    elif mirror_only:
        _print_facts(studies.mirror(found, studies.open_storage(place), sweep_name(found)), False)
    else:
        serve(
            found,
            sweep_name(found),
            studies.open_storage(place),
            port,
            follow,
            lambda address: print(address, flush=True),
        )


@app.command(epilog="Example: fp4dse rungs --replay runs/zoo/store --rungs 3 --keep 0.5")
def rungs(
    replay: Annotated[Path, typer.Option(help="A store with a finished sweep that had no rungs.")],
    rungs: Rungs = 3,
    keep: Keep = 0.5,
    as_json: AsJson = False,
) -> None:
    """What rungs would have saved in a finished sweep, and how often they would have dropped the best recipe."""
    import msgspec

    from fp4dse.results import open_store
    from fp4dse.sweeps.rungs import Halving, Replay
    from fp4dse.sweeps.rungs import replay as replay_store

    rows = [msgspec.to_builtins(row) for row in replay_store(open_store(replay), Halving(rungs, keep))]
    _print_rows(list(Replay.__struct_fields__), rows, "json" if as_json else "table")


@recipe_app.command("list", epilog="Example: fp4dse recipe list")
def recipe_list(as_json: AsJson = False) -> None:
    """All of them: name, modelled step time relative to BF16, points, what it is, where it is from."""
    from fp4dse.dse import recipe_files
    from fp4dse.dse.cost import overhead, points

    columns = ["name", "overhead", "points", "summary", "source"]
    rows = [
        {
            "name": name,
            "overhead": round(overhead(file.recipe), 3),
            "points": points(file.recipe),
            "summary": file.summary,
            "source": file.source,
        }
        for name, file in recipe_files().items()
    ]
    _print_rows(columns, rows, "json" if as_json else "table")


@recipe_app.command("show", epilog="Example: fp4dse recipe show nvfp4-sr > mine.toml")
def recipe_show(recipe: RecipeName, as_json: AsJson = False) -> None:
    """One recipe as TOML: to read, or to change and to name as the base of a space."""
    from fp4dse.dse import load_recipe, recipe_to_dict, recipe_to_toml

    found = load_recipe(recipe)
    if as_json:
        _print_json({"config_id": found.config_id, "label": found.label(), **recipe_to_dict(found)})
    else:
        print(f"# {found.label()}\n# config_id {found.config_id}\n{recipe_to_toml(found)}")


@app.command(epilog="Example: fp4dse cost nvidia-nvfp4 --model llama-1b --chip b200")
def cost(
    recipe: RecipeName,
    model: Annotated[str, typer.Option(help="A model shape that comes with fp4dse, or a .toml file.")] = "llama-1b",
    chip: Annotated[str, typer.Option(help="A chip that comes with fp4dse, or a .toml file.")] = "b200",
    extra_tokens: Annotated[
        float | None, typer.Option(help="Share of tokens more than BF16 to the same quality: gives time to quality.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also time this project's layers on --device.")] = False,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """What a recipe costs: modelled step time relative to BF16, split by technique; points, bits, memory."""
    from fp4dse.dse import load_recipe
    from fp4dse.dse.cost import load_chip, load_model, report

    found, shape, on = load_recipe(recipe), load_model(model), load_chip(chip)
    facts = report.summary(found, shape, on, extra_tokens)
    parts, work, layers = report.split(found, shape, on), report.operations(found, on), []
    if measure:
        from fp4dse.kernels.layer_time import layer_times
        from fp4dse.tasks import check_device

        check_device(device)
        layers = [to_builtins(line) for line in layer_times(found, shape, on, device)]
    if as_json:
        _print_json({**facts, "split": parts, "operations": work, "measured": layers})
        return
    _print_facts(facts, False)
    tables = {
        "The step by part:": parts,
        "Bytes and instructions per element of the tensor:": work,
        f"This project's layers on {device}, one lane, forward and backward:": layers,
    }
    for title, rows in tables.items():
        if rows:
            print(title)
            _print_rows(list(rows[0]), [{name: _short(value) for name, value in row.items()} for row in rows], "table")


@app.command(epilog="Example: fp4dse export te-nvfp4 --to te")
def export(
    recipe: RecipeName,
    to: Annotated[str, typer.Option(help="te (NVIDIA Transformer Engine), torchao or json.")],
    as_json: AsJson = False,
) -> None:
    """Settings of another library that compute a recipe; exit code 1 with what it cannot express if there are none."""
    from fp4dse.dse import load_recipe
    from fp4dse.dse.export import export as find_settings

    done = find_settings(load_recipe(recipe), to)
    settings = done.settings
    if as_json:
        facts = {"target": to, "cannot": done.cannot, "nearest" if done.cannot else "settings": settings.text}
        _print_json({**facts, "environment": settings.environment, "notes": settings.notes})
    elif done.cannot:
        lines = [f"fp4dse: {to} cannot express {recipe}:", *(f"  {line}" for line in done.cannot)]
        print(*lines, "the nearest that it has:", "", settings.text, sep="\n", file=sys.stderr)
    else:
        variables = [f"# or in the environment: {name}={value}" for name, value in settings.environment.items()]
        print(settings.text, *variables, *(f"# {note}" for note in settings.notes), sep="\n")
    raise typer.Exit(int(bool(done.cannot)))


@store_app.command("info", epilog="Example: fp4dse store info --store runs/quickstart/store")
def store_info(store: StorePath = None, as_json: AsJson = False) -> None:
    """What a store holds: runs by status, tasks, files, bytes, hidden and unreadable rows."""
    _print_facts(_open(store).info(), as_json)


@store_app.command("merge", epilog="Example: fp4dse store merge runs/all/store runs/a/store runs/b/store")
def store_merge(
    into: Annotated[str, typer.Argument(help="The store that grows, a folder or URL; made if it is not there.")],
    others: Annotated[list[str], typer.Argument(metavar="OTHER…", help="Stores to take over; they stay as they are.")],
) -> None:
    """Take over what other stores have, once each."""
    from fp4dse.results import open_store

    sources = [open_store(path) for path in others]
    target = open_store(into, create=True)
    for source in sources:
        print(f"{target.merge(source)} rows from {source.path}")


@store_app.command("invalidate", epilog="Example: fp4dse store invalidate quantizers 2")
def store_invalidate(
    component: Annotated[str, typer.Argument(help="quantizers, engine, or a task.")],
    below: Annotated[int, typer.Argument(help="The first revision that counts.")],
    store: StorePath = None,
) -> None:
    """Hide rows that an old revision of a component made, so that a sweep trains them again."""
    print(f"{_open(store).invalidate(component, below)} rows hidden")


@app.command(epilog="Example: fp4dse doctor")
def doctor(device: Device = "cpu", as_json: AsJson = False) -> None:
    """What this machine has, which paths a sweep will take, and why not the others."""
    from fp4dse.sweeps.setting import find_machine
    from fp4dse.tasks import diagnose

    machine = find_machine(device)
    workers = ("workers", str(len(machine.slots)), f"{machine.threads} threads each; --jobs changes the number")
    columns = ["topic", "found", "note"]
    rows = [dict(zip(columns, line, strict=True)) for line in [*diagnose(device), workers]]
    _print_rows(columns, rows, "json" if as_json else "table")


@app.command(epilog="Example: fp4dse selftest --device cuda")
def selftest(device: Device = "cpu", as_json: AsJson = False) -> None:
    """Check this machine's quantizers against their definitions and frozen vectors; exit code 1 on any mismatch."""
    from fp4dse.kernels.selftest import selftest as checks
    from fp4dse.tasks import check_device

    check_device(device)
    rows = [{"check": check.name, "cases": check.cases, "wrong": check.wrong} for check in checks(device)]
    _print_rows(["check", "cases", "wrong"], rows, "json" if as_json else "table")
    raise typer.Exit(int(any(row["wrong"] for row in rows)))


@bench_app.command("kernels", epilog="Example: fp4dse bench kernels --device cuda")
def bench_kernels(device: Device = "cpu", as_json: AsJson = False) -> None:
    """Time the quantizers beside a copy of the same tensor; exit code 1 if one differs from the reference."""
    from fp4dse.kernels.bench.table import bench
    from fp4dse.tasks import check_device

    check_device(device)
    columns = ["what", "time_us", "gb_s", "of_copy", "wrong", "extra_memory"]
    rows = [{name: getattr(row, name) for name in columns} for row in bench(device)]
    _print_rows(columns, rows, "json" if as_json else "table")
    raise typer.Exit(int(any(row["wrong"] for row in rows)))


@bench_app.command("results", epilog="Example: fp4dse bench results --rows 100000 --files 2000")
def bench_results(
    rows: Annotated[int, typer.Option(help="Rows with curves that are queried.")] = 1_000_000,
    files: Annotated[int, typer.Option(help="Inbox files that are joined.")] = 20_000,
    recipes: Annotated[int, typer.Option(help="Recipes in the report, which a browser opens.")] = 20_000,
    as_json: AsJson = False,
) -> None:
    """Time queries, compaction, statistics and the report on generated runs; takes minutes and a gigabyte of disk."""
    from fp4dse.results.bench import bench
    from fp4dse.results.report.bench import bench as bench_report

    times, pages = list(bench(rows, files)), list(bench_report(recipes))
    if as_json:
        _print_json([*times, *pages])
    else:
        _print_rows(["what", "seconds", "cpu_s", "target_s"], times, "table")
        _print_rows(["what", "value", "unit", "target"], pages, "table")


@bench_app.command("sweep", epilog="Example: fp4dse bench sweep")
def bench_sweep(
    only: Annotated[list[str], typer.Option(help="Rows to measure, by a word of their name. Default: all.")] = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Measure planning, harness cost, resume, memory and a simulated cluster against their targets; exit code 1 on a
    miss."""
    from fp4dse.sweeps.bench import bench

    columns = ["what", "measured", "target", "met"]
    rows = [{name: row[name] for name in columns} for row in bench(only)]
    _print_rows(columns, rows, "json" if as_json else "table")
    raise typer.Exit(int(not all(row["met"] for row in rows)))


@bench_app.command("train", epilog="Example: fp4dse bench train --device cuda")
def bench_train(device: Device = "cpu", as_json: AsJson = False) -> None:
    """Time the training of populations beside the same training one lane at a time; ratios are from one run."""
    from fp4dse.tasks import check_device
    from fp4dse.tasks.bench.table import bench

    check_device(device)
    columns = ["what", "value", "unit", "reach", "reached", "note"]
    _print_rows(
        columns,
        [{name: getattr(row, name) for name in columns} for row in bench(device)],
        "json" if as_json else "table",
    )


@app.command(epilog="Example: fp4dse tensor weights.safetensors --quantizer nvfp4 --quantizer mxfp4 --plot error.html")
def tensor(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .npy, .npz, .safetensors, .pt or .pth file.")],
    quantizer: Annotated[
        list[str] | None, typer.Option(help="A named quantizer; may be repeated. Default: four usual ones.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the errors, an .html file.")] = None,
    as_json: AsJson = False,
) -> None:
    """What quantizers make of the tensors in a file: error, gain, what is clipped and flushed, where the error is from.

    Blocks lie along the last axis. scale, dead, grid and cross are the shares of the squared error that come from
    storing the block scale, from the dead zone around zero, from the grid, and from their cross terms.
    """
    from fp4dse.kernels import inspect_file
    from fp4dse.results.tensor_page import tensor_table, write_tensor_page

    if plot and plot.suffix != ".html":
        raise ConfigError("--plot", str(plot), "a path that ends in .html (the page saves its picture as PNG)")
    found = inspect_file(file, quantizer)
    if plot:
        write_tensor_page(found["rows"], found["skipped"], f"Quantization error of {file.name}", plot)
    if as_json:
        _print_json(found)
    else:
        print(tensor_table(found["rows"], found["skipped"]), *([plot] if plot else []), sep="\n\n")


def _open(store: str | None) -> Store:
    from fp4dse.results import open_store
    from fp4dse.sweeps.arguments import latest_store

    return open_store(store or latest_store())


def _print_rows(columns: list[str], rows: list[dict], form: Literal["table", "json"]) -> None:
    if form == "json":
        _print_json(rows)
    else:
        table = Table(*columns, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*(_cell(row[name]) for name in columns))
        _console().print(table)


def _print_facts(facts: dict, as_json: bool) -> None:
    if as_json:
        _print_json(facts)
    else:
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(name.replace("_", " "), _cell(value))
        _console().print(table)


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{number} {name}" for name, number in value.items()) or "none"
    if isinstance(value, list):
        return "\n".join(map(_cell, value)) or "none"
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(value: object) -> object:
    """Three significant digits."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _console() -> Console:
    """As wide as the terminal; wide enough for any table where there is none."""
    return Console(width=None if sys.stdout.isatty() else 400, highlight=False, markup=False)


if __name__ == "__main__":
    main()
