"""Weights that products take in BF16 have a copy in it, which is theirs whatever changes them; no bit depends on it."""

import copy
import pickle

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.optimizer import SGD, AdamW, Muon, StableSPAM
from fp4dse.dse.training import Training
from fp4dse.kernels import QuantLinear
from fp4dse.kernels.ops.rounded import keep_copy, refresh, rounded
from fp4dse.tasks import Lane, get_task
from fp4dse.tasks.engine import Population
from fp4dse.tasks.engine.evaluation import evaluate
from fp4dse.tasks.optimizers import lane_optimizer

STEPS = 4
BF16 = Recipe.named("bf16")


def population(recipe=BF16, name="vision:smoke", lanes=3) -> Population:
    task = msgspec.structs.replace(get_task(*name.split(":")), steps=STEPS)
    return Population(task, [Lane(recipe, task.lr, seed) for seed in range(lanes)], "cpu")


def trained(recipe=BF16, name="vision:smoke") -> Population:
    p = population(recipe, name)
    for step in range(STEPS):
        p.train_step(step)
    return p


def weights(p):
    return [m.weight for m in p.model.modules() if isinstance(m, QuantLinear)]


def is_copied(weight) -> bool:
    """True if what is read for the weight is a copy of it."""
    return rounded(weight, torch.bfloat16) is rounded(weight, torch.bfloat16)


def are_right(p) -> bool:
    return all(torch.equal(rounded(w, torch.bfloat16), w.detach().to(torch.bfloat16)) for w in weights(p))


@pytest.mark.parametrize("optimizer", [AdamW(), SGD(), StableSPAM(), Muon()], ids=lambda of: type(of).__name__)
def test_no_bit_depends_on_copies_and_every_optimizer_makes_them_anew(optimizer, monkeypatch):
    recipe = msgspec.structs.replace(BF16, training=Training(optimizer=optimizer))
    mine = trained(recipe)
    assert all(is_copied(w) for w in weights(mine))
    assert are_right(mine)
    monkeypatch.setattr(lane_optimizer, "taken_in_bf16", lambda model: [False for _ in model.parameters()])
    bare = trained(recipe)
    assert bare.optimizer.copies is None
    assert not any(is_copied(w) for w in weights(bare))
    assert torch.equal(mine.optimizer.flat, bare.optimizer.flat)
    assert all(torch.equal(a, b) for a, b in zip(evaluate(mine), evaluate(bare), strict=True) if torch.is_tensor(a))


def test_the_forward_pass_reads_them():
    p = population()
    before = p.model(p.batch_of(0)[0])
    p.optimizer.copies.values.zero_()
    assert not torch.equal(p.model(p.batch_of(0)[0]), before)


def test_what_changes_weights_between_steps_is_seen_at_once_and_before_the_next_step():
    p, other = trained(), population()
    other.load_state(p.state(STEPS), STEPS)
    assert are_right(other)
    assert not any(is_copied(w) for w in weights(other))
    other.optimizer.refresh()
    assert are_right(other)
    assert all(is_copied(w) for w in weights(other))
    with torch.no_grad():
        weights(other)[0][1] = 0.3
    seen = []
    other._run(None, lambda: seen.append((is_copied(weights(other)[0]), are_right(other))))
    assert seen == [(True, True)]


def test_lanes_that_go_on_alone_have_copies_of_their_own():
    p = trained()
    p.keep([2, 0], STEPS)
    p.optimizer.refresh()
    assert are_right(p)
    assert all(is_copied(w) for w in weights(p))


@pytest.mark.parametrize(
    ("recipe", "copied"),
    [("nvfp4", {"embedding", "head"}), ("bf16", {"embedding", "head", "attention", "mlp"})],
)
def test_only_weights_that_are_taken_in_bf16_have_one(recipe, copied):
    p = population(Recipe.named(recipe))
    layers = [m for m in p.model.modules() if isinstance(m, QuantLinear)]
    assert {m.place.kind for m in layers if is_copied(m.weight)} == copied
    assert are_right(p)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_that_are_changed_between_captured_steps_are_read_anew(device, monkeypatch):
    """A captured step reads copies as they are, and what changes weights between two of them is not in it."""
    task = msgspec.structs.replace(get_task("regression", "smoke+bf16"), steps=16)
    found = []
    for of in (lane_optimizer.taken_in_bf16, lambda model: [False for _ in model.parameters()]):
        monkeypatch.setattr(lane_optimizer, "taken_in_bf16", of)
        p = Population(task, [Lane(BF16, task.lr, seed) for seed in range(3)], device)
        for step in range(task.steps):
            if step in (2, 9, 13):
                with torch.no_grad():
                    weights(p)[0][1] *= -0.5
            p.train_step(step)
        found.append((p.optimizer.flat, evaluate(p)[0]))
    (mine, loss), (bare, expected) = found
    assert torch.equal(mine, bare)
    assert torch.equal(loss, expected)


def test_a_copy_that_is_loaded_is_made_anew():
    """Torch counts changes of a loaded tensor from the start, so that an old copy might pass for a new one."""
    x = torch.randn(2, 4, 8)
    keep_copy(x, torch.zeros(2, 4, 8, dtype=torch.bfloat16))
    refresh(x)
    x.mul_(3.0)
    for again in copy.deepcopy(x), pickle.loads(pickle.dumps(x)):
        assert torch.equal(rounded(again, torch.bfloat16), x.to(torch.bfloat16))


def test_inputs_that_are_prepared_are_not_rounded_before():
    task = msgspec.structs.replace(get_task("regression", "smoke"), prepare=lambda *data: data)
    with pytest.raises(ConfigError, match="rounds_inputs"):
        Population(task, [Lane(Recipe.named("bf16"), 1e-3, 0)], "cpu")
