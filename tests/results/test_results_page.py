"""docs/results.md and docs/schema.md say what the code does."""

import inspect
import re
from pathlib import Path

import pandas as pd
import pytest

import fp4dse.results
from fp4dse.results.schema_page import schema_page
from fp4dse.results.stats.factors import AXES
from fp4dse.results.stats.paired import OVERHEAD, SETTING
from fp4dse.results.store.schema import COLUMNS, SCALARS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text()
QUERIES = re.findall(r"\*\*(\d+)\. (.*?)\*\*.*?```sql\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def swept(tmp_path_factory, row):
    """Two tasks, a rate that is worse, three seeds, one lane that diverged."""
    store = fp4dse.results.open_store(tmp_path_factory.mktemp("docs") / "store", create=True)
    losses = {"bf16": 0.50, "nvfp4": 0.56, "nvfp4-sr": 0.53, "nvfp4-sr-rht": 0.52, "mxfp4": 0.60, "mxfp4-sr-rht": 0.57}
    for task in ("vision", "regression"):
        for i, (name, loss) in enumerate(losses.items()):
            lanes = [
                row(
                    name,
                    seed,
                    loss * (1 + 0.01 * ((3 * i + 2 * seed) % 5)) * (1 + rate),
                    task=task,
                    lr=1e-3 * (1 + rate),
                )
                for seed in range(3)
                for rate in (0, 1)
            ]
            store.add(lanes, f"{task}-{name}")
        store.add([row("ue5m3-sr", seed, None if seed else 0.6, task=task) for seed in range(3)], f"{task}-diverged")
    return store


@pytest.mark.parametrize(("number", "question", "sql"), QUERIES, ids=[query[0] for query in QUERIES])
def test_every_query_of_the_page_answers(swept, number, question, sql):
    answer = swept.sql(sql)
    assert len(answer) or number in "46", question  # named recipes are not crossed: no effects, no interactions
    assert answer.notna().any(axis=0).sum() > len(answer.columns) / 2 or number in "346"


def test_there_are_ten_queries():
    assert [query[0] for query in QUERIES] == [str(i + 1) for i in range(10)]


def test_the_signatures_of_the_page_are_those_of_the_code(swept):
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \| .*? \| (.*?) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 23
    runs = swept.runs()
    nvfp4 = runs[runs["recipe_name"].eq("nvfp4")]["config_id"].iloc[0]
    others = {"neighbours": (nvfp4,), "compare": (nvfp4, runs[runs["recipe_name"].eq("mxfp4")]["config_id"].iloc[0])}
    for name, arguments, columns in rows:
        function = getattr(fp4dse.results, name)
        defaults = {"OVERHEAD": repr(OVERHEAD)}
        said = [text.partition("=") for text in arguments.split(", ")]
        real = inspect.signature(function).parameters
        assert [s[0] for s in said] == list(real), name
        for parameter, _, default in said:
            if default:
                assert repr(real[parameter].default) == defaults.get(default, default.replace('"', "'")), name
        listed = re.sub(r"\(.*?\)", "", columns).replace(" ", "").split(",")
        listed = [column for column in listed if column and not column.startswith("thoseof")]
        found = function(runs, *others.get(name, ()))
        assert isinstance(found, pd.DataFrame)
        assert set(listed) <= set(found.columns), name
        if not columns.startswith("those"):
            assert set(found.columns) - {*SETTING, OVERHEAD} == set(listed) - {OVERHEAD}, name


def test_the_schema_page_is_what_the_code_writes():
    written = (DOCS / "schema.md").read_text()
    assert written == schema_page(), "run `python -m fp4dse.results.schema_page > docs/schema.md`"


def test_every_column_has_a_meaning():
    assert all(column.meaning for name, column in COLUMNS.items() if name not in AXES)
    for name in [*SCALARS, "curve_step", "curve_loss", "baseline_loss", "gap"]:
        assert f"`{name}`" in schema_page()
