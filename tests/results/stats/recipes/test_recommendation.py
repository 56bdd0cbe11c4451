"""A verdict names a recipe, how sure that is and what it costs, and claims no more than the rows hold."""

import math

import numpy as np
import pandas as pd
import pytest

from fp4dse.dse.agreement import agreements
from fp4dse.dse.resolution import resolved
from fp4dse.results import add_gap, open_store, versus_soonest
from fp4dse.results.report.markup import spoken
from fp4dse.results.stats.recipes.equivalence import against
from fp4dse.results.stats.recipes.margins import BY_LAW
from fp4dse.results.stats.recipes.recommendation import verdicts
from fp4dse.results.stats.recipes.verdict import front_words
from fp4dse.results.text.labels import short_labels
from fp4dse.results.text.verdict_text import verdict_text


def only(runs: pd.DataFrame):
    [found] = verdicts(runs)
    return found


def priced(runs: pd.DataFrame, **costs: float) -> pd.DataFrame:
    return runs.assign(overhead=runs["recipe_name"].map({"bf16": 1.0, **costs}))


def test_the_lowest_loss_is_the_recipe_to_use(runs):
    found = only(runs(bf16=[0.50, 0.52, 0.51], nvfp4=[0.55, 0.57, 0.56], mxfp4=[0.70, 0.71, 0.72]))
    assert (found.name, found.bf16, found.pairs, found.tried) == ("nvfp4", "worse", 3, 2)
    assert found.gap_low < found.gap < found.gap_high
    assert found.sure().startswith("worse than BF16 by more than chance; ")


def worth(frame: pd.DataFrame, slope: float) -> pd.DataFrame:
    """The frame, of a task where 1 % more tokens lower BF16's loss by `slope` %."""
    return frame.assign(margin=slope * math.log(1.02), margin_of=BY_LAW)


def test_a_faster_recipe_is_the_one_to_use_where_more_tokens_make_up_for_its_gap(runs):
    frame = runs(bf16=[0.5, 0.51, 0.49], nvfp4=[0.505, 0.515, 0.495], mxfp4=[0.52, 0.53, 0.51])
    frame = priced(frame, nvfp4=0.9, mxfp4=0.6)
    steep, flat = (only(worth(frame, slope)) for slope in (0.3, 0.02))
    assert (steep.name, flat.name) == ("mxfp4", "nvfp4")
    assert steep.time.mean == pytest.approx(0.6 * math.exp(steep.gap / 0.3))
    assert steep.time.low < steep.time.mean < steep.time.high < 1
    assert steep.why == "the least time to BF16's loss"
    unknown = only(frame)  # nothing says what tokens are worth
    assert (unknown.name, unknown.why, math.isnan(unknown.time.mean)) == ("nvfp4", "the lowest loss", True)


def test_the_view_of_all_against_the_one_to_use_is_at_equal_time_where_that_chose_it(runs):
    frame = runs(bf16=[0.5, 0.51, 0.49], nvfp4=[0.505, 0.515, 0.495], mxfp4=[0.52, 0.53, 0.51])
    frame = priced(frame, nvfp4=0.9, mxfp4=0.6)
    slope = 0.3
    of_time = versus_soonest(worth(frame, slope)).set_index("label")
    assert set(of_time["ranked_by"]) == {"time"}
    assert of_time.index.tolist() == ["nvfp4", "bf16"]  # of MXFP4, which has no line of its own
    there = math.log(0.505 / 0.52) + slope * math.log(0.9 / 0.6)
    assert of_time.loc["nvfp4", "difference"] == pytest.approx(there, abs=2e-3)
    assert of_time.loc["nvfp4", "verdict"] == "higher"
    of_loss = versus_soonest(frame).set_index("label")
    assert set(of_loss["ranked_by"]) == {"loss"}
    assert of_loss.loc["mxfp4", "difference"] == pytest.approx(math.log(0.52 / 0.505), abs=2e-3)


def test_where_no_gap_is_in_reach_of_four_times_the_tokens_it_is_the_lowest_loss(runs):
    frame = priced(
        runs(bf16=[0.5, 0.51, 0.49], nvfp4=[0.75, 0.76, 0.73], mxfp4=[0.77, 0.78, 0.75]), nvfp4=0.9, mxfp4=0.5
    )
    reach = math.log(1.5) / math.log(4)
    within, beyond = (only(worth(frame, slope)) for slope in (1.1 * reach, 0.9 * reach))
    assert (within.name, within.why) == ("mxfp4", "the least time to BF16's loss")
    assert (beyond.name, beyond.why, beyond.time.mean) == ("nvfp4", "the lowest loss", math.inf)
    assert beyond.open + beyond.as_good == 0  # MXFP4 is told apart by its loss; at equal time it would be ahead


def test_one_recipe_within_reach_that_may_not_be_named_does_not_rank_the_others_by_time(runs):
    """The words say by what the recipe was chosen, whatever its own time is."""
    losses = {"bf16": [0.5, 0.51, 0.49], "fp4-all-the-way": [0.501, 0.511, 0.491], "nvfp4": [0.6, 0.61, 0.59]}
    frame = runs(**losses, mxfp4=[0.61, 0.62, 0.6])
    frame = priced(worth(frame, 0.1), nvfp4=0.95, mxfp4=0.55, **{"fp4-all-the-way": 1.0})
    found = only(frame)
    assert (found.name, found.by_time, found.why) == ("nvfp4", False, "the lowest loss of those that save time")
    near = only(priced(worth(frame, 0.2), nvfp4=0.95, mxfp4=0.55, **{"fp4-all-the-way": 1.0}))
    assert (near.name, near.by_time) == ("mxfp4", True)


def test_no_recipe_is_one_of_those_that_save_time_where_none_does(runs):
    frame = runs(bf16=[0.5, 0.51, 0.49], nvfp4=[0.51, 0.52, 0.5], mxfp4=[0.505])
    found = only(priced(worth(frame, 0.1), nvfp4=1.02, mxfp4=1.0))
    assert (found.name, found.slower, found.why) == ("nvfp4", 0, "the least time to BF16's loss")


def test_what_is_said_of_the_recipe_is_said_of_the_one_that_is_named_first(runs):
    """Screened it takes longer than BF16 to its loss, and less on fresh seeds."""
    losses = {"bf16": [0.5] * 11, "nvfp4": [0.53, 0.531, 0.529] + [0.501, 0.502, 0.5015, 0.5012] * 2}
    frame = priced(worth(runs(**losses), 0.2), nvfp4=0.9)
    late = frame["seed"].ge(3)
    frame = frame.assign(stage=late.map({True: "confirm", False: None}))
    words = "no recipe that saves time in a step is expected to reach BF16's loss in less time than BF16"
    assert words in only(frame[~late]).warnings
    found = only(frame)
    assert found.confirmed.time.mean < 1 < found.time.mean
    assert words not in found.warnings


def test_a_recipe_that_trains_otherwise_is_beside_bf16_that_does_too(runs):
    frame = runs(bf16=[0.5, 0.51, 0.49], nvfp4=[0.45, 0.46, 0.44], mxfp4=[0.6, 0.61, 0.59])
    with_it = frame["recipe_name"].eq("nvfp4")
    matched = frame.assign(baseline_id=frame["baseline_id"].mask(with_it, "f" * 16), gap_matched=0.02)
    matched = add_gap(frame).assign(baseline_id=matched["baseline_id"], gap_matched=0.02)
    [said] = [text for text in only(matched).warnings if text.startswith("it changes the optimizer")]
    assert said.endswith("against BF16 with that its gap is +2.02 %")
    assert not any(text.startswith("it changes") for text in only(frame).warnings)


def test_where_no_recipe_is_expected_to_save_time_to_bf16s_loss_it_says_so(runs):
    frame = priced(runs(bf16=[0.5, 0.51, 0.49], nvfp4=[0.52, 0.53, 0.51]), nvfp4=0.9)
    words = "no recipe that saves time in a step is expected to reach BF16's loss in less time than BF16"
    assert words in only(worth(frame, 0.1)).warnings
    assert words not in only(worth(frame, 0.5)).warnings
    assert words not in only(frame).warnings


def test_recipes_of_other_losses_are_as_good_at_equal_time_if_their_times_are(runs):
    seeds = [0.49, 0.5, 0.51]
    frame = runs(bf16=seeds, nvfp4=[1.02 * loss for loss in seeds], mxfp4=[1.04 * loss for loss in seeds])
    frame["val_loss"] *= np.exp(1e-5 * np.random.default_rng(0).normal(size=len(frame)))
    slope = math.log(1.04 / 1.02) / math.log(0.9 / 0.7)
    found = only(priced(worth(frame, slope), nvfp4=0.9, mxfp4=0.7))
    assert (found.as_good, found.open) == (1, 0)
    assert only(priced(worth(frame, slope), nvfp4=0.9, mxfp4=0.6)).as_good == 0


def test_a_gap_that_chance_explains_is_not_told_apart_from_bf16(runs):
    assert only(runs(bf16=[0.50, 0.50, 0.50], nvfp4=[0.45, 0.56, 0.51])).bf16 == "open"
    assert only(runs(bf16=[0.5, 0.5, 0.5], nvfp4=[0.5001, 0.5002, 0.5001])).bf16 == "same"
    assert only(runs(bf16=[0.5, 0.5, 0.5], nvfp4=[0.40, 0.41, 0.40])).bf16 == "better"


def test_one_seed_tells_nothing_and_says_so(runs):
    found = only(runs(bf16=[0.5], nvfp4=[0.6]))
    assert found.bf16 == "unknown"
    assert math.isnan(found.p_front)
    assert found.warnings[0].startswith("one seed: no difference can be told from chance")


def test_where_every_recipe_diverged_there_is_none_to_use(runs):
    found = only(runs(bf16=[0.5, 0.5], nvfp4=[None, 0.6], mxfp4=[None, None]))
    assert found.config_id is None
    assert found.none == "every recipe diverged (2 of 2): nothing here trains to the end"
    assert found.sure() == ""


def test_without_a_baseline_or_without_recipes_it_says_why_there_is_none(runs):
    assert only(runs(nvfp4=[0.5, 0.6])).none == "no BF16 baseline finished, so no recipe has a gap"
    assert only(runs(bf16=[0.5, 0.6])).none == "only BF16 was trained here"


def test_one_learning_rate_for_all_is_called_that_and_warned_of(runs):
    rates = only(runs(bf16=[0.5, 0.5], nvfp4=[0.6, 0.6])).rates
    assert rates.sentence() == "one learning rate for all recipes (0.001); none was searched"
    [warning] = rates.warnings()
    assert warning.startswith("one learning rate (0.001) for all")


def test_the_best_of_a_grid_is_called_that_and_its_edge_is_warned_of(runs):
    columns = {f"{name}@{lr}": [loss, loss] for name in ("bf16", "nvfp4") for lr, loss in GRID.items()}
    rates = only(runs(**columns)).rates
    assert rates.sentence() == "each recipe at the best of 3 learning rates (0.001, 0.002, 0.004)"
    assert rates.warnings() == ()
    edge = only(runs(**{**columns, "nvfp4@4e-3": [0.55, 0.55]})).rates
    assert edge.warnings() == (
        "the best learning rate of this recipe is at the edge of the grid: a better one may lie outside",
    )
    some = only(runs(**{k: v for k, v in columns.items() if k != "nvfp4@1e-3"})).rates
    assert any("had other learning rates than the rest" in text for text in some.warnings())


def sourced(runs, **sources: str):
    """Rates of BF16, NVFP4 and MXFP4, each at one of its own where the sources differ."""
    frame = runs(**{f"{name}@{lr}": [0.5 + lr, 0.5 + 2 * lr] for name, lr in RATES_OF.items()})
    return only(frame.assign(lr_source=frame["recipe_name"].map(sources))).rates


RATES_OF = {"bf16": 0.016, "nvfp4": 0.004, "mxfp4": 0.008}


def test_classes_at_tuned_rates_of_their_own_are_not_said_to_have_one(runs):
    rates = sourced(runs, bf16="tuned", nvfp4="tuned", mxfp4="tuned")
    assert rates.sentence() == "learning rates that were tuned on other seeds, each class of recipes at its own"
    assert rates.warnings() == ()
    assert "searched on other seeds" in sourced(runs, bf16="searched", nvfp4="searched", mxfp4="searched").sentence()


def test_a_class_without_a_tuned_rate_is_named_and_nothing_is_said_of_the_others(runs):
    rates = sourced(runs, bf16="tuned", nvfp4="preset", mxfp4="tuned")
    words = "this recipe had the preset's learning rate, which nobody tuned for its class"
    assert rates.sentence().endswith(f"each class of recipes at its own; {words}")
    [warning] = rates.warnings()
    assert warning.startswith(words)
    assert "--tune finds one" in warning
    [warning] = sourced(runs, bf16="preset", nvfp4="preset", mxfp4="preset").warnings()
    assert warning.startswith("BF16 and 2 recipes, this one among them, had the preset's")  # at two rates, not at one
    [warning] = sourced(runs, bf16="preset", nvfp4="tuned", mxfp4="tuned").warnings()
    assert warning.startswith("BF16 had the preset's")


def test_one_rate_for_all_that_is_the_presets_is_called_so(runs):
    frame = runs(bf16=[0.5, 0.5], nvfp4=[0.6, 0.6]).assign(lr_source="preset")
    rates = only(frame).rates
    assert rates.sentence() == "one learning rate for all recipes (0.001); it is the preset's, which nobody tuned"
    [warning] = rates.warnings()
    assert warning.startswith("one learning rate (0.001) for all, the preset's, which nobody tuned: ")
    assert only(frame.assign(lr_source="tuned")).rates.warnings() == ()


GRID = {"1e-3": 0.7, "2e-3": 0.6, "4e-3": 0.8}


def test_every_setting_of_a_store_has_one(swept):
    found = verdicts(open_store(swept.path).runs())
    assert [verdict.setting[0] for verdict in found] == ["regression", "vision"]
    assert found[1].diverged == 1
    assert "1 of 24 recipes diverged" in found[1].warnings


def test_a_task_that_orders_recipes_otherwise_than_a_larger_model_says_so_and_one_that_does_not_is_silent(runs):
    frame = runs(bf16=[0.50, 0.52, 0.51], nvfp4=[0.55, 0.57, 0.56])
    for preset in ("regression:quickstart", "language:0.4M"):
        [line, *_] = agreements().of(preset)
        task, _, name = preset.partition(":")
        found = only(frame.assign(task=task, preset=name, dataset_digest=line.dataset_digest))
        warned = [text for text in found.warnings if "ordered otherwise by language:0.4M" in text]
        assert len(warned) == (preset != "language:0.4M")
    assert any(text.startswith("nobody has compared") for text in only(frame).warnings)  # on data of no preset
    assert only(frame[frame["is_baseline"]]).warnings == ()


def test_a_preset_that_does_not_resolve_says_so_at_the_revision_that_was_checked(runs):
    frame = runs(bf16=[0.50, 0.52, 0.51], nvfp4=[0.55, 0.57, 0.56])
    for preset, warns in (("vision:quickstart", True), ("language:0.4M", True), ("regression:quickstart", False)):
        [line] = [one for one in resolved() if one.preset == preset]
        task, _, name = preset.partition(":")
        here = frame.assign(task=task, preset=name, dataset_digest=line.dataset_digest, rev_task=line.rev)
        for rows, expected in ((here, warns), (here.assign(rev_task=line.rev + 1), False)):
            verdict = only(rows)
            said = [text for text in verdict.warnings if "single recipes" in text]
            assert len(said) == expected, preset
            assert all("<data" not in spoken(text) for text in said)  # no number that a query would have to answer
            printed = verdict_text(verdict, short_labels(["nvfp4"], ["nvfp4"]), 500).splitlines()
            assert sum("single recipes" in text for text in printed) == expected


def test_chances_have_words_from_sure_to_luck():
    assert [front_words(p).split()[0] for p in (1.0, 0.8, 0.5, 0.0)] == ["almost", "probably", "on", "on"]


def test_a_recipe_with_one_seed_is_no_reference_where_others_have_more(runs):
    frame = runs(bf16=[0.50, 0.51, 0.52], nvfp4=[0.55, 0.56, 0.57], mxfp4=[0.52])
    assert only(frame).name == "nvfp4"
    nvfp4 = frame.loc[frame["recipe_name"].eq("nvfp4"), "config_id"]
    assert set(against(frame)["reference"]) == set(nvfp4)
    assert only(runs(bf16=[0.50], nvfp4=[0.55], mxfp4=[0.52])).name == "mxfp4"
