"""Studies of layers are noted beside the rows, replaced when they are made again, and merged."""

import msgspec
import pytest

from fp4dse.dse import StoreError
from fp4dse.results import open_store
from fp4dse.results.stats.layers.study import Measured, Spared, Study
from fp4dse.results.store.studies import FILE, read_studies, record_study

UNIT = Measured("mlp", "all", "a0", "b0", 0.25)
STUDY = Study("vision", "quickstart", "nvfp4", "c0", "d0", 1e-3, (0, 1), "", (UNIT,))
CHOICE = Spared(0.05, "products", (0,), "e0", 0.04, 0.04, (100, 101))


def test_a_store_without_studies_has_none(store):
    assert read_studies(store) == []


def test_the_same_study_is_noted_once_and_keeps_its_choices(store):
    record_study(store, msgspec.structs.replace(STUDY, choices=(CHOICE,)))
    other = msgspec.structs.replace(STUDY, lr=2e-3)
    record_study(store, other)
    record_study(store, msgspec.structs.replace(STUDY, seeds=(0, 1, 2)))
    assert read_studies(store) == [other, msgspec.structs.replace(STUDY, seeds=(0, 1, 2), choices=(CHOICE,))]
    again = msgspec.structs.replace(CHOICE, cost=0.03)
    larger = msgspec.structs.replace(CHOICE, budget=0.1)
    for choice in (larger, again):
        record_study(store, msgspec.structs.replace(STUDY, choices=(choice,)))
    assert read_studies(store)[-1].choices == (larger, again)


def test_studies_are_merged_with_their_stores(store, tmp_path):
    other = open_store(tmp_path / "other", create=True)
    mine, theirs = (msgspec.structs.replace(STUDY, task=task) for task in ("vision", "language"))
    record_study(store, mine)
    for study in (mine, theirs):
        record_study(other, study)
    store.merge(other)
    store.merge(other)
    assert read_studies(store) == [theirs, mine]


@pytest.mark.parametrize("text", ["{", "{}", '{"studies": [{"task": 1}]}', "[]"])
def test_a_file_that_is_something_else_is_an_error_that_names_it(store, text):
    (store.path / FILE).write_text(text)
    with pytest.raises(StoreError, match=FILE):
        read_studies(store)
