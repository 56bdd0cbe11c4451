"""Help comes at once, with an example, and what only looks needs no torch."""

import subprocess
import sys
from collections.abc import Iterator

import click
import typer

from fp4dse import cli

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from fp4dse import cli
for command in (["--help"], ["space", "zoo"], ["recipe", "list"], ["status"], ["query", "SELECT lr FROM runs"]):
    try:
        cli.main(command)
    except SystemExit as ended:
        assert not ended.code, command
"""


def test_what_only_looks_needs_no_torch(run, finished):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_has_help_with_an_example(run):
    commands = ["sweep", "quickstart", "status", "report", "query", "compare", "space", "doctor", "tensor"]
    commands += ["search", "dashboard", "rungs", "confirm"]
    lines = [[command] for command in commands] + [["recipe", "list"], ["recipe", "show"]]
    lines += [["store", command] for command in ("info", "merge", "mend", "invalidate")]
    for line in lines:
        answer = run(*line, "--help")
        assert answer.code == 0
        assert f"Example: fp4dse {' '.join(line)}" in answer.out


def helps(command: click.Command) -> Iterator[str]:
    """The help texts of a command, its options, and the commands in it."""
    yield from filter(None, (command.help, *(getattr(option, "help", None) for option in command.params)))
    for inner in getattr(command, "commands", {}).values():
        yield from helps(inner)


def test_help_begins_with_a_verb_or_a_noun():
    texts = list(helps(typer.main.get_command(cli.app)))
    assert len(texts) > 100
    assert not [text for text in texts if text.split()[0] in ("What", "Whether", "How", "Which")]


def test_help_imports_nothing_slow():
    code = (
        "import sys\n"
        "from fp4dse import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'torch', 'pandas', 'pyarrow', 'optuna', 'duckdb', 'plotly', 'scipy', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
