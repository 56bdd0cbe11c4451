"""Help comes at once, with an example, and what only looks needs no torch."""

import subprocess
import sys

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
    commands += ["search", "dashboard", "rungs"]
    lines = [[command] for command in commands] + [["recipe", "list"], ["recipe", "show"]]
    lines += [["store", command] for command in ("info", "merge", "mend", "invalidate")]
    for line in lines:
        answer = run(*line, "--help")
        assert answer.code == 0
        assert f"Example: fp4dse {' '.join(line)}" in answer.out


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
