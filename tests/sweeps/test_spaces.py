"""Every shipped space, counted: a change of a rule, a format or a canonical form shows here."""

import hashlib

import pytest

from fp4dse.dse import recipe_files
from fp4dse.dse.space.space import Count
from fp4dse.sweeps.arguments import find_space, shipped_spaces

COUNTS = {
    # name: (raw, merged, rejected by rule, left)
    "conventions": (16, 0, {}, 16),
    "estimators": (126, 10, {}, 116),
    "finetune": (
        191,
        9,
        {
            "a clip that is not trained": 2,
            "factors and scales are trained alone": 26,
            "factors-in-all-layers": 20,
            "one format for both operands": 65,
            "one thing learned at a time": 6,
            "scales-are-of-one-grid": 20,
        },
        43,
    ),
    "paper": (65536, 34816, {"estimator-needs-one-grid": 13056}, 17664),
    "paper-later": (864, 0, {}, 864),
    "paper-slice": (
        128,
        0,
        {"a power-of-two scale has the range of the tensor": 16, "noise in the forward pass alone": 28},
        84,
    ),
    "quartet2": (30, 2, {}, 28),
    "study": (
        4309,
        99,
        {
            "a power-of-two scale has the range of the tensor": 400,
            "noise in the forward pass alone": 22,
            "that is the baseline": 1,
        },
        3787,
    ),
    "study-part": (
        1109,
        90,
        {
            "a power-of-two scale has the range of the tensor": 80,
            "noise in the forward pass alone": 22,
            "that is the baseline": 1,
        },
        916,
    ),
    "study-singles": (
        469,
        56,
        {
            "a power-of-two scale has the range of the tensor": 16,
            "noise in the forward pass alone": 28,
            "that is the baseline": 1,
        },
        368,
    ),
    "quickstart": (48, 0, {}, 48),
    "rl": (18, 0, {"trainer and rollout are one: there is nothing to correct": 3, "that is the baseline": 1}, 14),
    "rl-fixes": (43, 4, {}, 39),
    "rl-inject": (9, 0, {}, 9),
    "rl-kl": (12, 0, {}, 12),
    "rl-replay": (8, 0, {"the rollout is the trainer: there is nothing to replay": 2}, 6),
    "rotations": (168, 16, {}, 152),
    "rounding": (128, 0, {}, 128),
    "scales": (80, 12, {}, 68),
    "slots": (64, 0, {"that is the baseline": 1}, 63),
    "tensor-scaling": (27, 0, {}, 27),
    "zoo": (52, 0, {}, 52),
}


STUDIED = {
    "study": "7824d62434ab4a12",
    "study-part": "7ddc2ac7e5e83eb2",
    "study-singles": "f25ab5659c254523",
}
"""Spaces whose lanes docs/study trains, and the hash of their recipes in order: no new recipe joins them unnoticed."""


def test_every_shipped_space_is_counted_here():
    assert set(COUNTS) == set(shipped_spaces())


def test_the_zoo_has_every_shipped_recipe():
    assert {recipe.config_id for recipe in find_space("zoo").recipes()} == {
        file.recipe.config_id for name, file in recipe_files().items() if name != "bf16"
    }


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_a_shipped_space(name):
    count = Count()
    recipes = list(find_space(name).recipes(count))
    assert (count.raw, count.merged, count.rejected, count.left) == COUNTS[name]
    assert len({recipe.config_id for recipe in recipes}) == len(recipes) == count.left
    assert not any(recipe.is_baseline for recipe in recipes)
    if name in STUDIED:
        ids = " ".join(recipe.config_id for recipe in recipes)
        assert hashlib.sha256(ids.encode()).hexdigest().startswith(STUDIED[name])


def test_the_papers_later_space_has_the_six_places_of_stochastic_rounding():
    slots = ("fprop_x", "fprop_w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x")
    every = [recipe.columns() for recipe in find_space("paper-later").recipes()]
    modes = {tuple(slot for slot in slots if of[f"{slot}_rounding"] == "stochastic") for of in every}
    intel, new_intel = ("dgrad_g", "wgrad_g", "wgrad_x"), ("wgrad_x",)
    assert modes == {(), slots[:2], slots[2:], slots, intel, new_intel}


def test_every_shipped_space_says_what_it_asks():
    for name in shipped_spaces():
        assert len(find_space(name).summary) > 20
