"""A store knows which spaces were swept into it, and what they ask."""

import json

import pytest

from fp4dse.dse import Space, StoreError
from fp4dse.results import marginal, open_store
from fp4dse.results.report import read_findings
from fp4dse.results.stats.factors import AXIS
from fp4dse.results.store.spaces import record_space, spaces, store_name


def test_the_space_that_was_swept_last_stands_last(store):
    assert spaces(store) == {}
    record_space(store, Space("zoo", "Which published recipe?"))
    record_space(store, Space("mine", "Does ü help?"))
    record_space(store, Space("zoo", "Which of them?"))
    assert list(spaces(store).items()) == [("mine", "Does ü help?"), ("zoo", "Which of them?")]


def test_a_note_that_cannot_be_read_is_named(store):
    (store.path / "spaces.json").write_text("[1]")
    with pytest.raises(StoreError, match=r"spaces\.json: found list; accepted: a JSON object"):
        spaces(store)


@pytest.mark.parametrize(
    "note",
    [
        1,
        {"asks": 1},
        {"levels": ["a"]},
        {"levels": {"a": [0]}},
        {"axes": {"x": ["1", "2"]}, "levels": {"a": [2]}},
        {"axes": {"x": ["1", "2"]}, "levels": {"a": []}},
    ],
)
def test_a_note_that_says_something_else_is_named_and_no_traceback(store, row, note):
    store.add([row()], "job")
    (store.path / "spaces.json").write_text(json.dumps({"zoo": note}))
    with pytest.raises(StoreError, match=r"spaces\.json: zoo: .*; mend it, or delete the file"):
        read_findings(store)


def test_a_store_without_a_note_goes_by_its_folder(tmp_path):
    assert store_name(open_store(tmp_path / "zoo" / "store", create=True)) == "zoo"
    assert store_name(open_store(tmp_path / "mine", create=True)) == "mine"


def test_a_note_of_an_older_store_is_read(store):
    (store.path / "spaces.json").write_text('{"zoo": "Which?"}')
    assert spaces(store) == {"zoo": "Which?"}
    record_space(store, Space("mine", "Does it help?"))
    assert spaces(store) == {"zoo": "Which?", "mine": "Does it help?"}


def filled(store, row, space):
    losses = {recipe: 0.5 + 0.01 * i for i, recipe in enumerate(space.recipes())}
    rows = [row("bf16", seed, 0.4 + 0.001 * seed) for seed in range(3)]
    store.add([*rows, *(row(r, seed, loss + 0.001 * seed) for r, loss in losses.items() for seed in range(3))], "job")
    return store


AXES = {"*": ["mxfp4-rceil", "nvfp4", "ue5m3-t448"], "backward.rounding": ["nearest", "stochastic"]}


def test_factors_go_by_the_names_and_values_of_the_spaces_axes(store, row):
    """In frames, queries and reports alike."""
    space = Space("mine", base="nvfp4", axes=AXES)
    filled(store, row, space)
    assert set(marginal(store.runs())["factor"]) == {"*.scale", "backward.rounding"}
    record_space(store, space)
    for lines in (marginal(store.runs()), store.sql("FROM marginal"), read_findings(store).marginal):
        found = set(lines[["factor", "reference", "level"]].itertuples(index=False, name=None))
        assert ("backward.rounding", "nearest", "stochastic") in found
        assert {("*", "mxfp4-rceil", "nvfp4"), ("*", "mxfp4-rceil", "ue5m3-t448")} < found
    text = store.sql("SELECT factor, level FROM effects WHERE kind = 'main'")
    assert set(text["level"]) == {"mxfp4-rceil", "nvfp4", "ue5m3-t448", "nearest", "stochastic"}


def test_axes_of_a_space_that_lacks_a_recipe_of_the_store_name_nothing(store, row):
    space = Space("mine", base="nvfp4", axes=AXES)
    filled(store, row, space)
    record_space(store, space)
    assert "*" in set(marginal(store.runs())["factor"])
    store.add([row("nvidia-nvfp4", seed, 0.6) for seed in range(3)], "other")
    assert "*" not in set(marginal(store.runs())["factor"])


def test_axes_name_the_factors_of_a_setting_whatever_was_trained_in_others(store, row):
    """Each setting goes by the latest space that has all its recipes, though another space has the other setting's."""
    mine = Space("mine", base="nvfp4", axes=AXES)
    filled(store, row, mine)
    record_space(store, mine)
    alone = store.runs()
    theirs = Space("theirs", base="mxfp4", axes={"backward.rotation": ["none", "rht32"], "*": ["mxfp4", "mxfp4-rceil"]})
    store.add([row(recipe, 0, 0.5, task="other") for recipe in theirs.recipes()], "theirs")
    store.add([row("nvidia-nvfp4", 0, 0.6, task="third")], "third")
    record_space(store, theirs)
    both = store.runs()
    found = both[both["task"].eq("vision")].reset_index(drop=True)
    assert marginal(found).equals(marginal(alone))
    lines = marginal(both)
    assert marginal(alone).equals(lines[lines["task"].eq("vision")].reset_index(drop=True))
    third = both[both["task"].eq("third")]
    assert third[[name for name in both if name.startswith(AXIS)]].isna().all(axis=None)


def test_a_merge_brings_the_spaces_along_and_keeps_the_last_one_last(store, tmp_path):
    record_space(store, Space("zoo", "Which of them?"))
    record_space(store, Space("mine", "Does ü help?"))
    other = open_store(tmp_path / "other", create=True)
    for name in ("mine", "theirs"):
        record_space(other, Space(name, "as they ask"))
    store.merge(other)
    merged = [("theirs", "as they ask"), ("zoo", "Which of them?"), ("mine", "Does ü help?")]
    assert list(spaces(store).items()) == merged
    store.merge(other)
    assert list(spaces(store).items()) == merged
