"""A clip that quantizers learn is a parameter like others: it moves, decays, is kept, and a lane's own."""

from itertools import pairwise

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Quantizer, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.precision import Finish
from fp4dse.dse.optimizer import SGD, Muon, StableSPAM
from fp4dse.dse.outliers import OUTLIER_NAMES, LearnedClip
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.kernels.learned import LEAST
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population, Pruning
from fp4dse.tasks.job import Rung
from fp4dse.tasks.own.one_by_one import SequentialNumerics
from fp4dse.tasks.start.make_weights import make_weights
from fp4dse.tasks.start.weights import start_from
from tests.tasks.in_two import train_in_two

replace = msgspec.structs.replace
TASK = replace(get_task("regression", "smoke"), steps=12)


def recipe(training: Training | None = None, finish: Finish | None = None, **clip: float) -> Recipe:
    base = Recipe.named("pact")
    x = replace(base.fprop.x, outliers=LearnedClip(**clip))
    return replace(base, fprop=replace(base.fprop, x=x), finish=finish, training=training or Training())


def lane(seed: int = 0, **more: object) -> Lane:
    return Lane(recipe(**more), TASK.lr, seed)


def clips(population: Population) -> torch.Tensor:
    """[L, layers]."""
    return torch.cat([v for name, v in population.model.state_dict().items() if "clip_" in name], 1)


def trained(*lanes: Lane, task=TASK) -> Population:
    population = Population(task, lanes, "cpu")
    for step in range(task.steps):
        population.train_step(step)
    return population


def test_training_moves_it_at_a_rate_of_its_own():
    population = trained(lane(start=1.0, decay=0.0), lane(start=1.0, decay=0.0, rate=4.0), lane(start=50.0, decay=0.0))
    moved = (clips(population) - torch.tensor([[1.0], [1.0], [50.0]])).abs()
    assert (moved[:2] > 0).all()
    assert (moved[1] > 2 * moved[0]).all()
    assert torch.equal(moved[2], torch.zeros(2))  # nothing is so large


@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_where_nothing_is_clamped_it_decays(rate):
    """By lr · rate · decay · alpha a step under plain SGD; never to zero."""
    sgd = Training(optimizer=SGD(momentum=0.0))
    population = trained(lane(training=sgd, start=50.0, decay=0.5, rate=rate))
    expected = 50.0 * (1 - TASK.lr * rate * 0.5) ** TASK.steps
    assert clips(population)[0].tolist() == pytest.approx([expected] * 2, rel=1e-5)
    fallen = trained(lane(training=sgd, start=50.0, decay=1e6, rate=rate), task=replace(TASK, steps=1))
    assert clips(fallen)[0].tolist() == [pytest.approx(LEAST)] * 2


@pytest.mark.parametrize("what", ["forward", "all", "all-but-weights"])
@pytest.mark.parametrize("optimizer", [None, SGD(), StableSPAM(), Muon()])
def test_while_its_quantizer_is_off_neither_it_nor_its_momenta_move(what, optimizer):
    training = Training(optimizer=optimizer, clip=0.5)
    population = Population(TASK, [lane(training=training, finish=Finish(0.5, what), decay=0.3, start=1.0)], "cpu")
    learned, seen = population.optimizer.learned, []
    for step in range(TASK.steps):
        population.train_step(step)
        per, kept = population.optimizer.per, population.optimizer.kept
        of_kept = [value[:, learned.at[per[name]]] for name, value in kept.items() if per[name] in learned.at]
        seen.append(torch.cat([clips(population), *of_kept], 1))
    moves = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert moves == [True] * 5 + [False] * 6


def test_what_a_finish_reports_is_of_the_clip_that_training_left():
    """Not of one that decayed unused: held-out data go through the quantizer after fine-tuning but for the weights."""
    task = replace(TASK, steps=200)
    fast = {"start": 3.0, "decay": 0.5, "rate": 20.0}
    population = trained(lane(finish=Finish(0.7, "all-but-weights"), **fast), task=task)
    before = trained(lane(**fast), task=replace(task, steps=60))  # the rate is constant so far
    assert (clips(population) - clips(before)).abs().max() < 1.0


def test_a_lane_is_itself_in_any_company_after_a_checkpoint_and_a_rung(tmp_path):
    members = [lane(start=1.0), lane(1, start=0.5, rate=8.0), lane(start=3.0, decay=0.1)]
    whole = train(TASK, members, record=True).lanes
    assert len({result.val_loss for result in whole}) == 3
    for at, member in enumerate(members):
        assert train(TASK, [member], record=True).lanes == whole[at : at + 1]
    assert train_in_two(TASK, members, file=tmp_path / "half.pt", after=5, record=True) == whole
    pruned = train(TASK, members, record=True, pruning=Pruning([Rung(6, 0.4)], lambda *_: [False, True, False])).lanes
    assert pruned[1] == whole[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_lanes_that_compute_the_same_begin_with_one_loss(device):
    """Each by its own clip, which lies among its lane's parameters, and which a tensor scale follows."""
    q = replace(Quantizer.named("nvfp4"), outliers=LearnedClip(start=1.0))
    base = Recipe.named("nvfp4")
    population = Population(
        TASK, [Lane(replace(base, fprop=replace(base.fprop, x=q)), lr, 0) for lr in (1e-4, 1e-3, 1e-2)], device
    )
    population.train_step(0)
    assert len(set(population.losses(0))) == 1


def test_a_rule_for_layers_may_give_it_to_some():
    """One lane has it in all layers, one by a rule in some, one in none."""
    task = replace(get_task("vision", "smoke"), steps=4)
    own, plain = recipe(start=1.0), Recipe.named("nvfp4")
    x = recipe_to_dict(own)["fprop"]["x"]
    rule = recipe_from_dict({**recipe_to_dict(plain), "layers": [{"kind": "mlp", "fprop.x": x}]})
    members = [Lane(of, 1e-3, 0) for of in (rule, plain, own)]
    population = trained(*members[:2], task=task)
    names = {name.partition(".clip_")[0] for name in population.model.state_dict() if "clip_" in name}
    assert names == {"layer.block0_up", "layer.block0_down"}
    results = [train(task, [member]).lanes[0] for member in members]
    assert results[:2] == train(task, members[:2]).lanes
    assert results[2].val_loss not in [of.val_loss for of in results[:2]]


@pytest.mark.parametrize("optimizer", [None, SGD(), StableSPAM(), Muon()])
def test_a_lane_is_itself_beside_lanes_that_learn_elsewhere(optimizer):
    """Also where gradients are clipped by their norm, and in what is recorded: clips that only others have change the
    order of no sum."""
    task, training = replace(get_task("vision", "smoke"), steps=2), Training(optimizer=optimizer, clip=0.05)
    plain = replace(Recipe.named("nvfp4"), training=training)
    x = recipe_to_dict(recipe())["fprop"]["x"]
    ruled = [
        recipe_from_dict({**recipe_to_dict(plain), "layers": [{"kind": kind, "fprop.x": x}]})
        for kind in (["mlp"], ["attention", "mlp"], ["linear", "attention"])
    ]
    members = [Lane(of, 1e-2, seed) for of, seed in [*((plain, s) for s in range(4)), *((of, 0) for of in ruled)]]
    whole = train(task, members, record=True).lanes
    apart = train(task, members[:4], record=True).lanes
    assert apart == whole[:4]
    for at in range(4, 7):
        assert train(task, members[at : at + 1], record=True).lanes == whole[at : at + 1]


def test_names_of_a_model_of_ones_own_mean_nothing():
    """Neither an attribute `clips` nor a parameter `clip_x` that is not a quantizer's."""

    class Own(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.clips = inner, [1, 2]
            self.clip_x = torch.nn.Parameter(torch.ones(1, 3))

        def forward(self, x):
            return self.inner(x) + 0.0 * self.clip_x.sum()

    task = replace(TASK, steps=2, model=lambda init, numerics: Own(TASK.model(init, numerics)))
    for one, learned in (lane(), 2), (Lane(Recipe.named("nvfp4"), TASK.lr, 0), 0):
        assert len(trained(one, task=task).optimizer.learned.clips) == learned
    weights, _ = make_weights(task, lane())
    with pytest.raises(ConfigError, match="clip_x: found nothing"):
        start_from(task, {name: value for name, value in weights.items() if name != "clip_x"}, "w")


def test_rollouts_have_it_where_they_compute_as_the_trainer_does():
    """Beside a lane with a rollout of its own, for which the samples of both come from other numerics."""
    task = replace(get_task("rl", "smoke"), steps=1)
    own, other = (lane(start=0.5, training=Training(rollout=of)) for of in (None, ROLLOUT_NAMES["nvfp4"]))
    whole = train(task, [own, other], record=True).lanes
    assert [train(task, [one], record=True).lanes[0] for one in (own, other)] == whole


def test_weights_in_a_file_have_it_and_recipes_without_it_leave_it():
    weights, _ = make_weights(TASK, lane(start=1.0))
    learned = {name: value for name, value in weights.items() if "clip_" in name}
    assert len(learned) == 2
    assert all(value.shape == (1,) and value != 1 for value in learned.values())
    started = start_from(TASK, weights, "w")
    taken = Population(started, [lane(start=9.0)], "cpu").model.state_dict()
    assert all(torch.equal(taken[name][0], value) for name, value in weights.items())
    without = Population(started, [Lane(Recipe.named("nvfp4"), TASK.lr, 0)], "cpu").model.state_dict()
    assert without.keys() == weights.keys() - learned.keys()
    from_others = start_from(TASK, {name: v for name, v in weights.items() if name not in learned}, "w")
    assert clips(Population(from_others, [lane(start=9.0)], "cpu")).tolist() == [[9.0, 9.0]]


def test_a_start_at_the_largest_is_that_of_the_weights_in_the_file():
    weights, _ = make_weights(TASK, Lane(Recipe.named("bf16"), TASK.lr, 0))
    base = Recipe.named("pact")
    w = replace(base.fprop.x, outliers=OUTLIER_NAMES["lsq"])
    lsq = replace(base, fprop=replace(base.fprop, w=w))
    begun = Population(start_from(TASK, weights, "w"), [Lane(lsq, TASK.lr, 0)], "cpu").model.state_dict()
    for name, value in weights.items():
        if (clip := name.replace(".weight", ".clip_w")) in begun:
            assert begun[clip][0] == value.abs().max()
    assert sum(".clip_w" in name for name in begun) == 2


def test_a_plain_module_has_no_place_for_it():
    numerics = SequentialNumerics([recipe()], [0])
    with pytest.raises(ConfigError, match=r"fprop.x.outliers: found 'pact'; .*plain torch modules have no place"):
        numerics.add_layer(0, Place("linear", 0, 1))
