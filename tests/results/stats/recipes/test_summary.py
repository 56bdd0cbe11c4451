import numpy as np
import pandas as pd
import pytest
import scipy.stats

from fp4dse.dse import ConfigError, Recipe
from fp4dse.results import add_gap, noise_floor, summarize
from fp4dse.results.stats.recipes.candidates import candidates
from fp4dse.results.stats.recipes.front_chance import front_chance
from fp4dse.results.stats.recipes.summary import SUMMARIZED

RNG = np.random.default_rng(20260101)


def line(summary: pd.DataFrame, name: str) -> pd.Series:
    found = summary[summary["name"].eq(name)]
    assert len(found) == 1
    return found.iloc[0]


def test_gap_is_the_mean_paired_log_ratio_with_the_t_interval_of_scipy(runs):
    base, fp4 = np.array([0.50, 0.60, 0.40]), np.array([0.56, 0.63, 0.45])
    found = line(summarize(runs(bf16=base, nvfp4=fp4)), "nvfp4")
    truth = scipy.stats.ttest_rel(np.log(fp4), np.log(base)).confidence_interval(0.95)
    assert found["gap"] == pytest.approx(np.log(fp4 / base).mean())
    assert (found["gap_low"], found["gap_high"]) == pytest.approx((truth.low, truth.high))
    assert (found["pairs"], found["seeds"], found["note"]) == (3, 3, "")


def test_the_interval_covers_the_truth_in_95_of_100_experiments(row):
    experiments, seeds, truth = 1500, 4, 0.2
    template = pd.DataFrame([row("bf16"), row("nvfp4")])
    frame = template.loc[np.tile([0, 1], experiments * seeds)].reset_index(drop=True)
    experiment = np.repeat(np.arange(experiments), 2 * seeds)
    common = np.repeat(RNG.normal(size=experiments * seeds), 2)  # what a seed does to both of a pair
    own = 0.1 * RNG.normal(size=len(frame))
    frame = frame.assign(
        preset=experiment.astype(str),
        seed=np.tile(np.repeat(np.arange(seeds), 2), experiments),
        val_loss=np.exp(common + own + truth * ~frame["is_baseline"]),
    )
    found = summarize(frame).query("not is_baseline")
    covered = ((found["gap_low"] <= truth) & (truth <= found["gap_high"])).mean()
    assert len(found) == experiments
    assert abs(covered - 0.95) < 4 * np.sqrt(0.95 * 0.05 / experiments)


def test_recipe_and_baseline_each_stand_at_their_own_best_learning_rate(runs):
    frame = runs(
        **{"bf16@0.001": [0.5, 0.6], "bf16@0.01": [0.4, 0.5], "nvfp4@0.001": [0.45, 0.55], "nvfp4@0.01": [0.9, 0.9]}
    )
    summary = summarize(frame)
    assert (line(summary, "bf16")["lr"], line(summary, "nvfp4")["lr"]) == (0.01, 0.001)
    assert line(summary, "nvfp4")["gap"] == pytest.approx(np.log([0.45 / 0.4, 0.55 / 0.5]).mean())


def test_a_learning_rate_where_a_seed_diverged_loses_to_one_where_none_did(runs):
    for clean in ([0.9, 0.9, 0.9], [0.9]):
        frame = runs(**{"bf16": [0.5, 0.5], "nvfp4@0.001": clean, "nvfp4@0.01": [0.1, 0.1, None]})
        found = line(summarize(frame), "nvfp4")
        assert (found["lr"], found["diverged"]) == (0.001, 0)


def test_a_learning_rate_with_one_lucky_seed_does_not_beat_one_with_all(runs):
    frame = runs(**{"bf16": [0.5, 0.5], "nvfp4@0.001": [0.9, 0.9], "nvfp4@0.01": [0.1]})
    assert line(summarize(frame), "nvfp4")["lr"] == 0.001


def test_a_learning_rate_whose_lanes_all_failed_is_not_chosen(runs):
    frame = runs(**{"bf16": [0.5, 0.5], "nvfp4@0.001": [0.9, None], "nvfp4@0.01": [0.1, 0.1]})
    frame.loc[frame["lr"].eq(0.01), ["status", "val_loss"]] = ["failed", np.nan]
    assert line(summarize(frame), "nvfp4")["lr"] == 0.001


def test_a_diverged_seed_puts_the_gap_to_infinity_and_the_recipe_off_the_front(runs):
    found = line(summarize(runs(bf16=[0.5, 0.5], nvfp4=[0.4, None], mxfp4=[0.9, 0.9])), "nvfp4")
    assert found["gap"] == np.inf
    assert (found["on_front"], found["diverged"], found["note"]) == (False, 1, "diverged")
    assert np.isnan(found["gap_low"])
    assert np.isnan(found["gap_high"])


def test_a_finished_lane_without_a_finite_loss_counts_as_diverged(runs):
    assert line(summarize(runs(bf16=[0.5, 0.5], nvfp4=[0.4, np.nan])), "nvfp4")["note"] == "diverged"
    assert line(summarize(runs(bf16=[0.5, 0.5], nvfp4=[0.4, np.inf])), "nvfp4")["note"] == "diverged"


def test_without_a_baseline_there_is_no_gap_and_it_says_so(runs):
    for frame in (runs(nvfp4=[0.4, 0.5]), runs(bf16=[None, None], nvfp4=[0.4, 0.5])):
        found = line(summarize(frame), "nvfp4")
        assert np.isnan(found["gap"])
        assert (found["on_front"], found["note"]) == (False, "no baseline")


def test_only_seeds_that_both_have_are_paired(runs):
    frame = runs(bf16=[0.5, 0.5, 0.5], nvfp4=[0.6, 0.6, 60.0])
    found = line(summarize(frame[~(frame["is_baseline"] & frame["seed"].eq(2))]), "nvfp4")
    assert found["gap"] == pytest.approx(np.log(1.2))
    assert (found["pairs"], found["seeds"]) == (2, 3)


@pytest.mark.parametrize("loss", [0.0, -0.3])
def test_a_loss_that_is_not_positive_has_no_gap_and_it_says_so(runs, loss):
    for frame in (runs(bf16=[0.5], nvfp4=[loss]), runs(bf16=[loss], nvfp4=[0.5])):
        found = line(summarize(frame), "nvfp4")
        assert np.isnan(found["gap"])
        assert found["note"] == "loss is not positive"


def test_one_seed_gives_a_gap_without_an_interval(runs):
    found = line(summarize(runs(bf16=[0.5], nvfp4=[0.6])), "nvfp4")
    assert found["gap"] == pytest.approx(np.log(1.2))
    assert np.isnan(found["gap_low"])
    assert np.isnan(found["p_best"])


@pytest.mark.parametrize(
    "column", ["preset", "dataset_digest", "device_class", "software_class", "rev_quantizers", "rev_engine", "rev_task"]
)
def test_rows_are_paired_within_one_setting_only(runs, column):
    frame = runs(bf16=[0.5, 0.6], nvfp4=[0.7, 0.8])
    other = 2 if column.startswith("rev") else "other"
    frame[column] = frame[column].mask(frame["is_baseline"], other)
    assert line(summarize(frame), "nvfp4")["note"] == "no baseline"


def test_the_baseline_is_the_reference_and_competes_with_nobody(runs):
    summary = summarize(runs(bf16=[0.5, 0.6], nvfp4=[0.7, 0.8], mxfp4=[0.9, 0.9]))
    assert (line(summary, "bf16")["gap"], line(summary, "bf16")["on_front"]) == (0, False)
    assert line(summary, "nvfp4")["on_front"]
    assert line(summary, "mxfp4")["on_front"]  # one point less than nvfp4


def test_a_plain_recipe_is_not_on_the_front_either(row):
    plain = Recipe.uniform(Recipe.named("bf16").fprop.x.__class__(element="none"))
    rows = [row(r, seed, 0.5) for r in ("bf16", plain, "nvfp4") for seed in (0, 1)]
    summary = summarize(pd.DataFrame(rows))
    assert summary["on_front"].tolist().count(True) == 1
    assert line(summary, "nvfp4")["on_front"]


def test_p_best_tells_who_differs_from_the_best(runs):
    noise = np.array([0.0, 0.1, -0.1, 0.05])
    best, same, worse = (
        0.5 * np.exp(noise),
        0.5 * np.exp(noise + np.array([0.01, -0.01, 0.02, 0])),
        0.6 * np.exp(noise + 0.001 * noise),
    )
    summary = summarize(runs(bf16=[0.4] * 4, nvfp4=best, nvfp4_sr=same, mxfp4=worse))
    assert line(summary, "nvfp4")["p_best"] == 1
    assert line(summary, "nvfp4-sr")["p_best"] == pytest.approx(
        scipy.stats.ttest_rel(np.log(same), np.log(best)).pvalue
    )
    assert line(summary, "mxfp4")["p_best"] < 1e-3


def test_summarize_keeps_the_gap_of_rows_that_were_filtered(runs):
    frame = add_gap(runs(bf16=[0.5, 0.6], nvfp4=[0.7, 0.8]))
    assert line(summarize(frame[~frame["is_baseline"]]), "nvfp4")["gap"] == pytest.approx(
        line(summarize(frame), "nvfp4")["gap"]
    )


def test_no_rows_give_an_empty_summary(store):
    assert summarize(store.runs(SUMMARIZED)).empty
    assert noise_floor(store.runs(SUMMARIZED)).empty


def test_noise_floor_is_the_rms_over_all_pairs_of_seeds(runs):
    losses = np.array([0.5, 0.55, 0.47, 0.61])
    pairs = [np.log(a / b) for i, a in enumerate(losses) for b in losses[:i]]
    found = noise_floor(runs(bf16=losses, nvfp4=[9.0])).iloc[0]
    assert found["noise_floor"] == pytest.approx(np.sqrt(np.mean(np.square(pairs))))
    assert found["seeds"] == 4
    assert np.isnan(noise_floor(runs(bf16=[0.5]))["noise_floor"].iloc[0])


def test_from_30_seeds_on_the_interval_is_resampled(runs):
    noise = np.exp(0.1 * RNG.gamma(1.0, size=40))
    found = line(summarize(runs(bf16=[0.5] * 40, nvfp4=0.6 * noise)), "nvfp4")
    below, above = found["gap"] - found["gap_low"], found["gap_high"] - found["gap"]
    assert above > 1.02 * below > 0  # as skewed as the losses are


def test_any_column_of_numbers_is_an_overhead(runs):
    frame = runs(bf16=[0.5, 0.6], nvfp4=[0.7, 0.8], mxfp4=[0.9, 0.9])
    frame["measured"] = frame["recipe_name"].map({"bf16": 1.0, "nvfp4": 0.4, "mxfp4": 0.5})
    summary = summarize(frame, "measured")
    assert summary.set_index("name")["measured"].to_dict() == {"bf16": 1.0, "nvfp4": 0.4, "mxfp4": 0.5}
    assert (line(summary, "nvfp4")["on_front"], line(summary, "mxfp4")["on_front"]) == (True, False)
    assert summarize(frame, "bits_per_element")["on_front"].sum() == 2


def test_a_recipe_without_an_overhead_is_not_on_the_front_and_it_says_so(runs):
    frame = runs(bf16=[0.5], nvfp4=[0.6], mxfp4=[0.9])
    frame["measured"] = frame["recipe_name"].map({"mxfp4": 0.5})
    summary = summarize(frame, "measured")
    assert (line(summary, "nvfp4")["on_front"], line(summary, "nvfp4")["note"]) == (False, "no measured")
    assert line(summary, "mxfp4")["on_front"]


def test_a_recipe_that_is_beaten_under_one_scenario_alone_stays_on_the_front(runs):
    frame = runs(bf16=[0.5, 0.6], nvfp4=[0.7, 0.8], mxfp4=[0.8, 0.9], quartet=[0.9, 1.0])
    for name, costs in {
        "overhead": {"bf16": 1.0, "nvfp4": 0.5, "mxfp4": 0.6, "quartet": 0.7},
        "overhead_low": {"bf16": 1.0, "nvfp4": 0.4, "mxfp4": 0.5, "quartet": 0.6},
        "overhead_high": {"bf16": 1.0, "nvfp4": 0.8, "mxfp4": 0.7, "quartet": 0.9},
    }.items():
        frame[name] = frame["recipe_name"].map(costs)
    summary = summarize(frame)
    assert summary.loc[summary["on_front"], "name"].tolist() == ["nvfp4", "mxfp4"]
    assert line(summary, "mxfp4")[["overhead_low", "overhead", "overhead_high"]].tolist() == [0.5, 0.6, 0.7]
    chance = front_chance(frame).set_index("name")["p_front"]
    assert (chance["nvfp4"], chance["quartet"]) == pytest.approx((1, 0), abs=0.01)
    assert chance["mxfp4"] > 0.9
    alone = summarize(frame.drop(columns=["overhead_low", "overhead_high"]))
    assert alone.loc[alone["on_front"], "name"].tolist() == ["nvfp4"]
    assert alone[["overhead_low", "overhead_high"]].isna().all(axis=None)


def test_a_recipe_that_costs_as_much_as_bf16_and_is_no_better_is_beaten_by_it(runs):
    frame = runs(bf16=[0.5, 0.6], nvfp4=[0.7, 0.84], mxfp4=[0.51, 0.613], quartet=[0.4, 0.481])
    frame["overhead"] = frame["recipe_name"].map({"bf16": 1.0, "nvfp4": 0.5, "mxfp4": 1.01, "quartet": 1.02})
    summary = summarize(frame)
    assert summary.loc[summary["on_front"], "name"].tolist() == ["quartet", "nvfp4"]
    chance = front_chance(frame).set_index("name")["p_front"]
    assert chance.to_dict() == pytest.approx({"nvfp4": 1, "mxfp4": 0, "quartet": 1}, abs=0.1)
    assert set(candidates(frame)["label"]) == set(summary.loc[summary["on_front"], "label"])
    assert summarize(frame, "points").loc[lambda lines: lines["name"].eq("quartet"), "on_front"].all()
    rolled_out = summarize(frame.assign(gap_unit="points"))  # the time of rollouts is not in the overhead
    assert rolled_out.loc[rolled_out["on_front"], "name"].tolist() == ["quartet", "mxfp4", "nvfp4"]


def test_overheads_of_an_older_cost_model_are_not_compared_with_newer_ones(row):
    older, newer = ({"overhead_of": f"llama-1b on b200, revision {n}"} for n in (9, 10))
    rows = [row("bf16", seed, 0.5, overhead=1.0, **newer) for seed in range(2)]
    rows += [row("mxfp4", seed, 0.7, overhead=0.1, **older) for seed in range(2)]
    rows += [row("nvfp4", seed, 0.6, overhead=(0.2, 0.5)[seed], **(older, newer)[seed]) for seed in range(2)]
    summary = summarize(pd.DataFrame(rows))
    assert (line(summary, "nvfp4")["on_front"], line(summary, "nvfp4")["overhead"]) == (True, 0.5)
    assert (line(summary, "mxfp4")["on_front"], line(summary, "mxfp4")["note"]) == (False, "no overhead")
    alone = summarize(pd.DataFrame([row("bf16", 0, 0.5, overhead=1.0, **older), *rows[2:4]]))
    assert line(alone, "mxfp4")["on_front"]


@pytest.mark.parametrize("column", ["recipe_label", "is_baseline", "speed"])
def test_an_overhead_that_is_no_column_of_numbers_is_refused(runs, column):
    with pytest.raises(ConfigError, match=f"overhead: found '{column}'; accepted: a column of numbers: .*points"):
        summarize(runs(bf16=[0.5], nvfp4=[0.6]), column)


def test_recipes_with_the_same_losses_are_the_same_computation_and_equal_shares_tie_by_chance(runs):
    base, losses = [0.50, 0.60, 0.40], [0.53, 0.61, 0.45]
    frame = runs(bf16=base, nvfp4=losses, mxfp4=losses, quartet=losses, luq=base)
    frame["val_loss_bf16"] = frame["val_loss"]
    found = summarize(frame)
    same = line(found, "luq")
    for gap in ("gap", "gap_bf16", "gap_matched"):
        assert same[[gap, f"{gap}_low", f"{gap}_high"]].tolist() == [0.0, 0.0, 0.0]
    assert summarize(frame[~frame["recipe_name"].eq("luq")]).query("not is_baseline")["p_best"].tolist() == [1.0] * 3
    shares = summarize(frame.assign(gap_unit="points"))
    assert np.isnan(line(shares, "luq")["gap_low"])
    assert line(shares, "bf16")[["gap_low", "gap_high"]].tolist() == [0.0, 0.0]
    tied = shares[~shares["is_baseline"] & ~shares["name"].eq("luq")]
    assert tied["p_best"].notna().all()  # they differ from the best, luq
    alone = summarize(frame[~frame["recipe_name"].eq("luq")].assign(gap_unit="points")).query("not is_baseline")
    assert sorted(alone["p_best"].fillna(9)) == [1.0, 9.0, 9.0]
