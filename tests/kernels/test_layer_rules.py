"""Lanes with rules for layers share a population, and each computes as it would alone."""

import pytest
import torch

from fp4dse.dse import ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.layers.place import Place
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.lanes.split import Group, make_split
from fp4dse.kernels.layers import QuantLinear

PLACE = Place("mlp", 0, 2, "up", name="block0.up")
OTHER = Place("attention", 0, 2, "qkv", name="block0.qkv")


def ruled(base, *rules):
    return recipe_from_dict({**recipe_to_dict(Recipe.named(base)), "layers": list(rules)})


def mlp(what):
    return ruled("nvfp4", {"kind": "mlp", **what})


RECIPES = [
    Recipe.named("nvfp4"),
    mlp({"*": "mxfp4"}),  # another block
    mlp({"*": "bf16"}),
    mlp({"wgrad": "bf16", "fprop.rotation": "rht16"}),
    mlp({"recipe": "nvidia-nvfp4"}),
    mlp({"*": "fp8"}),
    mlp({"recipe": "mxfp4-sr-rht"}),
    mlp({"recipe": "luq"}),
]
"""Of one signature: what rules change is no part of it."""
SEEDS = list(range(10, 10 + len(RECIPES)))


def passes(recipes, seeds, place=PLACE, steps=3):
    """Outputs and gradients of some steps of a layer, and the state at the end, with the lane axis first."""
    numerics = LaneNumerics(recipes, seeds, steps=steps)
    generator = torch.Generator().manual_seed(1)
    shapes = (48, 64), (32, 64), (32,), (48, 32)
    x, w, b, g = (torch.randn(len(SEEDS), *shape, generator=generator) for shape in shapes)
    mine = [SEEDS.index(seed) for seed in seeds]
    layer = QuantLinear(w[mine], b[mine], numerics, 3, place)
    out = []
    for step in range(steps):
        numerics.step.fill_(step)
        x_in = x[mine].clone().requires_grad_()
        layer.zero_grad()
        y = layer(x_in)
        y.backward(g[mine])
        out += [y.detach(), x_in.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]
    return numerics, out


def test_a_layer_computes_as_its_rule_says():
    for recipe in RECIPES[1:]:
        _, found = passes([recipe], SEEDS[:1])
        _, wanted = passes([recipe.at(PLACE)], SEEDS[:1])
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), recipe.label()
        _, elsewhere = passes([recipe], SEEDS[:1], OTHER)
        _, own = passes(RECIPES[:1], SEEDS[:1], OTHER)
        assert all(torch.equal(a, b) for a, b in zip(elsewhere, own, strict=True))


@pytest.mark.parametrize("order", [range(len(RECIPES)), [3, 0, 5, 1, 7, 2, 6, 4], [2, 2, 0, 2]])
def test_lanes_of_other_rules_change_no_bit(order):
    recipes, seeds = [RECIPES[i] for i in order], [SEEDS[i] for i in order]
    _, together = passes(recipes, seeds)
    for lane, (recipe, seed) in enumerate(zip(recipes, seeds, strict=True)):
        _, alone = passes([recipe], [seed])
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0], b[lane]), recipe.label()


def test_lanes_that_compute_alike_are_one_group():
    numerics, _ = passes(RECIPES * 2, SEEDS * 2)
    split = numerics.splits[3]
    assert sorted(lane for group in split.groups for lane in group.lanes) == list(range(2 * len(RECIPES)))
    assert all(len({numerics.recipes[i].at(PLACE).signature() for i in group.lanes}) == 1 for group in split.groups)
    assert len(split.groups) == len({recipe.at(PLACE).signature() for recipe in RECIPES})


def test_where_rules_change_nothing_the_layer_is_not_split():
    numerics, _ = passes(RECIPES, SEEDS, OTHER)
    assert numerics.splits == {}
    assert numerics.split(3) is None


def test_bf16_in_all_lanes_is_the_baseline():
    numerics, _ = passes([mlp({"*": "bf16"}), ruled("nvfp4", {"name": "block0.*", "*": "bf16"})], SEEDS[:2])
    assert numerics.precise_layers == {3}


def held(steps):
    return mlp({"*": {"like": "nvfp4", "tensor_scale": {"target": 448.0, "amax": "held", "steps": steps}}})


def test_state_of_groups_goes_through_state_and_load_state():
    recipes = [RECIPES[0], held(2), RECIPES[1], held(4)]
    numerics, _ = passes(recipes, SEEDS[:4])
    state = {name: value.clone() for name, value in numerics.state().items()}
    kept = [name for name in state if name.startswith("state/fprop.x/amax")]
    assert kept
    assert state[f"has/{kept[0]}"].tolist() == [True, True, False, True]  # the first lane computes as the held ones
    again = LaneNumerics(recipes, SEEDS[:4])
    again.add_layer(3, PLACE)
    again.load_state(state)
    assert all(torch.equal(value, state[name]) for name, value in again.state().items())
    assert again.state().keys() == state.keys()
    fewer = LaneNumerics([recipes[3], recipes[0]], [SEEDS[3], SEEDS[0]])
    fewer.add_layer(3, PLACE)
    fewer.load_state({name: value[[3, 0]] for name, value in state.items()})
    assert torch.equal(fewer.state()[kept[0]][0], state[kept[0]][3])


def test_what_is_lost_is_counted_over_all_groups():
    numerics = LaneNumerics(RECIPES[:3], SEEDS[:3])
    layers = [QuantLinear(torch.randn(3, 32, 64), None, numerics, i, place) for i, place in enumerate((PLACE, OTHER))]
    numerics.counting = True
    for layer in layers:
        layer(torch.randn(3, 48, 64))
    lost = numerics.lost()["fprop.x"]["flushed"]
    assert lost.shape == (3,)
    assert (lost > 0).all()
    numerics.forget_lost()
    assert numerics.lost() == {}


def test_evaluation_in_bf16_ignores_rules():
    numerics = LaneNumerics(RECIPES[:3], SEEDS[:3])
    layer = QuantLinear(torch.randn(3, 32, 64), None, numerics, 3, PLACE)
    x = torch.randn(3, 48, 64)
    numerics.training, numerics.evaluation = False, "bf16"
    wanted = LaneNumerics([Recipe.named("bf16")] * 3, SEEDS[:3])
    plain = QuantLinear(layer.weight.detach(), None, wanted, 3, PLACE)
    assert torch.equal(layer(x), plain(x))


def test_a_rule_that_meets_no_layer_is_an_error_that_names_it():
    numerics = LaneNumerics([mlp({"*": "mxfp4"}), ruled("nvfp4", {"name": "block7.*", "*": "mxfp4"})], [0, 1])
    numerics.add_layer(3, PLACE)
    with pytest.raises(ConfigError, match=r"layers\[0\]: found 'block7\.\*'.*block0\.up"):
        numerics.check_layers()


@pytest.mark.parametrize("lanes", [[(0, 1), (2,)], [(0, 2), (1,)], [(2,), (0, 1)], [(1,), (3, 0), (2,)]])
def test_cut_and_join_are_inverse_and_gradients_go_back(lanes):
    split = make_split([Group(of, None) for of in lanes], torch.device("cpu"))
    count = sum(map(len, lanes))
    x = torch.randn(count, 3, requires_grad=True)
    parts = split.cut(x)
    for group, part in zip(split.groups, parts, strict=True):
        assert torch.equal(part, x[list(group.lanes)])
    weights = torch.randn(count, 3)
    joined = split.join([part * 2 for part in parts])
    assert torch.equal(joined, 2 * x)
    (joined * weights).sum().backward()
    assert torch.equal(x.grad, 2 * weights)


def test_a_rule_that_is_idle_in_a_model_is_said_of_the_run():
    idle = recipe_from_dict({**recipe_to_dict(Recipe.named("nvfp4")), "layers": [{"kind": "conv", "*": "mxfp8"}]})
    numerics = LaneNumerics([idle, Recipe.named("nvfp4")], [0, 1])
    numerics.add_layer(0, Place("linear", 0, 1))
    numerics.check_layers()
    assert numerics.fallbacks[0] == "rule without a layer in this model: conv: mxfp8"
    numerics.add_layer(1, Place("conv", 0, 1))
    numerics.check_layers()
    assert not any("rule without" in said for said in numerics.fallbacks)
