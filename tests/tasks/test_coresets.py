"""A share of the training samples: chosen by what the model gets wrong and what quantization moves, or drawn once."""

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.training import Coreset, Training, coreset_name
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population, Stopped
from fp4dse.tasks.engine.evaluation import evaluating

replace = msgspec.structs.replace
SMOKE = get_task("finetune", "smoke")
SAMPLES, CHOSEN = 80, 8  # a tenth


def few(seeds):
    """The problem with a quarter of its samples, each of which is scored at every choice."""
    whole = SMOKE.problem(seeds)
    return replace(whole, train_x=whole.train_x[:, :SAMPLES], train_y=whole.train_y[:, :SAMPLES])


TASK = replace(SMOKE, steps=8, batch=8, problem=few, pretrain=lambda seeds, _device: SMOKE.preview(seeds).init)
"""From weights as they are drawn: nothing here depends on how good they are."""


def lane(coreset=None, seed=0, name="mxfp4", lr=1e-3):
    return Lane(replace(Recipe.named(name), training=Training(coreset=coreset)), lr, seed)


ACS, RANDOM = Coreset(), Coreset(by="random")


def population(*lanes, steps=0):
    found = Population(TASK, lanes, "cpu")
    for step in range(steps):
        found.train_step(step)
    return found


def expected_scores(of, lane, share):
    """In numpy, float64, from the logits of the lane's model and of the model that it starts from."""
    x, y = of.prepared(of.problem.train_x, of.problem.train_y)
    with torch.no_grad(), evaluating(of):
        quantized = of.model(x.expand(len(of.lanes), -1, -1))[0][lane]
    start = population(lane_of_bf16(of.lanes[lane].seed))
    with torch.no_grad(), evaluating(start, "bf16"):
        teacher = start.model(x)[0][0]

    def softmax(logits):
        e = np.exp(logits.double().numpy() - logits.double().numpy().max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    p, q = softmax(quantized), softmax(teacher)
    label = np.eye(p.shape[-1])[y[0].numpy()]
    each = (1 - share) * np.linalg.norm(p - label, axis=-1) + share * np.linalg.norm(p - q, axis=-1)
    return each.mean(-1)


def lane_of_bf16(seed):
    return Lane(Recipe.named("bf16"), 1e-3, seed)


@pytest.mark.parametrize("step", [0, 4])
def test_the_samples_with_the_largest_scores_are_read(step):
    """At the first choice by the labels alone, in the middle of training by both distances alike."""
    of = population(lane(ACS), lane(), steps=step)
    expected = expected_scores(of, 0, {0: 0.0, 4: 0.5}[step])
    of._enter(step)
    assert of.coresets.is_due(step)
    of.coresets.choose(step, lambda: evaluating(of), of.model)
    chosen = of.coresets.chosen[0, : int(of.coresets.sizes[0])].numpy()
    assert len(chosen) == CHOSEN
    least = np.sort(expected)[-CHOSEN]
    assert (expected[chosen] >= least - 1e-5).all()
    assert torch.equal(of.coresets.chosen[1], torch.arange(SAMPLES)), "another lane reads all"


def test_batches_are_of_the_chosen_samples_alone():
    of = population(lane(ACS), lane(RANDOM), lane(), steps=1)
    for step in range(1, 4):
        of._enter(step)
        rows = of.coresets.rows(of.batches(of.numerics.step)[of.seed_index])
        for number in range(2):
            assert set(rows[number].tolist()) <= set(of.coresets.chosen[number, :CHOSEN].tolist())
        assert torch.equal(rows[2], of.batches(of.numerics.step)[0])
    assert len(set(of.coresets.chosen[1, :CHOSEN].tolist())) == CHOSEN


def test_random_ones_are_a_seeds_whatever_the_recipe():
    here, there = population(lane(RANDOM), lane(RANDOM, seed=1)), population(lane(RANDOM, name="nvfp4"))
    assert torch.equal(here.coresets.chosen[0], there.coresets.chosen[0])
    assert not torch.equal(here.coresets.chosen[0], here.coresets.chosen[1])


def test_a_lane_is_what_it_is_beside_any_others():
    task = replace(TASK, steps=4)
    together = train(task, [lane(ACS), lane(RANDOM), lane()]).lanes
    alone = train(task, [lane(lr=1e38), lane(), lane(ACS)]).lanes
    assert alone[1:] == [together[2], together[0]]
    assert len({result.val_loss for result in together}) == 3
    assert train(task, [lane()]).lanes == together[2:], "without coresets all is as ever"


def test_training_goes_on_from_a_checkpoint_with_its_coreset(tmp_path):
    task, asked = replace(TASK, steps=4), iter([False, False, False, True])
    lanes = [lane(ACS), lane()]
    whole = train(task, lanes).lanes
    with pytest.raises(Stopped, match="after 3 of 4"):
        train(task, lanes, checkpoint=tmp_path / "c.pt", should_stop=lambda: next(asked))
    assert train(task, lanes, checkpoint=tmp_path / "c.pt").lanes == whole


def test_it_is_a_word_of_recipes():
    recipe = recipe_from_dict({**recipe_to_dict(Recipe.named("nvfp4")), "training": {"coreset": "acs"}})
    assert recipe.training.coreset == ACS
    assert recipe.label().endswith("coreset acs")
    assert recipe.columns()["coreset"] == "acs"
    assert coreset_name(Coreset(share=0.2)) == "acs share=0.2 selections=4"
    every = replace(recipe, training=Training(coreset=Coreset(share=1.0)))
    assert every.config_id == Recipe.named("nvfp4").config_id
    drawn = [replace(recipe, training=Training(coreset=Coreset(by="random", selections=n))) for n in (1, 4)]
    assert drawn[0].config_id == drawn[1].config_id
    assert recipe.baseline() == Recipe.named("bf16").canonical(), "gaps are to BF16 on all samples"


def test_tasks_without_a_teacher_refuse_it():
    with pytest.raises(ConfigError, match=r"training\.coreset: found 'random'; accepted: none with regression"):
        train(get_task("regression", "smoke"), [lane(RANDOM)])
    with pytest.raises(ConfigError, match=r"none with rl:smoke, which learns from samples of its own"):
        train(replace(get_task("rl", "smoke"), pretrain=None), [lane(RANDOM)])
