"""The benchmark's peer samples, rewards and learns as the engine does, to the precision of BF16 between products."""

import msgspec
import pytest
import torch

from fp4dse.dse import Recipe
from fp4dse.kernels import LaneNumerics, lane_mean
from fp4dse.tasks import get_task
from fp4dse.tasks.bench.compiled_rl import RolloutPeer, grpo
from fp4dse.tasks.bench.step_time import rollout_alone_us
from fp4dse.tasks.draws import Draws, seed_keys
from fp4dse.tasks.engine import Population
from fp4dse.tasks.engine.lane_counts import lanes_of
from fp4dse.tasks.rl.grpo import Clip, Target, log_probability, share_of, token_loss
from fp4dse.tasks.rl.sampling import CachedDecoder, sample

SMOKE, LANES = get_task("rl", "smoke"), 2


@pytest.fixture(scope="module")
def peer():
    return RolloutPeer(SMOKE, LANES, "cpu")


def test_it_decodes_with_a_cache_as_the_engine_does(peer):
    model = SMOKE.model(
        {name: value.detach().clone() for name, value in peer.parameters.items()},
        LaneNumerics([Recipe.named("bf16")] * LANES, range(LANES)),
    )
    model.numerics.training = False
    prompts = peer.plan.problems.prompts(Draws(seed_keys(range(LANES)), torch.zeros((), dtype=torch.int64)), 0, 128)
    theirs = peer.answer(prompts, greedy=True)
    ours = sample(CachedDecoder(model, model.numerics, peer.shape.context), prompts, theirs.shape[2])
    same = (ours.answers == theirs).cumprod(-1).bool()
    assert same.float().mean() > 0.9, "BF16 between products decides few tokens otherwise"
    inputs = torch.cat([prompts, ours.answers[..., :-1]], -1)
    with torch.no_grad():
        log_p = log_probability(peer.forward(inputs), ours.answers)
    assert (log_p - ours.log_p).abs().max() < 0.1
    assert (log_p - ours.log_p).abs().mean() < 0.01


def test_its_loss_is_the_engines():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LANES, 6, 5, 9, generator=generator)
    tokens = torch.randint(9, (LANES, 6, 5), generator=generator)
    old = log_probability(logits, tokens) + 0.3 * torch.randn(LANES, 6, 5, generator=generator)
    advantage = torch.randn(LANES, 6, 1, generator=generator)
    counts = torch.rand(LANES, 6, 5, generator=generator) > 0.4
    clip = Clip(high=0.28)
    target = Target(tokens, old, old, advantage.expand_as(old), torch.ones_like(old), share_of(counts), old[..., :0])
    ours = lane_mean(token_loss(log_probability(logits, tokens), target, clip)).sum()
    assert grpo(logits, tokens, old, advantage, counts, clip).item() == pytest.approx(ours.item(), rel=1e-5)


def test_a_rollout_that_is_timed_is_that_of_a_step():
    task = msgspec.structs.replace(SMOKE, pretrain=None, steps=4)
    whole, alone = (Population(task, lanes_of(task, [Recipe.named("bf16")], LANES), "cpu") for _ in range(2))
    whole.train_step(0)
    alone.roll_out(0)
    for ours, theirs in zip(whole.experience.target, alone.experience.target, strict=True):
        assert torch.equal(ours, theirs)
    before = alone.model.head.weight
    assert not torch.equal(whole.model.head.weight, before) or not whole.experience.target.advantage.any()
    assert rollout_alone_us(task, Recipe.named("bf16"), LANES, "cpu", rounds=1, warm_up=1) > 0


def test_it_learns(peer):
    before = peer.parameters["head"].detach().clone()
    torch.manual_seed(0)
    rewards = [peer.step() for _ in range(2)]
    assert all(((reward >= 0) & (reward <= 1)).all() for reward in rewards)
    assert torch.isfinite(peer.parameters["head"]).all()
    assert not torch.equal(peer.parameters["head"], before)
    assert all(parameter.grad is None for parameter in peer.parameters.values())
