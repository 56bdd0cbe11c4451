import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import ConfigError
from fp4dse.results import matched
from fp4dse.results.bench.generated import generated
from fp4dse.results.stats.paired import DERIVED, add_gap
from fp4dse.results.stats.recipes.equal_cost import _rivals, _windows

KNOBS = ("*.g.rounding", "wgrad.rotation")


def test_a_recipe_meets_the_best_other_one_of_its_own_storage():
    runs = generated(KNOBS, truth=lambda codes: 0.1 + 0.1 * codes[KNOBS[0]], noise=0.0)
    runs["bits_per_element"] = np.where(runs["dgrad_g_rounding"].eq("stochastic"), 4.25, 4.5)
    found = matched(runs).set_index("label")
    assert found["rivals"].tolist() == [2] * 6
    assert found["difference"].tolist() == pytest.approx([0] * 6)  # within a class all are alike
    assert found.loc["recipe 0", "rival_value"] == 4.5
    everyone = matched(runs, tolerance=0.1).set_index("label")
    assert everyone.loc["recipe 5", "difference"] == pytest.approx(0.1)
    assert everyone.loc["recipe 5", "rival"] in [f"{i:016x}" for i in range(3)]


def test_a_recipe_that_nothing_matches_has_no_rival():
    runs = generated(KNOBS)
    runs["mine"] = runs["config_id"].map(lambda text: 1.0 + int(text, 16))
    found = matched(runs, "mine")
    assert found["rivals"].eq(0).all()
    assert found[["rival", "difference"]].isna().all(axis=None)
    assert set(found["verdict"]) == {"open"}


def test_diverged_recipes_and_bf16_are_nobodys_rivals():
    runs = generated(KNOBS)
    runs.loc[runs["recipe_label"].eq("recipe 0") & runs["seed"].eq(0), ["status", "val_loss"]] = ["diverged", np.nan]
    found = matched(runs)
    assert len(found) == 5
    assert not {f"{0:016x}", f"{6:016x}"} & set(found["rival"])


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.3, 10.0])
def test_rivals_are_those_of_the_definition(tolerance):
    rng = np.random.default_rng(1)
    value, gap = rng.choice([4.0, 4.25, 4.5, 5.0, 8.0], 40), rng.normal(size=40)
    windows, draws = _windows(value, tolerance), np.stack([gap, -gap])
    rival = _rivals(windows, draws)
    assert sorted(i for window in windows for i in window.own) == list(range(40))
    for members, i in ((window.members, i) for window in windows for i in window.own):
        others = [j for j in range(40) if j != i and abs(value[j] - value[i]) <= tolerance * value[i] + 1e-9]
        assert set(members) == {i, *others}
        for losses, row in zip(draws, rival, strict=True):
            assert row[i] == min(others, key=lambda j: losses[j], default=i)


def test_equal_recipes_are_told_from_their_rivals_in_one_study_of_twenty_and_others_are_told():
    knobs = (*KNOBS, "*.scale", "forward.rounding")
    equal = pd.concat([generated(knobs, seed=seed, task=f"{seed:02}") for seed in range(20)], ignore_index=True)
    equal["bits_per_element"] = 4.0 + equal["config_id"].map(lambda text: int(text, 16) % 3)
    told = matched(equal).groupby("task")["verdict"].agg(lambda verdicts: verdicts.isin(["lower", "higher"]).any())
    assert told.sum() <= 3  # 5 % of 20, and three standard errors
    apart = generated(knobs, truth=lambda codes: 0.1 + 0.1 * (codes[KNOBS[1]] == 1))
    found = matched(apart).set_index("label")["verdict"]
    rotated = apart.loc[apart["wgrad_rotation"].eq("rht16"), "recipe_label"].unique()
    assert found[rotated].eq("higher").all()


def test_twins_are_the_same():
    runs = generated(KNOBS)
    twin = runs[runs["recipe_label"].eq("recipe 0")].assign(config_id="twin", recipe_label="twin", val_loss=1e-3)
    best = twin.assign(config_id="other", recipe_label="other")
    found = matched(add_gap(pd.concat([runs, twin, best], ignore_index=True).drop(columns=DERIVED, errors="ignore")))
    lines = found.set_index("label").loc[["twin", "other"]]
    assert lines["rival_label"].tolist() == ["other", "twin"]
    assert lines["verdict"].tolist() == ["same", "same"]


def test_what_cannot_be_matched_is_refused():
    with pytest.raises(ConfigError, match="overhead: found 'speed'"):
        matched(generated(KNOBS), "speed")
    with pytest.raises(ConfigError, match="tolerance: found -1"):
        matched(generated(KNOBS), tolerance=-1)
