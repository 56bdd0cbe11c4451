"""docs/numerics.md says what the code does."""

from pathlib import Path

from fp4dse.kernels.inspection.catalogue import table


def test_the_table_in_the_docs_is_the_one_that_the_code_makes():
    assert table() in (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
