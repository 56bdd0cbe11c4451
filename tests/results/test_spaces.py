"""A store knows which spaces were swept into it, and what they ask."""

import pytest

from fp4dse.dse import StoreError
from fp4dse.results import open_store
from fp4dse.results.spaces import note_space, spaces, store_name


def test_the_space_that_was_swept_last_stands_last(store):
    assert spaces(store) == {}
    note_space(store, "zoo", "Which published recipe?")
    note_space(store, "mine", "Does ü help?")
    note_space(store, "zoo", "Which of them?")
    assert list(spaces(store).items()) == [("mine", "Does ü help?"), ("zoo", "Which of them?")]


def test_a_note_that_cannot_be_read_is_named(store):
    (store.path / "spaces.json").write_text("[1]")
    with pytest.raises(StoreError, match=r"spaces\.json: found list; accepted: a JSON object"):
        spaces(store)


def test_a_store_without_a_note_goes_by_its_folder(tmp_path):
    assert store_name(open_store(tmp_path / "zoo" / "store", create=True)) == "zoo"
    assert store_name(open_store(tmp_path / "mine", create=True)) == "mine"


def test_a_merge_brings_the_spaces_along_and_keeps_the_last_one_last(store, tmp_path):
    note_space(store, "zoo", "Which of them?")
    note_space(store, "mine", "Does ü help?")
    other = open_store(tmp_path / "other", create=True)
    for name in ("mine", "theirs"):
        note_space(other, name, "as they ask")
    store.merge(other)
    merged = [("theirs", "as they ask"), ("zoo", "Which of them?"), ("mine", "Does ü help?")]
    assert list(spaces(store).items()) == merged
    store.merge(other)
    assert list(spaces(store).items()) == merged
