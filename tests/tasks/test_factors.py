"""A weight in trained parts: its factors and the rest are the weight at the start, have gradients of their own, are
kept, and are a lane's own."""

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import QUANTIZERS, ConfigError, Quantizer, Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.rule import LayerRule
from fp4dse.dse.optimizer import Muon, StableSPAM
from fp4dse.dse.oscillation import OsciReset, QRamping
from fp4dse.dse.outliers import TrainedFactors, outlier_words
from fp4dse.dse.rollout import Rollout
from fp4dse.dse.rules import canonical_faults
from fp4dse.dse.training import Training
from fp4dse.kernels import LaneNumerics, QuantConv2d, QuantLinear, convert
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population
from fp4dse.tasks.optimizers.lane_optimizer import decays
from fp4dse.tasks.own.one_by_one import SequentialNumerics
from fp4dse.tasks.start.make_weights import make_weights
from fp4dse.tasks.start.weights import start_from

replace = msgspec.structs.replace
TASK = replace(get_task("regression", "smoke"), steps=8)
METIS, BF16 = Recipe.named("metis-factors"), Recipe.named("bf16")
FINE = Quantizer.named("none")


def with_factors(base: str = "nvfp4", rank: int = 4, **more: object) -> Recipe:
    recipe = Recipe.named(base)
    w = replace(recipe.fprop.w, outliers=TrainedFactors(rank))
    return replace(recipe, fprop=replace(recipe.fprop, w=w), **more)


def layer_of(recipe: Recipe, weight: torch.Tensor, place: Place = Place()) -> QuantLinear:  # noqa: B008  (frozen)
    numerics = LaneNumerics([recipe] * len(weight), [5 + i for i in range(len(weight))])
    return QuantLinear(weight.clone(), None, numerics, 3, place)


def weights(*shape: int) -> torch.Tensor:
    """Two lanes of standard normal numbers."""
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))


def whole(layer: QuantLinear) -> torch.Tensor:
    of = layer.factors
    return layer.weight.detach() + (of.u * of.s[:, None] @ of.v).detach()


def with_spectrum(*values: float) -> torch.Tensor:
    """[2, 40, 24] with these singular values."""
    u, _, v = np.linalg.svd(weights(40, 24).double().numpy(), full_matrices=False)
    return torch.tensor(u[:, :, : len(values)] * np.array(values) @ v[:, : len(values)], dtype=torch.float32)


def test_at_the_start_factors_are_the_largest_singular_components():
    """Against numpy's decomposition; all parts together are the weight."""
    weight = with_spectrum(50.0, 20.0, 8.0, 1.0, 0.5, 0.2)
    layer = layer_of(with_factors(rank=3), weight)
    u, s, v = np.linalg.svd(weight.double().numpy(), full_matrices=False)
    assert np.allclose(layer.factors.s.detach(), s[:, :3], rtol=1e-5)
    largest = u[:, :, :3] * s[:, None, :3] @ v[:, :3]
    of = layer.factors
    assert np.allclose((of.u * of.s[:, None] @ of.v).detach(), largest, atol=1e-4)
    assert torch.allclose(whole(layer), weight, atol=1e-5)
    assert np.linalg.norm(layer.weight[0].detach(), 2) == pytest.approx(s[0, 3], rel=1e-3)


def test_the_worked_example():
    """W = diag(6, 3, 1): the factor is 6 on the first axis, and x = (1, 2, 4) meets it and the rest, diag(0, 3, 1),
    which MXFP4 holds."""
    weight = torch.diag_embed(torch.tensor([[6.0, 3.0, 1.0]] * 2))
    layer = layer_of(with_factors("mxfp4", 1), weight)
    assert torch.allclose(layer.factors.s, torch.tensor(6.0))
    assert torch.allclose(layer.factors.v.abs(), torch.tensor([1.0, 0.0, 0.0]), atol=1e-4)
    y = layer(torch.tensor([[[1.0, 2.0, 4.0]]] * 2))
    assert torch.allclose(y, torch.tensor([6.0, 6.0, 4.0]), atol=0.01)
    assert layer_of(with_factors("bf16", 1), weight).factors is None  # where nothing is quantized


@pytest.mark.parametrize("window", [False, True])
def test_gradients_are_those_of_the_parts(window):
    """Of a plain residual in BF16's products, against autograd on the definition; a convolution is its columns."""
    recipe = with_factors("nvfp4", 3)
    numerics = LaneNumerics([recipe] * 2, [0, 1])
    numerics.evaluation = "bf16"  # what remains is the rounding of operands to BF16
    g = torch.Generator().manual_seed(2)
    if window:
        weight, x = weights(6, 3, 3, 4), torch.randn(2, 2, 5, 5, 4, generator=g, requires_grad=True)
        layer = QuantConv2d(weight, None, numerics, 0, padding=1)
        images = x.flatten(0, 1).permute(0, 3, 1, 2)
        columns = torch.nn.functional.unfold(images, 3, padding=1).mT.reshape(2, 50, 4, 9)
        columns = columns.transpose(2, 3).flatten(2)
    else:
        x = torch.randn(2, 11, 16, generator=g, requires_grad=True)
        layer, columns = QuantLinear(weights(6, 16), None, numerics, 0), x
    of = layer.factors
    parts = {"x": x, "weight": layer.weight, "u": of.u, "s": of.s, "v": of.v}
    expected = columns @ layer.weight.mT + (columns @ of.v.mT * of.s[:, None]) @ of.u.mT
    y = layer(x).reshape(expected.shape)
    assert torch.allclose(y, expected, atol=0.02 * float(expected.detach().abs().max()))
    tangent = torch.randn(expected.shape, generator=g)
    theirs = torch.autograd.grad((expected * tangent).sum(), list(parts.values()))
    ours = torch.autograd.grad((y * tangent).sum(), list(parts.values()))
    for name, a, b in zip(parts, ours, theirs, strict=True):
        assert (a - b).norm() < 0.01 * b.norm(), name


def test_factors_take_what_is_large_from_what_is_quantized():
    """With a direction far above the others, the error of the product is that of the rest alone."""
    weight = 0.1 * weights(40, 32) + 20 * weights(40, 1) @ weights(1, 32)
    x, errors = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(3)), {}
    for name, recipe in {"without": Recipe.named("nvfp4"), "with": with_factors()}.items():
        recipe = replace(recipe, fprop=replace(recipe.fprop, x=FINE))
        errors[name] = (layer_of(recipe, weight)(x) - x @ weight.mT).norm()
    assert errors["with"] < 0.1 * errors["without"]


def test_precise_layers_have_none_and_ranks_are_cut_to_the_sizes():
    assert layer_of(METIS, weights(8, 8), Place("head")).factors is None
    layer = layer_of(METIS, weights(3, 8))
    assert [p.shape[1:] for p in layer.factors.parameters()] == [(3, 3), (3,), (3, 8)]
    assert layer.weight.detach().abs().max() < 1e-5  # all of it is in the factors


def test_outer_factors_decay_as_weights_do():
    layer = layer_of(METIS, weights(8, 8))
    assert dict(zip([n for n, _ in layer.named_parameters()], decays(layer), strict=True)) == {
        "weight": True,
        "factors.u": True,
        "factors.s": False,
        "factors.v": True,
    }


def lanes(count: int = 3, **training: object) -> list[Lane]:
    return [Lane(replace(METIS, training=Training(**training)), TASK.lr, seed) for seed in range(count)]


def test_all_parts_are_trained():
    population = Population(TASK, lanes(), "cpu")
    before = {name: p.detach().clone() for name, p in population.model.named_parameters()}
    for step in range(TASK.steps):
        population.train_step(step)
    moved = {name for name, p in population.model.named_parameters() if not torch.equal(before[name], p)}
    assert moved == set(before)
    assert sum("factors" in name for name in before) == 6


@pytest.mark.heavy
@pytest.mark.parametrize("task", ["regression:smoke", "vision:cnn-smoke", "language:moe8-smoke+bf16+recompute"])
def test_a_lane_is_the_same_in_any_company(task):
    task = replace(get_task(*task.split(":")), steps=2, eval_rows=16, batch=8)
    members = [Lane(METIS, task.lr, seed) for seed in (3, 1)]
    together = train(task, members, record=True).lanes
    assert all(lane.status == "done" for lane in together)
    assert train(task, members[1:], record=True).lanes == together[1:]


@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": Muon()},
        {"optimizer": StableSPAM(reset=3)},
        {"reset": OsciReset(start=0.1, every=50)},
        {"ramping": QRamping(every=31)},
    ],
    ids=["muon", "stable-spam", "osci-reset", "q-ramping"],
)
def test_it_trains_with_other_optimizers_and_what_looks_at_weights(training):
    steps = 60 if "reset" in training else 35 if "ramping" in training else 4
    [lane] = train(replace(TASK, steps=steps, batch=8), lanes(1, **training)).lanes
    assert lane.status == "done"


def test_a_start_from_weights_is_split_as_they_are():
    plain = Population(TASK, [Lane(Recipe.named("nvfp4"), TASK.lr, 4)], "cpu").model.state_dict()
    file = {name: value[0].clone() for name, value in plain.items()}
    started = Population(start_from(TASK, file, "w"), lanes(2), "cpu")
    for layer in (m for m in started.model.modules() if isinstance(m, QuantLinear)):
        name = next(name for name, m in started.model.named_modules() if m is layer)
        assert torch.allclose(whole(layer), file[f"{name}.weight"].expand(2, -1, -1), atol=1e-5)


def test_weights_that_are_written_are_whole():
    found, _ = make_weights(TASK, lanes(1)[0])
    assert found.keys() == Population(TASK, [Lane(BF16, TASK.lr, 0)], "cpu").model.state_dict().keys()
    trained = Population(TASK, lanes(1), "cpu")
    for step in range(TASK.steps):
        trained.train_step(step)
    for name, layer in trained.model.named_modules():
        if isinstance(layer, QuantLinear):
            assert torch.allclose(found[f"{name}.weight"], whole(layer)[0], atol=1e-5)
    Population(start_from(TASK, found, "w"), [*lanes(1)], "cpu")


FAULTS = {
    "another operand": (replace(METIS, wgrad=replace(METIS.wgrad, x=METIS.fprop.w)), "wgrad.x.outliers"),
    "rules for layers": (replace(METIS, layers=(LayerRule(kind=("mlp",), fprop_x=FINE),)), "low-rank (with layers)"),
    "a rule of some layers": (
        replace(Recipe.named("nvfp4"), layers=(LayerRule(kind=("mlp",), fprop_w=METIS.fprop.w),)),
        "layers[0]: fprop.w.outliers: found 'factors'",
    ),
    "the weights of a rollout": (
        replace(Recipe.named("nvfp4"), training=Training(rollout=Rollout(FINE, METIS.fprop.w))),
        "training.rollout.w",
    ),
    "a training of nothing": (replace(METIS, training=Training(trains="none")), "with training.trains"),
}


@pytest.mark.parametrize(("recipe", "words"), FAULTS.values(), ids=FAULTS)
def test_what_they_do_not_go_with_is_refused(recipe, words):
    assert any(words in str(error) for _, error in canonical_faults(recipe.canonical()))


def test_modules_that_are_not_ours_refuse_them():
    with pytest.raises(ConfigError, match=r"found 'factors'.*your model has no such parameters"):
        convert(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))), METIS)
    numerics = SequentialNumerics([METIS] * 2, [0, 1])
    with pytest.raises(ConfigError, match="plain torch modules have no place for them"):
        numerics.add_layer(0, Place())


def test_words_and_structure():
    assert outlier_words(TrainedFactors()) == "factors"
    assert outlier_words(TrainedFactors(4)) == "factors4"
    assert with_factors(rank=4).signature() != with_factors(rank=5).signature()
    assert with_factors("bf16").config_id == Recipe.named("bf16").config_id
    assert replace(QUANTIZERS["nvfp4"], outliers=TrainedFactors()).label() == "nvfp4 factors"
