"""The end of every command that trains: its trade-off as a table or JSON, its report, its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import typer

from fp4dse.commands.printing import console, print_json

if TYPE_CHECKING:
    from fp4dse.dse.cost import CostTarget
    from fp4dse.sweeps import SearchResult, SweepResult


def conclude(result: SweepResult | SearchResult, said: str, cost: CostTarget, as_json: bool) -> NoReturn:
    """Print the trade-off, with the overheads of `cost`, and what was `said` of it, write the report; end the program
    with the result's exit code."""
    from fp4dse.kernels.inspection.gaussian import gaussian_statistics
    from fp4dse.results import noise_floor, open_store, summarize
    from fp4dse.results.report import write_report
    from fp4dse.results.stats.recipes.recommendation import verdicts
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
