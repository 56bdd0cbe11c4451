from zlib import crc32

import numpy as np
import pandas as pd
import pytest
from scipy.special import stdtrit

from fp4dse.dse import ConfigError
from fp4dse.results import effects
from fp4dse.results.bench.generated import generated
from fp4dse.results.stats.estimates.least_squares import fit, sum_to_zero, undetermined
from fp4dse.results.stats.paired import PLAIN

SR, RHT, SCALE = "*.g.rounding", "wgrad.rotation", "*.scale"
KNOBS = (SCALE, "*.tensor_scale", SR, "forward.rounding", RHT)


def planted(codes: dict) -> np.ndarray:
    """What the study of importances planted: 0.30, 0.20, 0.10, and 0.25 for the first two together."""
    no_sr, no_rht = codes[SR] == 0, codes[RHT] == 0
    return 0.1 + 0.30 * no_sr + 0.20 * no_rht + 0.10 * (codes[SCALE] == 1) + 0.25 * (no_sr & no_rht)


def main(found: pd.DataFrame, factor: str, level: str) -> pd.Series:
    return found[found["kind"].eq("main") & found["factor"].eq(factor) & found["level"].eq(level)].iloc[0]


def order(found: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(found[found["kind"].eq("main")]["factor"]))


@pytest.mark.parametrize("recipes", [None, 50])
def test_planted_effects_are_recovered_in_the_right_order(recipes):
    found = effects(generated(KNOBS, truth=planted, noise=0.05, seeds=3, recipes=recipes))
    assert order(found)[:3] == [SR, RHT, SCALE]
    pair = found[found["kind"].eq("interaction")].iloc[0]
    assert {pair["factor"], pair["with_factor"]} == {SR, RHT}
    shares = found.drop_duplicates(["kind", "factor", "with_factor"])["share"]
    assert shares.sum() == pytest.approx(1.0, abs=0.3)


def test_effects_and_interactions_are_those_that_were_planted():
    found = effects(generated(KNOBS, truth=planted, noise=0.0, common=0.1))
    assert main(found, SR, "stochastic")["effect"] == pytest.approx(-0.30 - 0.25 / 3)
    assert main(found, RHT, "rht16")["effect"] == pytest.approx(-0.20 - 0.25 / 2)
    assert main(found, SCALE, "e8m0-rceil")["effect"] == pytest.approx(0.10)
    assert main(found, SR, "nearest")["effect"] == 0
    both = found[found["factor"].eq(SR) & found["with_factor"].eq(RHT)].set_index(["level", "with_level"])["effect"]
    assert both["nearest", "none"] == pytest.approx(0.25 / 3)
    assert both["stochastic", "rht32"] == pytest.approx(0.25 / 6)


def test_a_marginal_mean_is_the_mean_gap_at_a_level_of_a_full_design():
    runs = generated(KNOBS, truth=planted)
    found = main(effects(runs), RHT, "rht16")
    base = runs[runs["is_baseline"]].set_index("seed")["val_loss"]
    here = runs[runs["wgrad_rotation"].eq("rht16")]
    assert found["mean"] == pytest.approx(np.log(here["val_loss"] / here["seed"].map(base)).mean())


def test_an_unbalanced_design_does_not_bias_the_effects():
    """A sampler that likes stochastic rounding with rotations: plain level means mix the two effects up."""
    runs = generated(KNOBS, truth=planted, noise=0.0, common=0.0, seeds=2)
    good = runs["dgrad_g_rounding"].eq("stochastic") & runs["wgrad_rotation"].ne("none")
    kept = good | runs["is_baseline"] | (runs["config_id"].map(lambda name: crc32(name.encode())) % 3 == 0)
    runs = runs[kept]
    plain = runs[~runs["is_baseline"]].groupby("wgrad_rotation")["gap" if "gap" in runs else "val_loss"].mean()
    truth = -0.20 - 0.25 / 2
    assert abs(np.log(plain["rht16"] / plain["none"]) - truth) > 0.02
    assert main(effects(runs), RHT, "rht16")["effect"] == pytest.approx(truth, abs=1e-4)


def shares(found: pd.DataFrame) -> dict[tuple, float]:
    terms = found.drop_duplicates(["kind", "factor", "with_factor"])
    return dict(zip(zip(terms["factor"], terms["with_factor"], strict=True), terms["share"], strict=True))


def test_shares_of_an_unbalanced_design_are_those_computed_by_hand():
    """Log losses 0 (neither), 0 (rotation), 1 (both): the mean is 1/3, the total sum of squares 2/3. Without the
    rotation nothing is unexplained; without rounding the two rotated recipes stand at 1/2, off by 1/2 each."""
    runs = generated((SR, RHT), truth=lambda codes: np.where((codes[SR] == 1) & (codes[RHT] == 1), 1.0, 0.0), noise=0.0)
    odd = runs["dgrad_g_rounding"].eq("stochastic") & runs["wgrad_rotation"].eq("none")
    found = shares(effects(runs[~odd & runs["wgrad_rotation"].ne("rht32")]))
    assert found == pytest.approx({(SR, None): (1 / 2) / (2 / 3), (RHT, None): 0.0}, abs=1e-6)


def test_shares_of_a_balanced_design_are_the_classical_ones_and_sum_to_one():
    """2 × 3, and another factor that does nothing: sums of squares from marginal means."""
    table = np.add.outer([0.0, 0.3], [0.0, 0.1, 0.4]) + np.outer([0.0, 1.0], [0.0, 0.2, -0.1])
    runs = generated((SR, "forward.rounding", RHT), truth=lambda codes: table[codes[SR], codes[RHT]], noise=0.0)
    a, b = table.mean(axis=1, keepdims=True) - table.mean(), table.mean(axis=0, keepdims=True) - table.mean()
    rest = table - table.mean() - a - b
    total = np.square(table - table.mean()).sum()
    truth = {(SR, None): 3 * np.square(a).sum(), (RHT, None): 2 * np.square(b).sum(), (SR, RHT): np.square(rest).sum()}
    found = shares(effects(runs))
    assert {term: found[term] for term in truth} == pytest.approx(
        {t: part / total for t, part in truth.items()}, abs=1e-5
    )
    assert sum(found.values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_a_share_is_what_r_squared_falls_by_and_within_0_and_1_in_any_design(seed):
    rng = np.random.default_rng(seed)
    codes = [rng.choice(3, 30, p=rng.dirichlet([0.5] * 3)) for _ in range(2)]
    blocks = [sum_to_zero(len(np.unique(c)))[np.unique(c, return_inverse=True)[1]] for c in codes]
    design = np.hstack([np.ones((30, 1)), *blocks])
    if undetermined(design, np.ones(30)).any():
        pytest.skip("the two are one factor here")
    y = rng.normal(size=(30, 1)) + design @ rng.normal(size=(design.shape[1], 1))
    model = fit(design, y, np.ones(30), np.zeros(design.shape[1]))
    total = np.square(y - y.mean()).sum()

    def left(x: np.ndarray) -> float:
        return np.square(y - x @ np.linalg.lstsq(x, y, rcond=None)[0]).sum()

    first = slice(1, 1 + blocks[0].shape[1])
    falls = (left(np.delete(design, first, axis=1)) - left(design)) / total
    assert model.rise(np.eye(design.shape[1])[first]) / total == pytest.approx(falls, abs=1e-9)
    assert 0 <= falls <= 1


def test_recipes_with_more_seeds_weigh_no_more():
    runs = generated((SR, RHT), truth=lambda codes: 0.1 * codes[SR] * codes[RHT], noise=0.0, seeds=4)
    fewer = runs[runs["seed"].eq(0) | runs["recipe_label"].isin(["recipe 0", "recipe 5", "bf16"])]
    assert effects(fewer)["effect"].tolist() == pytest.approx(effects(runs)["effect"].tolist(), abs=1e-5)


def test_what_is_common_to_a_seed_does_not_move_an_effect_even_if_lanes_are_lacking():
    runs = generated((SR, RHT), truth=lambda codes: 0.1 * codes[SR], noise=0.0, common=0.5, seeds=4)
    holes = runs[~(runs["recipe_label"].eq("recipe 1") & runs["seed"].isin([0, 3]))]
    assert main(effects(holes), SR, "stochastic")["effect"] == pytest.approx(0.1)


@pytest.mark.parametrize("lacking", [False, True])
@pytest.mark.parametrize("seeds", [3, 6])
def test_intervals_of_effects_cover_the_truth(seeds, lacking):
    """Recipes that share a technique share noise within a seed, which a pooled residual would not see."""
    rng = np.random.default_rng(seeds)
    a, b = np.meshgrid([0, 1], [0, 1, 2], indexing="ij")
    a, b = np.tile(a.ravel(), 2), np.tile(b.ravel(), 2)
    design = np.column_stack([np.ones(12), sum_to_zero(2)[a], sum_to_zero(3)[b]])
    contrasts = np.array([[0, 2.0, 0, 0], [0, 0, 1, -1]])
    truth = contrasts @ np.array([0.0, 0.3, 0.1, -0.2])
    covered = np.zeros(2)
    for _ in range(1000):
        noise = rng.normal(size=(12, seeds)) + rng.normal(size=seeds) + rng.normal(size=(2, seeds))[a]
        y = (design @ np.array([1.0, 0.3, 0.1, -0.2]))[:, None] + noise
        if lacking:
            y[rng.integers(12), rng.integers(seeds)] = np.nan
        model = fit(design, y, np.ones(12), np.zeros(4))
        value, error, freedom = model.estimate(contrasts)
        covered += np.abs(value - truth) <= stdtrit(freedom, 0.975) * error
    assert covered / 1000 == pytest.approx([0.95, 0.95], abs=0.02)


@pytest.mark.parametrize("few", ["of a level", "any"])
@pytest.mark.parametrize("shared", [0.0, 1.0])
def test_recipes_of_three_seeds_beside_others_of_six_differ_by_what_three_seeds_say(few, shared):
    rng = np.random.default_rng(1)
    a, b = np.repeat([0, 1], 12), np.tile([0, 1, 2], 8)
    design = np.column_stack([np.ones(24), sum_to_zero(2)[a], sum_to_zero(3)[b]])
    contrasts, covered = np.array([[0, 2.0, 0, 0], [0, 0, 1, -1]]), np.zeros(2)
    for _ in range(500):
        y = rng.normal(size=(24, 6)) + 3 * rng.normal(size=6) + shared * rng.normal(size=(2, 6))[a]
        rows = a == 1 if few == "of a level" else rng.random(24) < 0.5
        y[np.ix_(rows, [3, 4, 5])] = np.nan
        value, error, freedom = fit(design, y, np.ones(24), np.zeros(4)).estimate(contrasts)
        covered += np.abs(value) <= stdtrit(freedom, 0.975) * error
    assert covered / 500 == pytest.approx([0.95, 0.95], abs=0.03)


def test_the_weights_of_a_seed_are_how_its_lanes_move_an_estimate():
    rng = np.random.default_rng(2)
    design, contrast = np.column_stack([np.ones(8), rng.normal(size=(8, 2))]), np.array([[0.0, 1.0, -2.0]])
    weight, y = rng.random(8) + 0.5, np.where(rng.random((8, 4)) < 0.3, np.nan, rng.normal(size=(8, 4)))
    y[:, 0] = 0.0
    before, squares = fit(design, y, weight, np.zeros(3)), np.zeros(4)
    for recipe, seed in np.argwhere(np.isfinite(y)):
        moved = y.copy()
        moved[recipe, seed] += 1.0
        after = fit(design, moved, weight, np.zeros(3))
        squares[seed] += (contrast @ (after.coefficients - before.coefficients)).item() ** 2
    assert before.seed_weights(contrast)[0] == pytest.approx(squares)


def test_the_clustered_error_is_the_t_interval_over_per_seed_estimates():
    rng = np.random.default_rng(0)
    design = np.column_stack([np.ones(8), rng.normal(size=(8, 2))])
    y = rng.normal(size=(8, 5))
    model = fit(design, y, np.ones(8), np.zeros(3))
    each = np.linalg.lstsq(design, y, rcond=None)[0]  # [3, seeds]
    value, error, freedom = model.estimate(np.eye(3)[1:])
    assert value.tolist() == pytest.approx(each.mean(axis=1)[1:].tolist())
    assert error.tolist() == pytest.approx((each.std(axis=1, ddof=1) / np.sqrt(5))[1:].tolist())
    assert freedom.tolist() == [4, 4]


def test_with_one_seed_the_residual_is_the_yardstick_and_it_says_so():
    rng = np.random.default_rng(1)
    design = np.column_stack([np.ones(24), np.tile([1.0, -1.0], 12), np.repeat([1.0, -1.0], 12)])
    covered = 0
    for _ in range(1000):
        model = fit(design, rng.normal(size=(24, 1)), np.ones(24), np.zeros(3))
        value, error, _ = model.estimate(np.array([[0, 2.0, 0]]))
        covered += abs(value[0]) <= 2.08 * error[0]  # t with 21 degrees of freedom
    assert covered / 1000 == pytest.approx(0.95, abs=0.025)
    found = effects(generated(KNOBS, truth=planted, seeds=1, noise=0.05))
    assert set(found["basis"]) == {"recipes"}
    assert main(found, SR, "stochastic")["p"] < 1e-6


def test_a_pair_of_levels_that_was_never_tried_has_no_interaction_and_leaves_the_rest_alone():
    runs = generated(KNOBS, truth=lambda codes: 0.1 * codes[SR], noise=0.0)
    runs = runs[~(runs["dgrad_g_rounding"].eq("stochastic") & runs["wgrad_rotation"].eq("rht32"))]
    found = effects(runs)
    pair = found[found["factor"].eq(SR) & found["with_factor"].eq(RHT)].set_index(["level", "with_level"])
    assert np.isnan(pair.loc[("stochastic", "rht32"), "effect"])
    assert pair.loc[("stochastic", "rht32"), "note"] == "no recipe finished"
    assert main(found, SR, "stochastic")["effect"] == pytest.approx(0.1, abs=1e-5)


def test_two_techniques_that_were_never_tried_together_have_no_interaction_at_all():
    runs = generated(KNOBS, truth=lambda codes: 0.1 * codes[SR])
    runs = runs[runs["wgrad_rotation"].isin(["none", "rht16"])]
    both = runs["dgrad_g_rounding"].eq("stochastic") & runs["wgrad_rotation"].eq("rht16")
    found = effects(runs[~both])
    pairs = found[found["kind"].eq("interaction")]
    lost = pairs["factor"].eq(SR) & pairs["with_factor"].eq(RHT)
    assert lost.sum() == 4
    assert pairs[lost][["effect", "low", "high", "p", "share"]].isna().all(axis=None)
    assert set(pairs[lost]["note"]) == {"no recipe finished", "too few of these pairs finished"}
    assert pairs[~lost]["effect"].notna().all()
    assert main(found, SR, "stochastic")["effect"] == pytest.approx(0.1, abs=0.01)


def test_a_level_that_always_diverges_has_no_effect_but_a_line_with_its_share():
    runs = generated((SR, RHT), truth=lambda codes: 0.1 * codes[SR])
    bad = runs["wgrad_rotation"].eq("rht32")
    runs.loc[bad, ["status", "val_loss"]] = ["diverged", np.nan]
    found = main(effects(runs), RHT, "rht32")
    assert (found["diverged"], found["note"], found["recipes"]) == (1.0, "no recipe finished", 2)
    assert np.isnan(found["effect"])
    assert main(effects(runs), RHT, "rht16")["diverged"] == 0


def test_ranks_put_what_diverged_last():
    runs = generated((SR, RHT))
    bad = runs["wgrad_rotation"].eq("rht32")
    runs.loc[bad, ["status", "val_loss"]] = ["diverged", np.nan]
    found = effects(runs, "rank")
    assert order(found)[0] == RHT
    assert main(found, RHT, "rht32")["effect"] > 0.3
    with pytest.raises(ConfigError, match="response: found 'loss'; accepted: gap, rank"):
        effects(runs, "loss")


def test_too_few_recipes_for_interactions_give_main_effects_and_say_so():
    found = effects(generated(seeds=2, recipes=40))
    assert set(found["kind"]) == {"main"}
    assert found["note"].str.contains("interactions need").all()


def test_factors_that_only_change_together_have_no_effect_of_their_own():
    runs = generated((SR, RHT, SCALE), truth=lambda codes: 0.1 * codes[SR])
    alone = runs["wgrad_rotation"].eq("rht32") == runs["fprop_x_scale"].eq("ue5m3")
    found = effects(runs[alone])
    mains = found[found["kind"].eq("main")]
    assert set(mains[mains["effect"].isna()]["factor"]) == {RHT, SCALE}
    assert set(mains[mains["effect"].isna()]["note"]) == {"it changes only together with others"}
    assert main(found, SR, "stochastic")["effect"] == pytest.approx(0.1, abs=0.02)


def test_without_a_baseline_effects_stand_and_means_are_unknown():
    runs = generated(KNOBS, truth=planted)
    with_, without = effects(runs), effects(runs[~runs["is_baseline"]].assign(baseline_id=PLAIN))
    assert without["effect"].tolist() == pytest.approx(with_["effect"].tolist())
    assert without["mean"].isna().all()


def test_settings_are_told_apart():
    runs = pd.concat(
        [generated((SR, RHT), truth=lambda c, s=s: s * c[SR], task=t) for t, s in (("a", 0.1), ("b", -0.1))]
    )
    found = effects(runs)
    signs = {task: main(part, SR, "stochastic")["effect"] for task, part in found.groupby("task")}
    assert signs["a"] > 0 > signs["b"]


def test_undetermined_names_the_columns_that_mix():
    x = np.random.default_rng(2).normal(size=(20, 3))
    assert undetermined(np.column_stack([x, x[:, 0] + x[:, 1]]), np.ones(20)).tolist() == [True, True, False, True]
    assert not undetermined(x, np.ones(20)).any()
