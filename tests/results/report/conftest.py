"""The report of the shared store, written once for all tests that read it."""

from pathlib import Path

import pytest

from fp4dse.kernels.inspection.gaussian import gaussian_statistics
from fp4dse.results import Store, write_report


@pytest.fixture(scope="session")
def swept_page(swept: Store) -> Path:
    """The whole report of `swept`, with the section of operands."""
    path = swept.path.parent / "swept.html"
    write_report(swept, path, title="Q & A <x>", statistics=gaussian_statistics)
    return path
