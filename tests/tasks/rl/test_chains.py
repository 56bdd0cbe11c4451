"""Problems can be checked exactly: against plain Python, for every kind of answer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.tasks.draws import Draws, seed_keys
from fp4dse.tasks.rl.base import Lessons, flawed_facts, worked_answers
from fp4dse.tasks.rl.chains import Chains

NONE_WRONG = Lessons(steps=1, batch=1, lr=1e-3, flawed=0.0, wrong=1.0, examples=1)


def at(seeds, step=0):
    return Draws(seed_keys(seeds), torch.full((), step, dtype=torch.int64))


def text(chains, tokens):
    names = [*map(str, range(chains.modulus)), "+", "-", "*", "=", "."]
    return " ".join(names[token] for token in tokens)


def value(chains, prompt):
    """By Python's own arithmetic, of the text."""
    words = text(chains, prompt).split(" ")
    total = int(words[0])
    for operator, operand in zip(words[1:-1:2], words[2:-1:2], strict=False):
        total = total if operator == "." else eval(f"{total} {operator} {operand}") % chains.modulus
    return total


@given(modulus=st.integers(4, 11), least=st.integers(1, 4), more=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_prompts_are_chains_of_the_length_that_was_asked_for(modulus, least, more, seed):
    chains = Chains(least, least + more, modulus)
    prompts = chains.prompts(at([seed]), 0, 5)
    assert prompts.shape == (1, 5, chains.prompt_length)
    results = chains.results(chains.answers(prompts))
    for prompt, [found] in zip(prompts[0].tolist(), results[0].tolist(), strict=True):
        words = text(chains, prompt).split(" ")
        assert least <= sum(word in "+-*" for word in words) <= chains.most
        assert words[-3:] == [".", ".", "="]
        assert found == value(chains, prompt)


def test_a_problem_is_a_function_of_seed_and_step_alone():
    chains = Chains(2, 4)
    together = chains.prompts(at([3, 5], step=7), 0, 6)
    assert torch.equal(chains.prompts(at([5], step=7), 0, 6)[0], together[1])
    assert not torch.equal(chains.prompts(at([5], step=8), 0, 6)[0], together[1])
    assert [text(chains, prompt) for prompt in together[0, :2].tolist()] == PINNED


PINNED = ["7 * 3 - 3 + 7 . . . . =", "5 + 5 - 8 . . . . . . ="]
"""On every machine."""


@pytest.mark.parametrize("chains", [Chains(1, 3, 4), Chains(2, 5)])
def test_worked_examples_are_right_and_one_wrong_step_makes_them_wrong(chains):
    prompts = chains.prompts(at([0]), 0, 200)
    answers = worked_answers(chains, NONE_WRONG, seed_keys([0]), prompts, at([0]))
    assert chains.is_right(prompts, answers).all()
    assert bool((chains.is_part(answers).sum(-1) == 2 * steps_of(chains, prompts) + 1).all())
    tail = torch.where(chains.is_part(answers), answers, 3)
    assert chains.is_right(prompts, tail).all(), "tokens behind the end count for nothing"
    last = chains.is_part(answers).sum(-1, keepdim=True) - 2
    for away in range(1, chains.modulus):
        other = torch.remainder(answers.gather(-1, last) + away, chains.modulus)
        assert not chains.is_right(prompts, answers.scatter(-1, last, other)).any()
    endless = torch.where(answers == chains.end, 0, answers)
    assert not chains.is_right(prompts, endless).any()


def steps_of(chains, prompts):
    return (chains.parts(prompts)[1] != chains.end).sum(-1)


def test_an_error_never_heals_by_itself():
    """Every step maps the numbers one to one."""
    chains = Chains(1, 1)
    numbers = torch.arange(chains.modulus)
    for operator in range(3):
        for operand in chains.multipliers if operator == 2 else range(1, chains.modulus):
            after = chains.apply(numbers, torch.tensor(operator), torch.tensor(operand))
            assert sorted(after.tolist()) == numbers.tolist()


@given(modulus=st.integers(4, 11), share=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_of_each_operator_the_same_share_of_facts_is_flawed(modulus, share, seed):
    """Counted in Python over the facts that problems have; all others are not."""
    chains = Chains(1, 1, modulus)
    flawed = flawed_facts(chains, share, seed_keys([seed])).view(3, modulus, modulus).tolist()
    for operator in range(3):
        operands = chains.multipliers if operator == 2 else range(1, modulus)
        found = sum(flawed[operator][number][operand] for number in range(modulus) for operand in operands)
        assert abs(found - share * modulus * len(operands)) <= 0.5 + 1e-4
        assert found == sum(map(sum, flawed[operator]))


def test_flawed_facts_are_the_seeds_own_and_wrong_as_often_as_asked_for():
    chains, lessons = Chains(1, 1), Lessons(1, 1, 1e-3, flawed=0.5, wrong=0.5, examples=1)
    seeds, draws = seed_keys([0, 1]), at([0, 0])
    prompts = chains.prompts(draws, 0, 6000)
    answers = worked_answers(chains, lessons, seeds, prompts, draws)
    wrong = ~chains.is_right(prompts, answers)
    assert abs(wrong.float().mean().item() - 0.25) < 0.03  # half of each operator's facts, half of the times
    facts = [
        {tuple(p[:3]) for p, is_wrong in zip(prompts[i].tolist(), wrong[i].tolist(), strict=True) if is_wrong}
        for i in (0, 1)
    ]
    assert facts[0] != facts[1]
