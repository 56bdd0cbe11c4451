"""The store: a folder of Parquet files that survives anything but the loss of its disk. The folder may be a URL.

    store.json      schema version
    inbox/          one Arrow file per finished job, written atomically
    parts/          Parquet files, each joined from many of the inbox or from smaller parts (see compaction.py)
    retired.json    component -> revision below which rows are hidden
    measured.json   how long recipes took on devices (see measured.py)
    spaces.json     what was swept into it, and what that asks (see spaces.py)
    sensitivity.json  which recipes were trained for which unit of layers (see studies.py)
    torn/           files that are not what was written (integrity.py); `mend` brings back those that turn out to be

A part is written before what it joins is deleted. A crash in between leaves rows twice, so rows are deduped whenever
they are read. Nothing is ever deleted but copies. Writers hold a lock; readers hold nothing and look again if a file
was joined into a part under their eyes.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from fp4dse.dse import ConfigError, StoreError
from fp4dse.dse.cost import BAND, DEFAULT_COST, CostTarget
from fp4dse.results.stats.factors import AXES
from fp4dse.results.stats.paired import DERIVED, MARGINS, MEASURED, NEEDED, OVERHEAD, SETTING, add_gap
from fp4dse.results.stats.recipes.summary import SUMMARIZED, summarize
from fp4dse.results.store.atomic import in_parallel, read_json, write_atomic, writing
from fp4dse.results.store.compaction import join_inbox, join_parts, list_files, write_part
from fp4dse.results.store.inbox import encode_ipc
from fp4dse.results.store.integrity import file_name
from fp4dse.results.store.locks import exclusive
from fp4dse.results.store.matching import with_baseline_ids
from fp4dse.results.store.measured import JOINED, Series, checked_series, figures, merged, with_figure
from fp4dse.results.store.parquet import (
    ALL,
    IDENTITY,
    IS_BF16,
    is_one_of,
    long_texts,
    read,
    read_all,
    scan,
    to_pandas,
    winners,
)
from fp4dse.results.store.pricing import PRICED, priced, prices
from fp4dse.results.store.query import run_sql
from fp4dse.results.store.reader import Reader
from fp4dse.results.store.remote import AnyPath, locate
from fp4dse.results.store.retired import RULED, Rules, as_json, checked_rules, stronger, valid
from fp4dse.results.store.schema import BY_NAME, CURVES, ROW, SCALARS, SCHEMA_VERSION, STATUSES, to_table
from fp4dse.results.store.spaces import merge_spaces, read_spaces, with_axes
from fp4dse.results.store.studies import merge_studies


def open_store(
    path: str | AnyPath, create: bool = False, beside: Collection[str] = (), cost: CostTarget = DEFAULT_COST
) -> Store:
    """The store in folder `path`, which may be a URL; with `create`, a new folder becomes one, or one that is empty but
    for names in `beside`. cost: whose overheads its runs are read with; those that are stored are of the default.

    StoreError if there is none, if the folder holds something else, or if a newer program wrote it.
    """
    path = locate(path)
    if not (path / "store.json").exists():
        if not create:
            hint = "it has no store.json" if path.is_dir() else "there is no such folder"
            raise StoreError(f"{path}: not a store ({hint}); `fp4dse sweep --store {path}` makes one")
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            strangers = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
            strangers = [name for name in strangers if name not in beside]
        if strangers:
            raise StoreError(f"{path}: not a store, and it holds {strangers[0]}; give a new or an empty folder")
        _write_version(path)
    store = Store(path, cost)
    store.version()
    return store


def _write_version(path: AnyPath) -> None:
    write_atomic(path / "store.json", f'{{"schema_version": {SCHEMA_VERSION}}}\n'.encode())


class Store:
    """A store that exists; `open_store` makes these. Holds no data, only the path, whose overheads are asked for and
    whether it has the lock."""

    def __init__(self, path: AnyPath, cost: CostTarget = DEFAULT_COST) -> None:
        self.path = path
        self.cost = cost
        self._locked = False
        self._reader = Reader(path)

    # --- writing -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one writer. Every writing method takes the lock by itself; a driver holds it for its whole run.

        StoreError if another process holds it.
        """
        if self._locked:
            yield
            return
        with exclusive(self.path / ".lock"):
            if self.version() < SCHEMA_VERSION:
                _write_version(self.path)  # from here on older programs refuse instead of dropping our columns
            with writing(self.path):
                for folder in ("inbox", "parts"):
                    (self.path / folder).mkdir(exist_ok=True)
                    for leftover in (self.path / folder).glob(".*.tmp"):
                        leftover.unlink(missing_ok=True)
            self._locked = True
            try:
                yield
            finally:
                self._locked = False

    def add(self, rows: list[dict[str, Any]], name: str) -> None:
        """Store rows as one file; when this returns they are on the disk. `name` is for people who look inside.

        The same rows added twice are one file. StoreError on a wrong row (nothing is written) or a full disk.
        """
        data = encode_ipc(to_table(rows))
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).lstrip(".")
        with self.lock():
            write_atomic(self.path / "inbox" / file_name(stem, data, "arrow"), data)

    def compact(self, minimum: int = 256) -> int:
        """Join the inbox into parts if it holds at least `minimum` files, and small parts into larger ones if there are
        many; returns how many files of the inbox were joined.

        Files that are broken are moved to `torn/` and logged. StoreError names one that cannot be read now.
        """
        with self.lock():
            self._reader.move_broken()
            files = self._files("inbox")
            joined = join_inbox(self.path, files) if len(files) >= minimum else 0
            join_parts(self.path)
            return joined

    def merge(self, other: Store) -> int:
        """Take over what `other` has and this store lacks, rules, timings, spaces and studies too; returns the rows
        added.

        Doing it twice adds nothing. A finished run replaces a failed one, never the other way round.
        """
        with self.lock():
            theirs = other._reader.read(read_all)
            # ours come last: of two equally good rows the last one wins, so only better ones come over
            both = pa.concat_tables([theirs.select(IDENTITY), self._read(IDENTITY, ALL)])
            new = theirs.take(np.flatnonzero(winners(both)[: len(theirs)]))
            if len(new):
                write_part(self.path, new)
            self._write_retired(stronger(self.retired(), other.retired()))
            self._write_measured(merged(self.measured(), other.measured()))
            merge_spaces(self, other)
            merge_studies(self, other)
            return len(new)

    def mend(self) -> dict[str, list[str]]:
        """Verify every file anew: move those that are broken to `torn/`, and bring back those in `torn/` that are not.
        Returns their names, "returned" and "broken" (with the reason). StoreError names one that cannot be read now."""
        with self.lock():
            return self._reader.mend()

    def invalidate(self, component: str, below: int) -> int:
        """Hide rows whose revision of `component` is lower than `below`; returns how many runs that hid.

        component: quantizers, engine, or a task that the store holds (ConfigError otherwise). The rows stay.
        """
        with self.lock():
            before = self._read(["task"])
            tasks = before["task"].unique().to_pylist()
            if component not in ("quantizers", "engine", *tasks):
                raise ConfigError("component", component, ", ".join(["quantizers", "engine", *tasks]))
            self._write_retired(stronger(self.retired(), checked_rules({component: below}, self.path / "retired.json")))
            return len(before) - len(self._read(["run_id"]))

    def add_measured(self, of: str, device_name: str, config_id: str, overhead: float) -> None:
        """Store what a recipe took on a device relative to BF16; its series `of` is the newest from now on."""
        with self.lock():
            self._write_measured(with_figure(self.measured(), of, device_name, config_id, overhead))

    def _write_measured(self, series: Series) -> None:
        if series != self.measured():
            write_atomic(self.path / "measured.json", f"{json.dumps(series, indent=1)}\n".encode())

    def _write_retired(self, rules: Rules) -> None:
        if rules != self.retired():
            write_atomic(self.path / "retired.json", as_json(rules))

    # --- reading -----------------------------------------------------------------------------------------------

    def runs(
        self,
        columns: Sequence[str] | None = None,
        curves: bool = False,
        recipes: Collection[str] | None = None,
        categories: bool = False,
        margins: bool = False,
    ) -> pd.DataFrame:
        """One row per run: retired ones hidden; finished ones before failed ones, then the newest.

        Holds every schema column (`columns`: only these), the overhead's band (see pricing.py), measured and
        measured_of (see measured.py), baseline_loss and the gaps (see paired.add_gap); only if asked for the margin of
        equivalence with what it is from (see stats/recipes/tokens_worth.py), and the curves, as arrays. recipes:
        config_ids; those and BF16 alone are read, under any training side. categories: texts are pandas categories,
        which a million rows take a tenth of the memory with. ConfigError on an unknown column.
        """
        known = [*ROW.names, *BAND, *MEASURED, *DERIVED, *MARGINS]
        more = [*(MARGINS if margins else ()), *(CURVES if curves else ())]
        columns = list(columns or [*SCALARS, *BAND, *MEASURED, *DERIVED, *more])
        for name in columns:
            if name not in known:
                raise ConfigError("column", name, ", ".join(known))
        gap, joined, margin = (any(name in columns for name in names) for names in (DERIVED, MEASURED, MARGINS))
        wanted = [name for name in columns if name in ROW.names] + (NEEDED if gap else []) + (JOINED if joined else [])
        wanted += SETTING if margin else ()
        overheads = not set(PRICED).isdisjoint(columns)
        wanted += ["config_id", "overhead_of"] if overheads else []
        condition = self._valid()
        if recipes is not None:
            condition &= is_one_of("config_id", recipes) | IS_BF16
        wanted += ["config_id"] if "baseline_id" in wanted else []
        found = to_pandas(self._read([*dict.fromkeys(wanted)], condition), categories)
        if "baseline_id" in wanted:
            found = with_baseline_ids(found, self.recipe_texts)
        if overheads and (not set(BAND).isdisjoint(columns) or found["overhead_of"].ne(self.cost.of).any()):
            found = priced(found, prices(self._recipe_texts(condition), self.cost), self.cost)
        if joined:
            more = found[JOINED].astype(object).merge(figures(self.measured()), how="left", on=JOINED)
            found = found.assign(**{name: more[name].set_axis(found.index) for name in MEASURED})
        found = self._with_margins(found) if margin else found
        found = (add_gap(found) if gap else found)[columns]
        return with_axes(found, read_spaces(self)) if {"config_id", "points", *AXES} <= set(columns) else found

    def _with_margins(self, found: pd.DataFrame) -> pd.DataFrame:
        """The rows with MARGINS, which take the curves of BF16's rows."""
        # it needs scipy, which a sweep does without
        from fp4dse.results.stats.recipes.tokens_worth import MARGINS_READ, with_margins

        return with_margins(found, to_pandas(self._read(MARGINS_READ, self._valid() & ds.field("is_baseline"))))

    def curves(self, run_ids: Sequence[str]) -> pd.DataFrame:
        """run_id, curve_step and curve_loss (arrays) of some runs."""
        return to_pandas(self._read(["run_id", *CURVES], self._valid() & is_one_of("run_id", run_ids)))

    def recipe_texts(self, config_ids: Collection[str]) -> dict[str, str]:
        """config_id -> recipe as JSON, of some recipes."""
        return self._recipe_texts(self._valid() & is_one_of("config_id", config_ids))

    def _recipe_texts(self, condition: ds.Expression) -> dict[str, str]:
        return self._reader.read(lambda files: long_texts(files, "config_id", "recipe", condition))

    def by_name(self, run_ids: Sequence[str]) -> pd.DataFrame:
        """run_id, metrics, pictures and what was recorded (dicts by name) of some runs."""
        table = self._read(["run_id", *BY_NAME], self._valid() & is_one_of("run_id", run_ids))
        rows = [{"run_id": row["run_id"], **{of: dict(row[of] or ()) for of in BY_NAME}} for row in table.to_pylist()]
        return pd.DataFrame(rows, columns=["run_id", *BY_NAME])

    def recorded(self, run_ids: Sequence[str]) -> dict[str, dict[str, list[float | None]]]:
        """run_id -> what was recorded, name -> values at the steps under "step"; without runs that have nothing."""
        rows = self._read(["run_id", "recorded"], self._valid() & is_one_of("run_id", run_ids)).to_pylist()
        return {row["run_id"]: dict(row["recorded"]) for row in rows if row["recorded"]}

    def done(self, pruned: bool = False) -> set[str]:
        """Ids of the runs that need no training: done or diverged, and not retired; the pruned ones on request."""
        finished = self._valid() & ds.field("status").isin(["done", "diverged", *(["pruned"] if pruned else [])])
        return set(self._reader.read(lambda files: scan(files, ["run_id"], finished))["run_id"].to_pylist())

    def sql(self, query: str) -> pd.DataFrame:
        """DuckDB SQL over the views `runs` (as `runs()`) and `curves`. ConfigError on a wrong query."""
        return self._reader.read(
            lambda files: run_sql(files, self._valid(), query, figures(self.measured()), self.cost, read_spaces(self))
        )

    def pareto(self, overhead: str = OVERHEAD) -> pd.DataFrame:
        """The lines of summarize that are on the front. overhead: any column of numbers."""
        more = MEASURED if overhead in MEASURED else [overhead]
        summary = summarize(self.runs([*dict.fromkeys([*SUMMARIZED, *more])]), overhead)
        return summary[summary["on_front"]].reset_index(drop=True)

    def retired(self) -> Rules:
        """Component -> revision below which its rows are hidden."""
        path = self.path / "retired.json"
        return checked_rules(read_json(path), path) if path.exists() else {}

    def measured(self) -> Series:
        """The times of recipes on devices; see measured.py."""
        path = self.path / "measured.json"
        return checked_series(read_json(path), path) if path.exists() else {}

    def version(self) -> int:
        """The schema version of the store; StoreError if it is newer than this program's."""
        found = read_json(self.path / "store.json").get("schema_version")
        if not isinstance(found, int):
            raise StoreError(f"{self.path / 'store.json'}: schema_version is {found!r}; accepted: a whole number")
        if found > SCHEMA_VERSION:
            limit = f"it has schema {found}, this program reads up to {SCHEMA_VERSION}"
            raise StoreError(f"{self.path}: made by a newer fp4dse ({limit}); upgrade fp4dse")
        return found

    def info(self) -> dict[str, Any]:
        """Counts, files, bytes, rules and unreadable files of the store, as plain data."""
        everything = self._read(["status", *RULED], ALL)
        visible = everything.filter(self._valid())
        counts = {line["values"]: line["counts"] for line in pc.value_counts(visible["status"]).to_pylist()}
        inbox, parts = self._files("inbox"), self._files("parts")
        return {
            "path": str(self.path),
            "schema_version": self.version(),
            "runs": len(visible),
            **{status: counts.get(status, 0) for status in STATUSES},
            "retired": len(everything) - len(visible),
            "retired_below": self.retired(),
            "tasks": sorted(visible["task"].unique().to_pylist()),
            "inbox_files": len(inbox),
            "part_files": len(parts),
            "bytes": sum(in_parallel(lambda file: file.stat().st_size, [*inbox, *parts])),
            "torn": sorted(str(file) for file in {*self._files("torn"), *self._reader.left_out}),
        }

    def _read(self, columns: Sequence[str], condition: ds.Expression | None = None) -> pa.Table:
        condition = self._valid() if condition is None else condition
        return self._reader.read(lambda files: read(files, columns, condition))

    def _valid(self) -> ds.Expression:
        """The rows that no rule hides."""
        return valid(self.retired())

    def files(self) -> frozenset[str]:
        """Names of the files that hold rows: while they are the same, so are the rows."""
        return frozenset(file.name for folder in ("inbox", "parts") for file in self._files(folder))

    def _files(self, folder: str) -> list[AnyPath]:
        return list_files(self.path, folder)
