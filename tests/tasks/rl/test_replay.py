"""Router replay: the trainer sends tokens to the experts that the rollout chose, with weights of its own router."""

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population
from fp4dse.tasks.language.decoder import Decoder, Routed, Shape
from fp4dse.tasks.language.experts import Mixture, noting
from tests.tasks.rl.little import little

replace = msgspec.structs.replace
TASK = replace(little(get_task("rl", "moe-smoke"), 3, prompts=8), pretrain=None)
SHAPE = Shape(16, 24, 2, 2, 8, experts=4, mixture=Mixture(2, capacity=None))


def lane(replay="none", rollout="mxfp4-rceil", seed=0, lr=TASK.lr):
    training = Training(rollout=ROLLOUT_NAMES[rollout] if rollout else None, replay=replay)
    return Lane(replace(Recipe.named("bf16"), training=training), lr, seed)


def tokens_of(lanes, batch=3):
    return torch.randint(0, 16, (lanes, batch, SHAPE.context), generator=torch.Generator().manual_seed(0))


def decoder():
    numerics = LaneNumerics([Recipe.named("bf16")] * 2, [0, 1])
    return Decoder(SHAPE, SHAPE.initial(16, [0, 1]), numerics)


def test_replaying_what_the_router_chose_changes_no_bit():
    model, tokens = decoder(), tokens_of(2)
    with noting(model) as noted:
        expected = model(tokens)[0]
    routes = torch.stack(noted, dim=2).view(*tokens.shape, SHAPE.depth, -1)
    assert torch.equal(model(Routed(tokens, routes))[0], expected)
    assert torch.equal(model(Routed(tokens, torch.full_like(routes, -1)))[0], expected)
    routes[0] = -1  # a lane by itself, beside one that replays
    assert torch.equal(model(Routed(tokens, routes))[0], expected)


def test_weights_are_the_softmax_of_the_own_router_over_the_given_experts():
    """exp(s_e) / Σ exp(s_e') over the given e' (2510.11370), token by token in plain torch; gradients reach the router
    of experts that it would not have chosen."""
    layer = decoder().blocks[0].experts
    x = torch.randn(2, 1, 5, 16, generator=torch.Generator().manual_seed(1))
    given = torch.tensor([[3, 0], [1, 2], [0, 1], [2, 3], [3, 1]]).expand(2, 1, 5, 2)
    y, _ = layer(x, given)
    scores = layer.router(x.flatten(1, 2))
    for of in range(2):
        for token in range(5):
            chosen = given[of, 0, token].tolist()
            weights = torch.softmax(scores[of, token, chosen], -1)
            row = x[:, :, token]
            parts = [layer.mlps[e](row)[of, 0] for e in chosen]
            assert torch.allclose(y[of, 0, token], weights[0] * parts[0] + weights[1] * parts[1], atol=1e-5)
    y.square().sum().backward()
    assert layer.router.weight.grad.flatten(2).norm(dim=2).gt(0).all()


def test_the_trainer_reads_the_routes_of_the_rollout_in_lanes_that_replay():
    population = Population(TASK, [lane(), lane("router")], "cpu")
    population.train_step(0)
    rollouts = population.experience
    (tokens, routes), _ = rollouts.batch()
    assert (routes[0] == -1).all()
    assert torch.equal(routes[1], rollouts.routes[1, : len(routes[1])])
    assert routes[1].min() >= 0
    rerouted = rollouts.statistics()["rerouted"]
    assert (rerouted > 0).all(), "a rollout in MXFP4 chooses others than a trainer in BF16"
    assert (rerouted < 0.5).all()
    assert tokens.shape == routes.shape[:3]


def test_the_first_ratios_are_one_with_replay_and_without():
    """The old policy's probabilities are those of the same experts."""
    population = Population(TASK, [lane(), lane("router")], "cpu")
    population.train_step(0)
    again = Population(TASK, [lane(), lane("router")], "cpu")
    again._enter(0)
    again.experience.collect()
    inputs, target = again.experience.batch()
    found = again.experience.observed(again.model(inputs), target)
    assert torch.equal(found["ratios_clipped"], torch.zeros(2))
    assert torch.equal(again.experience._log_p(again.model), again.experience.target.log_old)


@pytest.mark.heavy
def test_a_lane_that_replays_is_what_it_is_beside_any_others():
    """In another order, and beside one that diverges; and replay changes what a lane learns."""
    together = train(TASK, [lane(), lane("router"), lane(rollout=None)], record=True).lanes
    diverged, *others = train(TASK, [lane(lr=1e38), lane(rollout=None), lane("router")], record=True).lanes
    assert diverged.status == "diverged"
    assert others == [together[2], together[1]]
    assert together[0].recorded != together[1].recorded
    assert together[2].recorded["rerouted"][0] == 0, "before any update the same forward pass chooses the same experts"


@pytest.mark.gpu
def test_a_captured_lane_that_replays_is_what_it_is_beside_any_others():
    task = replace(TASK, steps=16)
    together = train(task, [lane(), lane("router"), lane(rollout=None)], "cuda")
    assert not [reason for reason in together.fallbacks if "graph" in reason]
    assert train(task, [lane(lr=1e38), lane("router"), lane()], "cuda").lanes[1:] == together.lanes[1::-1]


def test_training_with_replay_goes_on_from_a_state():
    lanes = [lane("router"), lane()]
    whole, first = Population(TASK, lanes, "cpu"), Population(TASK, lanes, "cpu")
    for step in range(3):
        whole.train_step(step)
    first.train_step(0)
    second = Population(TASK, lanes, "cpu")
    second.load_state(first.state(1), 1)
    for step in (1, 2):
        second.train_step(step)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name


def test_policies_without_experts_refuse_it():
    for name in ("rl", "smoke"), ("regression", "smoke"):
        with pytest.raises(ConfigError, match=r"training.replay: found 'router'; accepted: none with"):
            train(get_task(*name), [lane("router", rollout=None)])
