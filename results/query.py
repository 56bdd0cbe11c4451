"""SQL over the store. DuckDB reads the Parquet files itself, so a query costs only the columns that it names.

The views are put together from what is on disk:

    runs      one row per run: all schema columns but the curves, baseline_loss and gap (as paired.add_gap has them),
              measured and measured_of (see measured.py)
    curves    run_id, curve_step, curve_loss
    recorded  run_id, name, step, value: what `sweep --record` stored, a line a number

and from the statistics, for a query that names them, those of views.VIEWS: recipes, front, effects and more.

A run with several rows (see parquet.read) is left out of the scan and joined back as its one winning row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from fp4dse.dse import ConfigError
from fp4dse.results.measured import JOINED, MEASURED
from fp4dse.results.paired import DERIVED, NEEDED, SETTING, add_gap, baselines
from fp4dse.results.parquet import dataset, read, repeated, scan, to_pandas
from fp4dse.results.remote import Place
from fp4dse.results.schema import CURVES, ROW, SCALARS
from fp4dse.results.views import VIEWS, VIEWS_READ, to_arrow

ROWS = f"""
CREATE TEMP VIEW rows AS
    {{rows}};
CREATE TEMP VIEW curves AS
    SELECT run_id, {", ".join(CURVES)} FROM rows;
CREATE TEMP VIEW recorded AS
    SELECT run_id, series.key AS name, unnest(recorded['step'])::INT AS step, unnest(series.value) AS value
    FROM (SELECT run_id, recorded, unnest(map_entries(recorded)) AS series FROM rows) WHERE series.key <> 'step';
"""
STORED = "SELECT * FROM stored"
COPIED = "SELECT * FROM stored WHERE run_id NOT IN (FROM copied) UNION ALL SELECT * FROM winners"

RUNS = f"CREATE TEMP VIEW runs AS SELECT {', '.join(SCALARS)} FROM rows"
RUNS_WITH_GAP = f"""
CREATE TEMP VIEW runs AS
    SELECT {", ".join(SCALARS)}, {", ".join(MEASURED)}, baseline_loss,
        CASE WHEN status = 'diverged' THEN 'inf'::DOUBLE
             WHEN status = 'done' AND NOT coalesce(isfinite(val_loss), false) THEN 'inf'::DOUBLE
             WHEN status = 'done' AND val_loss > 0 AND baseline_loss > 0 THEN ln(val_loss) - ln(baseline_loss)
        END AS gap
    FROM rows LEFT JOIN baselines USING ({", ".join(SETTING)}, seed) LEFT JOIN figures USING ({", ".join(JOINED)});
"""


def run_sql(files: Sequence[Place], valid: ds.Expression, query: str, measured: pd.DataFrame) -> pd.DataFrame:
    """The answer to one DuckDB statement over the rows of `files` that are `valid`. measured: as measured.figures.

    ConfigError on a wrong query; FileNotFoundError if a file vanished under way.
    """
    import duckdb

    ids = scan(files, ["run_id"], valid)
    copies = repeated(ids)
    with duckdb.connect() as connection:
        connection.register("stored", dataset(files).filter(valid))
        if copies.any():
            copied = ids.filter(pa.array(copies))["run_id"].unique()
            connection.register("copied", pa.table({"run_id": copied}))
            connection.register("winners", read(files, ROW.names, valid & ds.field("run_id").isin(copied)))
        connection.execute(ROWS.format(rows=COPIED if copies.any() else STORED))
        if may_need_join(query):
            reference = read(files, NEEDED, valid & ds.field("is_baseline"))
            connection.register("baselines", baselines(to_pandas(reference)))
            types = [("measured", pa.float64()), *((name, pa.string()) for name in (*JOINED, "measured_of"))]
            connection.register("figures", pa.Table.from_pandas(measured, pa.schema(types), preserve_index=False))
            connection.execute(RUNS_WITH_GAP)
        else:
            connection.execute(RUNS)
        for name, view in _views(files, valid, query).items():
            connection.register(name, view)
        try:
            relation = connection.sql(query)
            answer = pa.table({}) if relation is None else relation.to_arrow_table()
        except duckdb.Error as error:
            if not all(file.exists() for file in files):
                raise FileNotFoundError(str(error)) from None
            reason = " ".join(str(error).splitlines()[0].split())
            views = ", ".join(["runs", "curves", "recorded", *VIEWS])
            raise ConfigError("query", query, f"DuckDB SQL over the views {views} ({reason})") from None
    return to_pandas(_plain_columns(answer))


def may_need_join(query: str) -> bool:
    """Whether a query may want what is joined to the rows (DERIVED, MEASURED), which takes longer than most queries. In
    doubt, True.

    False only for a SELECT per FROM, that names neither of them, has no star but that of count(*), and takes `runs`
    nowhere as a whole row.
    """
    text = re.sub(r"count\s*\(\s*\*\s*\)", "count()", query.lower())
    words = re.findall(r"\w+", text)
    named = {*DERIVED, *MEASURED, "columns", "describe", "summarize", "show", "table", "pivot", "unpivot"} & set(words)
    bare = re.findall(r"(?<!from )(?<!join )\bruns\b(?!\.)", " ".join(text.split()))
    alias = re.findall(r"\b(?:from|join) runs (?:as )?(\w+)", " ".join(text.split()))
    clauses = {"where", "group", "order", "limit", "having", "join", "left", "using", "qualify", "union", "on"}
    return bool(named or "*" in text or bare or set(alias) - clauses or words.count("select") < words.count("from"))


def _views(files: Sequence[Place], valid: ds.Expression, query: str) -> dict[str, pa.Table]:
    """The views of the statistics that the query names."""
    named = [name for name in VIEWS if name in re.findall(r"\w+", query.lower())]
    if not named:
        return {}
    runs = add_gap(to_pandas(read(files, [name for name in VIEWS_READ if name not in DERIVED], valid)))
    return {name: to_arrow(name, runs) for name in named}


def _plain_columns(table: pa.Table) -> pa.Table:
    """Every column under a name of its own, and sums of integers, which DuckDB makes 128-bit decimals, as floats."""
    seen: Counter[str] = Counter()
    fields = []
    for field in table.schema:
        again, seen[field.name] = seen[field.name], seen[field.name] + 1
        type_ = pa.float64() if pa.types.is_decimal(field.type) else field.type
        fields.append(pa.field(f"{field.name}_{again}" if again else field.name, type_))
    return table.rename_columns([field.name for field in fields]).cast(pa.schema(fields))
