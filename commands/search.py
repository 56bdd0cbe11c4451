"""The command that lets a sampler choose what of a space is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fp4dse.commands.conclusion import conclude
from fp4dse.commands.options import (
    AsJson,
    Axes,
    Budget,
    Chip,
    Data,
    Device,
    ExecutorName,
    ExecutorOptions,
    Jobs,
    Keep,
    Model,
    NewStore,
    Objectives,
    Preset,
    Rates,
    Rungs,
    SamplerName,
    Seeds,
    SpaceName,
    Start,
    TaskNames,
    only,
)
from fp4dse.commands.printing import print_rows, short
from fp4dse.commands.topics import new_app, under, warn_overridden

if TYPE_CHECKING:
    from fp4dse.sweeps import SearchResult

app = new_app()
command = under(app, "Train")


@command(epilog="Example: fp4dse search paper-slice --sampler tpe --trials 200 --task vision:small")
def search(
    space: SpaceName,
    sampler: SamplerName,
    trials: Annotated[int, typer.Option(help="Recipes to try for each task, those that the store knows included.")],
    objectives: Objectives = "gap,overhead",
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
    from fp4dse.sweeps.conclusions import search_conclusion

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
    conclude(result, search_conclusion(result), found.cost, as_json)


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
