"""Each kind of problems means what it writes, against plain Python on the text; and how hard presets are."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4dse.dse import Recipe
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.draws import Draws, seed_keys
from fp4dse.tasks.rl.base import Lessons, flawed_facts, lessons_task, worked_answers
from fp4dse.tasks.rl.carries import Carries
from fp4dse.tasks.rl.chains import Chains
from fp4dse.tasks.rl.edits import Edits
from fp4dse.tasks.rl.presets import _PRESETS, PRESETS
from fp4dse.tasks.rl.problems import EXAMPLES, Flaws
from fp4dse.tasks.rl.walks import Walks
from tests.each import each

replace = msgspec.structs.replace


def at(seeds, step=0):
    return Draws(seed_keys(seeds), torch.full((), step, dtype=torch.int64))


def words(kind, tokens):
    """The tokens as the modules' first lines write them."""
    if isinstance(kind, Walks):
        nodes = range(kind.nodes)
        names = [*map(str, nodes), *(f"{a}>{b}" for a in nodes for b in nodes), ">"]
    elif isinstance(kind, Edits):
        names = [
            *"abcdefghijklmnopqrstuvwxyz"[: kind.symbols],
            *(f"{d:+}" for d in range(1 - kind.length, kind.length)),
        ]
    elif isinstance(kind, Carries):
        names = [*map(str, range(kind.base)), "+", "'"]
    else:
        names = [*map(str, range(kind.modulus)), *"+-*"]
    names += ["=", "."]
    return [names[token] for token in tokens]


def walked(kind, before, start):
    edges = dict(word.split(">") for word in before[: kind.nodes])
    assert sorted(edges, key=int) == sorted(edges.values(), key=int) == list(map(str, range(kind.nodes)))
    signs, node, answer = before[kind.nodes :], start[0], []
    for _ in range(signs.count(">")):
        node = edges[node]
        answer.append(node)
    assert len({start[0], *answer}) == len(answer) + 1, "no node comes twice"
    return len(answer), answer


def edited(kind, before, start):
    steps, now, answer = len(before[: before.index(".")]) // kind.length, list(start), []
    for step in range(steps):
        moves = [int(word) for word in before[step * kind.length : (step + 1) * kind.length]]
        origins = [place + move for place, move in enumerate(moves)]
        assert sorted(origins) == list(range(kind.length)) != origins, "an edit moves symbols, and loses none"
        now = [now[origin] for origin in origins]
        answer += now
    return steps, answer


def added(kind, before, start):
    """With Python's own numbers."""
    used, answer, d = before[: before.index(".")], [], kind.digits
    number = int("".join(reversed(start[::2])), kind.base)
    for n in range(len(used) // (2 * d)):
        pairs = used[2 * d * n : 2 * d * (n + 1)]
        assert pairs[::2] == ["+", *["'"] * (d - 1)]
        other = int("".join(reversed(pairs[1::2])), kind.base)
        for place in range(1, d + 1):
            low = number % kind.base**place + other % kind.base**place
            answer += [str(low // kind.base ** (place - 1) % kind.base), str(low // kind.base**place)]
        number = (number + other) % kind.base**d
    return len(used) // 2, answer


BY_HAND = {Walks: walked, Edits: edited, Carries: added}
KINDS = st.one_of(
    st.builds(lambda least, more, rest: Walks(least, least + more, least + more + rest), *[st.integers(1, 4)] * 3),
    st.builds(
        lambda least, more, *of: Edits(least, least + more, *of),
        *[st.integers(1, 4)] * 2,
        st.integers(3, 5),
        st.integers(2, 9),
    ),
    st.builds(
        lambda least, more, d, base: Carries(least * d, (least + more) * d, d, base),
        *[st.integers(1, 3)] * 3,
        st.integers(2, 10),
    ),
)


@settings(max_examples=40)
@given(kind=KINDS, seed=st.integers(0, 2**31))
def test_prompts_say_what_answers_do(kind, seed):
    prompts = kind.prompts(at([seed]), 0, 4)
    answers = kind.answers(prompts)
    assert prompts.shape == (1, 4, kind.prompt_length)
    assert answers.shape == (1, 4, kind.answer_length)
    assert prompts.max() <= kind.end < kind.vocabulary
    for prompt, answer in zip(prompts[0].tolist(), answers[0].tolist(), strict=True):
        asked, found = words(kind, prompt), words(kind, answer)
        equals = asked.index("=")
        steps, right = BY_HAND[type(kind)](kind, asked[:equals], asked[equals + 1 :])
        assert kind.least <= steps <= kind.most
        assert found == right + ["."] * (kind.answer_length - len(right))


SHORT = [Chains(2, 4), Walks(2, 4, 6), Edits(2, 4, 3, 6), Carries(2, 4, 2)]


@each("kind", SHORT)
def test_a_problem_is_a_function_of_seed_and_step_alone(kind):
    together = kind.prompts(at([3, 5], step=7), 0, 6)
    assert torch.equal(kind.prompts(at([5], step=7), 0, 6)[0], together[1])
    assert not torch.equal(kind.prompts(at([5], step=8), 0, 6)[0], together[1])
    assert " ".join(words(kind, together[0, 0].tolist())) == PINNED[type(kind)]


PINNED = {
    Chains: "7 * 3 - 3 + 7 . . . . =",
    Walks: "0>3 1>0 2>4 3>2 4>5 5>1 > > > . . = 4",
    Edits: "+2 -1 -1 +1 +1 -2 +1 -1 +0 . . . . = e d f",
    Carries: "+ 6 ' 4 + 0 ' 9 . = 7 0 5 0",
}
"""On every machine."""


@each("kind", SHORT)
def test_the_result_has_to_be_right_and_nothing_else(kind):
    prompts = kind.prompts(at([0]), 0, 200)
    answers = kind.answers(prompts)
    assert kind.is_right(prompts, answers).all()
    part = kind.is_part(answers)
    assert kind.is_right(prompts, torch.where(part, answers, 0)).all(), "tokens behind the end count for nothing"
    assert not kind.is_right(prompts, torch.where(answers == kind.end, 0, answers)).any(), "an end has to be there"
    assert not kind.is_right(prompts, torch.full_like(answers, kind.end)).any()
    end = part.sum(-1, keepdim=True) - 1
    place = torch.arange(kind.answer_length)
    for back in range(1, end.min() + 1):
        other = torch.where(place == end - back, (answers + 1) % kind.end, answers)
        assert (kind.is_right(prompts, other) == (back > kind.result_length)).all()


@each("kind", SHORT)
def test_an_error_never_heals_by_itself(kind):
    """An answer that gets its first use of a fact wrong, and no other, is never right."""
    prompts, sound = kind.prompts(at([0]), 0, 200), kind.answers(kind.prompts(at([0]), 0, 200))
    facts = torch.tensor(kind.facts()).numel()
    for away in range(1, kind.outcomes):
        errs = torch.zeros(1, 200, kind.uses, dtype=torch.bool)
        errs[..., 0] = True
        wrong = kind.answers(prompts, Flaws(torch.full((1, facts), away), errs))
        assert not kind.is_right(prompts, wrong).any()
        assert torch.equal(kind.is_part(wrong), kind.is_part(sound))


@each("kind", SHORT)
def test_flawed_facts_are_those_that_problems_use(kind):
    """With all of them flawed every use is an error; and the numbers of facts are those of the groups."""
    keys, used = seed_keys([0, 1]), torch.tensor(kind.facts())
    everything = Lessons(1, 1, 1e-3, flawed=1.0, wrong=1.0, examples=1)
    assert torch.equal(flawed_facts(kind, 1.0, keys), used.flatten().expand(2, -1))
    prompts = kind.prompts(at([0, 1]), 0, 100)
    answers = worked_answers(kind, everything, keys, prompts, at([0, 1]))
    first = (answers != kind.answers(prompts)).to(torch.int64).cumsum(-1)
    assert (first.amax(-1) > 0).all()
    half = flawed_facts(kind, 0.5, keys)
    assert not torch.equal(half[0], half[1]), "they are the seed's own"
    for of in half.view(2, *used.shape):
        assert ((of & used).sum(1) - used.sum(1) / 2).abs().max() <= 0.5
        assert not (of & ~used).any()


def test_kinds_of_equal_numbers_have_tasks_of_their_own():
    """Chains were there first: what identifies their rows says nothing of a kind."""
    found = [msgspec.json.encode(kind) for kind in (Chains(2, 4, 9), Walks(2, 4, 9))]
    assert found == [b'{"least":2,"most":4,"modulus":9}', b'{"type":"walks","least":2,"most":4,"nodes":9}']


def test_stored_rows_of_chains_stay_comparable():
    """Of each preset: what identifies its data, and its base policy."""
    for name, digests in DIGESTS.items():
        of = _PRESETS[name]
        assert (PRESETS[name].digest, lessons_task(of.plan.problems, of.shape, of.lessons).digest) == digests, name


DIGESTS = {
    "smoke": ("eb15e9dd32c41e45", "769d811d63565864"),
    "narrow": ("d0745c364c932bcf", "78b270ffef96a619"),
    "small": ("32608c8785d50c6f", "e68566f1afa19557"),
    "clip-higher-small": ("2758130d550bbe91", "e68566f1afa19557"),
    "small-500": ("593665fab9afa380", "e68566f1afa19557"),
    "medium": ("c835f64f0ad9f372", "2c85e9df24a2e670"),
    "moe-smoke": ("655abf78cab5a7f9", "e8a1f078cce869f7"),
    "moe-small": ("337ac98294d3bc77", "04824394d78f8a30"),
    "dapo-small": ("2a862bf310d2ec2e", "e68566f1afa19557"),
}


def expected_success(problems, lessons, seeds, count=1000):
    """The success of policies that have learned the examples of `lessons` perfectly, float32 [2, S]: with answers drawn
    from them, and with the most probable tokens."""
    keys = seed_keys(seeds)
    draws = Draws(keys, torch.full((), EXAMPLES, dtype=torch.int64))
    prompts = problems.prompts(draws, 0, count)
    always = replace(lessons, wrong=1.0 if lessons.wrong > 0.5 else 0.0)
    answers = [worked_answers(problems, of, keys, prompts, draws) for of in (lessons, always)]
    return torch.stack([problems.is_right(prompts, of).to(torch.float32).mean(dim=1) for of in answers])


@each("name", ["small", "walks-small", "edits-small", "carries-small"])
def test_the_success_of_small_presets_is_known_before_they_are_trained(name):
    """Some 30 to 50 %, of drawn answers and of the most probable, with any seed."""
    of = _PRESETS[name]
    drawn, likely = expected_success(of.plan.problems, of.lessons, range(8))
    assert 0.35 < drawn.min() < drawn.max() < 0.52
    assert 0.26 < likely.min() < likely.max() < 0.42


@pytest.mark.heavy
@pytest.mark.parametrize(
    "preset", ["walks-smoke", *(pytest.param(f"{of}-smoke", marks=pytest.mark.slow) for of in ("edits", "carries"))]
)
def test_rewards_rise_from_a_start_that_leaves_room(preset):
    task = get_task("rl", preset)
    before = train(replace(task, steps=1), [Lane(Recipe.named("bf16"), 1e-9, 0)]).lanes[0]
    after = train(task, [Lane(Recipe.named("bf16"), task.lr, 0)]).lanes[0]
    assert 0.3 < before.metrics["accuracy"] < 0.65
    assert after.metrics["accuracy"] > before.metrics["accuracy"] + 0.2
