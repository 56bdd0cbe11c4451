"""Effects of treatments of rollouts in the report: those of the view, and nothing where there are none."""

import re

import msgspec
import pytest

from fp4dse.dse import QUANTIZERS, Recipe
from fp4dse.dse.noise import NOISE_NAMES
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.results import open_store
from fp4dse.results.report.findings import COLUMNS, findings
from fp4dse.results.report.rollout_treatments import PANEL

BF16 = Recipe.named("bf16")
ROLLOUT = msgspec.structs.replace(BF16, training=Training(rollout=ROLLOUT_NAMES["mxfp4-rceil"]))
TIS = msgspec.structs.replace(ROLLOUT, training=msgspec.structs.replace(ROLLOUT.training, tis=2.0))


def lane(row, recipe, seed, kl):
    series = {"step": [1.0, 2, 4, 8], "reward": [0.4, 0.5, 0.6, 0.7], "entropy": [0.3, 0.2, 0.2, 0.1]}
    series |= {"mismatch_kl": [kl] * 4} | {f"gradient_error{end}": [0.0] * 4 for end in ("", "/blocks.0", "/blocks.10")}
    of_rl = {"task": "rl", "preset": "small", "gap_unit": "points"}
    return row(recipe, seed, 0.2 + kl * (1 + seed), recorded=series, **of_rl)


@pytest.fixture
def rl(store, row):
    recipes = {BF16: 0.0, ROLLOUT: 0.03, TIS: 0.02}
    store.add([lane(row, r, seed, kl + 0.001 * seed * (kl > 0)) for r, kl in recipes.items() for seed in (0, 1)], "job")
    return store


def test_an_error_of_the_gradient_is_multiplied(store, row):
    """By a quarter in one seed and by a half in the other, whatever it was."""
    quantized = Recipe.uniform(QUANTIZERS["mxfp4-rceil"])
    of_rl = {"task": "rl", "preset": "small", "gap_unit": "points"}
    noisy = msgspec.structs.replace(quantized, training=Training(noise=NOISE_NAMES["weights"]))
    rows = []
    for recipe, factors in ((BF16, (0.0, 0.0)), (quantized, (0.2, 8.0)), (noisy, (0.05, 4.0))):
        for seed, factor in enumerate(factors):
            of = {"step": [1.0, 2, 4, 8], "reward": [0.4, 0.5, 0.6, 0.7], "entropy": [0.3, 0.2, 0.2, 0.1]}
            errors = {"gradient_error": [factor * x for x in (1.0, 10.0, 0.1, 1.0)]}
            rows.append(row(recipe, seed, 0.2 + 0.01 * seed, recorded=of | errors, **of_rl))
    store.add(rows, "job")
    text = re.sub("<[^>]*>", " ", page_of(store))
    assert "×\u00a00.35" in text


def page_of(store):
    return PANEL.html(findings(store.runs(COLUMNS), store))


def test_a_line_is_a_treatment_and_its_numbers_are_the_views(rl):
    page = page_of(rl)
    answer = rl.sql(PANEL.queries[0])
    known = {float(value) for name in ("difference", "low", "high", "seeds", "lr") for value in answer[name].dropna()}
    body = page.partition("</p>")[2].partition("<details")[0]
    assert {float(value) for value in re.findall(r'<data value="(.*?)"', body)} <= known | {0.0}
    text = re.sub("<[^>]*>", " ", body)
    assert "rollout mxfp4-rceil" in text
    assert "tis 2.0" in text
    assert "−0.01 " in text, "what the correction does to KL"
    assert "of block 0" in text
    assert "of block 10" in text
    of = answer.set_index(["treatment", "number"]).loc[("tis 2.0", "mismatch_kl")]
    assert of["difference"] == pytest.approx(-0.01)
    assert "<b>" in body, "the same in both seeds"


def test_it_is_left_out_where_nothing_was_recorded_and_says_so_beside_a_task_with_records(rl, row, tmp_path):
    other = open_store(tmp_path / "other", create=True)
    other.add([row("bf16", 0, 0.5), row("nvfp4", 0, 0.6)], "job")
    assert page_of(other) == ""
    rl.add([row("bf16", 0, 0.5), row("nvfp4", 0, 0.6)], "job-2")
    assert "No two recipes with records make a pair here" in page_of(rl)
