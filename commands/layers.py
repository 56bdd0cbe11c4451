"""Commands about the layers of a model: which of them must stay in BF16."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from fp4dse.commands import completing
from fp4dse.commands.completing import offer
from fp4dse.commands.options import (
    AsJson,
    Chip,
    Data,
    Device,
    ExecutorName,
    ExecutorOptions,
    Jobs,
    Model,
    NewStore,
    RecipeName,
    Start,
    only,
)
from fp4dse.commands.printing import print_facts, print_json, print_rows
from fp4dse.commands.topics import new_app, under
from fp4dse.dse import ConfigError

app = new_app()
command = under(app, "Train")


def parse_share(text: str | None) -> float | None:
    """`5%` as 0.05; None stays None."""
    if text is None:
        return None
    if not re.fullmatch(r"\d+(\.\d+)?\s*%", text) or not 0 < float(text.rstrip(" %")) <= 100:
        raise ConfigError("--budget", text, "a share of what sparing costs: 5%")
    return float(text.rstrip(" %")) / 100


@command(epilog="Example: fp4dse sensitivity nvfp4 --task language:tiny --budget 5%")
def sensitivity(
    recipe: RecipeName,
    task: Annotated[
        str,
        typer.Option(help="TASK, TASK:PRESET, or FILE.py:NAME of your own.", autocompletion=offer(completing.tasks)),
    ] = "language:tiny",
    by: Annotated[str, typer.Option(help="Units of layers: role (qkv, up …), or kind (attention, mlp …).")] = "role",
    parts: Annotated[int, typer.Option(help="Parts that the blocks are cut into; 0: each block.")] = 3,
    products: Annotated[
        str, typer.Option(help="Units of products: all, forward, backward, fprop, dgrad, wgrad; several with commas.")
    ] = "all",
    budget: Annotated[
        str | None, typer.Option(help="Then spare the units that gain most for 5%, say, and train that on fresh seeds.")
    ] = None,
    spend: Annotated[
        str | None, typer.Option(help="The budget is a share of the modelled step, or of multiply-adds (products).")
    ] = None,
    fisher: Annotated[
        bool, typer.Option("--fisher", help="Beside it a score of BF16 alone, trained here: does it rank units alike?")
    ] = False,
    data: Data = None,
    start: Start = [],  # noqa: B006
    seeds: Annotated[str, typer.Option(help="Number of seeds (5), or seeds (0,1,2 or 40-71).")] = "5",
    lr: Annotated[float | None, typer.Option(help="Learning rate of all. Default: the task's for the recipe.")] = None,
    store: NewStore = None,
    device: Device = "cpu",
    jobs: Jobs = None,
    stop_after: Annotated[
        str | None, typer.Option(help="Stop after 30m, say, with all that is finished saved.")
    ] = None,
    executor: ExecutorName = "local",
    option: ExecutorOptions = [],  # noqa: B006
    model: Model = None,
    chip: Chip = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained; write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find the layers that must stay in BF16: quantize each alone, spare each alone, and spend a budget on the best.

    The same command continues what was stopped, and trains nothing twice.
    """
    from fp4dse.results import open_store
    from fp4dse.sweeps import arguments, plan_sweep, stores
    from fp4dse.sweeps.conclusions import conclusion
    from fp4dse.sweeps.stages import sensitivity as studies

    grain = studies.make_grain(by, parts, products)
    share, kind = parse_share(budget), studies.check_spend(spend)
    cost = arguments.find_cost(model, chip)
    [asked] = arguments.parse_tasks([task], None, data, only(start))
    found = arguments.find_recipe(recipe, store)
    numbers = arguments.parse_seeds(seeds)
    plan = studies.plan_study(found, asked, grain, lr=lr, seeds=numbers, cost=cost)
    if share is not None:
        studies.check_budget(plan.study, share, kind)
    target = str(store or stores.default_store(f"sensitivity-{studies.file_name(recipe)}"))
    machine: dict[str, Any] = {"device": device, "jobs": jobs, "executor": executor}
    if dry_run:
        todo = plan_sweep(list(plan.recipes.values()), tasks=[asked], seeds=plan.study.seeds, lrs=[plan.study.lr],
                          store=target, **machine)  # fmt: skip
        print_facts({"units": [unit.label for unit in plan.study.units], **todo.facts()}, as_json)
        return
    budget_s = arguments.parse_duration(stop_after, "--stop-after")
    limits = {**machine, "options": arguments.parse_options(option), "progress": True}
    result = studies.run_study(plan, target, budget_s=budget_s, **limits)
    opened = open_store(target, cost=cost)
    if fisher and result.stopped is None:
        from fp4dse.tasks.inspection.fisher import fisher_scores  # trains with torch in this process

        scores = fisher_scores(plan.recipe, asked, plan.study.lr, plan.study.seeds, device)
        plan = studies.with_fisher(plan, scores)
    study, said = studies.note_study(plan, opened), conclusion(result)
    if share is not None and result.exit_code == 0 and result.stopped is None:
        try:
            choice, recipes = studies.choose(plan, opened, share, kind)
        except ConfigError:  # what was measured is worth seeing all the same
            _print(opened, study, said, as_json)
            raise
        left = None if budget_s is None else max(budget_s - result.wall_s, 0.0)
        result = studies.run_choice(plan, opened, choice, recipes, budget_s=left, **limits)
        said += f"\nthe choice, on fresh seeds: {conclusion(result)}"
        study = studies.note_study(plan, opened)
    _print(opened, study, said, as_json)
    raise typer.Exit(result.exit_code)


def _print(opened: Any, study: Any, said: str, as_json: bool) -> None:
    """The tables of a study and where its report is; it is written here."""
    from fp4dse.kernels.inspection.gaussian import gaussian_statistics
    from fp4dse.results.report import write_report
    from fp4dse.results.stats.layers.sensitivity import measured_choice
    from fp4dse.results.stats.layers.sensitivity import sensitivity as lines_of
    from fp4dse.results.text import sensitivity_table as text
    from fp4dse.sweeps.stores import report_path

    runs = opened.runs()
    page = report_path(opened.path) if len(runs) else None
    if page:
        write_report(opened, page, statistics=gaussian_statistics)
    if as_json:
        print_json({**text.study_facts(runs, study), "report": page and str(page)})
        return
    lines = lines_of(runs, study)
    rows = text.unit_rows(lines)
    if rows:
        print_rows(list(rows[0]), rows)
        print(text.about(study, lines))
    for choice in study.choices:
        print()
        print(text.budget_sentence(study, choice))
        measured = text.choice_rows(measured_choice(runs, study, choice))
        if measured:
            print_rows(list(measured[0]), measured)
        print(f"its recipe: fp4dse recipe show {choice.config_id} --store {opened.path}")
    print("", said, *([f"report: {page}"] if page else []), sep="\n")
