"""Answers with kept keys and values are those of a plain loop that reads everything anew for each token."""

import msgspec
import pytest
import torch
import torch.nn.functional as F

from fp4dse.dse import Recipe
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks.draws import Draws, seed_keys
from fp4dse.tasks.language.decoder import Decoder, Shape
from fp4dse.tasks.language.experts import Mixture
from fp4dse.tasks.rl.chains import Chains
from fp4dse.tasks.rl.numerics import SamplingNumerics
from fp4dse.tasks.rl.sampling import CachedDecoder, gumbel, sample

CHAINS = Chains(1, 3)
SHAPE = Shape(32, 64, 2, 4, CHAINS.prompt_length + CHAINS.answer_length)
LANES, SAMPLES = 3, 8


def decoder(recipe, shape=SHAPE):
    seeds = range(LANES)
    model = Decoder(shape, shape.initial(CHAINS.vocabulary, seeds), LaneNumerics([recipe] * LANES, seeds))
    model.numerics.training, model.numerics.evaluation = False, "quantized"
    return model


def drawn_at(step=0):
    return Draws(seed_keys(range(LANES)), torch.full((), step, dtype=torch.int64))


def problems():
    prompts = CHAINS.prompts(drawn_at(), 0, SAMPLES)
    return prompts, gumbel(drawn_at(), 16, CHAINS.answer_length, SAMPLES, CHAINS.vocabulary)


@torch.no_grad()
def plain_loop(model, prompts, noise):
    """Answers and their log-probabilities, without a cache."""
    tokens, found = prompts, []
    for step in range(CHAINS.answer_length):
        logits = model(tokens)[0][:, :, -1]
        token = (logits + noise[:, step]).argmax(-1, keepdim=True)
        found.append(F.log_softmax(logits, -1).gather(-1, token))
        tokens = torch.cat([tokens, token], -1)
    return tokens[..., prompts.shape[2] :], torch.cat(found, -1)


GROUPED = msgspec.structs.replace(SHAPE, kv_heads=2, qkv_bias=True, out_bias=True, qk_norm=True, tied=True)
"""As in other models: fewer heads of keys, biases, norms of heads, one table of embeddings."""


EXPERTS = msgspec.structs.replace(SHAPE, ffn=32, experts=4, mixture=Mixture(2, 32, capacity=None))


@pytest.mark.parametrize("shape", [SHAPE, GROUPED, EXPERTS], ids=["plain", "grouped", "experts"])
@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_a_cache_changes_no_answer_and_no_probability(name, shape):
    """Nothing here has a scale over more than a row. On the CPUs that were tried the bits are the same; libraries may
    add up products of other sizes in other orders."""
    model, (prompts, noise) = decoder(Recipe.named(name), shape), problems()
    answers, log_p = plain_loop(model, prompts, noise)
    found = sample(CachedDecoder(model, model.numerics, SHAPE.context), prompts, CHAINS.answer_length, noise)
    assert torch.equal(found.answers, answers)
    assert (found.log_p - log_p).abs().max() < 1e-5


def test_a_tensor_scale_is_that_of_what_is_read_at_once():
    """A token is quantized with those of its own position, and not with all before it: the answers differ a little."""
    model, (prompts, noise) = decoder(Recipe.named("nvfp4")), problems()
    answers, log_p = plain_loop(model, prompts, noise)
    found = sample(CachedDecoder(model, model.numerics, SHAPE.context), prompts, CHAINS.answer_length, noise)
    same = (found.answers == answers).cumprod(-1).bool()  # up to the first other token the inputs are the same
    assert same.float().mean() > 0.8
    assert 0 < (found.log_p - log_p)[same].abs().max() < 0.5


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    noise = gumbel(drawn_at(3), 16, 40_000, 4)
    drawn = (logits + noise).argmax(-1)
    for lane in range(LANES):
        shares = torch.bincount(drawn[lane], minlength=4) / drawn.shape[1]
        assert (shares - torch.softmax(logits, 0)).abs().max() < 5 * (0.25 / drawn.shape[1]) ** 0.5


def test_noise_is_that_of_the_lanes_seed_and_step():
    alone = gumbel(Draws(seed_keys([2]), torch.full((), 5)), 16, 3, 2, 4)
    assert torch.equal(alone[0], gumbel(drawn_at(5), 16, 3, 2, 4)[2])
    assert not torch.equal(alone[0], gumbel(drawn_at(6), 16, 3, 2, 4)[2])


def with_rollout(trainer, rollout):
    return Recipe(**{f: getattr(trainer, f) for f in ("fprop", "dgrad", "wgrad")}, training=Training(rollout=rollout))


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["plain", "experts"])
def test_a_rollout_of_its_own_computes_as_a_trainer_with_that_forward_pass(shape):
    """Bit for bit, lane by lane: MXFP4, its weights alone, and BF16 beside each other under a BF16 trainer."""
    rollouts = [ROLLOUT_NAMES["mxfp4"], ROLLOUT_NAMES["mxfp4-w4a16"], None]
    recipes = [with_rollout(Recipe.named("bf16"), rollout) for rollout in rollouts]
    seeds, (prompts, noise) = range(LANES), problems()
    trainer = LaneNumerics(recipes, seeds)
    model = Decoder(shape, shape.initial(CHAINS.vocabulary, seeds), trainer)
    numerics = SamplingNumerics([recipe.sampling() for recipe in trainer.recipes], trainer)
    for layer, place in trainer.places.items():
        numerics.add_layer(layer, place)
    numerics.evaluation = "quantized"
    mixed = sample(CachedDecoder(model, numerics, SHAPE.context), prompts, CHAINS.answer_length, noise)
    for lane, recipe in enumerate(recipes):
        other = decoder(recipe.sampling(), shape)
        alone = sample(CachedDecoder(other, other.numerics, SHAPE.context), prompts, CHAINS.answer_length, noise)
        assert torch.equal(mixed.log_p[lane], alone.log_p[lane])
        assert torch.equal(mixed.answers[lane], alone.answers[lane])
        assert torch.equal(mixed.entropy[lane], alone.entropy[lane])
        if shape.experts:
            assert torch.equal(mixed.routes[lane], alone.routes[lane])
