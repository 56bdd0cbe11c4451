import numpy as np
import pandas as pd
import pytest
import scipy.stats

from fp4dse.dse import ConfigError, Recipe
from fp4dse.results import against, compare
from fp4dse.results.bench.generated import generated
from fp4dse.results.bench.scores import scores_of_compare
from fp4dse.results.bench.studies import SIZES, WORLDS, drawn
from fp4dse.results.stats.estimates.promised import pair_alone
from fp4dse.results.stats.paired import rows_at_best_lr
from fp4dse.results.stats.recipes.equivalence import differences, promised
from fp4dse.results.stats.recipes.together import pair_among

RNG = np.random.default_rng(20260102)


def test_compare_pairs_by_seed_and_says_who_is_better(runs):
    a, b = np.array([0.50, 0.60, 0.40, 0.70]), np.array([0.55, 0.67, 0.45, 0.76])
    ids = [Recipe.named(name).config_id for name in ("nvfp4", "mxfp4")]
    found = compare(runs(nvfp4=a, mxfp4=b), *ids).iloc[0]
    truth = scipy.stats.ttest_rel(np.log(a), np.log(b))
    assert found["difference"] == pytest.approx(np.log(a / b).mean())
    assert found["p"] == pytest.approx(truth.pvalue)
    assert (found["low"], found["high"]) == pytest.approx(tuple(truth.confidence_interval(0.95)))
    change = f"{100 * np.expm1(found['difference']):.2f} %"
    assert f"nvfp4 has a lower loss than mxfp4: {change} (95 % interval -11.9" in found["verdict"]
    swapped = compare(runs(nvfp4=a, mxfp4=b), *reversed(ids)).iloc[0]
    assert swapped["verdict"] == found["verdict"]


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ([0.5, 0.6, 0.4], [0.6, 0.5, 0.41], "are not told apart"),
        ([0.5, 0.5], [0.5, 0.5], "are the same within ±0.5 %: equal losses on 2 paired seeds."),
        ([0.5], [0.6], "1 paired seed; at least 2"),
        ([0.5, 0.6], [None, 0.6], "mxfp4 diverged on 1 of the seeds"),
    ],
)
def test_compare_does_not_claim_what_the_seeds_do_not_show(runs, a, b, says):
    ids = [Recipe.named(name).config_id for name in ("nvfp4", "mxfp4")]
    assert says in compare(runs(nvfp4=a, mxfp4=b), *ids)["verdict"].iloc[0]


def test_a_difference_is_said_as_a_change_of_the_loss_and_not_as_its_logarithm(runs):
    ids = [Recipe.named(name).config_id for name in ("nvfp4", "mxfp4")]
    found = compare(runs(nvfp4=[0.54, 0.54, 0.541], mxfp4=[1.0, 1.0, 1.0]), *ids)["verdict"].iloc[0]
    assert "nvfp4 has a lower loss than mxfp4: -46.0 % (" in found
    found = compare(runs(nvfp4=[0.1, 0.101, 0.1], mxfp4=[1.0, 1.0, 1.0]), *ids)["verdict"].iloc[0]
    assert "nvfp4 has a lower loss than mxfp4: × 0.100 (95 % interval × 0.0" in found
    assert "p < 0.001" in found


def test_recipes_at_different_rates_are_said_to_be_so(runs):
    """More seeds win over a lower loss, so that a rate may be chosen for one recipe that the other has few seeds at."""
    ids = [Recipe.named(name).config_id for name in ("nvfp4", "mxfp4")]
    rows = runs(**{"nvfp4": [0.5, 0.6], "nvfp4@2e-3": [0.8, 0.9, 0.7], "mxfp4": [0.7, 0.6, 0.8]})
    line = compare(rows, *ids).iloc[0]
    assert (line["lr_a"], line["lr_b"], line["pairs"]) == (2e-3, 1e-3, 3)
    assert line["verdict"].endswith(
        " Each is at a rate of its own: nvfp4 0.002, mxfp4 0.001 (--lr takes one for both)."
    )
    assert "rate" not in compare(rows[rows["lr"].eq(1e-3)], *ids)["verdict"].iloc[0]


def test_compare_refuses_recipes_that_cannot_be_compared(runs):
    frame = runs(bf16=[0.5], nvfp4=[0.5])
    bf16, nvfp4 = (Recipe.named(name).config_id for name in ("bf16", "nvfp4"))
    with pytest.raises(ConfigError, match="found 'feed'"):
        compare(frame, "feed", nvfp4)
    frame["preset"] = frame["preset"].mask(frame["is_baseline"], "other")
    with pytest.raises(ConfigError, match="run on the same task"):
        compare(frame, bf16, nvfp4)


def test_the_same_is_claimed_when_two_one_sided_tests_say_so():
    d = RNG.normal(0.001, 0.002, (300, 6))
    found = differences(d, margin=0.004)
    for row, p in zip(d, found["p_same"], strict=True):
        above = scipy.stats.ttest_1samp(row, -0.004, alternative="greater").pvalue
        below = scipy.stats.ttest_1samp(row, 0.004, alternative="less").pvalue
        assert p == pytest.approx(max(above, below))
    half = scipy.stats.t.ppf(0.95, 5) * d.std(axis=1, ddof=1) / np.sqrt(6)
    inside = (np.abs(d.mean(axis=1)) + half) < 0.004
    assert (found["verdict"].eq("same") == inside).all()


def test_recipes_a_margin_apart_are_called_the_same_in_no_more_than_5_of_100_experiments():
    d = RNG.normal(0.005, 0.003, (4000, 5))
    assert differences(d, margin=0.005)["verdict"].eq("same").mean() <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 4000)


def settled(truth, seeds, margin, cases):
    """Of `cases` pairs that are open, or fewer: shares (0 or 1) that are not with as many seeds more as `compare` asks
    for, and these numbers. truth: [any], differences, whose lanes deviate by 1."""
    d = RNG.normal(truth[:, None], 1, (len(truth), seeds))
    lines = promised(differences(d, margin).query("verdict == 'open'").iloc[:cases], pair_alone)
    lines = lines[lines["more_seeds"].le(1000)]
    new = RNG.normal(truth[lines.index, None], 1, (len(lines), 1000))
    new[np.arange(1000) >= lines["more_seeds"].to_numpy()[:, None]] = np.nan
    later = differences(np.hstack([d[lines.index], new]), margin)
    return later["verdict"].ne("open").to_numpy(), lines["more_seeds"].to_numpy()


@pytest.mark.heavy
@pytest.mark.parametrize(("truth", "seeds"), [(0.5, 3), (0.5, 5), (1, 3), (1, 5), (2, 3), (2, 5), (4, 3)])
def test_the_seeds_that_two_alone_ask_for_settle_it_as_often_as_promised(truth, seeds):
    """Of differences of so many deviations of a pair. (Of 4 with 5 seeds none is open.)"""
    found, _ = settled(np.full(6000, truth), seeds, 0.3, 300)
    assert len(found) > 200
    assert found.mean() >= 0.8 - 3 * np.sqrt(0.8 * 0.2 / len(found))


@pytest.mark.heavy
@pytest.mark.parametrize("seeds", [3, 5])
def test_over_differences_of_all_sizes_the_promise_is_kept_and_not_by_far_exceeded(seeds):
    """Where a difference may be as well large as small. It allows for deviations of all sizes, too, and so is up to .08
    above its promise where, as here, there is only one."""
    found, more = settled(RNG.uniform(-12, 12, 10_000), seeds, 1e-6, 800)
    error = np.sqrt(0.8 * 0.2 / (more > 9).sum())
    assert 0.8 - 3 * error <= found[more > 9].mean() <= 0.88 + 3 * error


def test_where_no_number_of_seeds_in_reach_would_settle_it_compare_says_so():
    few = promised(differences(np.array([[-4.0, 4.1, -0.1] * 400, [5.0] + [np.nan] * 1199]), 1e-9), pair_alone)
    assert few["more_seeds"].iloc[0] == np.inf
    assert np.isnan(few["more_seeds"].iloc[1])


def test_the_verdicts_of_differences():
    lines = np.array([[0.1, 0.11], [-0.1, -0.11], [0.0, 0.0], [-0.2, 0.3], [0.1, np.nan]])
    found = promised(differences(lines), pair_alone)
    assert found["verdict"].tolist() == ["higher", "lower", "same", "open", "open"]
    assert found["more_seeds"].notna().tolist() == [False, False, False, True, False]


@pytest.mark.heavy
@pytest.mark.heavy
def test_of_recipes_that_are_much_alike_compare_asks_for_more_seeds_than_two_alone_would():
    """In this world a technique does half a lane's deviation. Where two alone ask for few seeds, three pairs made it
    look like more, as all recipes together know."""
    asked = []
    for number in range(5):
        rows = drawn(SIZES["48"], "weak", np.random.default_rng([11, number])).runs("weak")
        ids = sorted(rows["config_id"][rows["points"].gt(0)].unique())
        for pair in zip(ids[:10:2], ids[1:10:2], strict=True):
            two = rows[rows["config_id"].isin(pair) | rows["is_baseline"]]
            asked.append([compare(of, *pair)["more_seeds"].iloc[0] for of in (rows, two)])
    among, alone = np.array([pair for pair in asked if np.isfinite(pair).any()]).T
    few = alone < np.median(alone)
    assert few.sum() > 8
    assert among[few].mean() > 1.3 * alone[few].mean()


def test_a_pair_differs_by_as_much_as_all_recipes_let_it():
    """Of recipes that lie far apart a pair's difference is what it shows, of equal ones it is nothing; the deviation is
    that of all."""
    for world, kept in (("rough", True), ("null", False)):
        rows = rows_at_best_lr(drawn(SIZES["48"], world, np.random.default_rng([12, 1])).runs(world))
        whole = rows[rows["points"].gt(0)].groupby("config_id")["loss"].agg(lambda loss: np.log(loss).mean()).dropna()
        low, high = whole.idxmin(), whole.idxmax()
        shown = whole[high] - whole[low]
        found = pair_among(rows, high, low, 3, shown, 0.001)
        assert (found.truth.mean() > 0.8 * shown) == kept
        assert (abs(found.truth.mean()) < 0.4 * shown) != kept
        assert 0.005 < np.sqrt(np.mean(found.deviation**2)) < 0.05  # lanes of these worlds deviate by about .01


@pytest.mark.heavy
@pytest.mark.heavy
def test_what_compare_promises_among_others_is_kept():
    """Of neighbours in six worlds. Promises of one study hang together, so that two count as one."""
    kept = []
    for number in range(24):
        study = drawn(SIZES["48"], WORLDS[number % 6], np.random.default_rng([13, number]))
        kept += [share for _, share, _ in scores_of_compare(study, study.runs("x"))]
    assert len(kept) > 60
    assert np.mean(kept) > 0.8 - 2.5 * np.sqrt(0.8 * 0.2 / (len(kept) / 2))


def test_a_study_of_an_odd_number_of_recipes_has_scores_too():
    study = drawn(SIZES["48"], "additive", np.random.default_rng([14, 0]))
    rows = study.runs("x")
    few = sorted(rows["config_id"][rows["points"].gt(0)].unique())[:7]
    found = list(scores_of_compare(study, rows[rows["config_id"].isin(few) | rows["is_baseline"]]))
    assert 0 < len(found) <= 3


def test_compare_says_how_many_more_seeds_would_tell(runs):
    ids = [Recipe.named(name).config_id for name in ("nvfp4", "mxfp4")]
    found = compare(runs(nvfp4=[0.5, 0.53, 0.5], mxfp4=[0.52, 0.53, 0.55]), *ids).iloc[0]
    assert f"{found['more_seeds']:.0f} more seeds would tell" in found["verdict"]
    found = compare(runs(nvfp4=[0.5, 0.53, 0.5], mxfp4=[0.52, 0.53, 0.55]), *ids, margin=0.5).iloc[0]
    assert "the same within ±65 %" in found["verdict"]


def test_bf16_beside_the_recipes_changes_little_of_how_many_more_seeds_are_asked_for():
    """Their knobs say how far they lie apart, which BF16 has none of."""
    for number in range(4):
        rows = drawn(SIZES["48"], "additive", np.random.default_rng([78, number])).runs("x")
        one = rows.loc[rows["points"].gt(0), "config_id"].min()
        beside, alone = (
            against(of, one).set_index("config_id")["more_seeds"] for of in (rows, rows[~rows["is_baseline"]])
        )
        both = pd.concat([beside, alone], axis=1, keys=["beside", "alone"]).loc[alone.index]
        both = np.log(both[np.isfinite(both).all(axis=1)])
        assert len(both) > 5
        assert (both["beside"] - both["alone"]).abs().median() < 0.2


def test_only_an_undecided_pair_looks_at_the_other_recipes_and_at_those_of_its_setting_alone(monkeypatch):
    """The recipes of another setting are noisier: with them more seeds would be asked for."""
    study = drawn(SIZES["48"], "weak", np.random.default_rng([11, 0]))
    rows, rough = study.runs("weak"), drawn(SIZES["48"], "rough", np.random.default_rng([12, 0]))
    other = rough.runs("additive").assign(preset="another")
    ids = sorted(rows["config_id"][rows["points"].gt(0)].unique())
    both = pd.concat([rows, other[~other["config_id"].isin(ids[:2])]], ignore_index=True)
    alone, among = compare(rows, *ids[:2]), compare(both, *ids[:2])
    assert np.isfinite(alone["more_seeds"]).all()
    pd.testing.assert_frame_equal(alone, among)

    seen = set()

    def at_best_lr(frame):
        seen.update(frame["config_id"])
        return rows_at_best_lr(frame)

    monkeypatch.setattr("fp4dse.results.stats.recipes.equivalence.rows_at_best_lr", at_best_lr)
    assert "the same within" in compare(rows, *ids[:2], margin=1.0)["verdict"].iloc[0]
    assert seen == set(ids[:2])
    compare(rows, *ids[:2])
    assert seen == set(rows["config_id"])


def test_against_compares_with_the_best_of_each_setting_and_needs_no_baseline():
    runs = generated(
        ("*.g.rounding", "wgrad.rotation"), truth=lambda c: 0.1 * c["*.g.rounding"] + 0.05 * c["wgrad.rotation"]
    )
    for frame in (runs, runs[~runs["is_baseline"]]):
        found = against(frame)
        assert set(found["reference"]) == {"0000000000000000"}
        assert found[~found["label"].eq("bf16")]["difference"].is_monotonic_increasing
        assert found.set_index("label").loc["recipe 5", "difference"] == pytest.approx(0.2, abs=0.05)
        assert found["p_holm"].ge(found["p"]).all()
    assert "bf16" in set(against(runs)["label"])


def test_against_a_recipe_that_diverged_there_is_no_difference():
    runs = generated(("*.g.rounding", "wgrad.rotation"))
    runs.loc[runs["recipe_label"].eq("recipe 2") & runs["seed"].eq(1), ["status", "val_loss"]] = ["diverged", np.nan]
    found = against(runs, "0000000000000001").set_index("label")
    assert (found.loc["recipe 2", "verdict"], found.loc["recipe 2", "pairs"]) == ("diverged", 2)
    assert found.loc["recipe 2", ["difference", "p", "p_holm", "more_seeds"]].isna().all()
    assert set(against(runs, "0000000000000002")["verdict"]) == {"diverged"}


def test_against_claims_nothing_of_a_recipe_that_was_dropped_at_a_rung():
    runs = generated(recipes=4, seeds=3)
    runs.loc[runs["recipe_label"].eq("recipe 2") & runs["seed"].eq(1), "status"] = "pruned"
    found = against(runs).set_index("label")
    assert found.loc["recipe 2", "verdict"] == "pruned"
    assert np.isnan(found.loc["recipe 2", "difference"])
    assert "pruned" not in set(found.drop("recipe 2")["verdict"])


def test_a_margin_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="margin: found 0; accepted: a log ratio above 0"):
        against(generated(("*.g.rounding",)), margin=0)
    with pytest.raises(ConfigError, match="found 'feed'"):
        against(generated(("*.g.rounding",)), "feed")


def test_labels_with_commas_stand_in_quotes(runs):
    a, b = (Recipe.named(name) for name in ("nvfp4", "nvfp4-sr"))
    said = compare(runs(nvfp4=[0.5, 0.6], **{"nvfp4-sr": [0.6, 0.5]}), a.config_id, b.config_id)["verdict"].iloc[0]
    assert f'nvfp4 and "{b.label()}" are not told apart' in said


@pytest.mark.parametrize(("seeds", "rule"), [(4, "t-test"), (40, "bootstrap")])
def test_the_interval_the_verdict_and_p_are_of_one_rule_which_the_sentence_names(runs, seeds, rule):
    """A skewed loss: the bootstrap tells what the t-test does not, and must not stand beside its p."""
    ids = [Recipe.named(name).config_id for name in ("nvfp4", "mxfp4")]
    told = 0
    for seed in range(20, 40):
        apart = np.random.default_rng(seed).gamma(0.3, 0.02, seeds) - 0.0025
        line = compare(runs(nvfp4=0.5 * np.exp(apart), mxfp4=np.full(seeds, 0.5)), *ids, margin=1e-6).iloc[0]
        better = "has a lower loss than" in line["verdict"]
        assert better == (line["p"] < 0.05) == (line["low"] > 0 or line["high"] < 0)
        assert f"by the {rule} of {seeds} paired seeds" in line["verdict"]
        told += better
    assert 0 < told < 20


@pytest.mark.parametrize(("seeds", "verdict"), [(29, "open"), (30, "same")])
def test_shares_that_tie_are_open_below_30_seeds(runs, seeds, verdict):
    accuracies = (0.5 + 0.01 * np.arange(seeds)).tolist()
    frame = runs(bf16=accuracies, nvfp4=accuracies, mxfp4=accuracies).assign(gap_unit="points")
    one = frame.loc[frame["recipe_name"].eq("nvfp4"), "config_id"].iloc[0]
    assert against(frame, one)["verdict"].tolist() == [verdict] * 2
    assert differences(np.zeros((1, seeds)), shares=True)["verdict"].tolist() == [verdict]
    assert against(frame.assign(gap_unit=None), one)["verdict"].tolist() == ["same"] * 2
