"""Muon updates the weights of hidden layers as torch's own does, lane by lane, and all else as AdamW does."""

import math

import msgspec
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim._muon import _zeropower_via_newtonschulz

from fp4dse.dse import Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.dse.optimizer import MUON_SCALES, AdamW, Muon
from fp4dse.dse.training import Training
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population, Stopped
from fp4dse.tasks.optimizers import LaneOptimizer, Numbers, muon
from fp4dse.tasks.optimizers.hyperparameters import Tensors
from fp4dse.tasks.optimizers.lane_optimizer import hidden_matrices

from . import plain_net

replace = msgspec.structs.replace
SHAPES = {"up": (48, 16), "wide": (16, 40), "again": (48, 16), "square": (32, 32)}
PLAIN = {"head": (10, 16), "bias": (48,)}


class Model(nn.Module):
    """Hidden layers of two shapes that occur twice or lie either way, a head and a bias; lane axis first."""

    def __init__(self, lanes: int) -> None:
        super().__init__()
        for name, shape in {**SHAPES, **PLAIN}.items():
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.randn(lanes, *shape))
            if len(shape) > 1:
                layer.place = Place("head" if name == "head" else "mlp")
            self.add_module(name, layer)


def numbers(optimizer, weight_decay=0.1, **other) -> Numbers:
    given = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "clip": math.inf, "loss_scale": 1.0}
    return Numbers(optimizer, weight_decay, **{**given, **other})


def model_of(lanes: int) -> Model:
    torch.manual_seed(0)
    return Model(lanes)


def run(of_lanes, gradients, lr=0.02):
    """The model after a step with each of the gradients [steps, L, P]."""
    model, lanes = model_of(len(of_lanes)), len(of_lanes)
    made = LaneOptimizer(model, torch.full((lanes,), lr), of_lanes, [1.0] * len(gradients))
    for step, gradient in enumerate(gradients):
        made.step(gradient, torch.ones(lanes, dtype=torch.bool), torch.tensor([step]))
    return {name.removesuffix(".weight"): p.detach() for name, p in model.named_parameters()}


def drawn(steps: int, lanes: int) -> torch.Tensor:
    size = sum(math.prod(shape) for shape in {**SHAPES, **PLAIN}.values())
    return torch.randn(steps, lanes, size, generator=torch.Generator().manual_seed(1))


def of_torch(name: str, lane: int, n: Numbers, gradients) -> torch.Tensor:
    """The weight of one layer in one lane after the same steps by torch.optim.Muon."""
    o, shapes = n.optimizer, {**SHAPES, **PLAIN}
    weight = nn.Parameter(getattr(model_of(gradients.shape[1]), name).weight[lane].detach().clone())
    how = {"match-rms": "match_rms_adamw", "original": "original"}[o.scale]
    theirs = torch.optim.Muon(
        [weight], lr=0.02, weight_decay=n.weight_decay, momentum=o.momentum, nesterov=o.nesterov, adjust_lr_fn=how
    )
    sizes = [math.prod(shape) for shape in shapes.values()]
    for gradient in gradients:
        weight.grad = gradient[lane].split(sizes)[list(shapes).index(name)].view(shapes[name]).clone()
        theirs.step()
    return weight.detach()


KINDS = [Muon(), Muon(nesterov=False), Muon(momentum=0.8, scale="original"), Muon(0.5, False, "original")]


def test_the_weights_of_hidden_layers_move_as_those_of_torch(monkeypatch):
    """To the last bits where the iteration is torch's own, and within its BF16 rounding where it is ours."""
    lanes, gradients = [numbers(kind, 0.1 * i) for i, kind in enumerate(KINDS)], drawn(4, len(KINDS))
    start = {name: getattr(model_of(len(lanes)), name).weight.detach() for name in SHAPES}
    ours = run(lanes, gradients)

    def by_torch(x):
        return torch.stack([_zeropower_via_newtonschulz(one, muon.COEFFICIENTS, 5, 1e-7).float() for one in x])

    monkeypatch.setattr(muon, "orthogonal", by_torch)
    with_theirs = run(lanes, gradients)
    for i, n in enumerate(lanes):
        for name in SHAPES:
            theirs = of_torch(name, i, n, gradients)
            moved = (theirs - start[name][i]).norm()
            assert (with_theirs[name][i] - theirs).norm() < 4e-3 * moved  # the last rounding of theirs is to BF16
            assert (ours[name][i] - theirs).norm() < 3e-2 * moved


def exact(x: torch.Tensor) -> torch.Tensor:
    """The iteration of a matrix in float64, on its smaller side."""
    if x.shape[0] > x.shape[1]:
        return exact(x.T).T
    x = x.double() / x.double().norm()
    a, b, c = muon.COEFFICIENTS
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(3, 4), (48, 16), (16, 144), (33, 7), (64, 64), (1, 30)])
def test_the_iteration_is_as_near_to_the_exact_one_as_that_of_torch(shape):
    drawn = torch.randn(20, *shape, generator=torch.Generator().manual_seed(2))
    ours = muon.orthogonal(drawn)
    theirs = [_zeropower_via_newtonschulz(x, muon.COEFFICIENTS, 5, 1e-7).float() for x in drawn]
    wanted = [exact(x).float() for x in drawn]

    def error(made):
        return sum((a - b).square().sum() for a, b in zip(made, wanted, strict=True)).sqrt()

    assert error(ours) < 1.5 * error(theirs)
    assert error(ours) < 0.03 * torch.stack(wanted).norm()


def test_singular_values_become_about_one_and_singular_vectors_stay():
    x = torch.randn(4, 48, 16, generator=torch.Generator().manual_seed(3))
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    assert (s[:, 0] / s[:, -1] > 3).all()
    inside = u.mT @ muon.orthogonal(x).double() @ v.mT
    diagonal = inside.diagonal(dim1=1, dim2=2)
    assert ((diagonal > 0.6) & (diagonal < 1.25)).all()
    assert (inside - torch.diag_embed(diagonal)).abs().max() < 0.03


def test_a_matrix_of_zeros_or_of_tiny_numbers_stays_finite():
    for x in (torch.zeros(2, 8, 4), torch.full((2, 8, 4), 1e-30), torch.full((2, 8, 4), 1e30)):
        assert torch.isfinite(muon.orthogonal(x)).all()


def test_the_default_scale_moves_weights_as_far_as_adamw_and_the_others_as_their_sources_say():
    """Adam's first update has a root mean square of 1 and its later ones of 0.2 to 0.4 (2502.16982)."""
    (up, wide), scales = ((48, 16), (16, 40)), MUON_SCALES
    assert [scales["match-rms"](*shape) for shape in (up, wide)] == [0.2 * 48**0.5, 0.2 * 40**0.5]
    assert [scales["original"](*shape) for shape in (up, wide)] == [3**0.5, 1.0]
    model, [of_lane] = Model(1), [numbers(Muon(), 0.0)]
    made = LaneOptimizer(model, torch.ones(1), [of_lane], [1.0])
    before = {name: getattr(model, name).weight.detach().clone() for name in SHAPES}
    made.step(drawn(1, 1)[0], torch.ones(1, dtype=torch.bool), torch.tensor([0]))
    for name in SHAPES:
        moved = (getattr(model, name).weight - before[name]).square().mean().sqrt()
        assert 0.15 < moved < 0.23


def test_a_gain_multiplies_the_updates_of_hidden_layers_alone():
    gradients = drawn(1, 2)[:, :1].expand(-1, 2, -1)
    torch.manual_seed(0)
    model = Model(1)
    for p in model.parameters():
        p.data = p.data.repeat(2, *[1] * (p.dim() - 1))
    made = LaneOptimizer(model, torch.ones(2), [numbers(Muon(), 0.0), numbers(Muon(gain=4.0), 0.0)], [1.0])
    before = made.flat.clone()
    made.step(gradients[0], torch.tensor([True, True]), torch.tensor([0]))
    moved = dict(zip({**SHAPES, **PLAIN}, (before - made.flat).split(made.sizes, 1), strict=True))
    for name, of in moved.items():
        assert torch.allclose(of[1], of[0] * (4 if name in SHAPES else 1), rtol=1e-3, atol=1e-5)


def test_all_else_has_the_bits_of_adamw():
    gradients = drawn(5, 2)
    by_muon, by_adamw = (run([numbers(kind), numbers(kind, 0.3, beta2=0.99)], gradients) for kind in (Muon(), AdamW()))
    assert all(torch.equal(by_muon[name], by_adamw[name]) for name in PLAIN)
    assert not any(torch.equal(by_muon[name], by_adamw[name]) for name in SHAPES)


def names_of(task: str, preset: str, hidden: bool) -> set[str]:
    population = Population(get_task(task, preset), [Lane(Recipe.named("nvfp4-muon"), 1e-3, 0)], "cpu")
    named = [name for name, _ in population.model.named_parameters()]
    found = zip(named, hidden_matrices(population.model), strict=True)
    return {name for name, shape in found if bool(shape) == hidden}


def test_embeddings_heads_biases_norms_and_positions_are_left_to_adamw():
    inner = {"qkv", "out", "up", "down"}
    assert names_of("vision", "smoke", hidden=True) == {f"layer.block0_{name}.weight" for name in inner}
    others = {"embed", "norm", "blocks.0.norm1", "blocks.0.norm2", "head.weight"}
    assert names_of("language", "moe-smoke", hidden=False) == others  # the router is a matrix of a hidden layer


def test_a_convolution_is_the_matrix_of_its_product_in_our_models_and_in_plain_ones():
    population = Population(get_task("vision", "cnn-small"), [Lane(Recipe.named("nvfp4-muon"), 1e-3, 0)], "cpu")
    assert (64, 9 * 32) in hidden_matrices(population.model)
    plain = nn.Module()
    plain.weight, plain.place = nn.Parameter(torch.zeros(2, 8, 4, 3, 3)), Place("conv")
    assert hidden_matrices(plain) == [(8, 36)]


TRAINED = {
    "regression": (replace(get_task("regression", "smoke"), steps=10), "nvfp4-muon"),
    "language": (replace(get_task("language", "moe-smoke"), steps=5), "nvfp4-muon"),
    "cnn": (replace(get_task("vision", "resnet-smoke"), steps=5), "nvfp4-muon"),
    "plain module": (plain_net.task_of(), "nvfp4-muon"),
}


class After:
    """True from the question after so many on."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("case", TRAINED)
def test_lanes_are_independent_and_a_checkpoint_goes_on_bit_for_bit(case, tmp_path):
    task, name = TRAINED[case]
    others = [Training(Muon()), Training(Muon(scale="original", nesterov=False), weight_decay=0.3)]
    lanes = [Lane(replace(Recipe.named(name), training=of), task.lr, seed) for seed in (0, 1) for of in others]
    whole = train(task, lanes).lanes
    assert all(result.status == "done" for result in whole)
    assert len({result.val_loss for result in whole}) == 4
    assert train(task, [lanes[2], lanes[1]]).lanes == [whole[2], whole[1]]
    assert train(task, [lanes[3]]).lanes == [whole[3]]
    with pytest.raises(Stopped):
        train(task, lanes, checkpoint=tmp_path / "file", should_stop=After(4))
    assert train(task, lanes, checkpoint=tmp_path / "file").lanes == whole


@pytest.mark.heavy
def test_the_default_scale_shares_the_rate_that_was_tuned_for_adamw():
    """Of the quickstart's regression: rates of a quarter and of four times it are worse with either optimizer."""
    task = get_task("regression", "quickstart")
    for kind in (AdamW(), Muon()):
        recipe = replace(Recipe.named("bf16"), training=Training(kind))
        lanes = [Lane(recipe, task.lr * factor, seed) for factor in (0.25, 1.0, 4.0) for seed in (0, 1)]
        losses = [result.val_loss for result in train(task, lanes).lanes]
        assert max(losses[2:4]) < min(losses[:2] + losses[4:])


def test_an_update_never_waits_for_the_device():
    """Fake tensors have shapes and no numbers: asking for one is an error. So a CUDA graph can capture the update."""
    matrices = [(48, 16), None, (16, 40)]
    sizes = [48 * 16, 48, 16 * 40]
    columns = muon.columns(numbers(Muon()))
    with FakeTensorMode():
        g, hidden = torch.randn(3, sum(sizes)), sizes[0] + sizes[2]
        state = {"momentum": torch.zeros(3, hidden), **{name: torch.zeros(3, 48) for name in ("mean", "square")}}
        c = {name: torch.zeros(3, 1) for name in columns}
        out, kept = muon.update(g, state, c, [torch.ones(3, 1)] * 2, Tensors(sizes, matrices))
        with pytest.raises(RuntimeError):
            out.sum().item()
    assert [tuple(of.shape) for of in (out, *kept.values())] == [(3, sum(sizes)), (3, hidden), (3, 48), (3, 48)]
