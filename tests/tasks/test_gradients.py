"""Products write gradients of weights into the tensor of all gradients; they are those that autograd would leave."""

import msgspec
import pytest
import torch

from fp4dse.dse import Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.kernels import LaneNumerics, QuantLinear, silu
from fp4dse.kernels.destination import Destination, destination_of
from fp4dse.tasks import Lane, get_task
from fp4dse.tasks.engine import Population
from fp4dse.tasks.optimizers import gradients
from fp4dse.tasks.optimizers.lane_optimizer import Gradients


def trained(recipe, name, steps=2, parts=1) -> Population:
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.named(recipe)
    if parts > 1:
        recipe = recipe_from_dict({**recipe_to_dict(recipe), "training": {"accumulate": parts}})
    task = msgspec.structs.replace(get_task(*name.split(":")), steps=steps)
    p = Population(task, [Lane(recipe, task.lr, seed) for seed in range(3)], "cpu")
    for step in range(steps):
        p.train_step(step)
    return p


@pytest.mark.parametrize(
    ("recipe", "name", "parts"),
    [
        ("bf16", "regression:smoke+bf16", 1),
        ("nvfp4", "vision:smoke", 4),
        ("nvfp4-sr-rht", "language:smoke+recompute", 2),  # the embedding is the head
        ("bf16", "vision:cnn-smoke+bf16", 1),
        ("mxfp4", "language:moe-smoke", 1),  # experts are multiplied together
        ("pact", "regression:smoke", 1),
        ("wang-dge-occ", "regression:smoke", 2),
        ("metis-factors", "regression:smoke", 1),
    ],
)
def test_no_bit_depends_on_who_writes_gradients(recipe, name, parts, monkeypatch):
    monkeypatch.setattr(gradients, "ALIGNED", 1)  # sizes that only a GPU asks for
    mine = trained(recipe, name, parts=parts)
    assert mine.optimizer.gradients.destinations
    monkeypatch.setattr(gradients, "written_by_products", lambda model: [False for _ in model.parameters()])
    plain = trained(recipe, name, parts=parts)
    assert not plain.optimizer.gradients.destinations
    assert torch.equal(mine.optimizer.flat, plain.optimizer.flat)
    for key, value in mine.optimizer.kept.items():
        assert torch.equal(value, plain.optimizer.kept[key])


def test_weights_of_products_have_a_destination_but_where_something_else_uses_them():
    p = trained("bf16", "language:smoke", steps=1)
    names = [name for name, _ in p.model.named_parameters()]
    found = {names[i] for i in p.optimizer.gradients.destinations}
    products = {f"{name}.weight" for name, m in p.model.named_modules() if isinstance(m, QuantLinear)}
    assert found == products & set(names) - {"embed"}
    assert found


def layer(lanes=2, sizes=(8, 12), of=8) -> QuantLinear:
    numerics = LaneNumerics([Recipe.named("bf16")] * lanes, range(lanes))
    g = torch.Generator().manual_seed(1)
    return QuantLinear(torch.randn(lanes, *sizes, generator=g), torch.zeros(lanes, of), numerics, 0)


def test_autograd_has_them_while_no_destination_is_open():
    model, x = layer(), torch.randn(2, 5, 12)
    flat = torch.zeros(2, 8 * 12 + 8)
    made = Gradients(model, [96, 8], flat)
    assert isinstance(destination_of(model.weight), Destination)
    model(x).sum().backward()
    by_autograd = model.weight.grad.clone(), model.bias.grad.clone()
    model.zero_grad()
    made.open()
    model(x).sum().backward()
    assert model.weight.grad is None
    taken = made.take()
    assert torch.equal(taken, torch.cat([g.flatten(1) for g in by_autograd], 1))
    assert model.bias.grad is None
    model(x).sum().backward()
    assert torch.equal(model.weight.grad, by_autograd[0])
    assert torch.equal(made.take(), taken)


def test_what_a_weight_gets_by_a_penalty_is_added():
    model, x = layer(), torch.randn(2, 5, 12)
    made = Gradients(model, [96, 8], torch.zeros(2, 104))
    (model(x).sum() + model.weight.square().sum()).backward()
    expected = made.take()
    made.open()
    (model(x).sum() + model.weight.square().sum()).backward()
    assert torch.allclose(made.take(), expected, rtol=1e-6, atol=1e-6)


def test_a_layer_used_twice_in_parts_has_the_same_bits_beside_a_lane_with_a_rule_for_it():
    base = get_task("regression", "smoke")

    def model(parameters, numerics):
        made = base.model(parameters, numerics)
        a, b = made.layers
        made.forward = lambda x: b(silu(a(silu(a(x)))))
        return made

    task = msgspec.structs.replace(base, steps=3, model=model)
    plain = {**recipe_to_dict(Recipe.named("bf16")), "training": {"accumulate": 2}}
    ruled = recipe_from_dict({**plain, "layers": [{"name": "w0", "*": "mxfp8"}]})

    def first_lane(*recipes) -> torch.Tensor:
        p = Population(task, [Lane(recipe, task.lr, seed) for seed, recipe in enumerate(recipes)], "cpu")
        for step in range(3):
            p.train_step(step)
        return p.optimizer.flat[0]

    assert torch.equal(first_lane(recipe_from_dict(plain)), first_lane(recipe_from_dict(plain), ruled))


def test_a_second_pass_adds_to_the_first():
    model, x = layer(), torch.randn(2, 5, 12)
    made = Gradients(model, [96, 8], torch.zeros(2, 104))
    made.open()
    for factor in (1.0, 3.0):
        (model(x) * factor).sum().backward()
    twice = made.take()
    for factor in (1.0, 3.0):
        (model(x) * factor).sum().backward()
    assert torch.equal(twice[:, :96], model.weight.grad.flatten(1))


def test_what_does_not_lie_at_multiples_of_16_bytes_is_left_to_autograd():
    model = layer(of=8)
    assert list(Gradients(model, [96, 8], torch.zeros(2, 104)).destinations) == [0]
    assert not Gradients(model, [96, 7], torch.zeros(2, 103)).destinations
    assert destination_of(model.weight) is None


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_product_is_written_where_it_is_wanted(recipe):
    numerics = LaneNumerics([Recipe.named(recipe)] * 2, range(2))
    g, x = torch.randn(2, 32, 8), torch.randn(2, 32, 16)
    expected = numerics.gemm("wgrad", 0, g, 1, x, 1)
    apart = torch.full((2, 8 * 16 + 8), 7.0)
    out = apart[:, 4:-4].view(2, 8, 16)
    assert numerics.gemm("wgrad", 0, g, 1, x, 1, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)
    assert (apart[:, [0, 3, -4, -1]] == 7).all()
