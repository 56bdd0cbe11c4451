"""The `fp4dse` command: arguments in, tables and exit codes out. The commands stand in `commands/`, a module a topic.

Exit codes: 0 done, 1 some lanes failed or the machine did, 2 wrong input, 130 interrupted.
What is slow to import (torch, pandas, duckdb, plotly) is imported where it is used, so that --help answers at once.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from fp4dse.commands import diagnosis, jobs, layers, machine, recipes, results, search, stores, sweep, weights
from fp4dse.commands.topics import new_app
from fp4dse.dse import ConfigError, StoreError
from fp4dse.dse.program.terminal import safe_terminal
from fp4dse.dse.program.urls import redacted

app = new_app(add_completion=True)
for topic in (sweep, search, jobs, weights, layers, diagnosis, results, stores, recipes, machine):
    app.add_typer(topic.app)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run a command; wrong input becomes one line and an exit code."""
    with safe_terminal():
        try:
            app(arguments, prog_name="fp4dse")
        except (ConfigError, StoreError, OSError) as error:
            print(f"fp4dse: {redacted(error)}", file=sys.stderr)
            machine_failed = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
            sys.exit(1 if machine_failed else 2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(metadata.version("fp4dse"))
        raise typer.Exit


@app.callback(epilog="Start with: fp4dse quickstart")
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find the FP4 training techniques that buy the most model quality for the least overhead."""


if __name__ == "__main__":
    main()
