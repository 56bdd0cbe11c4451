"""The training benchmark: its baseline does what it stands for, and what cannot be measured says why."""

import pytest
import torch

from fp4dse.dse import SLOTS, ConfigError, Recipe
from fp4dse.kernels import dispatch, quantize
from fp4dse.tasks import get_task
from fp4dse.tasks.bench import baseline, speed
from fp4dse.tasks.bench.speed import Measure, Row, with_amax


def test_the_baseline_quantizes_as_the_engine_does():
    x = torch.randn(64, 96)
    ours = quantize(x, Recipe.named("nvfp4").slot("fprop.x")).values
    theirs = baseline.nvfp4(x)
    differs = ours != theirs
    assert (ours - theirs).abs()[differs].sum() < 1e-5 * ours.abs().sum()


@pytest.mark.parametrize("name", ["regression", "vision"])
def test_the_baseline_trains_every_task(name):
    assert baseline.seconds_per_step(get_task(name, "smoke"), "cpu", steps=1, warm_up=1, rounds=1) > 0


def test_recipes_change_what_their_tensor_scales_follow_alone():
    recipe = Recipe.named("nvidia-nvfp4")
    held = with_amax(recipe, "held")
    assert all(held.slot(slot).tensor_scale.amax == "held" for slot in SLOTS)
    assert with_amax(held, "current") == recipe
    assert held.rotation("wgrad") == recipe.rotation("wgrad")


def test_a_task_that_is_not_there_is_skipped_with_the_reason():
    row = speed._row(Measure("what", "×", "≤ 2", lambda: get_task("poetry", "small").lr))
    assert row.value is None
    assert row.reached is None
    assert "found 'poetry'" in row.note


def test_the_row_of_the_attention_core_says_which_path_was_taken(monkeypatch):
    monkeypatch.setattr(speed, "step_us", lambda *_: 1.0)
    rows = [measure.value() for measure in speed._by_layer("cpu") if "a core in" in measure.what]
    assert len(rows) == 2
    assert all(value == 1.0 for value, _ in rows)
    assert all(
        note.startswith("attention_core: computed by torch (Triton kernels not taken on cpu") for _, note in rows
    )

    def refused(*_):
        dispatch._REFUSED["attention_core"] = "q: found none; accepted: some"
        return 1.0

    monkeypatch.setattr(speed, "step_us", refused)
    (_, note), _ = (m.value() for m in speed._by_layer("cpu") if "a core in" in m.what)
    assert note == "attention_core: computed by torch (q: found none; accepted: some)"
    dispatch.refusals()


def test_rows_come_as_they_are_measured_and_only_those_that_are_asked_for(monkeypatch):
    measured = []

    def measure(name):
        return Measure(name, "s", "", lambda: measured.append(name) or 1.0)

    monkeypatch.setattr(speed, "_on_cpu", lambda: [measure(name) for name in ("wide MLP", "decoder", "narrow MLP")])
    rows = speed.bench("cpu", ["mlp"])
    assert measured == []
    assert next(rows).what == "wide MLP"
    assert measured == ["wide MLP"]
    assert [row.what for row in rows] == ["narrow MLP"]
    with pytest.raises(ConfigError, match="--only: found 'poetry'; accepted: a part of one of wide MLP; decoder"):
        speed.bench("cpu", ["poetry"])


@pytest.mark.parametrize(("value", "reach", "reached"), [(1.0, "≤ 2", True), (3.0, "≤ 2", False), (3.0, "≥ 2", True)])
def test_rows_say_whether_they_reach_what_is_asked(value, reach, reached):
    assert Row("what", value, "×", reach).reached is reached
