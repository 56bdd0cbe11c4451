import numpy as np
import pytest

from fp4dse.dse import ConfigError
from fp4dse.results import against, effects, marginal, neighbours
from fp4dse.results.bench.generated import generated

SR, RHT = "*.g.rounding", "wgrad.rotation"


def truth(codes):
    """Rotations of 16 help by 0.1, but only with stochastic rounding, which itself costs 0.02."""
    return 0.3 + 0.02 * codes[SR] - 0.1 * codes[SR] * (codes[RHT] == 1)


@pytest.fixture(scope="module")
def runs():
    return generated((SR, RHT, "*.scale"), truth=truth, noise=0.0)


def line(found, factor, level):
    return found[found["factor"].eq(factor) & found["level"].eq(level)].iloc[0]


def test_the_marginal_value_is_the_mean_over_the_company_and_its_range_tells_the_company_apart(runs):
    found = line(marginal(runs), RHT, "rht16")
    assert (found["reference"], found["matches"], found["helps"]) == ("none", 6, 0.5)
    assert found["difference"] == pytest.approx(-0.05)
    assert (found["tenth"], found["ninetieth"]) == pytest.approx((-0.1, 0.0))
    assert line(marginal(runs), SR, "stochastic")["difference"] == pytest.approx(0.02 - 0.1 / 3)


def test_a_recipe_without_a_partner_is_left_out(runs):
    fewer = runs[~runs["recipe_label"].eq("recipe 0")]
    assert line(marginal(fewer), RHT, "rht16")["matches"] == 5


def test_what_diverges_is_counted_and_not_averaged(runs):
    bad = runs.copy()
    bad.loc[bad["recipe_label"].eq("recipe 12") & bad["seed"].eq(1), ["status", "val_loss"]] = ["diverged", np.nan]
    found = line(marginal(bad), RHT, "rht16")
    assert (found["matches"], found["diverges"], found["recovers"]) == (6, 1, 0)
    assert found["difference"] == pytest.approx((3 * 0.0 - 2 * 0.1) / 5)


def test_the_interval_of_a_marginal_value_is_over_seeds():
    noisy = generated((SR, RHT, "*.scale"), truth=truth, noise=0.05, seeds=4)
    found = line(marginal(noisy), RHT, "rht16")
    assert found["low"] < -0.05 < found["high"]
    alone = marginal(generated((SR, RHT), truth=truth, seeds=1))
    assert alone["low"].isna().all()


def test_neighbours_differ_in_one_factor(runs):
    found = neighbours(runs, f"{9:016x}")  # stochastic, none, e4m3
    assert len(found) == 1 + 2 + 2
    assert found.iloc[0][["factor", "from_level", "level"]].tolist() == [RHT, "none", "rht16"]
    assert found.iloc[0]["difference"] == pytest.approx(-0.1)
    assert set(found[found["factor"].eq(SR)]["level"]) == {"nearest"}
    with pytest.raises(ConfigError, match="recipe: found 'feed'"):
        neighbours(runs, "feed")


def test_equal_neighbours_of_the_best_recipe_are_told_from_it_in_one_study_of_twenty():
    knobs = (SR, RHT, "*.scale", "forward.rounding")
    told = 0
    for seed in range(10):
        equal = generated(knobs, seed=seed)
        losses = np.log(equal["val_loss"]).groupby(equal["config_id"]).mean()
        best = losses.drop(equal.loc[equal["is_baseline"], "config_id"].unique()).idxmin()
        told += neighbours(equal, best)["verdict"].isin(["lower", "higher"]).any()
    assert told <= 2  # 5 % of 10, and three standard errors


def test_matches_whose_seeds_tie_have_no_interval_and_no_part_in_the_family():
    """A difference that is the same on three seeds, of one factor alone, so that nothing is pooled with it."""
    runs = generated((SR,), truth=lambda codes: 0.3 + 0.02 * codes[SR], noise=0.0)
    [found] = marginal(runs).to_dict("records")
    assert found["difference"] == pytest.approx(0.02)
    assert np.isnan([found[name] for name in ("low", "high", "p", "q")]).all()
    of_model = effects(runs)
    told = of_model[of_model["level"].eq("stochastic") & of_model["kind"].eq("main")].iloc[0]
    assert told["effect"] != 0
    assert told[["p", "q"]].isna().all()
    lines = against(runs)
    other = lines[lines["label"].ne("bf16")].iloc[0]
    assert other["verdict"] == "open"
    assert np.isnan(other["p"])


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_level_that_changes_no_bit_has_a_difference_of_zero_and_p_1_but_for_shares(noise):
    runs = generated((SR, "*.scale"), truth=lambda codes: 0.1 * codes["*.scale"], noise=noise, common=0.0)
    losses = runs.set_index(["config_id", "seed"])["val_loss"]
    labels = runs.drop_duplicates("config_id").set_index("config_id")["recipe_label"]
    ids = list(labels.index[labels.str.startswith("recipe")])
    twin = dict(zip(ids[len(ids) // 2 :], ids[: len(ids) // 2], strict=True))
    of = [losses[twin.get(name, name), seed] for name, seed in zip(runs["config_id"], runs["seed"], strict=True)]
    runs = runs.assign(val_loss=of)
    found = line(marginal(runs), SR, "stochastic")
    assert found[["difference", "low", "high", "p", "q"]].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    shares = line(marginal(runs.assign(gap_unit="points")), SR, "stochastic")
    assert shares["difference"] == 0
    assert np.isnan(shares[["low", "high", "p", "q"]].astype(float)).all() or noise
