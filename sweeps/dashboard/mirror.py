"""The Optuna study that the dashboard shows: a projection of a store, which may be deleted and rebuilt at any time.

There is one study per sweep and task (and device and software, where a store has several), and one trial per recipe, as
trials.py has them. A recipe with a diverged seed is a failed trial, one that was dropped at a rung a pruned trial:
neither can be shown as a good one (optuna-dashboard does not know the constraints of Optuna 5), and the mean of seeds
that were left would flatter.

Trials are immutable once they are there. So a recipe is mirrored when all lanes that its baseline has are there too,
and where something changed all the same, or a parameter got a value that its distribution lacks, the study is made
anew under its old name. A study with trials of somebody else is left alone. storages.py knows where studies are kept.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from fp4dse.dse import ConfigError
from fp4dse.results import Store
from fp4dse.sweeps.dashboard.trials import VALUES, TrialData, mean_curves, study_data

if TYPE_CHECKING:
    import optuna

MOST_NOTES = 200
"""Trials with a note, the best ones: the dashboard goes through all notes for each trial that has one."""
NOTE_PIECE = 2000
"""Characters of a note in one attribute; the dashboard joins the pieces."""
DIGEST = "digest"
"""The attribute by which a trial of ours is known, and known to be up to date."""

Curves = Callable[[Sequence[TrialData]], dict[str, dict[int, float]]]
"""Keys of trials -> step -> training loss."""


def mirror(store: Store, storage: optuna.storages.BaseStorage, sweep: str, unfinished: bool = True) -> dict[str, int]:
    """Bring the studies of a store up to date; returns study name -> trials.

    unfinished   also mirror recipes of which lanes are missing that the baseline has
    """
    return {
        name: mirror_trials(storage, name, study.trials, study.note, lambda trials: mean_curves(store, trials))
        for name, study in study_data(store, sweep, unfinished).items()
    }


def mirror_trials(
    storage: optuna.storages.BaseStorage,
    name: str,
    trials: Sequence[TrialData],
    note: str = "",
    curves: Curves = lambda _: {},
) -> int:
    """Make the study's trials `trials`: append what is new; make it anew if others changed. Returns their number.

    ConfigError if the storage has a study of that name with trials of somebody else.
    """
    import optuna

    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        axis: optuna.distributions.CategoricalDistribution(values) for axis, values in _choices(trials).items()
    }
    study = _study(storage, name)
    known = {trial.user_attrs.get(DIGEST): trial for trial in study.get_trials(deepcopy=False)}
    fits = all(
        trial.distributions.get(axis) == distribution
        for trial in list(known.values())[:1]
        for axis, distribution in distributions.items()
    )
    if None in known or len(study.directions) != len(VALUES):
        raise ConfigError("--storage", name, "a storage in which nobody else made a study of that name")
    if not fits or not set(known) <= {data.digest for data in trials}:
        optuna.delete_study(study_name=name, storage=storage)
        study, known = _study(storage, name), {}
    new = [data for data in trials if data.digest not in known]
    ranked = sorted((data.values[1], data.key) for data in trials if data.values)
    noted = {key for _, key in ranked[:MOST_NOTES]}
    losses = curves(new) if new else {}
    study_id = storage.get_study_id_from_name(name)
    for data in new:
        trial_id = storage.create_new_trial(study_id, _trial(data, distributions, losses.get(data.key, {})))
        if data.note and data.key in noted:
            _write_note(storage, study_id, f"dashboard:{trial_id}:", data.note, 0)
    _note_study(storage, study_id, note)
    return len(trials)


def _study(storage: optuna.storages.BaseStorage, name: str) -> optuna.Study:
    import optuna

    study = optuna.create_study(
        study_name=name, storage=storage, directions=["minimize"] * len(VALUES), load_if_exists=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if len(study.directions) == len(VALUES) and study.metric_names != list(VALUES):
            study.set_metric_names(list(VALUES))
    return study


def _choices(trials: Iterable[TrialData]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for data in trials:
        for axis, value in data.params.items():
            found.setdefault(axis, set()).add(value)
    return {axis: sorted(values) for axis, values in found.items()}


def _trial(
    data: TrialData, distributions: dict[str, optuna.distributions.BaseDistribution], losses: dict[int, float]
) -> optuna.trial.FrozenTrial:
    import optuna

    states = optuna.trial.TrialState
    state = states.PRUNED if data.pruned else states.FAIL if data.values is None else states.COMPLETE
    trial = optuna.trial.create_trial(
        state=state,
        values=list(data.values) if state == states.COMPLETE and data.values else None,
        params=data.params,
        distributions={axis: distributions[axis] for axis in data.params},
        user_attrs={**data.facts, DIGEST: data.digest},
        intermediate_values=losses,
    )
    if data.finished is not None:
        trial.datetime_complete = data.finished
        trial.datetime_start = data.finished - timedelta(seconds=data.seconds)
    return trial


def _note_study(storage: optuna.storages.BaseStorage, study_id: int, note: str) -> None:
    """Write the study's note, unless it is there already or somebody else wrote into it."""
    attrs = storage.get_study_system_attrs(study_id)
    version = attrs.get("dashboard:note_ver", 0)
    pieces = [key for key in attrs if key.startswith("dashboard:note_str:")]
    there = "".join(attrs[f"dashboard:note_str:{i}"] for i in range(len(pieces)))
    ours = not version or attrs.get("fp4dse:note") == _short_hash(there)
    if note and ours and note != there:
        _write_note(storage, study_id, "dashboard:", note, version, len(pieces))
        storage.set_study_system_attr(study_id, "fp4dse:note", _short_hash(note))


def _write_note(
    storage: optuna.storages.BaseStorage, study_id: int, prefix: str, note: str, version: int, pieces: int = 0
) -> None:
    """Write a note as optuna-dashboard's save_note does, which wants a trial that runs. pieces: of the note that is
    there."""
    parts = [note[start : start + NOTE_PIECE] for start in range(0, len(note), NOTE_PIECE)]
    parts += [""] * (pieces - len(parts))
    for i, part in enumerate(parts):
        storage.set_study_system_attr(study_id, f"{prefix}note_str:{i}", part)
    storage.set_study_system_attr(study_id, f"{prefix}note_ver", version + 1)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
