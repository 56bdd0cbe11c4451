"""Commands that train a space: all of it, what may be on its front again, and a small one to begin with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp4dse.commands import completing
from fp4dse.commands.completing import offer
from fp4dse.commands.conclusion import conclude
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
from fp4dse.commands.printing import print_facts, print_json
from fp4dse.commands.topics import new_app, open_given, under, warn_overridden
from fp4dse.dse import ConfigError

if TYPE_CHECKING:
    from fp4dse.dse.cost import CostTarget
    from fp4dse.results.store.remote import AnyPath
    from fp4dse.sweeps import SweepResult

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
    from fp4dse.sweeps.conclusions import conclusion

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
    conclude(result, conclusion(result), found.cost, as_json)


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
    from fp4dse.sweeps.conclusions import conclusion
    from fp4dse.sweeps.executors.folder import folder_of
    from fp4dse.sweeps.planning.estimate import estimate as estimate_plan
    from fp4dse.sweeps.planning.plan import count_space
    from fp4dse.sweeps.planning.setting import find_setting
    from fp4dse.sweeps.stages.confirm_bound import Machines, foresee_confirm
    from fp4dse.sweeps.stages.confirming import check_seeds
    from fp4dse.sweeps.stages.rate_search import FACTORS, run_tuned_sweep
    from fp4dse.sweeps.stages.rate_search import SEEDS as TUNING_SEEDS

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
        conclude(result, said, found.cost, as_json)


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
    from fp4dse.sweeps.conclusions import conclusion
    from fp4dse.sweeps.stages.confirming import plan_confirm

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
        conclude(result, conclusion(result), opened.cost, as_json)


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
    from fp4dse.sweeps.stages.confirming import plan_confirm, run_confirm

    store = open_store(target, cost=cost)
    planned = plan_confirm(store, seeds=seeds, budget_s=budget_s, **where)
    print(planned.sentences(), file=sys.stderr if as_json else None)
    machine = {name: where[name] for name in ("device", "jobs", "executor")}
    return run_confirm(store, planned, budget_s=budget_s, **machine, **limits)
