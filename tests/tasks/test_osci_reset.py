"""OsciReset puts oscillating weights where the quantizer has them, at the published moments and nowhere else."""

import math

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Quantizer, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.oscillation import OsciReset
from fp4dse.dse.training import Training
from fp4dse.kernels import quantize
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population, Pruning
from fp4dse.tasks.job import Rung
from fp4dse.tasks.optimizers.osci_reset import WINDOW, ends_of
from tests.tasks.in_two import train_in_two

from . import plain_net

replace = msgspec.structs.replace
TASK = replace(get_task("regression", "smoke"), steps=100)
EARLY = OsciReset(start=0.1, every=50, threshold=2.0)
END = 60
"""The first window of EARLY ends before this step, and no other does within 100 steps."""


def lane(reset=EARLY, seed: int = 0, name: str = "nvfp4") -> Lane:
    return Lane(replace(Recipe.named(name), training=Training(reset=reset)), TASK.lr, seed)


def test_windows_of_fifty_steps_begin_after_the_start_and_then_so_often():
    assert list(ends_of(OsciReset(), 1000)) == [690, 890]
    assert list(ends_of(OsciReset(start=0.0, every=50), 151)) == [50, 100, 150]
    assert list(ends_of(EARLY, TASK.steps)) == [END]
    assert not ends_of(OsciReset(), 100)


def weights(population: Population, of: int) -> list[torch.Tensor]:
    return [p.detach()[of].clone() for p in population.model.parameters()]


def test_weights_whose_ratio_is_large_become_their_quantized_values_and_the_others_stay():
    """By hand, from a training without resets; lanes with another threshold and without any beside it."""
    members = [lane(None), lane(EARLY), lane(replace(EARLY, threshold=8.0))]
    population, alone = Population(TASK, members, "cpu"), Population(TASK, [lane(None)], "cpu")
    seen = []
    for step in range(END + 1):
        seen.append(weights(alone, 0))
        if step < END:
            population.train_step(step)
            alone.train_step(step)
    population.resets.apply(END)
    counts = []
    for layer in range(2):
        w = torch.stack([of[layer] for of in seen[END - WINDOW :]])
        q = torch.stack([quantize(one, Quantizer.named("nvfp4")).values for one in w])
        ratio = q.diff(dim=0).abs().double().sum(0) / (w.diff(dim=0).abs().double().sum(0) + 1e-8)
        for of, threshold in enumerate((math.inf, 2.0, 8.0)):
            clear = (ratio - threshold).abs() > 1e-3
            wanted = torch.where(ratio >= threshold, q[-1], w[-1])
            assert torch.equal(weights(population, of)[layer][clear], wanted[clear])
            counts.append(int((ratio >= threshold).sum()))
    assert counts[0] == counts[3] == 0
    assert counts[1] > counts[2] > 0


@pytest.mark.heavy
def test_lanes_are_what_they_are_alone_with_and_without_resets(tmp_path):
    members = [lane(EARLY, 0), lane(None, 0), lane(replace(EARLY, start=0.3), 1), lane(None, 1, "nvfp4-sr")]
    whole = train(TASK, members).lanes
    assert [train(TASK, [member]).lanes[0] for member in members] == whole
    assert whole[0].val_loss != whole[1].val_loss
    for stop in (20, END, END + 1):
        assert train_in_two(TASK, members, file=tmp_path / f"{stop}.pt", after=stop) == whole
    stays = Pruning([Rung(30, 0.5)], lambda *_: [True, False, True, False])
    assert train(TASK, members, pruning=stays).lanes[::2] == whole[::2]
    members = [lane(EARLY, 0), lane(replace(EARLY, start=0.2), 1)]  # a window ends in another, whose lanes are gone
    gone = Pruning([Rung(30, 0.5)], lambda *_: [False, True])
    assert train(TASK, members, pruning=gone).lanes[1] == train(TASK, members).lanes[1]


def test_recording_changes_no_bit_of_a_training_with_resets():
    recorded = train(TASK, [lane(), lane(seed=1)], record=True).lanes
    assert [replace(of, recorded={}) for of in recorded] == train(TASK, [lane(), lane(seed=1)]).lanes


def test_momenta_stay():
    population = Population(TASK, [lane()], "cpu")
    for step in range(END):
        population.train_step(step)
    before = {name: value.clone() for name, value in population.optimizer.state().items()}
    flat = population.optimizer.flat.clone()
    population.resets.apply(END)
    assert all(torch.equal(value, before[name]) for name, value in population.optimizer.state().items())
    assert not torch.equal(population.optimizer.flat, flat)


def test_a_recipe_writes_and_reads_it():
    data = {**recipe_to_dict(Recipe.named("nvfp4")), "training": {"reset": "osci-reset"}}
    recipe = recipe_from_dict(data)
    assert recipe.training.reset == OsciReset()
    assert recipe.columns()["reset"] == "osci-reset"
    assert recipe.label() == "nvfp4, osci-reset"
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    assert recipe.config_id != Recipe.named("nvfp4").config_id
    with pytest.raises(ConfigError, match="every: "):
        recipe_from_dict({**data, "training": {"reset": {"kind": "osci-reset", "every": 49}}})


def test_without_quantized_weights_it_is_nothing():
    plain = replace(Recipe.named("bf16"), training=Training(reset=EARLY))
    assert plain.config_id == Recipe.named("bf16").config_id
    assert Recipe.named("tetrajet2-reset").baseline() == Recipe.named("bf16").canonical()


def test_plain_torch_modules_refuse_it():
    with pytest.raises(
        ConfigError, match=r"training.reset: found 'osci-reset'; accepted: none, for plain torch modules"
    ):
        Population(plain_net.task_of(), [lane()], "cpu")
