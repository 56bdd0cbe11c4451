"""SQL over the store. A query costs only the columns that it names.

DuckDB reads Parquet twice as fast by itself as through Arrow. So it does, where no rule hides rows and the files are on
a disk; all others reach it through Arrow.

The views are put together from what is on disk:

    runs      one row per run: all schema columns but the curves, baseline_loss and the gaps (as paired.add_gap
              has them), measured and measured_of (see measured.py)
    curves    run_id, curve_step, curve_loss
    recorded  run_id, name, step, value: what `sweep --record` stored, a line a number

and from the statistics, for a query that names them, those of views.VIEWS: recipes, front, effects and more.

A run with several rows (see parquet.read) is left out of the scan and joined back as its one winning row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from fp4dse.dse import ConfigError
from fp4dse.dse.cost import BAND, DEFAULT_COST, CostTarget
from fp4dse.results.stats.paired import DERIVED, EXCESS, MARGINS, MEASURED, NEEDED, PLAIN, SETTING, add_gap, baselines
from fp4dse.results.store.inbox import is_ipc
from fp4dse.results.store.matching import baseline_ids, with_baseline_ids
from fp4dse.results.store.measured import JOINED
from fp4dse.results.store.parquet import ALL, IS_BF16, dataset, duplicate_run_ids, long_texts, read, to_pandas
from fp4dse.results.store.pricing import priced, prices
from fp4dse.results.store.remote import AnyPath, RemotePath
from fp4dse.results.store.retries import is_server_error
from fp4dse.results.store.schema import CURVES, ROW, SCALARS
from fp4dse.results.store.spaces import SweptSpaces, with_axes

if TYPE_CHECKING:
    import duckdb

COPIED = "SELECT * FROM ({rows}) WHERE run_id NOT IN (FROM copied) UNION ALL BY NAME SELECT * FROM winners"
PRICED_AGAIN = f"""
SELECT rows.* REPLACE (
    CASE WHEN rows.overhead_of = prices.overhead_of THEN rows.overhead ELSE prices.overhead END AS overhead,
    prices.overhead_of AS overhead_of
), {", ".join(BAND)}
FROM ({{rows}}) AS rows LEFT JOIN prices USING (config_id)
"""
WITH_BASELINE_IDS = """
SELECT rows.* REPLACE (coalesce(rows.baseline_id, told.baseline_id) AS baseline_id)
FROM ({rows}) AS rows LEFT JOIN told USING (config_id)
"""
TOLD = pa.schema([("config_id", pa.string()), ("baseline_id", pa.string())])
CURVES_VIEW = f"CREATE TEMP VIEW curves AS SELECT run_id, {', '.join(CURVES)} FROM rows"

RECORDED_VIEW = """
CREATE TEMP VIEW recorded AS
    SELECT run_id, series.key AS name,
        unnest(coalesce(recorded['step/' || series.key], recorded['step']))::INT AS step, unnest(series.value) AS value
    FROM (SELECT run_id, recorded, unnest(map_entries(recorded)) AS series FROM rows)
    WHERE series.key <> 'step' AND NOT starts_with(series.key, 'step/')
"""


def _gap(loss: str, baseline: str) -> str:
    """A gap as `paired.add_gap` has it, in SQL."""
    return f"""CASE WHEN status = 'diverged' THEN 'inf'::DOUBLE
             WHEN status = 'done' AND NOT coalesce(isfinite(val_loss), false) THEN 'inf'::DOUBLE
             WHEN status = 'done' AND gap_unit = 'points' THEN {loss} - {baseline}
             WHEN status = 'done' AND {loss} > 0 AND {baseline} > 0 THEN ln({loss}) - ln({baseline}) END"""


OF_EXCESS = f"(CASE WHEN metric_name = '{EXCESS}' THEN val_metric END)"
BASELINE_EXCESS = "(val_metric - val_loss + baseline_loss)"
RUNS = f"CREATE TEMP VIEW runs AS SELECT {', '.join(SCALARS)} FROM rows"
OF_BASELINES = ", ".join((*SETTING, "seed"))
RUNS_JOINED = f"""
CREATE TEMP VIEW runs AS
    SELECT {", ".join(SCALARS)}, {", ".join(BAND)}, {", ".join(MEASURED)}, baseline_loss,
        {_gap("val_loss", "baseline_loss")} AS gap, {_gap("val_loss_bf16", "baseline_loss_bf16")} AS gap_bf16,
        {_gap("val_loss", "own_loss")} AS gap_matched, {_gap(OF_EXCESS, BASELINE_EXCESS)} AS gap_reducible
    FROM rows
        LEFT JOIN (SELECT * EXCLUDE (baseline_id) FROM baselines WHERE baseline_id = '{PLAIN}')
            USING ({OF_BASELINES})
        LEFT JOIN (SELECT {OF_BASELINES}, baseline_id, baseline_loss AS own_loss FROM baselines)
            USING ({OF_BASELINES}, baseline_id)
        LEFT JOIN figures USING ({", ".join(JOINED)});
"""


def run_sql(
    files: Sequence[AnyPath],
    valid: ds.Expression,
    query: str,
    measured: pd.DataFrame,
    cost: CostTarget = DEFAULT_COST,
    axes: SweptSpaces | None = None,
) -> pd.DataFrame:
    """The answer to one DuckDB statement over the rows of `files` that are `valid`. measured: as measured.figures.
    cost: whose overheads the rows have. axes: of the spaces that were swept.

    ConfigError on a wrong query; FileNotFoundError if a file vanished under way.
    """
    import duckdb

    from fp4dse.results.views import VIEWS

    unhidden = valid.equals(ALL)
    by_duckdb = [file for file in files if unhidden and _readable_by_duckdb(file)]
    by_arrow = [file for file in files if not (unhidden and _readable_by_duckdb(file))]
    others = dataset(by_arrow)
    all_rows = dataset(by_duckdb) if by_duckdb else others
    if by_duckdb and by_arrow:
        all_rows = ds.dataset([others, all_rows])
    copied = duplicate_run_ids(all_rows, valid)
    with duckdb.connect() as connection:
        connection.register("others", others.filter(valid))
        rows = _union(by_duckdb)
        if len(copied):
            connection.register("copied", pa.table({"run_id": copied}))
            connection.register("winners", read(all_rows, ROW.names, valid & ds.field("run_id").isin(copied)))
            rows = COPIED.format(rows=rows)
        joined, views = may_need_join(query), named_views(query)
        new_prices = None
        if joined or views or ("overhead" in query.lower() and _has_other_overheads(all_rows, valid, cost)):
            new_prices = prices(long_texts(files, "config_id", "recipe", valid), cost)
            connection.register("prices", pa.Table.from_pandas(new_prices, preserve_index=False))
            rows = PRICED_AGAIN.format(rows=rows)
        older = _recipes_without_baseline(files, all_rows, valid) if joined or views else {}
        if joined:
            if older:
                told = pa.Table.from_pandas(baseline_ids(older), TOLD, preserve_index=False)
                connection.register("told", told)
                rows = WITH_BASELINE_IDS.format(rows=rows)
            reference = to_pandas(read(all_rows, NEEDED, valid & IS_BF16))
            connection.register("baselines", baselines(with_baseline_ids(reference, lambda _: older)))
            types = [("measured", pa.float64()), *((name, pa.string()) for name in (*JOINED, "measured_of"))]
            connection.register("figures", pa.Table.from_pandas(measured, pa.schema(types), preserve_index=False))
        if views and new_prices is not None:
            for name, view in _views(all_rows, valid, views, new_prices, cost, axes or {}, older).items():
                connection.register(name, view)
        try:
            connection.execute("SET parquet_metadata_cache = true")  # each view that is made looks at all files again
            connection.execute(f"CREATE TEMP VIEW rows AS {rows}")
            connection.execute(RUNS_JOINED if joined else RUNS)
            for name, statement in {"curves": CURVES_VIEW, "recorded": RECORDED_VIEW}.items():
                if name in query.lower():
                    connection.execute(statement)
            _refuse_writing(connection, query)
            relation = connection.sql(query)
            answer = pa.table({}) if relation is None else relation.to_arrow_table()
        except duckdb.Error as error:
            if not all(file.exists() for file in files):
                raise FileNotFoundError(str(error)) from None
            if any(isinstance(file, RemotePath) for file in files) and is_server_error(error):
                raise OSError(str(error)) from None
            reason = " ".join(str(error).splitlines()[0].split())
            known = ", ".join(["runs", "curves", "recorded", *VIEWS])
            raise ConfigError("query", query, f"DuckDB SQL over the views {known} ({reason})") from None
    return to_pandas(_plain_columns(answer))


def _refuse_writing(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """ConfigError unless all statements of a query only read. COPY may stand within a SELECT or an EXPLAIN; what a
    setting would write (logs) is locked."""
    import duckdb

    reading = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.MULTI}  # MULTI: PIVOT
    types = {statement.type for statement in connection.extract_statements(query)}
    words = [query[start:].lower() for start, kind in duckdb.tokenize(query) if kind == duckdb.token_type.keyword]
    if not types <= reading or any(re.match(r"copy\b", word) for word in words):
        accepted = "one that only reads: SELECT, FROM, DESCRIBE, SUMMARIZE, PIVOT; --out FILE writes the answer"
        raise ConfigError("query", query, accepted)
    connection.execute("SET lock_configuration = true")


def _readable_by_duckdb(file: AnyPath) -> TypeGuard[Path]:
    """True if DuckDB can read the file itself: Parquet, on a disk, under a path that it does not take for a pattern."""
    return isinstance(file, Path) and not is_ipc(file) and not set("*?[") & set(str(file))


def _union(files: Sequence[Path]) -> str:
    """SQL for the rows of `files` and of `others`, which has all columns: one that a file lacks is null."""
    if not files:
        return "SELECT * FROM others"
    names = ", ".join("'" + str(file).replace("'", "''") + "'" for file in files)
    return f"SELECT * FROM read_parquet([{names}], union_by_name => true) UNION ALL BY NAME SELECT * FROM others"


def may_need_join(query: str) -> bool:
    """True if a query may need the joined columns (BAND, DERIVED, MEASURED, or the baseline of older rows), whose join
    takes longer than most queries. In doubt, True.

    False only for a SELECT per FROM, that names neither of them, has no star but that of count(*), and takes `runs`
    nowhere as a whole row.
    """
    text = re.sub(r"count\s*\(\s*\*\s*\)", "count()", query.lower())
    words = re.findall(r"\w+", text)
    shapes = {"columns", "describe", "summarize", "show", "table", "pivot", "unpivot"}
    named = {*BAND, *DERIVED, *MEASURED, "baseline_id", *shapes} & set(words)
    bare = re.findall(r"(?<!from )(?<!join )\bruns\b(?!\.)", " ".join(text.split()))
    alias = re.findall(r"\b(?:from|join) runs (?:as )?(\w+)", " ".join(text.split()))
    clauses = {"where", "group", "order", "limit", "having", "join", "left", "using", "qualify", "union", "on"}
    return bool(named or "*" in text or bare or set(alias) - clauses or words.count("select") < words.count("from"))


def named_views(query: str) -> list[str]:
    """The views of the statistics that the query names."""
    from fp4dse.results.views import VIEWS

    return [name for name in VIEWS if name in re.findall(r"\w+", query.lower())]


def _has_other_overheads(rows: ds.Dataset, valid: ds.Expression, cost: CostTarget) -> bool:
    """True if a row was stored with the overhead of another model, chip or revision."""
    return set(read(rows, ["overhead_of"], valid)["overhead_of"].unique().to_pylist()) - {cost.of} != set()


def _views(
    rows: ds.Dataset,
    valid: ds.Expression,
    named: Sequence[str],
    new_prices: pd.DataFrame,
    cost: CostTarget,
    axes: SweptSpaces,
    older: Mapping[str, str],
) -> dict[str, pa.Table]:
    """These views of the statistics. older: recipes of rows that do not name their baseline."""
    from fp4dse.results.stats.recipes.tokens_worth import MARGINS_READ, with_margins
    from fp4dse.results.views import columns_read, to_arrow  # all statistics, which a store needs for nothing else

    stored = [name for name in columns_read(named) if name not in (*DERIVED, *BAND, *MARGINS)]
    found = to_pandas(read(rows, stored, valid))
    found = with_margins(found, to_pandas(read(rows, MARGINS_READ, valid & ds.field("is_baseline"))))
    runs = priced(add_gap(with_baseline_ids(found, lambda _: older)), new_prices, cost)
    runs = with_axes(runs, axes)
    return {name: to_arrow(name, runs) for name in named}


def _recipes_without_baseline(files: Sequence[AnyPath], rows: ds.Dataset, valid: ds.Expression) -> dict[str, str]:
    """config_id -> recipe as JSON, of rows that do not name their baseline. Errors as of `scan`."""
    lacking = valid & ds.field("baseline_id").is_null()
    return long_texts(files, "config_id", "recipe", lacking) if rows.count_rows(filter=lacking) else {}


def _plain_columns(table: pa.Table) -> pa.Table:
    """Every column under a name of its own, and sums of integers, which DuckDB makes 128-bit decimals, as floats."""
    seen: Counter[str] = Counter()
    fields = []
    for field in table.schema:
        earlier, seen[field.name] = seen[field.name], seen[field.name] + 1
        type_ = pa.float64() if pa.types.is_decimal(field.type) else field.type
        fields.append(pa.field(f"{field.name}_{earlier}" if earlier else field.name, type_))
    return table.rename_columns([field.name for field in fields]).cast(pa.schema(fields))
