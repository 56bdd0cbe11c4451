"""Experts are multiplied together with the bits that each has by itself."""

import pytest
import torch

from fp4dse.dse import Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.layers.place import Place
from fp4dse.kernels import LaneNumerics, QuantLinear, gemm
from fp4dse.kernels.experts import expert_products, group_layers
from fp4dse.kernels.ops.grouped import grouped

EXPERTS, ROOM, WIDTH, OUT = 4, 32, 48, 40
FILLED = [[5, 0, 32, 17], [32, 1, 0, 16], [0, 31, 3, 0]]


def with_rules(base, rules):
    return recipe_from_dict({**recipe_to_dict(Recipe.named(base)), "layers": rules})


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Experts:
    """The layers of four experts, `up` and `down`, in lanes of these recipes and seeds."""

    def __init__(self, recipes, seeds, together=True, packed=False):
        self.numerics = LaneNumerics([recipe.canonical() for recipe in recipes], seeds, steps=100)
        self.numerics.groups_experts, self.numerics.packed = together, packed
        place, numbers = Place("mlp", 0, 2, expert=True), iter(range(2 * EXPERTS))

        def layer(role, expert, *shape):
            weight = torch.stack([randn(*shape, seed=100 * seed + expert) for seed in seeds])
            name = f"expert{expert}.{role}"
            return QuantLinear(weight, None, self.numerics, next(numbers), place.within(role, name))

        pairs = [(layer("up", e, OUT, WIDTH), layer("down", e, WIDTH, OUT)) for e in range(EXPERTS)]
        self.ups, self.downs = zip(*pairs, strict=True)
        group_layers(self.ups)
        group_layers(self.downs)
        self.numerics.check_layers()

    def step(self, number, x, filled):
        """Outputs, gradients, what is carried and what was counted."""
        self.numerics.step.fill_(number)
        self.numerics.counting = True
        x = x.clone().requires_grad_()
        y = expert_products(torch.relu(expert_products(x, self.ups, filled)), self.downs, filled)
        weights = [layer.weight for layer in (*self.ups, *self.downs)]
        gradients = torch.autograd.grad((y * y.detach().cos()).sum(), [x, *weights])
        counts = {f"{slot}/{name}": value for slot, of in self.numerics.lost().items() for name, value in of.items()}
        return [y.detach(), *gradients], {**self.numerics.state(), **counts}


def inputs(lanes=(0, 1, 2), seed=1):
    filled = torch.tensor(FILLED)
    x = randn(3, EXPERTS, ROOM, WIDTH, seed=seed)
    x[torch.arange(ROOM) >= filled[..., None]] = 0
    return x[list(lanes)], filled[list(lanes)]


def same(one, other, lanes=(0, 1, 2), among=(0, 1, 2), steps=2):
    """True if these lanes of one have the bits of the lanes of the other, which are those `among` all."""
    at = [lanes.index(lane) for lane in among]
    for number in range(steps):
        ours, carried = one.step(number, *inputs(lanes, seed=number))
        theirs, expected = other.step(number, *inputs(among, seed=number))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a[at], b)
        carried = {name: value for name, value in carried.items() if not name.startswith("counts/")}
        assert carried.keys() == {name for name in expected if not name.startswith("counts/")}
        for name, value in carried.items():
            assert torch.equal(value[at].nan_to_num(-1.0), expected[name].nan_to_num(-1.0)), name
    return True


RECIPES = (
    "bf16",
    "nvfp4",
    "nvfp4-sr-rht",
    "nvidia-nvfp4",
    "mxfp4-tiles",
    "hopper-moe-fp4",
    "tetrajet-qema",
    "quartet2",
    "averis",
    "metis",
    "wang-dge-occ",
    "luq-smp",
)


@pytest.mark.parametrize("name", RECIPES)
def test_together_they_have_the_bits_of_each_by_itself(name):
    recipes = [Recipe.named(name)] * 3
    one, other = Experts(recipes, [3, 4, 5]), Experts(recipes, [3, 4, 5], together=False)
    assert same(one, other)
    assert one.numerics.folds
    assert not other.numerics.folds
    assert not one.numerics.ungrouped


def test_a_lane_has_the_same_bits_beside_others():
    recipes = [Recipe.named("nvfp4-sr-rht")] * 3
    assert same(Experts(recipes, [3, 4, 5]), Experts(recipes[:2], [5, 3]), among=(2, 0))


PATHS = {
    "experts": ("nvfp4-sr-rht", {}, False),
    "packed": ("hopper-moe-fp4", {}, True),
    "converted": ("hopper-moe-fp4", {"wgrad": {"g": "fp8-1x128", "x": "fp8-1x128", "source": "converted"}}, True),
}


def small_step(recipe, seeds, packed):
    """Outputs and gradients of two small experts in lanes of these seeds, tokens of their own in each."""
    numerics = LaneNumerics([recipe.canonical()] * len(seeds), seeds)
    numerics.packed, place = packed, Place("mlp", 0, 2, "up", True)
    weights = torch.stack([randn(2, 16, 32, seed=seed) for seed in seeds])
    layers = [QuantLinear(weights[:, e], None, numerics, e, place) for e in range(2)]
    group_layers(layers)
    filled = torch.tensor([[seed % 17, 16 - seed % 13] for seed in seeds])
    x = torch.stack([randn(2, 16, 32, seed=100 + seed) for seed in seeds])
    x[torch.arange(16) >= filled[..., None]] = 0
    y = expert_products(x.requires_grad_(), layers, filled)
    return [y.detach(), *torch.autograd.grad((y * y.detach().cos()).sum(), [x, *(of.weight for of in layers)])]


@pytest.mark.parametrize(("name", "more", "packed"), PATHS.values(), ids=PATHS)
def test_of_64_lanes_each_has_the_bits_that_it_has_alone(name, more, packed):
    """The first and the last lane, and one between."""
    recipe = recipe_from_dict({**recipe_to_dict(Recipe.named(name)), **more})
    together = small_step(recipe, range(64), packed)
    for lane in (0, 37, 63):
        alone = small_step(recipe, [lane], packed)
        assert all(torch.equal(a[lane : lane + 1], b) for a, b in zip(together, alone, strict=True)), lane


def test_experts_draw_random_bits_of_their_own():
    layers = Experts([Recipe.named("nvfp4-sr")] * 2, [3, 4]).ups
    seeds = [layer.numerics.use(layer.layer).seeds.tolist() for layer in layers]
    assert len({seed for lanes in seeds for seed in lanes}) == 2 * EXPERTS
    assert {layer.numerics.use(layer.layer).site(0) for layer in layers} == {0}


RULED = {
    "all experts alike": [{"kind": "expert", "*": "mxfp4"}],
    "in the first block": [{"kind": "up", "blocks": "0", "*": "bf16"}],
}


@pytest.mark.parametrize("rules", RULED.values(), ids=RULED)
def test_rules_for_all_experts_leave_them_together(rules):
    recipes = [with_rules("nvfp4-sr-rht", rules), Recipe.named("nvfp4-sr-rht"), Recipe.named("nvfp4-sr-rht")]
    one, other = Experts(recipes, [3, 4, 5]), Experts(recipes, [3, 4, 5], together=False)
    assert same(one, other)
    assert not one.numerics.ungrouped


def test_a_rule_for_one_expert_takes_them_apart_with_the_same_bits_in_other_lanes_and_says_so():
    plain = Recipe.named("nvfp4-sr-rht")
    ruled = with_rules("nvfp4-sr-rht", [{"name": "expert1.*", "wgrad": "bf16"}])
    one, other = Experts([ruled, plain, plain], [3, 4, 5]), Experts([plain, plain], [4, 5])
    assert same(one, other, among=(1, 2))
    assert "experts multiplied one by one" in " ".join(one.numerics.fallbacks)
    assert not other.numerics.fallbacks or "one by one" not in " ".join(other.numerics.fallbacks)


def test_one_by_one_they_take_the_same_operation(monkeypatch):
    """On a GPU it has an order of sums of its own, and a rule of one lane must not change the bits of another."""
    multiplied = []

    def seen(a, b, count, *more):
        multiplied.extend(zip(count.tolist(), more[:1] * len(a), strict=True))
        return grouped(a, b, count, *more)

    monkeypatch.setattr(gemm, "grouped", seen)
    plain, x = Recipe.named("nvfp4-sr-rht"), inputs()
    for ruled in (plain, with_rules("nvfp4-sr-rht", [{"name": "expert1.*", "wgrad": "bf16"}])):
        Experts([ruled, plain, plain], [3, 4, 5]).step(0, *x)
    together, alone = multiplied[: len(multiplied) // 2], multiplied[len(multiplied) // 2 :]
    assert sorted(count for count, contracted in together if not contracted) == sorted(
        4 * [n for lane in FILLED for n in lane]
    )
    assert len(alone) == len(together) == 2 * 3 * 3 * EXPERTS  # layers, products, lanes
    assert sorted(pair for pair in alone if not pair[1]) == sorted(pair for pair in together if not pair[1])


def test_what_is_carried_is_taken_up_again_one_by_one():
    recipes = [Recipe.named("nvidia-nvfp4")] * 3
    one, other = Experts(recipes, [3, 4, 5]), Experts(recipes, [3, 4, 5], together=False)
    one.step(0, *inputs())
    other.numerics.load_state(one.numerics.state())
    ours, theirs = (of.step(1, *inputs(seed=1))[0] for of in (one, other))
    assert all(map(torch.equal, ours, theirs))


def test_new_seeds_are_those_of_all_experts():
    recipes = [Recipe.named("nvfp4-sr")] * 3
    one, other = Experts(recipes, [3, 4, 5]), Experts(recipes, [3, 4, 5])
    first = one.step(0, *inputs())[0]
    one.numerics.reseed([7, 8, 9])
    again = one.step(0, *inputs())[0]
    assert not torch.equal(first[1], again[1])  # gradients are rounded by chance
    other.numerics.reseed([7, 8, 9])
    assert torch.equal(other.step(0, *inputs())[0][1], again[1])


def test_activations_are_kept_as_codes_with_the_same_bits():
    recipes = [Recipe.named("hopper-moe-fp4")] * 3
    assert same(Experts(recipes, [3, 4, 5], packed=True), Experts(recipes, [3, 4, 5]))
