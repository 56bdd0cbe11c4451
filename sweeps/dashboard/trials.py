"""The contents of the dashboard, as plain data: a study per task, a trial per recipe at its best learning rate.

Parameters are the factors of the report, the values overhead and loss; what else is known are facts. A recipe that is
shown says nothing that depends on other recipes, so that it stays as it is when these come: what tells it from BF16 is
its own seeds alone, and of forty recipes that are as good as BF16 one or two are told from it. Its words say so; the
verdict of the study has all recipes in mind.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from fp4dse.results import Store, summarize
from fp4dse.results.stats.factors import AXES, factors
from fp4dse.results.stats.levels import POINTS as UNIT_OF_SHARES
from fp4dse.results.stats.levels import are_shares
from fp4dse.results.stats.paired import OVERHEAD, SETTING, by_seed, rows_at_best_lr
from fp4dse.results.stats.recipes.equivalence import differences
from fp4dse.results.stats.recipes.margins import margin_of
from fp4dse.results.stats.recipes.recommendation import VERDICTS_READ, verdicts
from fp4dse.results.stats.recipes.verdict import Against, bf16_words
from fp4dse.results.stats.stages import screened
from fp4dse.results.text.labels import short_labels
from fp4dse.results.text.pareto_table import metric_title
from fp4dse.results.text.ratios import change_with_range, noun, written_in
from fp4dse.results.text.verdict_text import answers
from fp4dse.sweeps.stores import report_path

log = logging.getLogger(__name__)

VALUES = ("modelled step time, BF16 = 1", "loss above BF16, %")
"""In the order of the report's axes: a chart of both has the cost to the right and the loss upwards."""
MOST_TRIALS = 10_000
"""More are not supported by optuna-dashboard; the best ones are shown."""
POINTS = 12
"""Of a training curve that a trial has: the dashboard lists them one below the other."""
REPORT = "/report"
"""Where serve.py serves the store's report."""

_AGAINST: dict[str, Against] = {"lower": "better", "higher": "worse", "same": "same", "open": "open"}
_READ = [*dict.fromkeys([*VERDICTS_READ, *AXES, OVERHEAD, "run_id", "created_at", "lane_s"])]


class TrialData(msgspec.Struct, frozen=True):
    """The data of a trial: `values` None for a diverged recipe, `pruned` for a dropped one. `run_ids`: its lanes;
    `seconds`: their share of the time in which they were trained with others."""

    key: str
    params: dict[str, str]
    values: tuple[float, float] | None
    facts: dict[str, Any]
    pruned: bool = False
    finished: datetime | None = None
    seconds: float = 0.0
    run_ids: tuple[str, ...] = ()
    note: str = ""

    @property
    def digest(self) -> str:
        """Hash of what must be the same for the trial to stay."""
        data = json.dumps([self.key, self.params, self.values, self.facts, self.pruned], sort_keys=True)
        return hashlib.sha256(data.encode()).hexdigest()[:12]


class StudyData(NamedTuple):
    """The data of a study. note: Markdown."""

    trials: list[TrialData]
    note: str


def study_data(store: Store, sweep: str, unfinished: bool = True) -> dict[str, StudyData]:
    """Study name -> its trials, in the order in which their recipes came to the store, and what they say."""
    runs = store.runs(_READ)
    found = {verdict.setting: verdict for verdict in verdicts(runs)}
    runs = screened(runs)
    settings = runs[list(SETTING)].drop_duplicates()
    link = f"[The report of this store]({REPORT}) (`{report_path(store.path)}`)"
    tried = runs[~runs["is_baseline"].astype(bool)].drop_duplicates("config_id")
    called = short_labels(tried["recipe_label"], tried["recipe_name"])
    of = f"{store.cost.model} on {store.cost.chip}"
    studies = {}
    for keys, part in runs.groupby(list(SETTING), sort=False):
        task = f"{part['task'].iloc[0]}:{part['preset'].iloc[0]}"
        same = settings[["task", "preset"]].eq([part["task"].iloc[0], part["preset"].iloc[0]]).all(axis="columns")
        where = [] if same.sum() == 1 else [str(part[name].iloc[0]) for name in SETTING[2:]]
        paragraphs = [f"**{title}**: {text}" for title, text in answers(found[keys], called)] if keys in found else []
        note = "\n\n".join([*paragraphs, *filter(None, [called.says()]), link])
        studies[" ".join([sweep, task, *where])] = StudyData(_trials(part, unfinished, link, of), note)
    return studies


def _trials(runs: pd.DataFrame, unfinished: bool, link: str, of: str) -> list[TrialData]:
    """The trials of one setting. of: what their overheads are of."""
    seen = runs[runs["status"].ne("failed")]
    lanes = seen.groupby("config_id")[["lr", "seed"]].apply(lambda part: len(part.drop_duplicates()))
    baseline = seen[seen["is_baseline"].astype(bool)]
    wanted = 0 if unfinished else len(baseline[["lr", "seed"]].drop_duplicates())
    pruned = set(seen["config_id"][seen["status"].eq("pruned")])
    table = summarize(runs).set_index("config_id")
    table = table[~table["is_baseline"].astype(bool) & table.index.isin(lanes.index[lanes >= wanted])]
    if len(table) > MOST_TRIALS:
        log.warning("%d recipes; the dashboard gets the %d with the lowest gap", len(table), MOST_TRIALS)
        table = table.sort_values("gap").head(MOST_TRIALS)
    order = runs.groupby("config_id", sort=False)["created_at"].min()
    params = _params(runs.drop_duplicates("config_id").set_index("config_id").loc[table.index])
    at_best = rows_at_best_lr(runs)
    trained = {str(key): part for key, part in at_best.groupby("config_id") if key in table.index}
    words, title = _against_bf16(at_best), metric_title(table)
    trials = []
    for config_id in sorted(table.index, key=lambda config_id: (order[config_id], config_id)):
        row, key = table.loc[config_id], str(config_id)
        if table["lr"].nunique() > 1:
            params[key]["learning rate"] = f"{row['lr']:g}"
        gap, finite = float(row["gap"]), math.isfinite(row["gap"])
        name = str(row["label"]) if pd.isna(row["name"]) else f"{row['name']}: {row['label']}"
        facts: dict[str, Any] = {"recipe": name}
        says: list[str] = []
        if finite:
            with written_in(row["gap_unit"]):
                facts[f"{noun()} against BF16"] = against = change_with_range(gap, row["gap_low"], row["gap_high"])
                says = [f"* {noun()} against BF16: {against}; {words[key]}"]
            facts["verdict"] = words[key]
        facts |= {"val loss": _plain(row["val_loss"])} | ({title: _plain(row["val_metric"])} if title else {})
        facts |= {count: int(row[count]) for count in ("seeds", "diverged", "failed")}
        facts |= {"note": row["note"]} if row["note"] else {}
        says += [f"* {row['note']}"] if row["note"] else []
        if pd.notna(row[OVERHEAD]):
            says.append(f"* cost: {row[OVERHEAD]:.2f} of BF16's modelled step time ({of})")
        trials.append(
            TrialData(
                key=key,
                params=params[key],
                values=(_shown(row[OVERHEAD]), _shown(_percents(gap, row["gap_unit"]))) if finite else None,
                facts=facts | {"config_id": key},
                pruned=config_id in pruned,
                finished=_local(trained[key]["created_at"].max()),
                seconds=float(trained[key]["lane_s"].sum()),
                run_ids=tuple(trained[key]["run_id"]),
                note="\n".join([f"**{name}**", "", *says, "", link]),
            )
        )
    return trials


def _percents(gap: float, unit: object) -> float:
    """The loss above BF16's in % of it, or in points where losses are shares."""
    return 100 * gap if unit == UNIT_OF_SHARES else 100 * math.expm1(min(gap, 700.0))


def _params(recipes: pd.DataFrame) -> dict[str, dict[str, str]]:
    """config_id -> factor -> level, as the report names them. recipes: indexed by config_id."""
    found = factors(recipes)
    return {
        str(config_id): {factor.name: factor.levels[factor.codes[i]] for factor in found}
        for i, config_id in enumerate(recipes.index)
    }


def _against_bf16(rows: pd.DataFrame) -> dict[str, str]:
    """config_id -> what its own seeds say of its difference to BF16. rows: of `rows_at_best_lr`, of one setting."""
    recipes, gaps = by_seed(rows, rows["gap"])
    margin = margin_of(rows)
    found = differences(np.where(np.isfinite(gaps), gaps, np.nan), margin.value, bool(are_shares(rows).any()))
    compared = zip(recipes, found["pairs"], found["verdict"], strict=True)
    said = {str(key): _AGAINST[verdict] if pairs > 1 else "unknown" for key, pairs, verdict in compared}
    with written_in(UNIT_OF_SHARES if are_shares(rows).any() else None):
        words = {key: bf16_words(against, margin) for key, against in said.items()}
    return {key: text if said[key] == "unknown" else f"{text}, by its own seeds alone" for key, text in words.items()}


def mean_curves(store: Store, trials: Sequence[TrialData]) -> dict[str, dict[int, float]]:
    """Keys of trials -> step -> training loss at up to POINTS steps, the mean over the lanes that logged it."""
    owner = {run_id: trial.key for trial in trials for run_id in trial.run_ids}
    sums: dict[str, dict[int, list[float]]] = {}
    for run_id, steps, losses in store.curves(list(owner)).itertuples(index=False):
        own = sums.setdefault(owner[run_id], {})
        for step, loss in zip(steps, losses, strict=True) if steps is not None else ():
            if math.isfinite(loss):
                own.setdefault(int(step), []).append(float(loss))
    out = {}
    for key, own in sums.items():
        steps = sorted(own)
        chosen = {steps[round(i)] for i in np.linspace(0, len(steps) - 1, POINTS)} if steps else ()
        out[key] = {step: _shown(math.fsum(own[step]) / len(own[step])) for step in sorted(chosen)}
    return out


def _local(time: pd.Timestamp | None) -> datetime | None:
    """A time as Optuna has it: in this machine's zone, without naming it."""
    return None if time is None or pd.isna(time) else time.to_pydatetime().astimezone().replace(tzinfo=None)


def _plain(value: float) -> float | None:
    """A number as JSON has it: no NaN, no infinity, no numpy."""
    return _shown(value) if math.isfinite(value) else None


def _shown(value: float) -> float:
    """With six digits: the dashboard shows all that there are."""
    return float(f"{value:.6g}")
