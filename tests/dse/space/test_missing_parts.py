"""A path into a part that no recipe of a space has is refused: recipes with and without it would be the same."""

import pytest

from fp4dse.dse import ConfigError, Recipe, Space, recipe_from_dict, recipe_to_dict

ONE = {"design": "one-at-a-time"}
ROLLOUTS, CACHES = {"training.rollout": ["trainer", "mxfp4"]}, {"training.rollout.kv_cache": ["mxfp4", "fp8-row"]}

MISSING = {
    # base, axes, what else: (the path that is refused, what has to be set first)
    "a cache of the trainer's rollout": ("bf16", CACHES, {}, "training.rollout", "mxfp4"),
    "one beside another axis": (
        "bf16",
        {"forward": ["mxfp4-rceil"], "training.rollout.kv_cache": ["fp8-row"]},
        {},
        "training.rollout",
        "mxfp4",
    ),
    "a field of such a cache": ("bf16", {"training.rollout.kv_cache.block": [16]}, {}, "training.rollout", "mxfp4"),
    "above the axis that sets it": ("bf16", CACHES | ROLLOUTS, {}, "training.rollout", "mxfp4"),
    "beside it, each alone": ("bf16", ROLLOUTS | CACHES, ONE, "training.rollout", "mxfp4"),
    "below one that leaves it": (
        "bf16",
        {"training.rollout": ["trainer"], **CACHES},
        {},
        "training.rollout",
        "mxfp4",
    ),
    "a rotation": ("bf16", {"training.rollout.rotation": ["hadamard32"]}, {}, "training.rollout", "mxfp4"),
    "noise": ("bf16", {"training.noise.start": [0.1, 0.2]}, {}, "training.noise", "qerl"),
    "an injected error": ("bf16", {"training.inject.parts": ["dead"]}, {}, "training.inject", "scale"),
    "a teacher": ("bf16", {"training.distill.weight": [0.5]}, {}, "training.distill", "qad"),
    "another optimizer": (
        "bf16",
        {"training.optimizer": ["adamw"], "training.optimizer.momentum": [0.5]},
        {},
        "training.optimizer",
        "sgd",
    ),
    "a tensor scale": ("mxfp4", {"*.tensor_scale.target": [448]}, {}, "*.tensor_scale", "amax"),
    "outliers": ("mxfp4", {"forward.outliers.rank": [8]}, {}, "forward.outliers", "low-rank"),
    "a rotation of products": ("mxfp4", {"backward.rotation.size": [32]}, {}, "backward.rotation", "rht16"),
    "a scale of another kind": ("mxfp4", {"*.g.scale.zero": ["one"]}, {}, "*.g.scale", "e4m3"),
}


@pytest.mark.parametrize(("base", "axes", "more", "part", "example"), MISSING.values(), ids=MISSING)
def test_an_axis_of_a_part_that_no_recipe_has_is_refused(base, axes, more, part, example):
    [(path, values)] = [(path, values) for path, values in axes.items() if path.startswith(f"{part}.")]
    with pytest.raises(ConfigError) as caught:
        Space.from_dict({"base": base, "axes": axes, **more}, "try.toml")
    field = path.removeprefix(f"{part}.").partition(".")[0]
    assert caught.value.where == f"try.toml: axes.{path}"
    assert caught.value.found == [str(value) for value in values]
    assert f"nothing has {part} with {field} here" in caught.value.accepted
    assert caught.value.accepted.endswith(f'set the part as a whole first, as {part} = "{example}"')
    first = {part: [example]} | {text: of for text, of in axes.items() if text != part}
    recipes = list(Space.from_dict({"base": base, "axes": first}).recipes())
    assert len(recipes) == len(values), "and does what is said where that is done"


@pytest.mark.parametrize(
    ("base", "axes", "more", "left"),
    [
        ("bf16", ROLLOUTS | CACHES, {}, 3),
        ("bf16", CACHES, {"fixed": {"training.rollout": "mxfp4"}}, 2),
        ("bf16", {"training.rollout": ["mxfp4"]}, {"fixed": {"training.rollout.kv_cache": "fp8-row"}}, 1),
        ("bf16", {"training.noise": ["qerl"], "training.noise.start": [0.1, 0.2]}, {}, 2),
        ({"training": {"noise": "qerl"}}, {"training.noise.start": [0.1, 0.2]}, {}, 2),
        ({"training": {"noise": "qerl"}}, {"training.noise.start": [0.1, 0.2]}, ONE, 3),
        ("mxfp4", {"recipe": ["mxfp4", "nvfp4-sr-rht"], "*.rotation.size": [32, 64]}, {}, 3),
        ("mxfp4", {"*.g": [{"rounding": "stochastic"}], "*.g.rounding.bits": [8, 16]}, {}, 2),
        ("nvfp4-sr-rht", {"*.rotation.size": [32, 64]}, {}, 2),
    ],
)
def test_a_part_that_some_recipes_have_is_varied_in_these(base, axes, more, left):
    base = base if isinstance(base, str) else recipe_to_dict(Recipe.named("bf16")) | base
    assert len(list(Space.from_dict({"base": base, "axes": axes, **more}).recipes())) == left


def test_what_is_fixed_is_refused_likewise():
    with pytest.raises(ConfigError, match=r"^space: fixed\.training\.rollout\.kv_cache: found .*training.rollout = "):
        Space.from_dict({"base": "bf16", "fixed": {"training.rollout.kv_cache": "fp8-row"}})
    with pytest.raises(ConfigError, match=r"fixed\.\*\.scale\.format: .*; accepted: \*\.scale, set as a whole"):
        Space.from_dict({"base": "nvfp4", "fixed": {"*.scale.format": "e8m0"}})


@pytest.mark.parametrize(
    ("path", "value"),
    [("*.rotation.size", 32), ("forward.tensor_scale.target", 448.0), ("wgrad.x.outliers.rank", 8)],
)
def test_so_is_a_rule_for_layers_in_the_file_of_a_recipe(path, value):
    plain = recipe_to_dict(Recipe.named("mxfp4"))
    with pytest.raises(ConfigError, match=r"nothing has .* here, and this would be left out") as caught:
        recipe_from_dict(plain | {"layers": [{"kind": "attention", path: value}]}, "own.toml")
    assert caught.value.where == f"own.toml: layers[0].{path}"
    assert caught.value.found == value


@pytest.mark.parametrize(
    ("training", "key"),
    [
        ({"rollout": {"kv_cache": "fp8-row"}}, "rollout.x"),
        ({"rollout": {"rotation": "hadamard32"}}, "rollout.x"),
        ({"noise": {"start": 0.1}}, "noise.kind"),
    ],
)
def test_the_file_of_a_recipe_has_to_say_which_rollout_and_which_noise(training, key):
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(recipe_to_dict(Recipe.named("bf16")) | {"training": training}, "own.toml")
    assert caught.value.where == f"own.toml: training.{key}"
