"""A task whose losses are shares is read in points of accuracy wherever a gap is written, and no other is."""

import math
import re

import msgspec
import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import Recipe
from fp4dse.dse.cost import CostTarget, overhead, rollout_overhead, rollout_share
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.results import compare, noise_floor, open_store, summarize
from fp4dse.results.report import write_report
from fp4dse.results.stats.levels import units
from fp4dse.results.stats.paired import add_gap
from fp4dse.results.stats.recipes.margins import POINTS_MARGIN, margin_of, read_margin
from fp4dse.results.stats.recipes.recommendation import verdicts
from fp4dse.results.text.pareto_table import pareto_table
from fp4dse.results.text.ratios import change, change_range, fine_change, size, written_in
from fp4dse.sweeps.dashboard.trials import study_data
from tests.commands.running import call

RL = {"task": "rl", "preset": "small", "gap_unit": "points"}
ACCURACY = {"bf16": (0.80, 0.84, 0.82), "nvfp4": (0.75, 0.78, 0.78), "mxfp4": (0.60, 0.63, 0.57)}


@pytest.fixture
def both(store, row):
    """The same losses twice: as a task of points, and as one of ratios."""
    lanes = [
        row(name, seed, 1 - accuracy, val_metric=accuracy, val_loss_bf16=1 - accuracy, **of)
        for name, found in ACCURACY.items()
        for seed, accuracy in enumerate(found)
        for of in (RL, {})
    ]
    store.add(lanes, "job")
    return store


@pytest.fixture
def compared(capsys):
    """Runs `compare` and returns what it says."""

    def run(store, a, b, margin, code=0):
        assert call("compare", a, b, "--margin", margin, "--store", str(store.path)) == code
        return "".join(capsys.readouterr())

    return run


def mean_of(name):
    return np.mean([a - b for a, b in zip(ACCURACY[name], ACCURACY["bf16"], strict=True)])


def test_a_gap_is_the_difference_of_shares_in_frames_and_in_sql(both):
    runs = both.runs()
    assert units(runs) == {("rl", "small"): "points"}
    for line in runs.to_dict("records"):
        base = 1 - ACCURACY["bf16"][line["seed"]]
        plain = line["val_loss"] - base if line["task"] == "rl" else math.log(line["val_loss"] / base)
        assert line["gap"] == line["gap_bf16"] == line["gap_matched"] == pytest.approx(plain, abs=1e-12)
    asked = both.sql("SELECT run_id, gap, gap_bf16, gap_matched FROM runs ORDER BY run_id")
    names = ["gap", "gap_bf16", "gap_matched"]
    np.testing.assert_allclose(asked[names], runs.sort_values("run_id")[names], atol=1e-15)
    assert set(both.sql("SELECT gap_unit FROM recipes WHERE task = 'rl'")["gap_unit"]) == {"points"}


def test_a_loss_of_zero_has_a_gap_in_points_alone(row):
    losses = {"bf16": 0.1, "nvfp4": 0.0}
    runs = pd.DataFrame([row(name, 0, loss, **of) for of in (RL, {}) for name, loss in losses.items()])
    gaps = add_gap(runs)["gap"]
    assert gaps[1] == pytest.approx(-0.1)
    assert math.isnan(gaps[3])


def test_statistics_are_of_the_differences(both):
    lines = summarize(both.runs()).query("task == 'rl'").set_index("name")
    assert lines.loc["nvfp4", "gap"] == pytest.approx(-mean_of("nvfp4"))
    floor = noise_floor(both.runs()).set_index("task").loc["rl", "noise_floor"]
    assert floor == pytest.approx(math.sqrt(2) * np.std(ACCURACY["bf16"], ddof=1))
    by_name = both.runs().drop_duplicates("config_id").set_index("recipe_name")["config_id"]
    line = compare(both.runs(), by_name["mxfp4"], by_name["nvfp4"]).set_index("task").loc["rl"]
    assert line["difference"] == pytest.approx(mean_of("nvfp4") - mean_of("mxfp4"))
    assert "nvfp4 has a higher accuracy than mxfp4: +17.0 points (95 % interval" in line["verdict"]
    effects = both.sql("SELECT effect FROM effects WHERE task = 'rl' AND kind = 'main'")["effect"]
    assert effects.dropna().abs().max() < 0.25, "shares, where logarithms of them would be 0.8"


def test_texts_say_points_of_accuracy(both):
    runs = both.runs(margins=True)
    text = pareto_table(summarize(runs), noise_floor(runs), verdicts=verdicts(runs))
    points, ratios = sorted(text.partition("\n\n★")[0].split("\n\n\n"))
    assert points.startswith("rl (small)")
    assert "noise floor 2.8 points" in points
    assert "the highest accuracy, -5.00 points" in points
    assert "accuracies within ±0.7 points count as the same" in points
    assert not re.search(r"\d points", ratios)
    rows = runs[runs["task"].eq("rl")]
    assert margin_of(rows).value == POINTS_MARGIN


ARMS = {"bf16": 0.0, "nvfp4": 0.001, "mxfp4": -0.012}
"""Accuracy of recipes beside BF16's, in mean over seeds."""


def arms(row, seeds):
    """Lanes of ARMS: seeds differ by ten points, paired differences by one and a half."""
    rng = np.random.default_rng(0)
    level = 0.9 + 0.05 * rng.standard_normal(seeds).clip(-1.5, 1.5)
    apart = {name: 0.015 * rng.standard_normal(seeds) for name in ARMS}
    accuracy = {name: level + of + apart[name] - apart[name].mean() for name, of in ARMS.items()}
    return [row(name, s, 1 - a, val_loss_bf16=1 - a, **RL) for name in ARMS for s, a in enumerate(accuracy[name])]


@pytest.mark.parametrize(("seeds", "verdict"), [(3, "not told apart"), (48, "the same within ±0.7 points")])
def test_the_same_within_points_takes_as_many_seeds_as_chance_asks_for(store, row, compared, tmp_path, seeds, verdict):
    """Of a difference of 0.1 points, with the deviation that three seeds of `rl:small` had."""
    store.add(arms(row, seeds), "job")
    said = compared(store, "nvfp4", "bf16", "0.7 points")
    assert f"nvfp4 and bf16 are {verdict}: the accuracy of the first is at +0.1" in said
    assert f"{seeds} paired seeds" in said
    other = compared(store, "bf16", "mxfp4", "0.7 points")
    assert ("bf16 has a higher accuracy than mxfp4: +1.20 points" in other) == (seeds == 48)
    write_report(store, tmp_path / "report.html")
    page = re.sub(r"<[^>]*>", "", (tmp_path / "report.html").read_text(encoding="utf-8")).replace("\u00a0", " ")
    assert ("as good as BF16 within ±0.7 points" in page) == (seeds == 48)
    assert "ccuracies within ±0.7 points count as the same" in page


def test_a_margin_says_its_unit_and_is_refused_in_another(both, compared):
    def refused(margin):
        return compared(both, "nvfp4", "bf16", margin, code=2)

    assert "--margin: found 'points'; accepted: % with vision:quickstart" in refused("0.7 points")
    assert "--margin: found '%'; accepted: points with rl:small" in refused("0.5 %")
    assert "margin: found 0.7; accepted: a share of problems up to 0.1: 0.007 is 0.7 points" in refused("0.7")
    assert "--margin: found '0.7 furlongs'; accepted: a log ratio above 0" in refused("0.7 furlongs")


def test_a_margin_is_read_as_gaps_are():
    assert read_margin("0.7 points") == (pytest.approx(0.007), "points")
    assert read_margin("0.5%") == (pytest.approx(0.005), "%")
    assert read_margin("5e-3") == (0.005, "")


def test_the_report_and_the_dashboard_do(both, tmp_path):
    write_report(both, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Accuracy <b><data" in page
    assert "−5.00\u00a0points" in page
    assert '"points":true' in page
    found = study_data(both, "sweep")
    [rl] = [study for name, study in found.items() if "rl:small" in name]
    shown = {trial.facts["recipe"].partition(":")[0]: trial for trial in rl.trials}["nvfp4"]
    assert shown.facts["accuracy against BF16"].startswith("-5.00 points")
    assert shown.values[1] == pytest.approx(5.0)


def test_numbers_in_points():
    with written_in("points"):
        assert (change(0.032), change(-0.2), change(0.0)) == ("-3.20 points", "+20.0 points", "+0.00 points")
        assert change_range(0.03, 0.02, 0.04) == "-4.00 to -2.00 points"
        assert (size(0.007), fine_change(0.00012)) == ("0.7 points", "-0.012 points")
        assert (change(math.nan), change_range(0.1, math.nan, 0.2)) == ("–", "")
    assert change(0.032) == "+3.25 %"


def test_accuracies_that_tie_on_every_seed_are_not_told_apart_and_not_the_same(store, row, compared):
    """They are counts over held-out problems: +0.2 points on each of two seeds, or 0 on each, is chance."""
    solved = {"bf16": (0.7, 0.75), "nvfp4": (0.702, 0.752), "mxfp4": (0.7, 0.75)}
    store.add([row(name, s, 1 - a, **RL) for name, of in solved.items() for s, a in enumerate(of)], "job")
    for other, by in (("nvfp4", r"\+0.20"), ("mxfp4", r"[+-]?0.00")):
        said = compared(store, other, "bf16", "0.7 points")
        assert re.search(
            rf"not told apart: the accuracy of the first is at {by} points on each of 2 paired seeds", said
        )
    lines = store.sql("FROM versus_best WHERE label <> 'mxfp4' ORDER BY label")
    assert not lines["verdict"].isin(["same", "higher", "lower"]).any()
    assert lines[["p", "p_same"]].isna().all(axis=None)
    gaps = store.sql("FROM recipes").set_index("name")
    assert gaps.loc[["nvfp4", "mxfp4"], ["gap_low", "gap_high"]].isna().all(axis=None)
    assert gaps.loc["bf16", ["gap_low", "gap_high"]].eq(0).all()


def test_recipes_that_learn_from_their_own_samples_have_the_time_of_an_iteration(store, row):
    """Of an overhead that is of another model than the stored time of rollouts there is none."""
    bf16 = Recipe.named("bf16")
    sampled = msgspec.structs.replace(bf16, training=Training(rollout=ROLLOUT_NAMES["mxfp4-rceil"]))
    store.add([row(of, s, 0.2, **RL) for of in (bf16, sampled, Recipe.named("mxfp4")) for s in (0, 1)], "job")
    store.add([row("nvfp4", 0, 0.5), row("bf16", 0, 0.5)], "other")
    lines = store.sql("FROM recipes").set_index("label")
    share = rollout_share()
    assert lines.loc["bf16, rollout mxfp4-rceil", "iteration_overhead"] == pytest.approx(
        share * rollout_overhead(sampled) + 1 - share
    )
    mxfp4 = Recipe.named("mxfp4")
    assert lines.loc["mxfp4", "iteration_overhead"] == pytest.approx(
        share * rollout_overhead(mxfp4) + (1 - share) * overhead(mxfp4)
    )
    assert lines.loc["mxfp4", "rollout_share"] == pytest.approx(share)
    assert lines.loc["nvfp4", ["iteration_overhead", "rollout_share"]].isna().all()
    other = open_store(store.path, cost=CostTarget("llama-70b", "gb300")).sql("FROM recipes")
    assert other[["iteration_overhead", "rollout_share"]].isna().all(axis=None)
    assert "iteration_overhead" not in summarize(store.runs(), overhead="points")


def test_what_rollouts_take_stands_beside_an_overhead_that_does_not_have_it(store, row, tmp_path):
    """`bf16, rollout mxfp4-rceil` has an overhead of 1: the trainer's step is BF16's."""
    bf16 = Recipe.named("bf16")
    sampled = msgspec.structs.replace(bf16, training=Training(rollout=ROLLOUT_NAMES["mxfp4-rceil"]))
    recipes = {bf16: 0.2, sampled: 0.21, Recipe.named("mxfp4"): 0.25}
    store.add([row(of, s, loss + 0.01 * s**2, **RL) for of, loss in recipes.items() for s in range(3)], "job")
    store.add([row("nvfp4", 0, 0.5), row("bf16", 0, 0.5)], "other")
    lines = store.sql("FROM recipes").set_index("label")
    assert lines.loc["bf16, rollout mxfp4-rceil", "overhead"] == 1
    assert lines.loc["bf16, rollout mxfp4-rceil", "rollout_overhead"] == pytest.approx(rollout_overhead(sampled))
    assert rollout_overhead(sampled) < 1
    assert math.isnan(lines.loc["nvfp4", "rollout_overhead"])
    runs = store.runs(margins=True)
    blocks = pareto_table(summarize(runs), noise_floor(runs), verdicts=verdicts(runs), width=200).split("\n\n\n")
    [rl] = [block for block in blocks if block.startswith("rl (small)")]
    [other] = [block for block in blocks if not block.startswith("rl (small)")]
    [line] = [line.split() for line in rl.splitlines() if line.endswith("rollout mxfp4-rceil") and "points" in line]
    assert f"{rollout_overhead(sampled):.2f}" in line
    assert re.search(r"overhead +rollout +", rl)
    assert "rollout" not in other.partition("\n\n★")[0]
    assert "step time (llama-8b on gb200), the trainer's alone: what its rollouts take is not in it." in rl
    assert any("overhead: of the trainer's step alone" in block for block in blocks)
    write_report(store, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("are of <b>the trainer's step alone</b>") == 1, "beside the front of the task that rolls out"
    assert '"rollout_overhead":["float64"' in page
    assert "rollout overhead" in page
