"""Fine-tuning: what training starts from is evaluated as it is, trained on with quantizers, or taught by itself."""

from functools import partial

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.training import Distill, Training
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.data.grammar import TRAIN, Language
from fp4dse.tasks.distance import mean_losses
from fp4dse.tasks.engine import Population, Pruning
from fp4dse.tasks.engine.evaluation import evaluate
from fp4dse.tasks.job import Rung
from fp4dse.tasks.language import presets
from fp4dse.tasks.start.base_weights import base_weights
from fp4dse.tasks.start.make_weights import make_weights
from fp4dse.tasks.start.weights import start_from
from fp4dse.tasks.threads import torch_threads
from tests.tasks.in_two import train_in_two

replace = msgspec.structs.replace
SHIPPED = get_task("finetune", "smoke")
TASK = replace(SHIPPED, steps=14)
BASE = get_task("language", "smoke", "grammar")
FORWARD = {
    "fprop": {"x": "nvfp4", "w": "nvfp4"},
    "dgrad": {"g": "bf16", "w": "bf16", "source": "forward"},
    "wgrad": {"g": "bf16", "x": "bf16", "source": "forward"},
}
QAD = {"distill": "qad"}


@pytest.fixture(autouse=True)
def little_is_held_out(monkeypatch):
    monkeypatch.setattr(presets, "EVAL_PASSES", 1)


def recipe(**training):
    return recipe_from_dict({**FORWARD, "training": training})


def lane(seed=0, lr=TASK.lr, **training):
    return Lane(recipe(**training), lr, seed)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with torch_threads(1):
        yield


def kl(teacher, student, temperature=1.0):
    """Of torch, in nats, [...]."""
    p, q = ((x.double() / temperature).log_softmax(-1) for x in (teacher, student))
    return torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1) * temperature**2


def test_it_starts_where_the_base_ends_and_reads_on():
    """A base is what `weights make language:… --data grammar` makes, and no text of its training comes again."""
    few = replace(BASE, steps=2)
    weights, _ = make_weights(few, Lane(Recipe.named("bf16"), BASE.lr, 4))
    task = replace(TASK, pretrain=partial(base_weights, few, BASE.lr))
    for _ in range(2):  # made, then remembered
        for name, value in Population(task, [lane(4)], "cpu").model.state_dict().items():
            assert torch.equal(value[0], weights[name])
    read = {tuple(text) for text in BASE.problem([0]).train_x[0].tolist()}
    here = SHIPPED.problem([0]).train_x[0]
    assert len(here) == SHIPPED.steps * SHIPPED.batch
    assert not read & {tuple(text) for text in here.tolist()}
    after = Language().texts(TRAIN, BASE.steps * BASE.batch, 2, here.shape[1])[0]
    assert torch.equal(here[:2], torch.from_numpy(after))


@pytest.fixture(scope="module")
def together():
    """QAT, QAD, both at once and neither, in one population where they can be."""
    tuned = [lane(), lane(**QAD), lane(distill={"weight": 0.25, "temperature": 2.0}), lane(1, **QAD)]
    untrained = [lane(trains="none"), Lane(recipe_from_dict({**bf16(), "training": {"trains": "none"}}), 1.0, 0)]
    plain = [Lane(Recipe.named("bf16"), TASK.lr, 0)]
    return [train(TASK, lanes).lanes for lanes in (tuned, untrained[:1], untrained[1:], plain)]


def bf16():
    return recipe_to_dict(Recipe.named("bf16"))


def test_rounding_to_nearest_loses_and_training_gets_some_of_it_back(together):
    tuned, [rounded], [base], [plain] = together
    assert rounded.val_loss_bf16 == base.val_loss, "the base, in BF16"
    assert rounded.val_loss > base.val_loss + 0.005
    qat, qad = tuned[:2]
    assert qat.val_loss < rounded.val_loss - 0.005
    assert base.val_loss < qad.val_loss, "a teacher can give back what it has itself"
    assert plain.val_loss < base.val_loss
    assert rounded.metrics["excess"] == pytest.approx(
        rounded.val_loss - plain.val_loss + plain.metrics["excess"], abs=1e-4
    )


def test_a_taught_lane_comes_nearer_to_its_teacher_on_texts_that_it_has_not_read():
    """The divergence falls to .55 to .85 of what it was, in six seeds; losses may fall or rise by as much as chance."""
    seeds = range(2)
    population = Population(TASK, [lane(seed, **QAD) for seed in seeds], "cpu")
    bf16 = Population(TASK, [Lane(Recipe.named("bf16"), 1.0, seed) for seed in seeds], "cpu")
    x, _ = population.batch_of(TASK.steps - 1)

    @torch.no_grad()
    def away():
        return kl(bf16.model(x)[0], population.model(x)[0]).flatten(1).mean(1)

    before = away()
    for step in range(TASK.steps - 1):
        population.train_step(step)
    assert (away() < 0.95 * before).all()


def test_a_lane_is_itself_beside_lanes_with_other_teachers_and_after_a_checkpoint(together, tmp_path):
    [qat, qad, both, other], *_ = together
    assert train(TASK, [lane()]).lanes == [qat]
    assert both not in (qat, qad)
    assert train_in_two(TASK, [lane(1, **QAD)], file=tmp_path / "half.pt", after=5) == [other]
    leaves = Pruning([Rung(7, 0.5)], lambda *_: [False, True, False])
    assert train(TASK, [lane(1), lane(**QAD), lane()], pruning=leaves).lanes[1] == qad


def test_what_is_not_trained_is_the_base_to_the_bit():
    population = Population(TASK, [lane(trains="none")], "cpu")
    before = [p.clone() for p in population.model.parameters()]
    loss, _ = evaluate(population)
    for step in range(3):
        population.train_step(step)
    assert all(torch.equal(a, b) for a, b in zip(before, population.model.parameters(), strict=True))
    assert torch.equal(evaluate(population)[0], loss)


def test_the_loss_is_the_distance_from_the_base_in_bf16():
    """Of each lane, by torch's own divergence and gradient, from logits of a model built anew."""
    lanes = [lane(**QAD), lane(1), lane(distill={"weight": 0.25, "temperature": 2.0})]
    population = Population(TASK, lanes, "cpu")
    for step in range(3):
        population.train_step(step)
    x, taught = population.batch_of(3)
    bf16 = Population(TASK, [Lane(Recipe.named("bf16"), 1.0, seed) for seed in (0, 1, 0)], "cpu")
    with torch.no_grad():
        of_base = bf16.model(x)[0]
    assert torch.equal(taught.logits, of_base)
    logits = population.model(x)[0].detach().requires_grad_()
    found, own = mean_losses(TASK, (logits, torch.zeros(3)), taught)
    found.sum().backward()
    theirs = logits.detach().double().requires_grad_()
    labels = torch.nn.functional.cross_entropy(theirs.flatten(0, 2), taught.targets.flatten(), reduction="none")
    labels = labels.view(3, -1).mean(1)
    away = [kl(of_base[i], theirs[i], t).mean() for i, t in ((0, 1.0), (2, 2.0))]
    expected = torch.stack([away[0], labels[1], 0.75 * labels[2] + 0.25 * away[1]])
    expected.sum().backward()
    assert torch.allclose(found.double(), expected, rtol=1e-5)
    assert torch.allclose(own.double(), labels, rtol=1e-5), "curves and rungs go by it"
    assert torch.allclose(logits.grad.double(), theirs.grad, rtol=1e-4, atol=1e-9)


def test_a_teacher_is_what_training_starts_from():
    """Also of --from, in tasks of language; other tasks have none."""
    weights, _ = make_weights(replace(BASE, steps=2), Lane(Recipe.named("bf16"), BASE.lr, 3))
    task = replace(start_from(BASE, weights, "w"), steps=2)
    population = Population(task, [lane(**QAD)], "cpu")
    x, taught = population.batch_of(0)
    with torch.no_grad():
        own = Population(task, [Lane(Recipe.named("bf16"), 1.0, 0)], "cpu").model(x)[0]
    assert torch.equal(taught.logits, own)
    for other in (BASE, get_task("regression", "smoke"), get_task("rl", "smoke")):
        with pytest.raises(ConfigError, match=rf"training.distill: found 'qad'; accepted: none with {other.name}"):
            Population(other, [lane(**QAD)], "cpu")


def test_the_training_side_in_a_recipe():
    qad = recipe(**QAD)
    assert qad.training == Training(distill=Distill())
    assert recipe_from_dict(recipe_to_dict(qad)) == qad
    assert qad.label().endswith("from forward, qad")
    half = recipe(distill={"weight": 0.5})
    assert (half.columns()["distill"], half.columns()["trains"]) == ("distill weight=0.5 temperature=1", "all")
    assert qad.baseline() == recipe(trains="none").baseline() == Recipe.named("bf16").canonical()
    untrained = recipe(trains="none", schedule="cosine", weight_decay=0.1, **QAD)
    otherwise = recipe_from_dict({**recipe_to_dict(Recipe.named("nvfp4")), "training": {"trains": "none"}})
    assert untrained.config_id == otherwise.config_id == recipe(trains="learned").config_id
    assert untrained.config_id != recipe().config_id
    assert untrained.label() == "bf16, forward nvfp4, untrained"
    base = recipe_from_dict({**bf16(), "training": {"trains": "none"}})
    assert not base.is_baseline
    assert base.baseline() == Recipe.named("bf16").canonical()


MISTAKES = {
    "name": ({"distill": "kl"}, r"training.distill: found 'kl'; accepted: none, qad"),
    "weight": ({"distill": {"weight": 0}}, r"training.distill.weight: found 0; accepted: a number above 0"),
    "more than all": (
        {"distill": {"weight": 1.5}},
        r"distill.weight: found 1.5; accepted: .*, at most 1",
    ),
    "trains": ({"trains": "scales"}, r"training.trains: found 'scales'; accepted: all, learned, none"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    changes, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        recipe(**changes)


def test_what_is_learned_can_be_trained_alone():
    """Clips move, weights stay; beside a lane in which all move."""
    pact = replace(Recipe.named("pact"), training=Training(trains="learned"))
    clip = replace(pact.fprop.x, outliers=replace(pact.fprop.x.outliers, start=1.0))
    pact = replace(pact, fprop=replace(pact.fprop, x=clip))
    population = Population(TASK, [Lane(pact, 1e-2, 0), Lane(replace(pact, training=Training()), 1e-2, 0)], "cpu")
    before = {name: p.clone() for name, p in population.model.named_parameters()}
    for step in range(4):
        population.train_step(step)
    for name, p in population.model.named_parameters():
        assert torch.equal(p[0], before[name][0]) == ("clip_" not in name), name
        assert not torch.equal(p[1], before[name][1]), name
