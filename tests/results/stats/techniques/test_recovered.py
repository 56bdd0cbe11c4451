"""Of what rounding to nearest loses, the share that training gives back, and how sure that is."""

import math
import re

import msgspec
import numpy as np
import pytest
from scipy import stats

from fp4dse.dse import Recipe, recipe_from_dict
from fp4dse.dse.training import Training
from fp4dse.results import open_store
from fp4dse.results.report import write_report
from fp4dse.results.stats.estimates.intervals import mean_interval
from fp4dse.results.stats.techniques.recovered import ratio, recovered
from fp4dse.results.views import VIEWS_READ

SIDES = {
    "dgrad": {"g": "bf16", "w": "bf16", "source": "forward"},
    "wgrad": {"g": "bf16", "x": "bf16", "source": "forward"},
}


def recipe(w="nvfp4", trains="all", outliers="none", x="nvfp4"):
    of_w = {"like": w, "outliers": outliers}
    return recipe_from_dict({"fprop": {"x": x, "w": of_w}, **SIDES, "training": {"trains": trains}})


SEEDS = (0, 1, 2, 3)


def loss(seed, base, lost=0.0, back=0.0):
    """Of a lane: seeds differ much more than methods."""
    return base + 0.1 * seed + lost - back * (1 + 0.1 * seed)


@pytest.fixture
def runs(tmp_path, row):
    store = open_store(tmp_path / "store", create=True)

    def rows(of, lost, back, bf16=2.0):
        done = [row(of, seed, loss(seed, 2.0, lost, back)) for seed in SEEDS]
        return [{**line, "val_loss_bf16": loss(seed, bf16)} for seed, line in zip(SEEDS, done, strict=True)]

    every = [*rows(Recipe.named("bf16"), 0.0, 0.01), *rows(recipe(trains="none"), 0.1, 0.0)]
    every += [*rows(recipe(), 0.1, 0.05), *rows(recipe("nvfp4", "learned", "lora"), 0.1, 0.02)]
    every += [*rows(recipe("mxfp4-rceil", x="bf16"), 0.1, 0.05)]
    store.add(every, "job")
    return store.runs(VIEWS_READ)


def test_a_method_is_beside_rounding_the_same_operands(runs):
    lines = recovered(runs).set_index("config_id")
    assert set(lines.index) == {recipe().config_id, recipe("nvfp4", "learned", "lora").config_id}
    qat, lora = lines.loc[recipe().config_id], lines.loc[recipe("nvfp4", "learned", "lora").config_id]
    assert qat["ptq_label"] == lora["ptq_label"] == recipe(trains="none").label()
    assert qat["pairs"] == 4
    assert qat["lost"] == pytest.approx(0.1)
    mean = np.mean([0.05 * (1 + 0.1 * seed) for seed in SEEDS])
    assert qat["of_base"] == pytest.approx(mean / 0.1)
    assert lora["of_base"] == pytest.approx(0.4 * mean / 0.1)
    from_bf16 = np.mean([0.1 + 0.01 * (1 + 0.1 * seed) for seed in SEEDS])
    assert qat["of_bf16"] == pytest.approx(mean / from_bf16)
    assert qat["of_base_low"] < qat["of_base"] < qat["of_base_high"]


def test_with_one_seed_there_is_no_interval(runs):
    line = recovered(runs[runs["seed"].eq(0)]).iloc[0]
    assert math.isfinite(line["of_base"])
    assert math.isnan(line["of_base_low"])


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """2,000 studies of four seeds: 95 % within three standard errors, where the t-test's assumptions hold."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(2000):
        below = 1 + 0.2 * rng.standard_normal(4)
        above = 0.4 * below + 0.1 * rng.standard_normal(4)
        _, low, high = ratio(above, below)
        hits += low <= 0.4 <= high
    assert abs(hits / 2000 - 0.95) < 3 * (0.95 * 0.05 / 2000) ** 0.5


def test_ends_of_the_interval_are_where_the_test_is_just_lost():
    """A t-test of above - r · below against zero has p = 0.05 there: scipy's own."""
    above, below = np.array([0.5, 0.7, 0.4, 0.6]), np.array([1.0, 1.1, 0.9, 1.2])
    _, low, high = ratio(above, below)
    for end in low, high:
        assert stats.ttest_1samp(above - end * below, 0).pvalue == pytest.approx(0.05)


def test_where_nothing_was_lost_for_sure_the_interval_has_no_ends():
    share, low, high = ratio(np.array([0.1, -0.1, 0.1]), np.array([0.2, -0.3, 0.2]))
    assert math.isfinite(share)
    assert (low, high) == (-math.inf, math.inf)
    assert math.isnan(ratio(np.array([1.0, 1.0]), np.array([0.0, 0.0]))[0])


@pytest.mark.parametrize("lost", [0.0, -2e-5])
def test_of_a_loss_that_is_not_there_nothing_is_a_share(lost):
    """Else what made things worse would have a share above 1, and an interval, too."""
    worse = np.array([-3e-5, -2e-5, -4e-5])
    assert np.isnan(ratio(worse, np.full(3, lost))).all()
    assert np.isnan(ratio(worse, lost + np.array([1e-5, 0, -1e-5]))).all()
    assert np.isnan(ratio(worse[:1], np.full(1, lost))).all()


def test_with_one_untrained_lane_for_all_seeds_the_interval_is_that_of_what_is_given_back():
    """Whatever was lost is one number then, without a spread: the interval is in its units, and never unbounded."""
    given, lost = np.array([0.01, 0.03, 0.02, 0.04]), 0.005
    over = mean_interval(given[None]).iloc[0]
    assert ratio(given, np.full(4, lost)) == pytest.approx(tuple(over[["mean", "low", "high"]] / lost))


def from_one_start(tmp_path, row, lost, trained):
    """All seeds begin with the same weights; bf16 that was trained on ends `trained` above these."""
    store, start = open_store(tmp_path / "store", create=True), {"start_digest": "1234" * 4, "start_method": "gptq"}
    for which, losses in {
        Recipe.named("bf16"): [2 + trained + 0.001 * seed for seed in SEEDS],
        recipe(trains="none"): [2 + lost for _ in SEEDS],
        recipe(): [1.99 + 0.001 * seed for seed in SEEDS],
    }.items():
        rows = [row(which, seed, losses[seed], dataset_digest="gptq", **start) for seed in SEEDS]
        store.add([{**line, "val_loss_bf16": 2.0} for line in rows], "job")
    return store


@pytest.mark.parametrize(("lost", "trained", "empty"), [(-2e-5, -0.02, "of_base"), (0.01, 0.03, "of_bf16")])
def test_a_share_is_empty_where_its_own_loss_is_not_there(tmp_path, row, lost, trained, empty):
    store = from_one_start(tmp_path, row, lost, trained)
    [line] = store.sql("FROM recovered").to_dict("records")
    assert line["lost"] == pytest.approx(lost)
    for name in ("of_base", "of_bf16"):
        ends = [line[f"{name}{end}"] for end in ("", "_low", "_high")]
        assert np.isnan(ends).all() if name == empty else np.isfinite(ends).all(), name
    write_report(store, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    [section] = re.findall(r'(?s)<section id="recovered">(.*?)</section>', page)
    cells = re.findall(r'<td class="n"[^>]*>(.*?)</td>', section)[:2]
    assert [cell == "–" for cell in cells] == [empty == "of_base", empty == "of_bf16"]


def test_pairs_that_tie_have_no_interval():
    share, low, high = ratio(np.array([0.43, 0.53]) - 0.41 - np.array([0, 0.1]), np.array([0.04, 0.04]))
    assert share == pytest.approx(0.5)
    assert math.isnan(low)
    assert math.isnan(high)


def test_rows_of_recipes_that_only_differ_in_training_have_one_ptq():
    other = msgspec.structs.replace(recipe(), training=Training(weight_decay=0.1))
    assert other.canonical().fprop == recipe(trains="none").canonical().fprop


def test_lines_say_the_weights_that_they_are_measured_from_and_mix_none(tmp_path, row):
    """Of GPTQ's weights what is lost is another thing than of the base, and so is a share of it."""
    store = open_store(tmp_path / "store", create=True)
    starts = {"base": {}, "gptq": {"start_digest": "12345678" * 2, "start_method": "gptq"}}
    starts["other"] = {"start_digest": "abcdef01" * 2}
    for number, (name, of) in enumerate(starts.items()):
        lost = 0.1 / (1 + number)
        done = [(Recipe.named("bf16"), 0.0), (recipe(trains="none"), lost), (recipe(), lost / 2 + 0.001)]
        for which, above in done:
            rows = [row(which, seed, 2 + 0.1 * seed + above, dataset_digest=name, **of) for seed in SEEDS]
            store.add([{**line, "val_loss_bf16": 2 + 0.1 * line["seed"]} for line in rows], "job")
    lines = store.sql("FROM recovered").set_index("start")
    assert lines["lost"].to_dict() == pytest.approx(
        {"the base": 0.1, "gptq 12345678": 0.05, "weights abcdef01": 0.1 / 3}
    )
    untrained = recipe(trains="none").label()
    assert lines.loc["gptq 12345678", "ptq_label"] == f"gptq 12345678: {untrained}"
    assert lines.loc["the base", "ptq_label"] == untrained
    assert lines["pairs"].eq(len(SEEDS)).all()
    assert lines.loc["gptq 12345678", "of_base"] == pytest.approx(0.5 - 0.001 / 0.05)
    write_report(store, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Measured from <b>gptq 12345678</b>, given by <code>--from</code>" in page
    assert "Measured from the task's own base, rounded to nearest" in page


def test_losses_equal_to_the_bit_give_all_back_or_nothing_and_shares_tie_by_chance():
    lost = np.array([0.1, 0.12, 0.14])
    assert ratio(lost, lost) == (1.0, 1.0, 1.0)
    assert ratio(0 * lost, lost) == (0.0, 0.0, 0.0)
    assert ratio(0 * lost, np.array([0.1, -0.1, 0.2]))[1:] == (-math.inf, math.inf)  # nothing was lost for sure
    for above in (lost, 0 * lost):
        assert np.isnan(ratio(above, lost, shares=True)[1:]).all()
    assert np.isnan(ratio(lost / 2, lost)[1:]).all()  # a constant share is no computation
