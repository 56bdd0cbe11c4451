"""The tab key offers names, and what it takes to know them is no slow import."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest
import typer

from fp4dse import cli
from fp4dse.commands import completing
from fp4dse.commands.options import EXECUTOR_NAMES, OBJECTIVE_NAMES, SAMPLER_NAMES
from fp4dse.dse import recipe_files
from fp4dse.sweeps.arguments import shipped_spaces
from fp4dse.sweeps.executors import EXECUTORS
from fp4dse.sweeps.searching.answers import OBJECTIVES
from fp4dse.sweeps.searching.sampling import SAMPLERS
from fp4dse.tasks import remembered
from fp4dse.tasks.catalogue import TASKS
from fp4dse.tasks.listing import list_tasks

SLOW = ("torch", "pandas", "pyarrow", "duckdb", "optuna", "plotly", "numpy")
REFUSING = f"""
import os, sys
for name in {SLOW}:
    sys.modules[name] = None  # importing it fails
from fp4dse import cli
lines, sys.argv = sys.argv[1:], ["fp4dse"]
for line in lines:
    os.environ |= {{"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}}
    try:
        cli.main()
    except SystemExit:
        print("of", line)
"""


def offered(lines: Iterable[str]) -> dict[str, list[str]]:
    """Line -> what a shell is offered at the end of it; all in one process, whose start takes longer than they do."""
    env = {**os.environ, "_FP4DSE_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-c", REFUSING, *lines], capture_output=True, text=True, env=env)
    assert done.stderr == ""
    parts = re.findall(r"((?:.*\n)*?)of (.*)\n", done.stdout)
    return {line: names.split() for names, line in parts}


NAMES = {
    "fp4dse swe": ["sweep"],
    "fp4dse space quick": ["quickstart"],
    "fp4dse sweep zoo --chip h2": ["h200"],
    "fp4dse cost quartet": ["quartet", "quartet2"],
    "fp4dse cost bf16 --model llama-8": ["llama-8b"],
    "fp4dse sweep zoo --executor s": ["slurm"],
    "fp4dse search zoo --sampler nsga": ["nsga2", "nsga3"],
    "fp4dse search zoo --objectives gap,o": ["gap,overhead"],
    "fp4dse search zoo --objectives gap,g": [],
}


def test_names_are_offered_without_a_slow_import():
    assert offered(NAMES) == NAMES


def test_help_names_all_executors_samplers_and_objectives():
    assert [list(EXECUTORS), list(SAMPLERS), list(OBJECTIVES)] == [EXECUTOR_NAMES, SAMPLER_NAMES, OBJECTIVE_NAMES]


@pytest.mark.heavy
def test_the_names_are_those_that_the_commands_take(monkeypatch, tmp_path):
    assert list(completing.spaces()) == list(shipped_spaces())
    assert list(completing.spaces_and_recipes()) == [*shipped_spaces(), *recipe_files()]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert list(completing.tasks()) == list(TASKS)
    remembered.remember("all tasks", list_tasks())
    assert list(completing.tasks()) == [f"{task}:{preset}" for task, presets in TASKS.items() for preset in presets]


def test_every_argument_that_takes_a_known_name_offers_some():
    """Options and arguments by their names, over all commands."""
    known = {"space", "recipe", "task", "chip", "model", "device", "executor", "quantizer"}

    def parameters(group):
        for command in group.commands.values():
            yield from parameters(command) if hasattr(command, "commands") else command.params

    found = [parameter for parameter in parameters(typer.main.get_command(cli.app)) if parameter.name in known]
    assert {parameter.name for parameter in found} == known
    assert all(parameter._custom_shell_complete is not None for parameter in found)
