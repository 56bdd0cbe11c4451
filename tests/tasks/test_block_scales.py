"""Scales of blocks that are trained alone: codes stay, scales move, and what is stored has scales in their format."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.outliers import TrainedScales
from fp4dse.dse.training import Training
from fp4dse.kernels import LaneNumerics, QuantLinear, convert, quantize
from fp4dse.kernels.block_scales import NAME, BlockScales, into_weight
from fp4dse.kernels.factors import with_whole_weights
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population
from fp4dse.tasks.engine.evaluation import evaluate
from fp4dse.tasks.start.weights import start_from

replace = msgspec.structs.replace
TASK = replace(get_task("regression", "smoke"), steps=6)


def recipe(w="nvfp4", trains="learned", scales=True, **fprop):
    of_w = {"like": w, "outliers": "scales" if scales else "none"} if isinstance(w, str) else w
    return recipe_from_dict(
        {
            "fprop": {"x": "bf16", "w": of_w, **fprop},
            "dgrad": {"g": "bf16", "w": "bf16", "source": "forward"},
            "wgrad": {"g": "bf16", "x": "bf16", "source": "forward"},
            "training": {"trains": trains},
        }
    )


def lanes(*seeds, lr=0.02, **more):
    return [Lane(recipe(**more), lr, seed) for seed in seeds]


def layer(w=None, lanes=2, **more):
    numerics = LaneNumerics([recipe(**more)] * lanes, range(lanes))
    w = torch.randn(lanes, 12, 40, generator=torch.Generator().manual_seed(0)) if w is None else w
    return QuantLinear(w, None, numerics, 0)


def test_before_training_it_is_rounding_to_nearest():
    """Bit for bit what the quantizer makes of what it has made."""
    x, of = torch.randn(2, 5, 40), layer()
    plain = layer(scales=False, trains="all")
    plain.weight.data = plain.numerics.decoded_weight(0, of.weight.detach())
    assert torch.equal(of(x), plain(x))


def test_codes_stay_where_scales_move():
    """A factor of a few percent is stored in the scale's format: elements keep their codes, also at the largest error
    that this rounding has."""
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    q = QUANTIZERS["nvfp4"]
    before = quantize(w, q)
    m = 1 + 0.4 * torch.rand(64, 4, generator=torch.Generator().manual_seed(2))
    after = quantize(before.values * m.repeat_interleave(16, 1), q)
    assert torch.equal(before.codes, after.codes)
    ratio = (after.scales * after.tensor_scale) / (before.scales * before.tensor_scale)
    assert ((ratio / m - 1).abs() <= 2**-4 + 1e-6).all(), "half a step of E4M3"


def test_gradients_are_those_of_the_formula():
    """Against autograd through m · Q(W) in plain torch, with codes as constants; K is no multiple of the block."""
    of, x = layer(), torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        of.block_scales.m.uniform_(0.9, 1.1)
    m = of.block_scales.m
    y = of(x)
    y.square().sum().backward()
    codes = of.numerics.decoded_weight(0, of.weight.detach())
    own = m.detach().clone().requires_grad_()
    g = 2 * y.detach().transpose(1, 2) @ x.bfloat16().float()  # dL/dŴ of the product, straight through Q
    (codes * own.repeat_interleave(16, 2)[:, :, :40] * g).sum().backward()
    assert torch.allclose(m.grad, own.grad, rtol=2e-2, atol=2e-2 * own.grad.abs().max())
    expected = g * m.detach().repeat_interleave(16, 2)[:, :, :40]
    assert (of.weight.grad - expected).norm() < 0.01 * expected.norm(), "operands of gradients are BF16"


def test_scales_alone_are_trained_and_the_loss_falls():
    task = replace(TASK, steps=40)
    population = Population(task, lanes(0, 1), "cpu")
    first = evaluate(population)[0]
    before = {name: p.detach().clone() for name, p in population.model.named_parameters()}
    for step in range(task.steps):
        population.train_step(step)
    moved = {name for name, p in population.model.named_parameters() if not torch.equal(before[name], p)}
    assert moved
    assert all(name.endswith(NAME) for name in moved)
    assert (evaluate(population)[0] < 0.9 * first).all()


def test_a_lane_is_what_it_is_beside_any_others():
    together = train(TASK, lanes(0, 1)).lanes
    alone, diverged = train(TASK, [*lanes(1), *lanes(3, lr=1e38)]).lanes
    assert alone == together[1]
    assert diverged.status == "diverged" or diverged.val_loss is not None


def test_in_bf16_weights_have_their_trained_scales():
    of, x = layer(), torch.randn(2, 5, 40)
    with torch.no_grad():
        of.block_scales.m.uniform_(0.5, 2)
    of.numerics.training, of.numerics.evaluation = False, "bf16"
    whole = into_weight(of.weight.detach(), of.block_scales.m.detach())
    plain = layer(whole, scales=False, trains="all")
    plain.numerics.training, plain.numerics.evaluation = False, "bf16"
    assert torch.equal(of(x), plain(x))


def test_a_file_has_weights_as_wholes_and_scales_begin_anew():
    population = Population(TASK, lanes(0), "cpu")
    population.train_step(0)
    whole = with_whole_weights(population.model.state_dict())
    assert not any(name.endswith(NAME) for name in whole)
    weights = {name: value[0].clone() for name, value in whole.items()}
    started = Population(start_from(TASK, weights, "here"), lanes(0), "cpu")
    for module in started.model.modules():
        if isinstance(module, BlockScales):
            assert (module.m == 1).all()
    for name, value in started.model.state_dict().items():
        if not name.endswith(NAME):
            assert torch.equal(value[0], weights[name])


def test_what_has_no_such_scales_is_refused():
    for change, what in (
        ({"w": "mxfp4-rceil"}, "fprop.w.scale"),
        ({"w": "nvfp4-2d"}, "fprop.w.block"),
        ({"w": "nvfp4-4over6-mse"}, "fprop.w.scaling"),
        ({"w": {"like": "nvfp4", "rounding": "stochastic", "outliers": "scales"}}, "fprop.w.rounding"),
        ({"rotation": "rht16"}, "fprop.rotation"),
        ({"x": {"like": "nvfp4", "outliers": "scales"}}, "fprop.x.outliers"),
    ):
        with pytest.raises(ConfigError, match=what):
            recipe(**change)
    with pytest.raises(ConfigError, match=r"fprop\.w\.outliers: found 'scales'.*training.trains"):
        recipe(trains="none")
    with pytest.raises(ConfigError, match=r"fprop\.w\.outliers: found 'scales'"):
        convert(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)), recipe(), seed=0)


def test_it_is_a_word_of_recipes():
    assert recipe().fprop.w.outliers == TrainedScales()
    assert recipe_from_dict(recipe_to_dict(recipe())) == recipe()
    assert recipe().signature() != recipe(scales=False, trains="all").signature()
    plain = replace(Recipe.named("nvfp4"), training=Training(trains="learned"))
    assert plain.canonical().training.trains == "none", "nothing there is learned"
