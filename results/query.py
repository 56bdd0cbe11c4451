"""SQL over the store. DuckDB reads the Parquet files itself, so a query costs only the columns that it names.

The views are put together from what is on disk:

    runs      one row per run: all schema columns but the curves, baseline_loss and gap (as stats.add_gap has them)
    curves    run_id, curve_step, curve_loss

A run with several rows (see parquet.read) is left out of the scan and joined back as its one winning row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from fp4dse.dse import ConfigError
from fp4dse.results.parquet import dataset, read, repeated, scan, to_pandas
from fp4dse.results.remote import Place
from fp4dse.results.schema import CURVES, ROW, SCALARS
from fp4dse.results.stats import NEEDED, SETTING, baselines

RUNS = f"""
CREATE TEMP VIEW rows AS
    SELECT * FROM stored {{scanned}} UNION ALL SELECT * FROM winners;
CREATE TEMP VIEW curves AS
    SELECT run_id, {", ".join(CURVES)} FROM rows;
CREATE TEMP VIEW runs AS
    SELECT {", ".join(SCALARS)}, baseline_loss,
        CASE WHEN status = 'diverged' THEN 'inf'::DOUBLE
             WHEN status = 'done' AND NOT coalesce(isfinite(val_loss), false) THEN 'inf'::DOUBLE
             WHEN status = 'done' AND val_loss > 0 AND baseline_loss > 0 THEN ln(val_loss) - ln(baseline_loss)
        END AS gap
    FROM rows LEFT JOIN baselines USING ({", ".join(SETTING)}, seed);
"""


def run_sql(files: Sequence[Place], valid: ds.Expression, query: str) -> pd.DataFrame:
    """The answer to one DuckDB statement over the rows of `files` that are `valid`.

    ConfigError on a wrong query; FileNotFoundError if a file vanished under way.
    """
    import duckdb

    ids = scan(files, ["run_id"], valid)
    copied = ids.filter(pa.array(repeated(ids)))["run_id"].unique()
    reference = baselines(to_pandas(read(files, NEEDED, valid & ds.field("is_baseline"))))
    with duckdb.connect() as connection:
        connection.register("stored", dataset(files).filter(valid))
        connection.register("copied", pa.table({"run_id": copied}))
        connection.register("winners", read(files, ROW.names, valid & ds.field("run_id").isin(copied)))
        connection.register("baselines", reference)
        connection.execute(RUNS.format(scanned="WHERE run_id NOT IN (FROM copied)" if len(copied) else ""))
        try:
            relation = connection.sql(query)
            answer = pa.table({}) if relation is None else relation.to_arrow_table()
        except duckdb.Error as error:
            if not all(file.exists() for file in files):
                raise FileNotFoundError(str(error)) from None
            reason = " ".join(str(error).splitlines()[0].split())
            raise ConfigError("query", query, f"DuckDB SQL over the views runs and curves ({reason})") from None
    return to_pandas(_plain_columns(answer))


def _plain_columns(table: pa.Table) -> pa.Table:
    """Every column under a name of its own, and sums of integers, which DuckDB makes 128-bit decimals, as floats."""
    seen: Counter[str] = Counter()
    fields = []
    for field in table.schema:
        again, seen[field.name] = seen[field.name], seen[field.name] + 1
        type_ = pa.float64() if pa.types.is_decimal(field.type) else field.type
        fields.append(pa.field(f"{field.name}_{again}" if again else field.name, type_))
    return table.rename_columns([field.name for field in fields]).cast(pa.schema(fields))
