"""What recipes are called beside each other is short, tells them apart, and loses nothing."""

import pytest

from fp4dse.dse import Recipe, recipe_files
from fp4dse.results.text.labels import SHORT, short_labels
from fp4dse.sweeps.arguments import find_space

NAMED = {file.recipe.label(): name for name, file in recipe_files().items()}


def shortened(space: str) -> tuple:
    labels = [recipe.label() for recipe in find_space(space).recipes()]
    return labels, short_labels(labels, [NAMED.get(label) for label in labels])


@pytest.mark.parametrize("space", ["zoo", "paper-slice", "estimators"])
def test_no_two_recipes_are_called_the_same_and_none_is_called_more_than_its_label(space):
    labels, found = shortened(space)
    assert len(set(found.short.values())) == len(set(labels))
    assert all(len(found.of(label)) <= len(label) + len(f"{NAMED.get(label, '')}: ") for label in labels)


def test_the_recipes_of_the_zoo_go_by_their_names():
    labels, found = shortened("zoo")
    assert found.common == ()
    assert all(found.of(label).partition(":")[0] == NAMED[label] for label in labels)
    assert max(map(len, found.short.values())) <= SHORT + len(": ") + max(map(len, NAMED.values()))
    assert found.of(Recipe.named("nvfp4-sr").label()) == "nvfp4-sr: nvfp4, gradients 16/17 SR"
    assert found.of(Recipe.named("nvidia-nvfp4").label()) == "nvidia-nvfp4"
    assert found.of(Recipe.named("nvfp4").label()) == "nvfp4"


def test_what_all_recipes_have_is_said_once_and_their_formats_stay():
    labels = ["nvfp4, SR, wgrad rht16, loss scale 8", "ue5m3, wgrad rht16, loss scale 8"]
    found = short_labels(labels, [None, None])
    assert found.short == {labels[0]: "nvfp4, SR", labels[1]: "ue5m3"}
    assert found.says() == "All recipes have: wgrad rht16, loss scale 8"
    same = short_labels(["nvfp4", "nvfp4, SR"], [None, None])
    assert (same.common, same.of("nvfp4"), same.of("nvfp4, SR")) == ((), "nvfp4", "nvfp4, SR")


def test_a_recipe_without_a_name_is_never_called_by_the_name_of_another():
    found = short_labels(["nvfp4", "nvfp4, loss scale 8", "ue5m3, loss scale 8"], ["nvfp4", None, None])
    assert found.common == ()
    assert len(set(found.short.values())) == 3


def test_what_is_left_out_never_makes_a_label_that_of_a_shipped_recipe():
    backward = ["nvfp4, forward bf16, loss scale 8", "nvfp4, forward bf16, SR, loss scale 8"]
    found = short_labels(backward, [None, None])
    assert list(found.short.values()) == ["nvfp4, forward bf16", "nvfp4, forward bf16, SR"]
    assert found.says() == "All recipes have: loss scale 8"
    rotated = ["nvfp4, gradients 16/17 SR, wgrad rht16", "ue5m3-t448, gradients 16/17 SR, wgrad rht16"]
    assert (
        short_labels(["mxfp4, wgrad rht16", *rotated[1:]], [None, None]).common == ()
    )  # ue5m3-sr without the rotation
    assert short_labels(rotated, [NAMED[rotated[0]], None]).short == {
        rotated[0]: "nvfp4-sr-rht: nvfp4, gradients 16/17 SR, wgrad rht16",
        rotated[1]: "ue5m3-t448",
    }


def test_one_recipe_and_one_that_was_not_compared_keep_their_labels():
    found = short_labels(["nvfp4, SR"], [None])
    assert (found.common, found.of("nvfp4, SR"), found.of("other")) == ((), "nvfp4, SR", "other")
    assert short_labels([], []) == ((), {})


def test_equal_rotations_sources_and_estimators_share_a_phrase():
    labels = {name: Recipe.named(name).label() for name in ("quartet", "quartet2", "ufp4")}
    assert labels["ufp4"].endswith("gradients SR, rht16")
    assert "backward rht128, backward x+w from forward" in labels["quartet2"]
    assert "fprop hadamard32, backward rht32, backward x+w from forward, forward clipped" in labels["quartet"]


def test_what_most_slots_have_stands_first_and_the_others_follow():
    labels = {name: Recipe.named(name).label() for name in ("nvidia-nvfp4", "wang-dge-occ", "tseng-mxfp4")}
    assert labels["nvidia-nvfp4"].startswith("nvfp4, weights nvfp4-2d, gradients 16/17 SR")
    assert labels["wang-dge-occ"].startswith("forward fp4-row, gradients fp8-e5m2, backward x+w fp8")
    assert labels["tseng-mxfp4"].startswith("mxfp4, forward bf16, backward 3/4 SR")
