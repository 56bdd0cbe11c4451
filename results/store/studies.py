"""The studies of layers that were made in a store: sensitivity.json beside the rows, which know nothing of units."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fp4dse.dse import StoreError
from fp4dse.results.stats.layers.study import Measured, Study
from fp4dse.results.store.atomic import read_json, write_atomic

if TYPE_CHECKING:
    from fp4dse.results.store.store import Store

FILE = "sensitivity.json"


def read_studies(store: Store) -> list[Study]:
    """The studies, the latest last; StoreError if the file is unreadable."""
    path = store.path / FILE
    if not path.exists():
        return []
    try:
        return msgspec.convert(read_json(path), dict[str, list[Study]])["studies"]
    except (msgspec.ValidationError, KeyError) as error:
        raise StoreError(
            f"{path}: {error}; mend it, or delete the file: the same command notes its study again"
        ) from None


def record_study(store: Store, study: Study) -> None:
    """Note a study; one of the same recipe, task, rate and units is replaced, and the choices made there are kept
    beside new ones."""
    with store.lock():
        others = []
        for known in read_studies(store):
            if known.is_of == study.is_of and _units(known) == _units(study):
                asked = {(choice.budget, choice.spend) for choice in study.choices}
                study = msgspec.structs.replace(study, units=_with_scores(study, known))
                kept = tuple(choice for choice in known.choices if (choice.budget, choice.spend) not in asked)
                study = msgspec.structs.replace(study, choices=(*kept, *study.choices))
            else:
                others.append(known)
        _write(store, [*others, study])


def merge_studies(store: Store, other: Store) -> None:
    """Take over the studies of another store that this one has not."""
    ours = read_studies(store)
    known = {(study.is_of, _units(study)) for study in ours}
    new = [study for study in read_studies(other) if (study.is_of, _units(study)) not in known]
    if new:
        _write(store, [*new, *ours])


def _with_scores(study: Study, known: Study) -> tuple[Measured, ...]:
    """The units of a study with the scores that they have there or had before."""
    before = {(unit.alone, unit.spared): unit.fisher for unit in known.units}
    return tuple(
        msgspec.structs.replace(unit, fisher=before[unit.alone, unit.spared]) if unit.fisher is None else unit
        for unit in study.units
    )


def _units(study: Study) -> frozenset[tuple[str, str]]:
    return frozenset((unit.alone, unit.spared) for unit in study.units)


def _write(store: Store, studies: list[Study]) -> None:
    write_atomic(store.path / FILE, msgspec.json.encode({"studies": studies}) + b"\n")
