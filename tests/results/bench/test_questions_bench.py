"""Questions asked of drawn studies: what is taken for the truth is the truth, and what is scored is what is said."""

import numpy as np
import pandas as pd
import pytest

from fp4dse.results.bench.question_scores import scores_of_questions
from fp4dse.results.bench.questions import NEGLIGIBLE, Answered, answered_questions, asked_of, true_effects
from fp4dse.results.bench.statistics import TARGETS, summed
from fp4dse.results.bench.studies import SIZES, WORLDS, drawn
from fp4dse.results.stats.paired import add_gap, rows_at_best_lr
from fp4dse.results.stats.techniques.answers import effects_over

SIZE = SIZES["48"]


def rows_of(studies, more=0):
    runs = [study.runs(f"{i:06}", more) for i, study in enumerate(studies)]
    return rows_at_best_lr(add_gap(pd.concat(runs, ignore_index=True)))


def test_a_pair_of_the_questions_differs_in_one_knob_by_the_level_that_its_effect_names():
    asked = asked_of(SIZE)
    levels = {f"{i:016x}": codes for i, codes in enumerate(np.ndindex(3, 2, 2, 2, 2, 3))}
    for (question, effect), pairs in asked.pairs.items():
        knob, level, *_ = effect.split(" ")
        axis = SIZE.larger.index(knob)
        assert len(pairs) == (1 if question == "one pair" else 48 if axis == 0 else 48 // (3 if axis == 5 else 2))
        for before, after in pairs:
            changed = [i for i in range(6) if levels[before][i] != levels[after][i]]
            assert (changed, levels[before][axis], levels[after][axis]) == ([axis], 0, int(level))
    assert {effect.name for one in asked.questions for effect in one.effects} == {name for _, name in asked.pairs}


@pytest.mark.parametrize("world", ["rough", "holes", "shared"])
def test_the_truth_of_an_effect_is_what_many_seeds_say_of_its_pairs(world):
    study, pairs = drawn(SIZE, world, np.random.default_rng(4)), asked_of(SIZE).pairs
    rows = rows_of([study], more=300)
    lines = effects_over(rows, pairs, NEGLIGIBLE).query("evaluation == 'quantized'")
    truth = true_effects(study, rows, pairs)
    assert [*truth] == [*zip(lines["question"], lines["effect"], strict=True)]
    assert lines["difference"].to_numpy() == pytest.approx([*truth.values()], abs=0.006)
    assert np.ptp([*truth.values()]) > 0.05


def test_later_tasks_leave_a_study_as_it_is_and_half_of_them_have_its_truth():
    studies, twins = ([drawn(SIZE, "weak", np.random.default_rng(i)) for i in range(12)] for _ in range(2))
    found = answered_questions(studies, rows_of(studies))
    for study, twin in zip(studies, twins, strict=True):
        pd.testing.assert_frame_equal(study.runs("a"), twin.runs("a"))
    same = [(one.answers["truth"] - one.answers["truth_later"]).abs().max() < 1e-9 for one in found]
    assert 1 <= sum(same) <= 7


def effect(question, truth, low, high, tells, later=False):
    """A line whose own interval is half as wide."""
    line = {"task": "b" if later else "a", "question": question, "truth": truth, "low": low, "high": high}
    line |= {"evaluation": "quantized", "difference": (low + high) / 2, "tells": tells, "shares": question == "B"}
    own_low, own_high = (0.75 * one + 0.25 * other for one, other in ((low, high), (high, low)))
    repeats = "harms" if own_low > 0 else "helps" if own_high < 0 else "open"
    return line | {"own_low": own_low, "own_high": own_high, "repeats": repeats}


def answer(claim, tells, truths, said):
    line = {"evaluation": "quantized", "claim": claim, "tells": tells, "answer": said}
    return line | dict(zip(("truth", "truth_later"), truths, strict=True))


def test_scores_count_what_is_covered_told_and_wrong():
    lines = [
        effect("A", 0.00, -0.01, 0.03, "open"),
        effect("A", 0.05, 0.01, 0.03, "harms"),  # not covered
        effect("B", 0.00, 0.01, 0.05, "harms"),  # told, and nothing there
        effect("one pair", -0.019, -0.02, 0.02, "open"),  # covered by both effects' intervals, not by its own
        effect("B", 0.00, -0.004, 0.004, "negligible", later=True),
        effect("C", 0.01, -0.004, 0.004, "negligible", later=True),  # wrong, and not covered
        effect("C", 0.00, np.nan, np.nan, "open", later=True),  # no interval: of nothing
    ]
    answers = [
        answer("helps", "helps", (-0.02, -0.01), "confirmed"),
        answer("helps", "helps", (-0.02, 0.0), "confirmed"),  # wrong: the later one has none
        answer("differs", "harms", (-0.02, -0.01), "confirmed"),  # wrong: the other side was told
        answer("harms", "helps", (0.02, 0.01), "refuted"),  # wrong
        answer("harms", "negligible", (0.5 * NEGLIGIBLE, 0.01), "refuted"),
        answer("differs", "open", (0.02, 0.01), "not settled"),
        answer("helps", "helps", (-0.02, np.nan), "not settled"),
    ]
    scores = scores_of_questions(Answered(pd.DataFrame(lines), pd.DataFrame(answers)))
    found = {what: (total, count) for what, total, count in scores}
    bias = [0.01, -0.03, 0.03, 0.019, 0, -0.01]
    assert found.pop("100 · (a question's effect - truth)") == (pytest.approx(100 * sum(bias)), 6)
    assert found == {
        "interval of a question's effect covers": (2, 6),
        "interval of a question's effect of one pair covers": (0, 1),
        "interval of a question's effect that shares noise within a seed covers": (1, 2),
        "all intervals of a question cover": (2, 5),
        "null effects of questions told by their own intervals": (1, 3),
        "questions with a null effect told": (1, 3),
        "`negligible`: wrong": (1, 2),
        "`confirmed`: wrong": (2, 3),
        "`refuted`: wrong": (1, 2),
        "claims that are true of both tasks: confirmed": (1, 4),
        "answers: confirmed or refuted": (5, 7),
    }


@pytest.fixture(scope="module")
def figures():
    """Of four studies of each world."""
    studies = [drawn(SIZE, WORLDS[i % len(WORLDS)], np.random.default_rng([8, i])) for i in range(28)]
    found = answered_questions(studies, rows_of(studies))
    return {line["what"]: line for line in summed("48 × 3", [[*scores_of_questions(one)] for one in found])}


def test_intervals_of_questions_cover_and_answers_are_seldom_wrong(figures):
    """Over all worlds, by three errors of the simulation."""
    for what in ("interval of a question's effect covers", "all intervals of a question cover"):
        line = figures[what]
        assert line["error"] < 0.02
        assert line["value"] == pytest.approx(0.95, abs=0.02 + 3 * line["error"])
    for what in ("questions with a null effect told", "`confirmed`: wrong", "`refuted`: wrong", "`negligible`: wrong"):
        line = figures[what]
        assert TARGETS[what] == "≤ 0.05"
        assert line["value"] <= 0.05 + 3 * line["error"]
    assert figures["claims that are true of both tasks: confirmed"]["value"] > 0.4
