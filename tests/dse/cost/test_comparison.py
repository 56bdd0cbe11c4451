"""The model beside what was measured, and the page that says so."""

from pathlib import Path

import pytest

from fp4dse.dse.cost.cost_page import TABLES, fill
from fp4dse.dse.cost.validation import kernels, throughputs

PAGE = (Path(__file__).parents[3] / "docs" / "cost.md").read_text(encoding="utf-8")


def test_the_tables_of_the_page_are_those_that_the_code_makes():
    assert fill(PAGE) == PAGE, "run: python -m fp4dse.dse.cost.cost_page docs/cost.md"


@pytest.mark.parametrize("name", TABLES)
def test_every_table_stands_on_the_page(name):
    assert f"<!-- {name} -->\n| " in PAGE


def test_the_first_throughput_is_absolute_and_the_others_are_ratios():
    first, *others = throughputs()
    assert first.measured == 18812
    assert all(1 < row.measured < 3 for row in others)


def test_errors_are_those_that_the_page_owns_up_to():
    """A change of the model that makes it worse must be seen, and the page's words with it."""
    absolute, *ratios = throughputs()
    assert 0.5 < absolute.error < 1
    assert max(abs(row.error) for row in ratios) < 0.25
    assert max(abs(row.error) for row in ratios if "MXFP4" in row.what) < 0.05
    assert max(abs(row.error) for row in kernels()) < 0.4
    assert sorted(abs(row.error) for row in kernels())[len(kernels()) // 2] < 0.15
