"""A cache of few bits: answers are those of a plain loop whose attention reads keys and values quantized one by one."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.rollout import ROLLOUT_NAMES, Rollout
from fp4dse.dse.training import Training
from fp4dse.kernels import quantize
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.rl.kv_cache import CacheFormats
from fp4dse.tasks.rl.sampling import CachedDecoder, sample
from tests.tasks.rl.test_sampling import CHAINS, LANES, SHAPE, decoder, plain_loop, problems

replace = msgspec.structs.replace
BF16 = Recipe.named("bf16")


def by_definition(x, name):
    """Each row of x [N, n, d], the key or value of one token and head, filled up with zeros to a whole block."""
    q = QUANTIZERS[name]
    short = -x.shape[-1] % (q.block if isinstance(q.block, int) else 1)
    rows = torch.nn.functional.pad(x, (0, short))
    return quantize(rows, q).values[..., : x.shape[-1]]


@pytest.mark.parametrize("name", ["fp8-row", "mxfp8", "mxfp4-rceil", "mxfp4"])
def test_answers_are_those_of_a_loop_without_a_cache(name):
    """Heads are 8 wide. None of these has a scale over more than a token, so that nothing depends on the others."""
    model, (prompts, noise) = decoder(BF16), problems()
    core = model.numerics.attention
    model.numerics.attention = lambda layer, q, k, v, **how: core(
        layer, q, by_definition(k, name), by_definition(v, name), **how
    )
    answers, log_p = plain_loop(model, prompts, noise)
    model.numerics.attention = core
    formats = CacheFormats([QUANTIZERS[name]] * LANES, model.numerics)
    cached = CachedDecoder(model, model.numerics, SHAPE.context, formats)
    found = sample(cached, prompts, CHAINS.answer_length, noise)
    assert torch.equal(found.answers, answers)
    assert (found.log_p - log_p).abs().max() < 1e-5
    plain = sample(CachedDecoder(model, model.numerics, SHAPE.context), prompts, CHAINS.answer_length, noise)
    assert not torch.equal(plain.log_p, found.log_p)


def test_lanes_have_caches_of_their_own():
    model, (prompts, noise) = decoder(BF16), problems()
    names = ["bf16", "nvfp4", "fp8"]

    def answered(formats):
        formats = CacheFormats([QUANTIZERS[name] for name in formats], model.numerics)
        cached = CachedDecoder(model, model.numerics, SHAPE.context, formats)
        return sample(cached, prompts, CHAINS.answer_length, noise)

    mixed = answered(names)
    for lane, name in enumerate(names):
        assert torch.equal(mixed.log_p[lane], answered([name] * LANES).log_p[lane])


def with_cache(cache, name="bf16"):
    rollout = replace(ROLLOUT_NAMES[name], kv_cache=QUANTIZERS[cache])
    return replace(BF16, training=Training(rollout=rollout))


def test_training_has_it_and_bf16_evaluation_does_not():
    task = replace(get_task("rl", "smoke"), steps=2)
    recipes = [BF16, with_cache("mxfp4"), with_cache("fp8-row", "mxfp4-w4a16")]
    lanes = [Lane(recipe, task.lr, 1) for recipe in recipes]
    found = train(task, lanes, record=True).lanes
    assert found[0].recorded["mismatch_kl"][0] == pytest.approx(0, abs=1e-6)
    assert found[1].recorded["mismatch_kl"][0] > 1e-4
    assert found[1].val_loss != found[1].val_loss_bf16
    assert train(task, lanes[1:2], record=True).lanes == [found[1]]


def test_in_a_recipe():
    plain = recipe_to_dict(BF16)
    told = {"training": {"rollout": {"like": "mxfp4-rceil-w4a16", "kv_cache": "fp8-row"}}}
    recipe = recipe_from_dict(plain | told)
    assert recipe.training.rollout == replace(ROLLOUT_NAMES["mxfp4-rceil-w4a16"], kv_cache=QUANTIZERS["fp8-row"])
    assert recipe.columns()["rollout"] == "mxfp4-rceil-w4a16, KV fp8-row"
    assert recipe_from_dict(recipe_to_dict(recipe)) == recipe
    unquantized = replace(ROLLOUT_NAMES["mxfp4"], kv_cache=QUANTIZERS["none"])
    assert unquantized.canonical() == ROLLOUT_NAMES["mxfp4"], "attention multiplies BF16 numbers anyway"
    alone = with_cache("mxfp4")
    assert alone.canonical().training.rollout is not None
    assert alone.config_id != BF16.config_id
    assert not alone.is_baseline
    assert alone.baseline() == BF16.canonical()


MISTAKES = {
    "tile": ("fp8-128x128", r"kv_cache.block: found '128x128'; accepted: blocks along the width of a head"),
    "held": ("fp8-delayed", r"kv_cache: found .*; accepted: quantizers without MS-EDEN"),
    "residual": ({"like": "mxfp4", "outliers": "residual"}, r"kv_cache.outliers: found 'residual'; accepted: none"),
    "name": ("fp9", r"kv_cache: found 'fp9'; accepted: none, bf16"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    cache, message = MISTAKES[name]
    told = {"training": {"rollout": {"x": "bf16", "w": "mxfp4", "kv_cache": cache}}}
    with pytest.raises(ConfigError, match=rf"training.rollout.{message}"):
        recipe_from_dict(recipe_to_dict(BF16) | told)


def test_a_rollout_like_the_trainers_is_refused():
    with pytest.raises(ConfigError, match=r"training.rollout.like: found 'trainer'; accepted: none, bf16"):
        recipe_from_dict(recipe_to_dict(BF16) | {"training": {"rollout": {"like": "trainer"}}})


def test_a_rollout_without_a_cache_of_its_own_is_what_it_was():
    assert Rollout(QUANTIZERS["bf16"], QUANTIZERS["mxfp4"]).canonical() == ROLLOUT_NAMES["mxfp4-w4a16"]
