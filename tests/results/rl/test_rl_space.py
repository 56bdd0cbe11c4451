"""What the page of reinforcement learning says of the whole space `rl` is what the store has."""

import re

import numpy as np
import pytest
from scipy.stats import nct
from scipy.stats import t as student

from fp4dse.results import open_store
from fp4dse.results.stats.estimates.intervals import holm
from fp4dse.sweeps.arguments import find_space
from tests.results.rl.rl_page import DOCS, EQUAL, IN_ROLLOUTS, section, short, signed, table, told
from tests.results.rl.rl_space import BASELINE, CELLS, QUESTIONS, ROLLOUTS, averaged, effect, label

PRESET = "walks-small"
TITLE = "Which recipes of the space `rl` differ from BF16?"


@pytest.fixture
def solved(eight):
    return eight(PRESET)


@pytest.fixture
def in_bf16(eight):
    return eight(PRESET, "val_loss_bf16")


def told_from(deviation, n=8):
    """The difference that n pairs of this deviation tell from none, by a t-test at 5 %, with a chance of 80 %."""
    sizes, most = np.arange(0.01, 20, 0.01), student.ppf(0.975, n - 1)
    at = sizes / deviation * n**0.5
    return sizes[nct.sf(most, n - 1, at) + nct.cdf(-most, n - 1, at) >= 0.8][0]


def ratio(divergence, of):
    """Of the KL of the first recipes to that of the second, with its limits, as the page has it."""
    return "×{:.2f} ({:.2f} to {:.2f})".format(*np.exp(effect(divergence.loc[PRESET], of)[:3]))


def test_the_space_was_trained_whole(space_store):
    runs = space_store.runs()
    own = runs[runs["preset"].eq(PRESET)]
    assert set(own["lr"]) == {EQUAL}
    ids = own.drop_duplicates("config_id").set_index("config_id")["recipe_label"]
    of_space = [recipe.config_id for recipe in find_space("rl").recipes()]
    assert set(ids[of_space]) == {label(*cell) for cell in CELLS if cell != BASELINE}


def test_the_table_of_the_space_is_what_the_store_has(page, solved, in_bf16, divergence):
    rows = table(page, "| trainer | rollouts | TIS |")
    cells = [(row[0], row[1], row[2] == "2") for row in rows]
    assert sorted(cells) == sorted(cell for cell in CELLS if cell != BASELINE)
    found = [told(solved[label(*cell)] - solved["bf16"]) for cell in cells]
    adjusted = holm([of[3] for of in found])
    assert adjusted.min() > 0.05, "none is told with all in mind"
    for row, cell, of, all_14 in zip(rows, cells, found, adjusted, strict=True):
        name = label(*cell)
        assert row[3:5] == [signed(*of), f"{short(of[3])}, {short(all_14)}"], cell
        assert row[5] == signed(*told(in_bf16[name] - in_bf16["bf16"])), cell
        kl = 1e4 * np.exp(divergence.loc[PRESET, name].mean())
        assert row[6] == ("0" if np.isnan(kl) else f"{kl:.1f}"), cell
    assert f"BF16 has {100 + solved['bf16'].mean():.1f} %" in section(page, TITLE)


def test_the_questions_of_the_space_are_answered_by_the_store(page, solved, in_bf16):
    rows = table(page, "| what | pairs | points, 95 % |")
    found = [effect(solved, of) for of in QUESTIONS.values()]
    adjusted = holm([of[3] for of in found])
    for row, (what, of), line, all_seven in zip(rows, QUESTIONS.items(), found, adjusted, strict=True):
        assert row[:2] == [what, str(len(of))]
        assert row[2:4] == [signed(*line), f"{short(line[3])}, {short(all_seven)}"], what
        assert row[4] == signed(*effect(in_bf16, of)), what
        assert float(row[5]) == round(told_from(averaged(solved, of).std()), 1), what
    against_bf16 = [what.startswith(("QAT against", "MXFP4 trainer against BF16")) for what in QUESTIONS]
    assert (adjusted < 0.05).tolist() == against_bf16
    also = holm([effect(in_bf16, of)[3] for of in QUESTIONS.values()])
    assert (also < 0.05).tolist() == against_bf16, "evaluated in BF16, too"
    least, most = min(found, key=lambda of: of[3]), found[5]
    said = f"(QAT) costs {-least[0]:.1f} points and one in MXFP4 {-most[0]:.1f}, too close to separate"
    assert said in section(page, TITLE)
    assert "(Holm's p {} and {})".format(*map(short, also[4:6])) in section(page, TITLE)
    at_the_top = section(page, "What was found")
    said = "(QAT) costs [{:.2f} ({:.2f} to {:.2f})](#which-recipes-of-the-space-rl-differ-from-bf16) and in the whole "
    said += "trainer {:.2f} ({:.2f} to {:.2f}), both significant after correction ({} and {};"
    limits = [-x for of in (least, most) for x in (of[0], of[2], of[1])]
    assert said.format(*limits, *map(short, adjusted[4:6])) in at_the_top
    mean, low, high, p = found[0]
    assert f"{mean:+.2f} ({low:.2f} to {high:+.2f}; 8 seeds; p = {short(p)})" in at_the_top


def test_what_quantized_trainers_cost_hangs_on_no_single_seed(page, solved):
    trainers = [averaged(solved, QUESTIONS[what]) for what in list(QUESTIONS)[4:6]]
    assert [(of < 0).sum() for of in trainers] == [7, 7]
    most = max(told(of.drop(seed))[3] for of in trainers for seed in of.index)
    text = section(page, TITLE)
    assert "each in seven of the eight seeds, and each is significant alone without any one of them" in text
    assert f"(p {short(most)} at most)" in text


def test_every_query_of_the_smaller_stores_has_an_answer(page):
    asked = re.findall(r'fp4dse query --store docs/study/rl-(\w+)-store "(.*)"', page)
    assert {name for name, _ in asked} == {"arms", "evaluated", "space"}
    for name, query in asked:
        assert len(open_store(DOCS / "study" / f"rl-{name}-store").sql(query)), query


def test_what_eight_seeds_can_tell(page, solved):
    text = section(page, TITLE)
    spread = [(solved[label(*cell)] - solved["bf16"]).std() for cell in CELLS if cell != BASELINE]
    ends = min(spread), max(spread)
    said = "pairs deviate by {:.1f} to {:.1f} points, which takes a difference of {:.1f} to {:.1f} points"
    assert said.format(*ends, *map(told_from, ends)) in text
    of_means = [told_from(averaged(solved, of).std()) for of in QUESTIONS.values()]
    assert f"means over pairs take {min(of_means):.1f} to {max(of_means):.1f}" in text
    mean, low, high, _ = told(solved[IN_ROLLOUTS] - solved["bf16"])
    assert f"have {mean:.2f} here ({low:.2f} to {high:+.2f})" in text
    runs = open_store(DOCS / "study" / "rl-arms-store").runs()
    others = -100 * runs.pivot(index="seed", columns="recipe_label", values="val_loss")
    mean, low, high, _ = told(others[IN_ROLLOUTS] - others["bf16"])
    said = f"with [{len(others)} other seeds](#rollouts-or-trainer) {mean:.2f} ({low:.2f} to {high:.2f})."
    assert said in text
    half = max(abs(x) for x in effect(solved, QUESTIONS["MXFP4 trainer against QAT"])[1:3])
    assert f"and {half - 0.05:.1f} points either way are not excluded" in text


def test_what_correction_and_formats_of_rollouts_do(page, solved, divergence):
    text, of = section(page, TITLE), QUESTIONS["TIS 2 against none"]
    mean = effect(solved, of)[0]
    assert f"{mean:+.2f} points over six pairs" in text
    each = [effect(solved, [pair]) for pair in of]
    adjusted = holm([line[3] for line in each])
    best = int(np.argmin([line[3] for line in each]))
    assert of[best][1] == label("QAT", "W4A16", False)
    mean, low, high, p = each[best]
    assert f"has {mean:+.2f} ({low:+.2f} to {high:+.2f}, p = {short(p)}; of six {short(adjusted[best])})" in text
    assert f"Nor does it lower KL: {ratio(divergence, of)}" in text
    under_bf16 = [(label("BF16", "W4A16", tis), label("BF16", "W4A4", tis)) for tis in (False, True)]
    assert f"W4A16 has less KL under a BF16 trainer, {ratio(divergence, under_bf16)}, over two pairs" in text
    for trainer in ("QAT", "MXFP4"):
        means = {name: solved[label(trainer, name, False)].mean() for name in ROLLOUTS}
        assert min(means, key=means.get) == "BF16"


def test_three_lanes_of_another_card_are_the_same_to_the_bit(page, space_store, store):
    own, other = (of.runs(["config_id", "lr", "seed", "preset", "val_loss"]) for of in (space_store, store))
    both = own.merge(other, on=["config_id", "lr", "seed", "preset"], suffixes=("", "_other"))
    assert len(both) == 3
    assert "and three of BF16 of the space `rl`" in section(page, "What was found")
    assert both["val_loss"].eq(both["val_loss_other"]).all()


def test_what_a_trainer_costs_hangs_on_the_rollouts(page, solved):
    rows = table(page, "| rollouts | QAT less a BF16 trainer |")
    cells = [("BF16", False), ("W4A16", False), ("W4A16", True), ("W4A4", False)]
    apart = {}
    for row, (rollouts, tis) in zip(rows, cells, strict=True):
        assert row[0] == rollouts + ", TIS" * tis
        for written, trainer in zip(row[1:], ("QAT", "MXFP4"), strict=True):
            found = told(solved[label(trainer, rollouts, tis)] - solved[label("BF16", rollouts, tis)])
            assert written == signed(*found)
            apart[trainer, rollouts, tis] = -found[0], -found[2], -found[1]
    text = section(page, "What was found")
    for trainer in ("QAT", "MXFP4"):
        mean, low, high = apart[trainer, "W4A4", False]
        assert f"{mean:.2f} ({low:.2f} to {high:+.2f})" in text
