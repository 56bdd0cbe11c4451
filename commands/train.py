"""Commands that train: sweeps, searches, and what watches, stops and repeats them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fp4dse.commands import completing
from fp4dse.commands.completing import offer
from fp4dse.commands.options import (
    AsJson,
    Axes,
    Budget,
    Chip,
    ConfirmSeeds,
    Data,
    Device,
    ExecutorName,
    ExecutorOptions,
    Jobs,
    Keep,
    Model,
    NewStore,
    Preset,
    Rates,
    Rungs,
    Seeds,
    SpaceName,
    Start,
    StorePath,
    TaskNames,
    only,
)
from fp4dse.commands.printing import console, print_facts, print_json, print_rows, short
from fp4dse.commands.topics import new_app, open_given, under, warn_overridden
from fp4dse.dse import ConfigError

if TYPE_CHECKING:
    from fp4dse.dse.cost import CostTarget
    from fp4dse.results.store.remote import AnyPath
    from fp4dse.sweeps import SearchResult, SweepResult

app = new_app()
command = under(app, "Train")


@command(epilog="Example: fp4dse quickstart --budget 5m")
def quickstart(
    store: NewStore = None,
    device: Device = "cpu",
    jobs: Jobs = None,
    budget: Budget = None,
    model: Model = None,
    chip: Chip = None,
    as_json: AsJson = False,
) -> None:
    """48 recipes × 3 seeds on two small tasks, a minute or two on two CPU cores: table, store and report."""
    from fp4dse.sweeps import arguments, run_sweep, stores
    from fp4dse.sweeps.progress import conclusion

    found = arguments.find_space("quickstart", model=model, chip=chip)
    result = run_sweep(
        found,
        tasks=arguments.parse_tasks(["regression", "vision"], "quickstart"),
        store=store or stores.default_store(found.name),
        device=device,
        jobs=jobs,
        budget_s=arguments.parse_duration(budget),
        progress=True,
    )
    _conclude(result, conclusion(result), found.cost, as_json)


@command(epilog="Example: fp4dse sweep quickstart --task vision:small --seeds 5 --budget 30m")
def sweep(
    space: SpaceName,
    axis: Axes = [],  # noqa: B006
    task: TaskNames = ["regression"],  # noqa: B006
    data: Data = None,
    start: Start = [],  # noqa: B006
    preset: Preset = None,
    seeds: Seeds = None,
    lr: Rates = [],  # noqa: B006
    store: NewStore = None,
    device: Device = "cpu",
    jobs: Jobs = None,
    budget: Budget = None,
    rungs: Rungs = 0,
    keep: Keep = None,
    executor: ExecutorName = "local",
    option: ExecutorOptions = [],  # noqa: B006
    model: Model = None,
    chip: Chip = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="Train again what the store has.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Store gradient norms and what slots lose, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained; write nothing.")] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="As --dry-run, with time and memory here.")] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="First find the best learning rate of every recipe, on other seeds.")
    ] = False,
    confirm: Annotated[bool, typer.Option("--confirm", help="Then confirm the best, as `fp4dse confirm`.")] = False,
    confirm_seeds: ConfirmSeeds = 10,
    as_json: AsJson = False,
) -> None:
    """Train what the store lacks of a space: recipes × learning rates × seeds, with BF16 beside them.

    The same command continues a sweep that was stopped, and tries failed lanes again.
    """
    import msgspec

    from fp4dse.sweeps import arguments, plan_sweep, run_sweep, stores
    from fp4dse.sweeps.confirm_bound import Machines, foresee_confirm
    from fp4dse.sweeps.confirming import check_seeds
    from fp4dse.sweeps.estimate import estimate as estimate_plan
    from fp4dse.sweeps.executors.folder import folder_of
    from fp4dse.sweeps.plan import count_space
    from fp4dse.sweeps.progress import conclusion
    from fp4dse.sweeps.rate_search import FACTORS, run_tuned_sweep
    from fp4dse.sweeps.rate_search import SEEDS as TUNING_SEEDS
    from fp4dse.sweeps.setting import find_setting

    found = arguments.find_space(space, axis, model, chip)
    warn_overridden(found)
    asked: dict[str, Any] = {
        "tasks": arguments.parse_tasks(task, preset, data, only(start)),
        "seeds": arguments.parse_seeds(seeds) if seeds else None,
        "lrs": arguments.parse_lrs(lr),
        "halving": arguments.parse_halving(rungs, keep),
        "device": device,
        "jobs": jobs,
        "executor": executor,
    }
    target = store or stores.default_store(found.name)
    options = arguments.parse_options(option)
    budget_s = arguments.parse_duration(budget)
    if confirm:
        check_seeds(confirm_seeds, "--confirm-seeds")
    if executor == "folder":
        folder_of(options)
    if dry_run or estimate:
        plan = plan_sweep(found, **asked, store=None if rerun else target, measure=estimate)
        more = {}
        if estimate:
            more = estimate_plan(plan, find_setting(asked["tasks"], device, jobs), target, _say).facts()
        if tune:
            rates = len(asked["lrs"] or FACTORS)
            more["to_tune"] = f"{plan.recipes * len(asked['tasks']) * rates * len(TUNING_SEEDS)} lanes before, or more"
        if confirm:
            more["to_confirm"] = foresee_confirm(
                found, plan, asked["tasks"], target, seeds=confirm_seeds, lrs=asked["lrs"],
                on=Machines(device, jobs, executor), budget_s=budget_s, timed=estimate,
            )  # fmt: skip
        print_facts({**count_space(found), **plan.facts(), **more}, as_json)
    else:
        limits: dict[str, Any] = {"options": options, "record": record, "progress": True}
        run = run_tuned_sweep if tune else run_sweep
        result = run(found, **asked, store=target, rerun=rerun, budget_s=budget_s, **limits)
        said = conclusion(result)
        if confirm and result.stopped is None:
            left = None if budget_s is None else max(budget_s - result.wall_s, 0.0)
            where = {name: asked[name] for name in ("tasks", "device", "jobs", "executor")}
            new = _confirm(target, found.cost, confirm_seeds, left, where, limits, as_json)
            said += f"\nconfirming: {conclusion(new)}"
            result = msgspec.structs.replace(new, failed=result.failed + new.failed)
        _conclude(result, said, found.cost, as_json)


@command(epilog="Example: fp4dse confirm --store runs/quickstart/store --budget 10m")
def confirm(
    store: StorePath = None,
    seeds: ConfirmSeeds = 10,
    task: Annotated[
        list[str],
        typer.Option(
            help="Of the store's tasks, TASK:PRESET; may be repeated. Default: all.",
            autocompletion=offer(completing.tasks),
        ),
    ] = [],  # noqa: B006
    data: Data = None,
    start: Start = [],  # noqa: B006
    device: Device = "cpu",
    jobs: Jobs = None,
    budget: Budget = None,
    executor: ExecutorName = "local",
    option: ExecutorOptions = [],  # noqa: B006
    model: Model = None,
    chip: Chip = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train what may be on the front again with fresh seeds: half of them choose the best, the others say how good.

    The same command continues what was stopped. A task of your own is named as it was swept, with its data.
    """
    from fp4dse.sweeps import arguments
    from fp4dse.sweeps.confirming import plan_confirm
    from fp4dse.sweeps.progress import conclusion

    opened = open_given(store, model, chip)
    where: dict[str, Any] = {
        "tasks": arguments.parse_tasks(task, None, data, only(start)) or None,
        "device": device,
        "jobs": jobs,
        "executor": executor,
    }
    for name, given in (("--data", data), ("--from", only(start))):
        if given is not None and not task:
            raise ConfigError(name, given, "the --task that it is for, too")
    budget_s = arguments.parse_duration(budget)
    limits: dict[str, Any] = {"options": arguments.parse_options(option), "progress": True}
    if dry_run:
        planned = plan_confirm(opened, seeds=seeds, budget_s=budget_s, **where)
        print_json(planned.facts()) if as_json else print(planned.sentences())
    else:
        result = _confirm(opened.path, opened.cost, seeds, budget_s, where, limits, as_json)
        _conclude(result, conclusion(result), opened.cost, as_json)


@command(epilog="Example: fp4dse search paper-slice --sampler tpe --trials 200 --task vision:small")
def search(
    space: SpaceName,
    sampler: Annotated[str, typer.Option(help="tpe, nsga2, nsga3, gp or random.")],
    trials: Annotated[int, typer.Option(help="Recipes to try for each task, those that the store knows included.")],
    objectives: Annotated[
        str, typer.Option(help="Of gap, overhead, loss, metric, points, bits. The best are sought.")
    ] = "gap,overhead",
    axis: Axes = [],  # noqa: B006
    task: TaskNames = ["regression"],  # noqa: B006
    data: Data = None,
    start: Start = [],  # noqa: B006
    preset: Preset = None,
    seeds: Seeds = None,
    lr: Rates = [],  # noqa: B006
    store: NewStore = None,
    device: Device = "cpu",
    jobs: Jobs = None,
    batch: Annotated[
        int | None, typer.Option(help="Recipes proposed together for a task. Default: what fills the workers.")
    ] = None,
    sampler_seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    budget: Budget = None,
    rungs: Rungs = 0,
    keep: Keep = None,
    executor: ExecutorName = "local",
    option: ExecutorOptions = [],  # noqa: B006
    model: Model = None,
    chip: Chip = None,
    as_json: AsJson = False,
) -> None:
    """Let a sampler propose recipes of a space in batches, and train them; what the store has is looked up.

    Each task is a search of its own, and all of them run side by side. The same command continues what was stopped.
    """
    from fp4dse.sweeps import arguments, run_search, stores
    from fp4dse.sweeps.progress import search_conclusion

    found = arguments.find_space(space, axis, model, chip)
    warn_overridden(found)
    result = run_search(
        found,
        sampler=sampler,
        trials=trials,
        objectives=[name.strip() for name in objectives.split(",")],
        tasks=arguments.parse_tasks(task, preset, data, only(start)),
        seeds=arguments.parse_seeds(seeds) if seeds else None,
        lrs=arguments.parse_lrs(lr),
        store=store or stores.default_store(found.name),
        device=device,
        jobs=jobs,
        batch=batch,
        sampler_seed=sampler_seed,
        budget_s=arguments.parse_duration(budget),
        halving=arguments.parse_halving(rungs, keep),
        executor=executor,
        options=arguments.parse_options(option),
        progress=True,
    )
    if set(result.objectives) != {"gap", "overhead"} and not as_json:  # else the table below has the front
        _print_fronts(result)
    _conclude(result, search_conclusion(result), found.cost, as_json)


@command(epilog="Example: fp4dse status --watch")
def status(
    store: StorePath = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and follow it until it ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Progress of a sweep, from any terminal: lanes, rate, what runs, what failed and why, best so far, time left."""
    from fp4dse.sweeps import progress, read_state
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
    from fp4dse.sweeps.progress import headline
    from fp4dse.sweeps.stores import latest_store

    print(headline(stop_sweep(store or latest_store())))


@command("run-one", epilog="Example: fp4dse run-one regression-small-1f0c2ab93d4e --store runs/zoo/store")
def run_one(
    job: Annotated[str, typer.Argument(help="A failed job's name, a failed lane's run_id, or a job.json.")],
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """Run one job again in the foreground, with all that it says, and store what comes of it."""
    from fp4dse.sweeps.progress import job_line
    from fp4dse.sweeps.rerun import find_job
    from fp4dse.sweeps.rerun import run_one as run

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
    from fp4dse.sweeps.halving import Halving, Replay
    from fp4dse.sweeps.halving import replay as replay_store

    rows = [msgspec.to_builtins(row) for row in replay_store(open_store(replay), Halving(rungs, keep))]
    if not as_json:
        rows = [{**row, "regret": change(row["regret"])} for row in rows]
    print_rows(list(Replay.__struct_fields__), rows, as_json)


def _say(sentence: str) -> None:
    print(f"fp4dse: {sentence}", file=sys.stderr, flush=True)


def _confirm(
    target: str | Path | AnyPath,
    cost: CostTarget,
    seeds: int,
    budget_s: float | None,
    where: dict[str, Any],
    limits: dict[str, Any],
    as_json: bool,
) -> SweepResult:
    """Say what there is to confirm and what it costs, and train it. where: arguments of `plan_confirm`; limits: of
    `run_sweep`."""
    from fp4dse.results import open_store
    from fp4dse.sweeps.confirming import plan_confirm, run_confirm

    store = open_store(target, cost=cost)
    planned = plan_confirm(store, seeds=seeds, budget_s=budget_s, **where)
    print(planned.sentences(), file=sys.stderr if as_json else None)
    machine = {name: where[name] for name in ("device", "jobs", "executor")}
    return run_confirm(store, planned, budget_s=budget_s, **machine, **limits)


def _print_fronts(result: SearchResult) -> None:
    """The front of each task in the objectives of the search."""
    from fp4dse.results.text.ratios import change, written_in

    for study in result.studies:
        with written_in(study.gap_unit):
            lines = [
                {name: change(value) if name == "gap" else short(value, 4) for name, value in line.items()}
                for line in study.front
            ]
        print(f"{study.task}:{study.preset}: nothing is better in {' and '.join(result.objectives)} than")
        print_rows(["label", "config_id", "seeds", *result.objectives], lines)


def _conclude(result: SweepResult | SearchResult, said: str, cost: CostTarget, as_json: bool) -> NoReturn:
    """Print the trade-off, with the overheads of `cost`, and what was `said` of it, write the report; end the program
    with the result's exit code."""
    from fp4dse.kernels.inspection.gaussian import gaussian_statistics
    from fp4dse.results import noise_floor, open_store, summarize
    from fp4dse.results.report import write_report
    from fp4dse.results.stats.verdict import verdicts
    from fp4dse.results.text.frames import records
    from fp4dse.results.text.pareto_table import pareto_table, price_remarks
    from fp4dse.sweeps.stores import report_path

    store = open_store(result.store, cost=cost)
    runs = store.runs(margins=True)
    summary = summarize(runs)
    page = report_path(store.path) if len(runs) else None
    if page:
        write_report(store, page, statistics=gaussian_statistics)
    if as_json:
        print_json(
            {**result.facts(), "overhead_of": cost.of, "report": page and str(page), "recipes": records(summary)}
        )
    else:
        width = min(console().width, 100)
        remarks = price_remarks(runs, summary)
        table = pareto_table(summary, noise_floor(runs), width=width, verdicts=verdicts(runs), remarks=remarks)
        found = [f"{table}\n{cost.explanation}", said, f"report: {page}"]
        print(*(found if page else found[1:2]), sep="\n\n")
    raise typer.Exit(result.exit_code)
