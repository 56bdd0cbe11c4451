"""The packages of results depend on each other in one direction."""

import ast
from pathlib import Path

import pytest

ROOM = Path(__file__).parents[2] / "results"
MAY_IMPORT = {
    "stats": {"published", "stats", "text"},
    "text": {"stats", "text"},
    "store": {"stats", "store", "text", "views"},
    "report": {"report", "stats", "store", "text"},
}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_depend_on_those_below_alone(package):
    """A statistic can be tried on any frame of runs, since it needs no store; the store shows nothing."""
    found = {
        node.module.split(".")[2]
        for file in (ROOM / package).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fp4dse.results.")
    }
    assert found <= MAY_IMPORT[package]
