"""LoRA over rounded weights: factors that begin as nothing, are trained alone, and are rounded when they are merged."""

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe, recipe_from_dict
from fp4dse.dse.layers.precision import Precise
from fp4dse.dse.outliers import OUTLIER_NAMES, TrainedFactors, outlier_words
from fp4dse.dse.rules import canonical_faults
from fp4dse.kernels import LaneNumerics, QuantLinear
from fp4dse.kernels.factors import has_factors, is_factor, merged, with_whole_weights
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population
from fp4dse.tasks.engine.evaluation import evaluate, final_results
from fp4dse.tasks.language.decoder import Decoder, Shape
from fp4dse.tasks.start.weights import start_from
from tests.tasks.in_two import train_in_two

replace = msgspec.structs.replace
TASK = replace(get_task("regression", "smoke"), steps=6)


def recipe(
    outliers: str | None = "lora", trains: str = "learned", w: str | dict[str, object] = "nvfp4", **training: object
) -> Recipe:
    found = recipe_from_dict(
        {
            "fprop": {"x": "bf16", "w": w},
            "dgrad": {"g": "bf16", "w": "bf16", "source": "forward"},
            "wgrad": {"g": "bf16", "x": "bf16", "source": "forward"},
            "training": {"trains": trains, **training},
        }
    )
    w = replace(found.fprop.w, outliers=OUTLIER_NAMES[outliers] if outliers else None)
    return replace(found, fprop=replace(found.fprop, w=w))


def lanes(count: int = 2, **more: object) -> list[Lane]:
    return [Lane(recipe(**more), 10 * TASK.lr, seed) for seed in range(count)]


def trained(population: Population) -> Population:
    for step in range(TASK.steps):
        population.train_step(step)
    return population


def layers(population: Population) -> list[QuantLinear]:
    return [m for m in population.model.modules() if isinstance(m, QuantLinear) and m.factors is not None]


def test_at_the_start_it_is_the_model_without_to_the_bit():
    weight = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(1))
    with_, without = (
        QuantLinear(weight.clone(), None, LaneNumerics([recipe(outliers)] * 2, [4, 5]), 3)
        for outliers in ("lora", None)
    )
    assert torch.equal(with_(x), without(x))
    assert torch.equal(with_.weight, weight)
    u, v = with_.factors.u, with_.factors.v
    assert with_.factors.s is None
    assert not u.any()
    assert v.abs().max() <= 1 / 8
    assert v.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.03)  # of 2,048 uniform draws
    assert not torch.equal(v[0], v[1]), "lanes have seeds of their own"
    with_(x).square().sum().backward()
    assert u.grad.any()
    assert not v.grad.any(), "nothing comes through U yet"


def test_gradients_are_those_of_the_definition():
    generator = torch.Generator().manual_seed(2)
    x, tangent = torch.randn(2, 9, 24, generator=generator), torch.randn(2, 9, 10, generator=generator)
    numerics = LaneNumerics([recipe()] * 2, [0, 1])
    numerics.evaluation = "bf16"  # what remains is the rounding of operands to BF16
    layer = QuantLinear(torch.randn(2, 10, 24, generator=generator), None, numerics, 0)
    u, v = layer.factors.u, layer.factors.v
    with torch.no_grad():
        u.normal_(generator=generator)
    expected = x @ layer.weight.mT + (x @ v.mT) @ u.mT
    theirs = torch.autograd.grad((expected * tangent).sum(), [u, v, layer.weight])
    ours = torch.autograd.grad((layer(x) * tangent).sum(), [u, v, layer.weight])
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize("outliers", ["lora", "factors"])
def test_only_factors_are_trained(outliers):
    population = Population(TASK, lanes(outliers=outliers), "cpu")
    before = {name: p.detach().clone() for name, p in population.model.named_parameters()}
    trained(population)
    moved = {name for name, p in population.model.named_parameters() if not torch.equal(before[name], p)}
    assert moved == {name for name in before if is_factor(name)}
    assert len(moved) == (4 if outliers == "lora" else 6)


def test_lanes_that_train_everything_beside_it_are_themselves():
    both = [Lane(recipe(), TASK.lr, 0), Lane(recipe(trains="all"), TASK.lr, 1)]
    assert both[0].recipe.signature() == both[1].recipe.signature()
    together = train(TASK, both).lanes
    assert [train(TASK, [lane]).lanes[0] for lane in both] == together
    assert together[0].val_loss != together[1].val_loss


def test_the_merged_loss_is_that_of_one_weight_which_is_rounded():
    population = trained(Population(TASK, lanes(), "cpu"))
    before = [p.detach().clone() for p in population.model.parameters()]
    results = final_results(population)
    assert all(torch.equal(a, b) for a, b in zip(before, population.model.parameters(), strict=True))
    assert all(lane.val_loss_merged not in (lane.val_loss, None) for lane in results)
    whole = with_whole_weights(population.model.state_dict())
    for at, lane in enumerate(results):
        alone = start_from(TASK, {name: value[at].clone() for name, value in whole.items()}, "w")
        plain = Population(alone, [Lane(recipe(None, "all"), TASK.lr, at)] * 2, "cpu")
        assert not has_factors(plain.model)
        assert evaluate(plain)[0][0].item() == pytest.approx(lane.val_loss_merged, rel=1e-6)
    with merged(population.model, population.numerics):
        assert not any(layer.factors.u.any() for layer in layers(population))
    assert [lane.val_loss_merged for lane in train(TASK, lanes(outliers=None, trains="all")).lanes] == [None] * 2


@pytest.mark.parametrize("w", [{"like": "fp8-delayed"}, {"like": "nvfp4", "rounding": "ema"}], ids=["held", "average"])
def test_what_was_kept_of_the_rest_does_not_scale_or_round_the_merged_weight(w):
    """The largest components of a weight are above all that the rest ever had."""
    now = {**w, "like": "fp8-current"} if w["like"] == "fp8-delayed" else {"like": "nvfp4"}
    of = []
    for each in (w, now):
        population = trained(Population(replace(TASK, steps=12), lanes(outliers="factors", w=each), "cpu"))
        for step in range(TASK.steps, 12):
            population.train_step(step)
        kept = {name: value.clone() for name, value in population.numerics.state().items()}
        of.append([lane.val_loss_merged for lane in final_results(population)])
        assert kept.keys() == population.numerics.state().keys()
        assert all(torch.equal(value, kept[name]) for name, value in population.numerics.state().items())
    assert of[0] == of[1], "the rest is frozen, and so rounded alike in training"


def test_a_weight_that_bf16_holds_loses_nothing_by_its_merge():
    """In BF16 both ways are one but for the rounding of products."""
    population = trained(Population(TASK, lanes(w="fp8-row"), "cpu"))
    in_bf16 = evaluate(population, "bf16")[0]
    with merged(population.model, population.numerics):
        assert torch.allclose(evaluate(population, "bf16")[0], in_bf16, rtol=1e-2)


@pytest.mark.parametrize(("outliers", "trains"), [("lora", "learned"), ("factors", "all")])
def test_a_checkpoint_has_them(outliers, trains, tmp_path):
    members = lanes(outliers=outliers, trains=trains)
    assert train_in_two(TASK, members, file=tmp_path / "c", after=4) == train(TASK, members).lanes


def test_a_policy_learns_by_its_adapters_alone():
    """Sampling and updates use the same parts; the rest stays as the base had it."""
    task = replace(get_task("rl", "smoke"), steps=4, pretrain=None)
    population = Population(task, [Lane(recipe(), 10 * task.lr, 0)], "cpu")
    before = {name: p.detach().clone() for name, p in population.model.named_parameters()}
    for step in range(task.steps):
        population.train_step(step)
        assert population.experience.recorded["mismatch_kl"] < 1e-6, "answers are drawn by the policy that learns"
    moved = {name for name, p in population.model.named_parameters() if not torch.equal(before[name], p)}
    assert moved
    assert all(map(is_factor, moved))


def test_a_head_that_is_the_embedding_has_no_factors():
    """They would be taken off what tokens look up, too."""
    shape = Shape(32, 48, 1, 2, 16, tied=True)
    parameters = {name: torch.zeros(1, *of) for name, of in shape.parameters(17).items()}
    Decoder(shape, parameters, LaneNumerics([recipe()], [0]))
    everywhere = replace(recipe(), precise=Precise(head=False))
    with pytest.raises(ConfigError, match=r"precise\.head: found .*embedding"):
        Decoder(shape, parameters, LaneNumerics([everywhere], [0]))


def test_words_and_what_it_is_beside():
    assert outlier_words(TrainedFactors(start="zero")) == "lora"
    assert outlier_words(TrainedFactors(8, "zero")) == "lora8"
    assert recipe().label().endswith("trains what is learned")
    assert recipe(outliers=None).canonical().training.trains == "none", "nothing is left to learn"
    assert recipe().signature() != recipe("factors").signature()
    assert any("training.trains" in str(error) for _, error in canonical_faults(recipe(trains="none").canonical()))
    for optimizer in ("muon", "stable-spam"):
        assert any("adamw, sgd" in str(e) for _, e in canonical_faults(recipe(optimizer=optimizer).canonical()))
