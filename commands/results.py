"""Commands that read what was trained: report, queries, comparisons, answers and the dashboard."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fp4dse.commands.options import AsJson, Chip, Model, StorePath
from fp4dse.commands.printing import print_answer, print_facts, print_json, print_rows, print_tables
from fp4dse.commands.topics import new_app, open_given, under
from fp4dse.dse import ConfigError

if TYPE_CHECKING:
    import pandas as pd

app = new_app()
command = under(app, "Read")

Form = Literal["table", "csv", "json", "parquet", "latex"]


@command(epilog="Example: fp4dse report --store runs/quickstart/store --out front.html")
def report(
    store: StorePath = None,
    out: Annotated[Path | None, typer.Option(help="Default: report.html beside the store.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for front, effects, interactions and curves.")] = None,
    form: Annotated[
        Literal["png", "svg", "pdf"] | None, typer.Option("--format", help="Of the figures. Default: pdf.")
    ] = None,
    model: Model = None,
    chip: Chip = None,
) -> None:
    """Write a store's report: one HTML file that needs no network. With --figures, its pictures for a paper instead."""
    from fp4dse.kernels.inspection.gaussian import gaussian_statistics
    from fp4dse.results.report import write_figures, write_report
    from fp4dse.sweeps.stores import report_path

    if figures and out:
        raise ConfigError("--out", str(out), "nothing with --figures, which names the folder of the pictures")
    if form and not figures:
        raise ConfigError("--format", form, "nothing without --figures: the report is HTML")
    if out is not None and (out.is_dir() or not out.name):
        raise ConfigError("--out", str(out), "the path of a file; this is a folder")
    found = open_given(store, model, chip)
    if figures:
        print(*write_figures(found, figures, form or "pdf"), sep="\n")
    else:
        page = out or report_path(found.path)
        write_report(found, page, statistics=gaussian_statistics)
        print(page)


@command(epilog='Example: fp4dse query "SELECT recipe_label, avg(gap) FROM runs GROUP BY ALL" --format csv')
def query(
    sql: Annotated[str, typer.Argument(metavar="SQL", help="DuckDB SQL, or the name of a view.")],
    store: StorePath = None,
    form: Annotated[
        Form | None, typer.Option("--format", help="Default: table, or what the name of --out ends in.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the answer to a .csv, .json, .parquet or .tex file.")] = None,
    model: Model = None,
    chip: Chip = None,
) -> None:
    """Ask a store in SQL. Views: runs (one row a lane), curves, recipes, front, effects and more (docs/results.md).

    `DESCRIBE runs` lists the columns of a view. As LaTeX a view named alone has the columns for a paper; in SQL, as
    "FROM effects", it has all.
    """
    from fp4dse.results.store.atomic import write_atomic
    from fp4dse.results.store.query import named_views
    from fp4dse.results.text.frames import FORMATS, format_of, records
    from fp4dse.results.views import BRIEF, LACKING, VIEWS, columns_read, for_paper

    if not sql.strip():
        raise ConfigError("query", sql, f"DuckDB SQL, or a view: runs, curves, recorded, {', '.join(VIEWS)}")
    written: str = form or (format_of(out) if out else "table")
    found = open_given(store, model, chip)
    answer = found.sql(f"FROM {sql}" if sql.isidentifier() else sql)
    for view in named_views(sql):
        if view in LACKING and (says := LACKING[view](found.runs(columns_read([view])), str(found.path))):
            print(f"fp4dse: {view}: {says}", file=sys.stderr)
    if written == "latex" and sql in VIEWS:
        whole, answer = len(answer.columns), for_paper(sql, answer)
        shown = f'{len(answer.columns)} of {whole} columns; fp4dse query "FROM {sql}" has all'
        print(f"fp4dse: {shown}", file=sys.stderr)
    if written == "table" and out is None:
        print_answer([str(name) for name in answer.columns], records(answer), BRIEF.get(sql, ()))
        if any("overhead" in str(name) for name in answer.columns):
            print(found.cost.explanation)
    elif written == "table":
        raise ConfigError("--format", written, f"{', '.join(FORMATS)} for a file")
    elif out:
        write_atomic(out, FORMATS[written](answer))
    elif written == "parquet" and sys.stdout.isatty():
        raise ConfigError("--format", written, "table, csv, json, latex on a terminal; parquet with --out FILE")
    elif sys.stdout.isatty():
        print(FORMATS[written](answer).decode(), end="")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(FORMATS[written](answer))


@command(epilog="Example: fp4dse compare nvfp4 nvfp4-sr")
def compare(
    recipe_a: Annotated[str, typer.Argument(help="One of the store: its name, label, .toml file or config_id.")],
    recipe_b: Annotated[str | None, typer.Argument(help="Another one. Default: all that differ in one factor.")] = None,
    store: StorePath = None,
    margin: Annotated[
        str | None,
        typer.Option(
            help="Results this close count as the same: 0.005 or '0.5 %' of the loss, '0.7 points' of accuracy. "
            "Default: as much as 2 % more tokens; 0.7 points."
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Lanes at this rate alone. Default: each recipe at its best.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Is one recipe better than another, are they the same, or how many more seeds would tell? Paired over seeds.

    With one recipe: what would each single change to it do?
    """
    from fp4dse.results import compare as compare_runs
    from fp4dse.results import neighbours
    from fp4dse.results.stats.levels import units
    from fp4dse.results.stats.paired import MARGINS
    from fp4dse.results.stats.recipes.margins import Margin, check_unit, read_margin
    from fp4dse.results.stats.techniques.effects import EFFECTS_READ
    from fp4dse.results.text.frames import plain, records
    from fp4dse.results.text.ratios import change_with_range, written_in
    from fp4dse.sweeps.arguments import find_stored

    within, unit = read_margin(margin) if margin is not None else (None, "")
    read = [*EFFECTS_READ, *MARGINS, "recipe_name"]  # without overheads, for which every recipe would be priced
    runs = _at_rate(open_given(store).runs(read), lr)
    a = find_stored(recipe_a, runs)
    check_unit(unit, runs[runs["config_id"].eq(a)])
    if recipe_b is None:
        lines = neighbours(runs, a, within)
        if as_json:
            print_json(records(lines))
        else:
            of, rows = units(runs), []
            for row in lines.to_dict("records"):
                more = "none in reach" if math.isinf(row["more_seeds"]) else plain(row["more_seeds"])
                with written_in(of.get((row["task"], row["preset"]))):
                    size = change_with_range(row["difference"], row["low"], row["high"])
                facts = {"task": f"{row['task']}:{row['preset']}", "pairs": row["pairs"], "verdict": row["verdict"]}
                change = f"{row['factor']}: {row['from_level']} → {row['level']}"
                rows.append({**facts, "change": change, "loss": size, "more seeds": more})
            print_rows(["task", "change", "loss", "pairs", "verdict", "more seeds"], rows)
        return
    lines = compare_runs(runs, a, find_stored(recipe_b, runs), within)
    if as_json:
        print_json(records(lines))
    else:
        print(*lines["verdict"], sep="\n")
        if margin is None:
            for line in lines.to_dict("records"):
                with written_in(units(runs).get((line["task"], line["preset"]))):
                    same = Margin(line["margin"], line["margin_of"]).sentence()
                print(f"{line['task']} ({line['preset']}): {same}.")


def _at_rate(runs: pd.DataFrame, lr: float | None) -> pd.DataFrame:
    """The rows of a frame at one learning rate, all of them for None."""
    if lr is None:
        return runs
    chosen = runs[runs["lr"].eq(lr)]
    if chosen.empty:
        rates = ", ".join(f"{rate:g}" for rate in sorted(runs["lr"].dropna().unique()))
        raise ConfigError("--lr", lr, f"a rate of the store: {rates}")
    return chosen


@command(epilog="Example: fp4dse answer docs/study/questions.toml --store docs/study/store")
def answer(
    questions: Annotated[
        Path, typer.Argument(help="A .toml file (docs/results.md), best written before the training.")
    ],
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """Answer the questions of a file: effects over pairs of recipes, and what they settle by the file's rule.

    As JSON: {"effects": [...], "answers": [...], "warnings": [...]}, with differences as log ratios, or shares where
    gaps are in points.
    """
    from fp4dse.results.stats.levels import units
    from fp4dse.results.stats.preset_warnings import warnings_of_answers
    from fp4dse.results.stats.techniques.answers import answers, effects_of
    from fp4dse.results.stats.techniques.questions import load_questions
    from fp4dse.results.text.answer_tables import answer_rows, effect_tables
    from fp4dse.results.text.frames import records
    from fp4dse.results.text.verdict_text import titled

    asked = load_questions(questions)
    runs = open_given(store).runs()
    effects = effects_of(runs, asked)
    found, warnings = answers(effects, asked), warnings_of_answers(effects, {asked.screen, *asked.later})
    if as_json:
        print_json({"effects": records(effects), "answers": records(found), "warnings": warnings})
        return
    print_tables(effect_tables(effects, asked, units(runs)))
    print()
    print_rows(["question", "effect", "answer", "why"], answer_rows(found))
    for line in warnings:
        print(titled("Beware", f"{line['task']}: {line['warning']}."))


@command(epilog="Example: fp4dse dashboard --store runs/zoo/store")
def dashboard(
    store: StorePath = None,
    storage: Annotated[
        str | None, typer.Option(help="A journal file, postgresql://… or grpc://127.0.0.1:PORT.")
    ] = None,
    port: Annotated[int, typer.Option(help="Of 127.0.0.1; 0: any that is free.")] = 8080,
    follow: Annotated[bool, typer.Option(help="Stay in step with a sweep that runs.")] = True,
    mirror_only: Annotated[bool, typer.Option("--mirror-only", help="Bring the studies up to date and leave.")] = False,
    serve_grpc: Annotated[int | None, typer.Option(help="Instead offer the storage to other processes here.")] = None,
    model: Model = None,
    chip: Chip = None,
) -> None:
    """Show a store in optuna-dashboard: one study per task, one trial per recipe. It is made from the store's rows."""
    from fp4dse.results.store.spaces import store_name
    from fp4dse.sweeps.dashboard import storages
    from fp4dse.sweeps.dashboard.mirror import mirror
    from fp4dse.sweeps.dashboard.serve import default_storage, serve

    found = open_given(store, model, chip)
    where = storage or default_storage(found.path)
    if serve_grpc is not None:
        storages.serve_grpc(where, serve_grpc)
    elif mirror_only:
        print_facts(mirror(found, storages.open_storage(where), store_name(found)))
    else:
        say = partial(print, flush=True)
        serve(found, store_name(found), storages.open_storage(where), port, follow, say)
