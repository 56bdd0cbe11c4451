"""Q-Ramping finds periods as published, updates by them as the released code does, and undoes what it looked at."""

import math

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Quantizer, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.optimizer import SGD
from fp4dse.dse.oscillation import QRamping
from fp4dse.dse.training import Training
from fp4dse.kernels import quantize
from fp4dse.kernels.ops.adamw import NUMBERS
from fp4dse.kernels.ops.adamw import adamw as plain_adamw
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population, Pruning
from fp4dse.tasks.job import Rung
from fp4dse.tasks.optimizers import ramped
from fp4dse.tasks.optimizers.oscillation import WINDOW
from fp4dse.tasks.optimizers.q_ramping import QRampings, periods, starts_of
from tests.tasks.in_two import train_in_two

from . import plain_net

replace = msgspec.structs.replace
TASK = replace(get_task("regression", "smoke"), steps=64)
OFTEN = QRamping(every=31, alpha=2.0)


def lane(ramping=OFTEN, seed: int = 0, name: str = "tetrajet", **training) -> Lane:
    return Lane(replace(Recipe.named(name), training=Training(ramping=ramping, **training)), TASK.lr, seed)


def test_periods_follow_from_ratios():
    """alpha 16, beta 5: each whole 16 of the ratio is 5 steps more, up to the steps between two looks."""
    ratios = torch.tensor([0.0, 15.99, 16.0, 31.9, 35.0, 50.0, 1e9, math.nan, math.inf])
    assert periods(ratios, QRamping()).tolist() == [1, 1, 6, 6, 11, 16, 200, 1, 200]
    assert periods(ratios[:5], QRamping(alpha=8.0, beta=0.5)).tolist() == [1, 1, 2, 2, 3]


def test_weights_are_looked_at_before_the_first_step_and_then_so_often():
    assert list(starts_of(QRamping(), 500)) == [0, 200, 400]
    assert list(starts_of(QRamping(), 429)) == [0, 200]
    assert not starts_of(QRamping(), WINDOW - 1)


def released(w, gradients, every, lr, b1, b2, eps, decay):
    """The released code's update of one weight in float64; `every`: its period in each step."""
    m = v = total = 0.0
    count = 0
    for t, (g, period) in enumerate(zip(gradients, every, strict=True), 1):
        count, total = count + 1, total + g
        w *= 1 - lr * decay
        if count % period == 0:
            mean = total / count
            m, v = b1 * m + (1 - b1) * mean, b2 * v + (1 - b2) * mean * mean
            w -= lr * count / (1 - b1**t) * m / (math.sqrt(v) / math.sqrt(1 - b2**t) + eps)
            count, total = 0, 0.0
    return w


def test_updates_are_those_of_the_released_code_also_where_a_period_changes_while_a_weight_waits():
    lr, b1, b2, eps, decay = 0.01, 0.9, 0.95, 1e-8, 0.1
    first, then = [1, 2, 3, 5, 7, 40, 6, 4], [1, 2, 4, 3, 7, 2, 1, 9]
    gradients = torch.randn(24, 2, 8, generator=torch.Generator().manual_seed(0))
    flat = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    start, kept = flat.clone(), {"mean": torch.zeros(2, 8), "square": torch.zeros(2, 8), **ramped.state(flat)}
    other, momenta = flat.clone(), [torch.zeros(2, 8), torch.zeros(2, 8)]
    for t, g in enumerate(gradients, 1):
        if t in (1, 11):
            kept["period"][0] = torch.tensor(first if t == 1 else then)
        row = [lr, b1, 1 - b1, b2, 1 - b2, eps, 1 - b1**t, 1 - b2**t, decay]
        numbers = torch.tensor([row] * 2)
        assert numbers.shape[1] == len(NUMBERS)
        every, alive = torch.ones(8, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
        ramped.adamw(flat, kept, g, alive, numbers, every)
        plain_adamw(other, *momenta, g, alive, numbers, every)
    for i, (of_first, of_then) in enumerate(zip(first, then, strict=True)):
        drawn = gradients[:, 0, i].double().tolist()
        wanted = released(start[0, i].item(), drawn, [of_first] * 10 + [of_then] * 14, lr, b1, b2, eps, decay)
        assert flat[0, i].item() == pytest.approx(wanted, abs=1e-6)
    assert torch.equal(flat[1], other[1])  # periods of one: AdamW's bits
    dead = {name: value.clone() for name, value in kept.items()}
    ramped.adamw(flat, kept, gradients[0], torch.zeros(2, dtype=torch.bool), numbers, every)
    assert all(torch.equal(value, dead[name]) for name, value in kept.items())


def test_periods_are_those_of_the_next_steps_of_a_training_without_ramping():
    members = [lane(), lane(None), lane(QRamping(every=40, alpha=1.0))]
    population, alone = Population(TASK, members, "cpu"), Population(TASK, [lane(None)], "cpu")
    seen = []
    for step in range(WINDOW + 1):
        seen.append([p.detach()[0].clone() for p in alone.model.parameters()])
        alone.train_step(step)
    before = population.optimizer.flat.clone()
    population.ramping.apply(0, population._undone, population.optimizer.kept)
    assert torch.equal(population.optimizer.flat, before)
    assert not any(population.optimizer.kept[name].any() for name in ("mean", "square", "sum", "count"))
    ratios = []
    for layer in range(2):
        w = torch.stack([of[layer] for of in seen])
        q = torch.stack([quantize(one, Quantizer.named("mxfp4-rceil")).values for one in w])
        ratio = q.diff(dim=0).abs().double().sum(0) / (w.diff(dim=0).abs().double().sum(0) + 1e-8)
        ratios.append(ratio.flatten())
    ratio = torch.cat(ratios)
    for i, (alpha, most) in enumerate([(2.0, 31), (math.inf, 1), (1.0, 40)]):
        clear = (ratio / alpha - (ratio / alpha).round()).abs() > 1e-3 if i != 1 else ratio >= 0
        wanted = (torch.floor(ratio / alpha) * 5 + 1).clamp(max=most).int()
        assert torch.equal(population.optimizer.kept["period"][i][clear], wanted[clear])
        assert (wanted > 1).any() == (i != 1)


@pytest.mark.heavy
def test_lanes_are_what_they_are_alone_with_and_without_it(tmp_path):
    """Q-EMA keeps averages from step to step, which are undone, too."""
    members = [lane(), lane(None), lane(QRamping(every=34), 1)]
    members = [replace(of, recipe=replace(of.recipe, fprop=Recipe.named("tetrajet-qema").fprop)) for of in members]
    whole = train(TASK, members).lanes
    assert [train(TASK, [member]).lanes[0] for member in members] == whole
    assert whole[0].val_loss != whole[1].val_loss
    assert train_in_two(TASK, members, file=tmp_path / "before it looks again.pt", after=31) == whole
    stays = Pruning([Rung(33, 0.5)], lambda *_: [True, False, True])
    assert train(TASK, members, pruning=stays).lanes[::2] == whole[::2]
    ramping_leaves = Pruning([Rung(33, 0.5)], lambda *_: [False, True, False])
    assert train(TASK, members, pruning=ramping_leaves).lanes[1] == whole[1]


def test_a_recipe_writes_and_reads_it():
    data = {**recipe_to_dict(Recipe.named("nvfp4")), "training": {"ramping": "q-ramping"}}
    recipe = recipe_from_dict(data)
    assert recipe.training.ramping == QRamping()
    assert recipe.columns()["ramping"] == "q-ramping"
    assert recipe.label() == "nvfp4, q-ramping"
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    plain = replace(Recipe.named("bf16"), training=Training(ramping=OFTEN))
    assert plain.config_id == Recipe.named("bf16").config_id
    assert Recipe.named("tetrajet-qramping").baseline() == Recipe.named("bf16").canonical()
    assert replace(Recipe.named("tetrajet-qramping"), training=Training()) == Recipe.named("tetrajet")


def test_other_optimizers_and_modules_refuse_it():
    with pytest.raises(ConfigError, match=r"training.optimizer: found 'sgd'; accepted: adamw or the task's, with trai"):
        recipe_from_dict(recipe_to_dict(lane(optimizer=SGD()).recipe))
    with pytest.raises(
        ConfigError, match=r"training.ramping: found 'q-ramping'; accepted: none, for plain torch modules"
    ):
        Population(plain_net.task_of(), [lane(name="nvfp4")], "cpu")
    ours = Population(TASK, [lane()], "cpu")
    with pytest.raises(ConfigError, match=r"accepted: none with rl, whose steps cannot be undone"):
        QRampings(ours.model, ours.numerics, [OFTEN], get_task("rl", "smoke"))
