"""What is learned from a rollout, rebuilt in plain float64 from its tokens, rewards and log-probabilities."""

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import Recipe
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.tasks import Lane, get_task
from fp4dse.tasks.engine import Population

SMOKE = get_task("rl", "smoke")
PROBLEMS, SAMPLES, MINIBATCHES, MODULUS, END = 16, 8, 2, 4, 8
"""Of the preset: digits to 3, then + - * = and the end."""
BOUNDS = [None, None, 1.02, 2.0]
"""Of the weights that correct for the rollout, by lane; the first lane samples by the trainer's own forward pass."""


class Rollout(msgspec.Struct):
    """Tokens are int [L, B, ·], log-probabilities of the answers' tokens float64 [L, B, T]."""

    prompts: np.ndarray
    answers: np.ndarray
    of_rollout: np.ndarray
    of_trainer: np.ndarray


@pytest.fixture(scope="module")
def experience_and_rollout():
    """The third rollout, after four updates, as the engine stores it, and as it was drawn."""
    rollouts = [None, *[ROLLOUT_NAMES["mxfp4"]] * (len(BOUNDS) - 1)]
    training = [Training(rollout=of, tis=bound) for of, bound in zip(rollouts, BOUNDS, strict=True)]
    recipes = [msgspec.structs.replace(Recipe.named("bf16"), training=of) for of in training]
    population = Population(SMOKE, [Lane(recipe, 2e-3, seed=1) for recipe in recipes], "cpu")
    for step in range(2 * MINIBATCHES):
        population.train_step(step)
    experience, seen = population.experience, []
    answer = experience._answers
    experience._answers = lambda *args: seen.append((args[0], answer(*args))) or seen[-1][1]
    population.roll_out(2 * MINIBATCHES)
    [(prompts, drawn)] = seen
    read = torch.cat([prompts, drawn.answers[..., :-1]], dim=-1)
    with torch.no_grad(), population.numerics.temporarily(training=False):
        parts = [population.model(part)[0].double() for part in read.chunk(MINIBATCHES, dim=1)]
    # behind the whole prompt the first token of the answer is told
    logits = torch.cat(parts, dim=1).numpy()[:, :, prompts.shape[-1] - 1 :]
    every = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    answers = drawn.answers.numpy()
    of_trainer = np.take_along_axis(every, answers[..., None], axis=-1)[..., 0]
    return experience, Rollout(prompts.numpy(), answers, drawn.log_p.double().numpy(), of_trainer)


def reward(prompt, answer):
    """1 if what stands before the first end is what the chain makes."""
    value, steps = prompt[0], prompt[1:-1].tolist()
    while steps[0] != END:
        operator, operand, *steps = steps
        value = {4: value + operand, 5: value - operand, 6: value * operand}[operator] % MODULUS
    return float(END in answer[1:] and answer[0] != END and answer[answer.tolist().index(END) - 1] == value)


def is_counted(answers):
    """True up to the first end, which is one of an answer's tokens."""
    return np.array([[END not in answer[:t] for t in range(len(answer))] for answer in answers])


@pytest.mark.heavy
def test_what_is_learned_from_a_rollout_is_what_its_tokens_and_probabilities_make(experience_and_rollout):
    experience, drawn = experience_and_rollout
    target = {name: value.double().numpy() for name, value in experience.target._asdict().items()}
    recorded = {name: value.double().numpy() for name, value in experience.recorded.items()}
    size = PROBLEMS * SAMPLES // MINIBATCHES
    assert np.array_equal(target["tokens"], drawn.answers)
    np.testing.assert_allclose(target["log_old"], drawn.of_trainer, atol=1e-5)
    for lane, bound in enumerate(BOUNDS):
        prompts, answers = drawn.prompts[lane], drawn.answers[lane]
        counted = is_counted(answers)
        rewards = np.array([reward(*of) for of in zip(prompts, answers, strict=True)])
        assert 0.1 < rewards.mean() < 0.9
        assert recorded["reward"][lane] == pytest.approx(rewards.mean(), abs=1e-6)

        for first in range(0, PROBLEMS * SAMPLES, SAMPLES):
            group = slice(first, first + SAMPLES)
            assert (prompts[group] == prompts[first]).all(), "a group answers one problem"
            away = rewards[group] - rewards[group].mean()
            advantage = away / (np.sqrt((away**2).sum() / (SAMPLES - 1)) + 1e-4)
            found = target["advantage"][lane, group]
            np.testing.assert_allclose(found, np.repeat(advantage[:, None], found.shape[1], axis=1), atol=1e-5)

        numbers = [counted[of : of + size].sum() for of in range(0, len(counted), size)]
        assert len(set(numbers)) == MINIBATCHES, "minibatches of as many tokens would not tell"
        shares = np.repeat([counted[:size].size / number for number in numbers], size)
        np.testing.assert_allclose(target["share"][lane], np.where(counted, shares[:, None], 0), rtol=1e-6)

        ratio = np.exp(drawn.of_trainer[lane] - drawn.of_rollout[lane])  # of the trainer to what tokens were drawn from
        np.testing.assert_allclose(target["weight"][lane], 1 if bound is None else np.minimum(ratio, bound), atol=1e-5)
        if bound is not None:
            assert 0.1 < (ratio[counted] < 0.99).mean() < 0.9, "weights on both sides of 1"
            assert (ratio[counted] > BOUNDS[2]).any(), "and some that are bounded"

        # Σ p (q/p - 1 - log q/p) over all tokens is KL(p, q); tokens are draws from p, the rollout's
        kl, reverse = ((r - 1 - np.log(r))[counted].mean() for r in (ratio, 1 / ratio))
        assert recorded["mismatch_kl"][lane] == pytest.approx(kl, rel=1e-3, abs=1e-6)
        if lane:
            assert abs(reverse / kl - 1) > 1e-2, "the other way round would not be told"
