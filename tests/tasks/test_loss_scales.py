"""Dynamic loss scales are torch's, lane by lane, and leave out the steps whose gradients overflow."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import Recipe
from fp4dse.dse.scale import TensorScale
from fp4dse.dse.training import Training
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population, Pruning
from fp4dse.tasks.job import Rung
from fp4dse.tasks.optimizers.loss_scales import LossScales
from tests.tasks.in_two import train_in_two

replace = msgspec.structs.replace
TASK = replace(get_task("regression", "smoke"), steps=12)
CPU = torch.device("cpu")
TOO_LARGE = 2.0**127


def lane(seed: int = 0, **training) -> Lane:
    return Lane(replace(Recipe.named("nvfp4"), training=Training(**training)), TASK.lr, seed)


@given(finite=st.lists(st.booleans(), max_size=24).filter(lambda of: of.count(False) < 12), growth=st.integers(1, 6))
def test_a_scale_moves_as_that_of_torch(finite, growth):
    """Beside one that stays, and one of another growth."""
    scales = LossScales([2.0**12, 24.0, 2.0**12], [growth, 0, 7], CPU)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=growth)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for is_finite in finite:
        parameter.grad = torch.tensor([1.0 if is_finite else torch.inf])
        theirs.scale(torch.zeros(1))  # makes its state
        theirs.step(optimizer)
        theirs.update()
        halved = scales.move(torch.tensor([is_finite] * 3))
        assert halved.tolist() == [not is_finite, False, not is_finite]
        assert scales.scale[:2].tolist() == [theirs.get_scale(), 24.0]


def test_a_scale_is_never_halved_below_one_nor_doubled_to_infinity():
    scales = LossScales([4.0, 1.5, TOO_LARGE], [1, 1, 1], CPU)
    for _ in range(3):
        scales.move(torch.tensor([False, False, True]))
    assert scales.scale.tolist() == [1.0, 1.0, TOO_LARGE]
    assert not scales.move(torch.zeros(3, dtype=torch.bool))[:2].any()
    assert not LossScales([1.0], [0], CPU).move(torch.tensor([False])).any()


def test_steps_that_overflow_change_neither_weights_nor_momenta_until_the_scale_fits():
    population = Population(TASK, [lane(loss_scale=TOO_LARGE, loss_scale_growth=100), lane()], "cpu")
    scale = population.optimizer.scaling.scale
    skipped = 0
    for step in range(TASK.steps):
        before, held = scale[0].item(), population.optimizer.flat[0].clone()
        mean = population.optimizer.kept["mean"][0].clone()
        population.train_step(step)
        if scale[0] < before:
            assert scale[0] == before / 2
            assert torch.equal(population.optimizer.flat[0], held)
            assert torch.equal(population.optimizer.kept["mean"][0], mean)
            skipped += 1
        else:
            assert not torch.equal(population.optimizer.flat[0], held)
    assert 0 < skipped < TASK.steps
    assert population.alive.all()


@pytest.mark.parametrize("amax", ["previous", "held", "history", "feedback"])
def test_what_quantizers_keep_is_finite_after_steps_that_overflow(amax):
    """From the first step on, and again later: the lane goes on to the last step, beside one that overflows nowhere."""
    held = replace(Recipe.named("nvfp4").dgrad.g, tensor_scale=TensorScale(amax=amax, steps=3.0))
    recipe = Recipe.uniform(held)
    members = [
        Lane(replace(recipe, training=Training(loss_scale=scale, loss_scale_growth=2)), TASK.lr, 0)
        for scale in (TOO_LARGE, 1.0)
    ]
    population = Population(TASK, members, "cpu")
    scale, skipped = population.optimizer.scaling.scale, []
    for step in range(TASK.steps):
        before = scale[0].item()
        population.train_step(step)
        skipped += [step] if scale[0] < before else []
        assert all(value.isfinite().all() for value in population.numerics.state().values())
    if amax != "feedback":  # whose powers are bounded: what is beyond them saturates
        assert skipped[0] == 0
        assert skipped[-1] > 3
    assert population.alive.all()


def test_it_diverges_where_the_loss_itself_does_and_where_a_constant_scale_overflows():
    wild = Lane(lane(loss_scale=64.0, loss_scale_growth=4).recipe, 1e38, 0)
    too_large = lane(loss_scale=TOO_LARGE)
    found = train(TASK, [wild, too_large, lane(loss_scale=TOO_LARGE, loss_scale_growth=4)]).lanes
    assert [result.status for result in found] == ["diverged", "diverged", "done"]
    assert found[1].diverged_step == 0


def test_it_resumes_and_is_nothing_where_it_moves_nothing(tmp_path):
    """Powers of two that never overflow are undone to the last bit."""
    members = [lane(loss_scale=64.0, loss_scale_growth=2), lane(), lane(1, loss_scale=TOO_LARGE, loss_scale_growth=2)]
    whole = train(TASK, members).lanes
    assert whole[0].val_loss == whole[1].val_loss
    assert train_in_two(TASK, members, file=tmp_path / "half.pt", after=5) == whole
    for stays in ([False, True, False], [True, False, False]):
        found = train(TASK, members, pruning=Pruning([Rung(6, 0.4)], lambda *_, of=stays: of)).lanes
        assert found[stays.index(True)] == whole[stays.index(True)]


def test_its_baseline_is_plain_bf16_for_powers_of_two():
    assert lane(loss_scale=1024.0, loss_scale_growth=2000).recipe.baseline() == Recipe.named("bf16").canonical()
    odd = lane(loss_scale=1000.0, loss_scale_growth=2000).recipe
    assert odd.baseline().training == odd.training
    assert odd.label() == "nvfp4, loss scale 1000, loss scale growth 2000"
