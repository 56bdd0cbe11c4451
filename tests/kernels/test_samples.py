"""Averaged samples of a stochastic rounding (SMP, arXiv 2112.10769): the mean stays and the variance is divided."""

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Quantizer, Recipe
from fp4dse.dse.cost.chip import load_chip
from fp4dse.dse.cost.model import load_model
from fp4dse.dse.cost.products import product
from fp4dse.dse.estimator import Clipped, Estimator, Through
from fp4dse.dse.outliers import OUTLIER_NAMES
from fp4dse.dse.rounding import Stochastic, rounding_name, rounding_words
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import TensorScale
from fp4dse.kernels import LaneNumerics, lanes, quantize
from fp4dse.kernels.quant.backend import PLAIN, _compiled
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.operand.kinds import make_slot
from fp4dse.kernels.quant.operand.records import Use

replace = msgspec.structs.replace
LUQ, NVFP4 = Quantizer.named("luq"), Quantizer.named("nvfp4-1716")
CPU = torch.device("cpu")
DRAWS = 4000


def of_samples(q: Quantizer, samples: int) -> Quantizer:
    return replace(q, rounding=Stochastic(samples=samples))


def use(draws: int, **more) -> Use:
    return Use(torch.arange(draws), torch.tensor(0), 0, training=True, **more)


def drawn(q: Quantizer, x: torch.Tensor) -> torch.Tensor:
    """DRAWS independent encodings of x [R, C], decoded: [DRAWS, R, C], float64."""
    slot = make_slot([Recipe.uniform(q)] * DRAWS, "wgrad.g", CPU, PLAIN)
    return slot.quantize(x.expand(DRAWS, -1, -1), use(DRAWS)).decoded().double()


def variance(values: torch.Tensor, mean: torch.Tensor) -> tuple[float, float]:
    """The summed variance of all elements about their mean, and its standard error, from independent draws."""
    each = (values - mean).square().flatten(1).sum(1)
    return each.mean().item(), each.std().item() / len(each) ** 0.5


def within(found: tuple[float, float], whole: tuple[float, float], samples: int) -> bool:
    """Within five standard errors of whole / samples: a chance of one in a million."""
    error = (found[1] ** 2 + (whole[1] / samples) ** 2) ** 0.5
    return abs(found[0] - whole[0] / samples) < 5 * error < 0.1 * whole[0]


@pytest.mark.parametrize("q", [LUQ, NVFP4], ids=["luq", "nvfp4"])
def test_the_mean_of_samples_is_unbiased_and_their_variance_is_divided_by_their_number(q):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    whole = variance(drawn(of_samples(q, 1), x), x)
    for samples in (2, 4):
        values = drawn(of_samples(q, samples), x)
        bias, error = values.mean(0) - x, values.std(0) / DRAWS**0.5
        assert (bias.abs() < 5 * error + 1e-4 * x.abs().max()).all()  # 16 random bits: up to 2^-17 of a step
        assert within(variance(values, x), whole, samples)


def test_two_samples_halve_the_variance_of_the_weight_gradient():
    """Of the products of `luq-smp`, whose other operand is deterministic, against those of `luq`."""
    torch.manual_seed(1)
    g, x = torch.randn(1, 24, 8).expand(DRAWS, -1, -1), torch.randn(1, 24, 16).expand(DRAWS, -1, -1)
    made = {}
    for name in ("luq", "luq-smp"):
        numerics = LaneNumerics([Recipe.named(name)] * DRAWS, range(DRAWS))
        kept = numerics.slots["wgrad.x"].quantize(x.mT, numerics.use(0)).decoded()[:1]
        made[name] = numerics.gemm("wgrad", 0, g, 1, x, 1).double()
        exact = (g[:1].mT @ kept.mT).double()
        dgrad = numerics.gemm("dgrad", 0, g, 2, torch.ones(DRAWS, 8, 4), 1)
        made[f"dgrad of {name}"] = dgrad
    error = made["luq-smp"].std(0) / DRAWS**0.5
    assert ((made["luq-smp"].mean(0) - exact[0]).abs() < 5 * error + 1e-3).all()
    assert within(variance(made["luq-smp"], exact), variance(made["luq"], exact), 2)
    assert torch.equal(made["dgrad of luq"], made["dgrad of luq-smp"])  # one sample there


def test_the_first_sample_is_that_of_a_single_rounding_and_the_others_have_bits_of_their_own():
    x = torch.randn(2, 16, 32)
    one, three = (make_slot([Recipe.uniform(of_samples(LUQ, n))] * 2, "wgrad.g", CPU, PLAIN) for n in (1, 4))
    [single], terms = one.quantize(x, use(2)).terms, three.quantize(x, use(2)).terms
    assert torch.equal(terms[0].values, single.values)
    assert torch.equal(terms[0].factor, single.factor / 4)
    assert len({tuple(term.values.flatten().tolist()) for term in terms}) == 4


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("q", [LUQ, NVFP4, replace(NVFP4, block="16x16"), Quantizer.named("nvfp4-exact")], ids=str)
def test_native_code_has_the_bits_of_the_reference(q, dim):
    x = torch.randn(2, 32, 64)
    slots = [make_slot([Recipe.uniform(of_samples(q, 2))] * 2, "wgrad.g", CPU, of) for of in (PLAIN, _compiled())]
    ours, theirs = (slot.quantize(x, use(2, dim=dim)).terms for slot in slots)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.factor, b.factor)


def test_evaluation_makes_one_encoding_rounded_to_nearest():
    x = torch.randn(2, 16, 32)
    slot = make_slot([Recipe.uniform(of_samples(NVFP4, 4))] * 2, "fprop.x", CPU, PLAIN)
    [term] = slot.quantize(x, use(2, evaluating=True)).terms
    assert torch.equal(term.decoded()[0], quantize(x[0], NVFP4).values)


@pytest.mark.parametrize("policy", ["held", "previous"])
def test_all_samples_of_a_step_follow_the_same_maximum(policy, monkeypatch):
    monkeypatch.setattr(lanes, "backend", lambda _: PLAIN)
    q = replace(of_samples(NVFP4, 2), tensor_scale=TensorScale(amax=policy, steps=2))
    numerics = LaneNumerics([Recipe.uniform(q)] * 2, [0, 1])
    factors = []
    for step, size in enumerate((1.0, 10.0, 100.0, 1000.0)):
        numerics.step.fill_(step)
        first, second = numerics.slots["wgrad.g"].quantize(size * torch.ones(2, 16, 32), numerics.use(0)).terms
        assert torch.equal(first.factor, second.factor)
        factors.append(first.factor[0].item())
    assert factors[1] == factors[0] < factors[2]


def test_where_the_mean_is_one_operand_it_is_the_mean():
    """Of products that round operands, which take them whole."""
    x = torch.randn(2, 16, 32)
    operand = make_slot([Recipe.uniform(of_samples(NVFP4, 2))] * 2, "wgrad.g", CPU, PLAIN).quantize(x, use(2))
    [whole] = operand.whole().terms
    first, second = (2 * term.decoded() for term in operand.terms)
    assert torch.allclose(whole.decoded(), (first + second) / 2, rtol=1e-6)


def test_what_encodes_a_tensor_once_refuses_several_samples():
    q = of_samples(NVFP4, 2)
    with pytest.raises(ConfigError, match=r"rounding\.samples: found 2; accepted: 1"):
        quantize(torch.randn(4, 32), q)
    with pytest.raises(ConfigError, match=r"rounding\.samples: found 2; accepted: 1"):
        descriptor([q])  # which every path computes by


def test_a_clamped_operand_has_samples_too():
    x = torch.randn(2, 16, 64)
    q = replace(of_samples(NVFP4, 2), outliers=OUTLIER_NAMES["occ"])
    operand = make_slot([Recipe.uniform(q)] * 2, "fprop.x", CPU, PLAIN).quantize(x, use(2))
    assert len(operand.terms) == 2
    assert not torch.equal(operand.terms[0].values, operand.terms[1].values)
    assert operand.rest is not None
    assert (
        (operand.decoded() + operand.rest - x).abs().mean() < 0.1 * x.abs().mean() < (operand.decoded() - x).abs().max()
    )


def test_samples_of_an_error_or_under_an_estimator_are_refused():
    residual = replace(of_samples(NVFP4, 2), outliers=OUTLIER_NAMES["residual"])
    assert [rule for rule, _ in quantizer_faults(residual)] == ["outliers"]
    assert not quantizer_faults(replace(residual, outliers=OUTLIER_NAMES["occ"]))
    recipe = replace(Recipe.uniform(of_samples(NVFP4, 2)), estimator=Estimator(w=Through(Clipped())))
    assert "fprop.w has rounding smp2" in str(recipe.validate())


def test_a_sample_more_is_a_product_and_an_encoding_more():
    luq, smp = Recipe.named("luq"), Recipe.named("luq-smp")
    assert smp.slot("wgrad.g").bits_per_element == 2 * luq.slot("wgrad.g").bits_per_element
    model, chip = load_model("llama-8b"), load_chip("gb200")
    plain, sampled = (dict(product("wgrad", of.wgrad, model, chip)) for of in (luq, smp))
    assert plain["stochastic rounding"] == 0
    assert sampled["stochastic rounding"] == pytest.approx(sampled["products"])
    assert sampled["products"] == plain["products"]


@pytest.mark.parametrize(
    ("rounding", "name", "words"),
    [
        (Stochastic(samples=2), "smp2", "SMP2"),
        (Stochastic(samples=4), "smp4", "SMP4"),
        (Stochastic(bits=8, samples=2), "smp2 8", "SMP2 8"),
    ],
)
def test_samples_have_names(rounding, name, words):
    assert (rounding_name(rounding), rounding_words(rounding)) == (name, words)
