"""The Optuna study that the dashboard shows: a projection of a store, which may be deleted and rebuilt at any time.

There is one study per sweep and task (and device and software, where a store has several), and one trial per recipe at
its best learning rate: its axes are the parameters, gap and overhead the values, what else is known user attributes.
A recipe with a diverged seed is a failed trial, one that was dropped at a rung a pruned trial: neither can be shown as
a good one (optuna-dashboard does not know the constraints of Optuna 5), and the mean of seeds that were left would
flatter.

Trials are immutable once they are there. So a recipe is mirrored when all lanes that its baseline has are there too,
and where something changed all the same, or a parameter got a value that its distribution lacks, the study is made
anew under its old name. Optuna's journal cannot be read any more once something was added behind a torn line, so the
file is mended before it is opened.

Storage is a journal file (a path), a database (`postgresql://…`, `sqlite:///…`), or another process's storage behind
Optuna's gRPC proxy (`grpc://127.0.0.1:13000`). This is the only module that knows Optuna's storages.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from fp4dse.dse import ConfigError
from fp4dse.results import Store, summarize
from fp4dse.results.paired import OVERHEAD, SETTING
from fp4dse.results.schema import RECIPE
from fp4dse.results.summary import SUMMARIZED

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

VALUES = ("gap", "overhead")
MOST_TRIALS = 10_000
"""More are not supported by optuna-dashboard; the best ones are shown."""
AXES = [name for name in RECIPE if "_" in name and name.split("_")[0] in ("fprop", "dgrad", "wgrad", "estimator")]
"""Columns that are parameters of a trial, where they vary."""


class Line(msgspec.Struct, frozen=True):
    """A trial to be: `values` None for a diverged recipe, `pruned` for one that was dropped."""

    key: str
    params: dict[str, str]
    values: tuple[float, float] | None
    facts: dict[str, Any]
    pruned: bool = False

    @property
    def digest(self) -> str:
        """What must be the same for the trial to stay."""
        return json.dumps([self.key, self.params, self.values, self.facts, self.pruned], sort_keys=True)


def mirror(store: Store, storage: optuna.storages.BaseStorage, sweep: str, unfinished: bool = True) -> dict[str, int]:
    """Bring the studies of a store up to date; returns study name -> trials.

    unfinished   also mirror recipes of which lanes are missing that the baseline has
    """
    return {name: mirror_lines(storage, name, lines) for name, lines in study_lines(store, sweep, unfinished).items()}


def study_lines(store: Store, sweep: str, unfinished: bool = True) -> dict[str, list[Line]]:
    """Study name -> its trials, in the order in which their recipes came to the store."""
    runs = store.runs([*dict.fromkeys([*SUMMARIZED, *AXES, OVERHEAD, "created_at"])])
    settings = runs[list(SETTING)].drop_duplicates()
    studies = {}
    for _, part in runs.groupby(list(SETTING), sort=False):
        task = f"{part['task'].iloc[0]}:{part['preset'].iloc[0]}"
        same = settings[["task", "preset"]].eq([part["task"].iloc[0], part["preset"].iloc[0]]).all(axis="columns")
        where = [] if same.sum() == 1 else [str(part[name].iloc[0]) for name in SETTING[2:]]
        studies[" ".join([sweep, task, *where])] = _lines(part, unfinished)
    return studies


def _lines(runs: pd.DataFrame, unfinished: bool) -> list[Line]:
    """The trials of one setting."""
    seen = runs[runs["status"].ne("failed")]
    lanes = seen.groupby("config_id")[["lr", "seed"]].apply(lambda part: len(part.drop_duplicates()))
    baseline = seen[seen["is_baseline"].astype(bool)]
    wanted = 0 if unfinished else len(baseline[["lr", "seed"]].drop_duplicates())
    pruned = set(seen["config_id"][seen["status"].eq("pruned")])
    recipes = runs.drop_duplicates("config_id").set_index("config_id")
    table = summarize(runs).set_index("config_id")
    table = table[~table["is_baseline"].astype(bool) & table.index.isin(lanes.index[lanes >= wanted])]
    varying = _varying(recipes.loc[table.index])
    if len(table) > MOST_TRIALS:
        log.warning("%d recipes; the dashboard gets the %d with the lowest gap", len(table), MOST_TRIALS)
        table = table.sort_values("gap").head(MOST_TRIALS)
    order = runs.groupby("config_id", sort=False)["created_at"].min()
    lines = []
    for config_id in sorted(table.index, key=lambda config_id: (order[config_id], config_id)):
        row, recipe = table.loc[config_id], recipes.loc[config_id]
        gap = float(row["gap"])
        params = {name: _text(recipe[column]) for name, column in varying.items()}
        if table["lr"].nunique() > 1:
            params["lr"] = f"{row['lr']:g}"
        facts = {name: _plain(row[name]) for name in ("label", "gap_low", "gap_high", "val_loss", "note")}
        facts |= {"config_id": config_id} | {name: int(row[name]) for name in ("seeds", "diverged", "failed")}
        finite = math.isfinite(gap)
        lines.append(
            Line(
                key=str(config_id),
                params=params,
                values=(gap, float(recipe[OVERHEAD])) if finite else None,
                facts=facts,
                pruned=config_id in pruned,
            )
        )
    return lines


def _varying(recipes: pd.DataFrame) -> dict[str, str]:
    """Parameter name -> column, for columns that vary. Columns that always agree are one parameter: `scale` where all
    six slots do, else `dgrad_g wgrad_g rounding`."""
    agreeing: dict[tuple, list[str]] = {}
    for column in AXES:
        values = tuple(map(_text, recipes[column]))
        if len(set(values)) > 1:
            agreeing.setdefault((_field(column), values), []).append(column)
    everywhere = {field: [column for column in AXES if _field(column) == field] for field, _ in agreeing}
    names = {}
    for (field, _), columns in agreeing.items():
        slots = [column.removesuffix(f"_{field}") for column in columns]
        whole = columns == everywhere[field] and len(columns) > 1
        names[field if whole else columns[0] if len(columns) == 1 else " ".join([*slots, field])] = columns[0]
    return names


def _field(column: str) -> str:
    """`fprop_x_tensor_scale` -> `tensor_scale`, `wgrad_rotation` -> `rotation`."""
    stage, operand, *rest = column.split("_", 2)
    return "_".join(rest) if rest and len(operand) == 1 else column.removeprefix(f"{stage}_")


def mirror_lines(storage: optuna.storages.BaseStorage, name: str, lines: Sequence[Line]) -> int:
    """Make the study's trials these lines: append what is new; make it anew if others changed. Returns the trials."""
    import optuna

    choices = _choices(lines)
    study = _study(storage, name)
    known = {trial.user_attrs.get("digest"): trial for trial in study.get_trials(deepcopy=False)}
    fits = all(
        trial.distributions.get(axis) == optuna.distributions.CategoricalDistribution(values)
        for trial in list(known.values())[:1]
        for axis, values in choices.items()
    )
    wanted = {line.digest for line in lines}
    if not fits or not set(known) <= wanted:
        optuna.delete_study(study_name=name, storage=storage)
        study, known = _study(storage, name), {}
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        axis: optuna.distributions.CategoricalDistribution(values) for axis, values in choices.items()
    }
    for line in lines:
        if line.digest not in known:
            study.add_trial(_trial(line, distributions))
    return len(lines)


def _study(storage: optuna.storages.BaseStorage, name: str) -> optuna.Study:
    import optuna

    study = optuna.create_study(
        study_name=name, storage=storage, directions=["minimize"] * len(VALUES), load_if_exists=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if study.metric_names != list(VALUES):
            study.set_metric_names(list(VALUES))
    return study


def _choices(lines: Iterable[Line]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for line in lines:
        for axis, value in line.params.items():
            found.setdefault(axis, set()).add(value)
    return {axis: sorted(values) for axis, values in found.items()}


def _trial(line: Line, distributions: dict[str, optuna.distributions.BaseDistribution]) -> optuna.trial.FrozenTrial:
    import optuna

    states = optuna.trial.TrialState
    state = states.PRUNED if line.pruned else states.FAIL if line.values is None else states.COMPLETE
    return optuna.trial.create_trial(
        state=state,
        values=list(line.values) if state == states.COMPLETE and line.values else None,
        params=line.params,
        distributions={axis: distributions[axis] for axis in line.params},
        user_attrs={**line.facts, "digest": line.digest},
    )


def _text(value: object) -> str:
    return "-" if value is None or value is pd.NA or value != value else str(value)


def _plain(value: Any) -> Any:
    """As JSON has it: no NaN, no infinity, no numpy."""
    if isinstance(value, str) or value is None:
        return value
    return float(value) if math.isfinite(value) else None


# --- storages ------------------------------------------------------------------------------------------------------


def open_storage(url: str | Path) -> optuna.storages.BaseStorage:
    """The storage behind a path or URL. ConfigError if a package for it is missing, or nobody answers."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scheme, separator, rest = str(url).partition("://")
    if not separator:
        path = Path(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        mend_journal(path)
        return optuna.storages.JournalStorage(_journal(path))
    if scheme == "grpc":
        host, _, port = rest.partition(":")
        if not port.isdigit():
            raise ConfigError("--storage", str(url), "grpc://HOST:PORT")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            proxy = optuna.storages.GrpcStorageProxy(host=host, port=int(port))
        proxy.wait_server_ready(timeout=10)
        return proxy
    if scheme == "postgresql":
        scheme = "postgresql+psycopg"
    try:
        return optuna.storages.RDBStorage(f"{scheme}://{rest}")
    except Exception as error:  # whatever the database's driver raises
        reason = " ".join(str(error).split())[:200]
        raise ConfigError("--storage", _without_password(url), f"a database that answers ({reason})") from None


def _journal(path: Path) -> optuna.storages.journal.JournalFileBackend:
    """Optuna's journal file, but what is added need not survive a power cut: waiting for the disk is most of the time
    that mirroring takes."""
    from optuna.storages.journal import JournalFileBackend
    from optuna.storages.journal._file import get_lock_file

    class Journal(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            with get_lock_file(self._lock), open(self._file_path, "ab") as file:
                file.write("".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in logs).encode())

    return Journal(str(path))


def mend_journal(path: Path) -> bool:
    """Cut a torn last line off a journal; a journal that is broken elsewhere is removed, it is but a projection.

    Returns whether anything was done. What is behind the last newline was never read by anyone.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return False
    whole = data[: data.rfind(b"\n") + 1]
    try:
        for line in whole.splitlines():
            json.loads(line)
    except ValueError:
        log.warning("%s: broken; it is made anew from the store", path)
        path.unlink()
        return True
    if len(whole) < len(data):
        log.warning("%s: the last line is torn; cut off", path)
        os.truncate(path, len(whole))
    return len(whole) < len(data)


def _without_password(url: str | Path) -> str:
    scheme, separator, rest = str(url).partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def close_storage(storage: optuna.storages.BaseStorage) -> None:
    """Give back the connections of a storage; a journal has none."""
    import optuna

    storage.remove_session()
    if isinstance(storage, optuna.storages.RDBStorage):
        storage.engine.dispose()
    if isinstance(storage, optuna.storages.GrpcStorageProxy):
        storage.close()


def serve_grpc(url: str | Path, port: int) -> None:
    """Offer a storage to other processes of this machine until interrupted."""
    import optuna

    with warnings.catch_warnings(), contextlib.suppress(KeyboardInterrupt):
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.run_grpc_proxy_server(open_storage(url), host="127.0.0.1", port=port)
