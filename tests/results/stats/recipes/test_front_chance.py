import numpy as np
import pandas as pd
import pytest
from scipy.special import ndtr

from fp4dse.dse import ConfigError
from fp4dse.results import against, front_chance, hypervolume, summarize
from fp4dse.results.bench.generated import generated
from fp4dse.results.bench.studies import SIZES, drawn
from fp4dse.results.stats.estimates.shrinkage import unmoved
from fp4dse.results.stats.estimates.spread import shrunken, spread_over_seeds
from fp4dse.results.stats.factors import varied_by
from fp4dse.results.stats.paired import add_gap, rows_at_best_lr
from fp4dse.results.stats.recipes.front_chance import _draws, codes_of
from fp4dse.results.stats.recipes.pareto import front, hypervolumes
from fp4dse.results.stats.recipes.recommendation import verdicts

KNOBS = ("*.g.rounding", "wgrad.rotation")
REFERENCE = (10.0, np.log(2))


def test_a_recipe_that_is_better_by_far_is_surely_on_the_front():
    runs = generated(KNOBS, truth=lambda codes: 0.1 + 0.2 * codes[KNOBS[0]])
    found = front_chance(runs, "points")
    assert found.loc[found["label"].eq("recipe 0"), "p_front"].item() == 1.0  # cheapest, and none is better
    assert found.loc[found["label"].eq("recipe 5"), "p_front"].item() == 0.0


def test_two_recipes_that_are_alike_share_the_front_evenly():
    runs = generated(("*.g.rounding",), seeds=200, noise=0.02)
    runs["overhead"] = 0.5
    found = front_chance(runs, "overhead")
    gaps = found["gap"].to_numpy()
    assert found["p_front"].sum() == pytest.approx(1.0)
    error = 0.02 * np.sqrt(2 / 200)  # of the difference, which says how the share falls
    assert found["p_front"].min() == pytest.approx(ndtr(-abs(gaps[0] - gaps[1]) / error), abs=0.06)


def test_recipes_of_the_same_bits_are_drawn_as_one():
    runs = generated(("*.g.rounding",), seeds=5, noise=0.02)
    runs["overhead"] = 0.5
    one = runs[runs["recipe_label"].eq("recipe 0")]
    twin = one.assign(config_id="twin", recipe_label="twin")
    dearer = twin.assign(config_id="dearer", recipe_label="dearer", overhead=0.6)
    alone = front_chance(runs, "overhead").set_index("label")["p_front"]
    found = front_chance(pd.concat([runs, twin, dearer], ignore_index=True), "overhead").set_index("label")["p_front"]
    assert 0 < found["recipe 0"] == found["twin"] == alone["recipe 0"]
    assert found["dearer"] == 0


def test_recipes_of_one_cost_have_one_place_together_whether_or_not_their_techniques_do_anything():
    knobs = ("*.g.rounding", "wgrad.rotation", "*.scale", "dgrad.rotation")
    runs = generated(knobs, truth=lambda codes: 0.1 + 0.05 * codes["*.g.rounding"])
    runs["overhead"] = runs["points"].map(lambda points: 0.9 - 0.1 * points)
    found = front_chance(runs)
    assert found.groupby("overhead")["p_front"].sum().max() <= 1 + 1e-9  # 2.3 where each of those that tie counts


@pytest.mark.heavy
def test_where_half_of_the_techniques_do_nothing_recipes_are_on_the_front_as_often_as_they_are_said_to_be():
    """A few studies of `bench statistics`; its lines are from thousands."""
    studies = [drawn(SIZES["48"], "additive", np.random.default_rng([1, i])) for i in range(40)]
    found = front_chance(add_gap(pd.concat([study.runs(f"{i:06}") for i, study in enumerate(studies)])))
    chances, truths = [], []
    for study, (_, lines) in zip(studies, found.groupby("task"), strict=True):
        rows = study.rows(lines["config_id"])
        chances.append(lines["p_front"].to_numpy())
        truths.append(study.places(rows, front(study.cost[rows], study.gap[rows], 1.0)))
    chance, true = np.concatenate(chances), np.concatenate(truths)
    open_ = (chance > 0.2) & (chance < 0.8)
    assert true[open_].mean() == pytest.approx(chance[open_].mean(), abs=0.15)  # 0.24 too few where all that tie count
    assert np.square(true - chance).mean() < 0.0075  # 0.0107


def test_the_shared_part_of_a_seed_moves_no_chance_and_widens_the_hypervolume():
    quiet = generated(KNOBS, seeds=3, common=0.0, seed=3)
    loud = quiet.assign(val_loss=quiet["val_loss"] * np.where(quiet["is_baseline"], np.exp(0.05 * quiet["seed"]), 1))
    assert front_chance(loud, "points")["p_front"].tolist() == front_chance(quiet, "points")["p_front"].tolist()
    width = [np.ptp(hypervolume(frame, "points")[["low", "high"]].to_numpy()) for frame in (quiet, loud)]
    assert width[1] > 3 * width[0]


def test_the_lines_are_those_of_the_summary_and_the_draws_can_be_repeated():
    runs = generated(KNOBS)
    found = front_chance(runs, "points")
    summary = summarize(runs, "points")
    assert found["on_front"].sum() == summary["on_front"].sum()
    assert set(found["config_id"]) == set(summary[~summary["is_baseline"]]["config_id"])
    pd.testing.assert_frame_equal(found, front_chance(runs, "points"))
    assert found["p_front"].tolist() != front_chance(runs, "points", seed=1)["p_front"].tolist()


def test_with_one_seed_nothing_is_known_of_the_chance():
    runs = generated(KNOBS, seeds=1)
    assert front_chance(runs, "points")["p_front"].isna().all()
    found = hypervolume(runs, "points").iloc[0]
    assert found["hypervolume"] > 0
    assert np.isnan([found["low"], found["high"]]).all()


def test_a_recipe_with_one_seed_has_the_noise_of_the_others():
    runs = generated(KNOBS, seeds=5)
    fewer = runs[~(runs["recipe_label"].eq("recipe 5") & runs["seed"].gt(0))]
    assert front_chance(fewer, "points")["p_front"].between(0, 1).all()


@pytest.mark.parametrize(("recipes", "seeds", "common"), [(6, 3, 0.01), (30, 3, 0.0), (30, 5, 0.01)])
def test_the_hypervolume_interval_covers_the_truth(recipes, seeds, common):
    rng = np.random.default_rng(recipes + seeds)
    x = rng.integers(1, 6, recipes).astype(float)
    mean = 0.02 + 0.05 * rng.random(recipes) + 0.03 / x
    truth = hypervolumes(x, mean[None], REFERENCE)[0]
    covered = 0
    for _ in range(500):
        gaps = mean[:, None] + common * rng.normal(size=seeds) + 0.01 * rng.normal(size=(recipes, seeds))
        spread = spread_over_seeds(gaps)
        area = hypervolumes(x, spread.mean[None], REFERENCE)[0]
        drawn = [
            hypervolumes(x, draw + shared[:, None], REFERENCE) for draw, shared in _draws(unmoved(spread), 200, rng)
        ]
        low, high = 2 * area - np.quantile(np.concatenate(drawn), [0.975, 0.025])
        covered += low <= truth <= high
    assert covered / 500 == pytest.approx(0.95, abs=0.02)


def test_variances_are_shrunk_as_far_as_their_spread_allows():
    rng = np.random.default_rng(0)
    freedom = np.full(4000, 2)
    alike = rng.chisquare(2, 4000) / 2
    pooled, d = shrunken(alike, freedom)
    assert pooled.std() < 0.1 * alike.std()
    assert pooled.mean() == pytest.approx(1.0, abs=0.1)
    assert d.min() > 20
    prior = 6 / rng.chisquare(6, 4000)  # scaled inverse chi-square: d0 = 6
    pooled, d = shrunken(prior * rng.chisquare(2, 4000) / 2, freedom)
    assert d[0] == pytest.approx(8, rel=0.2)
    assert np.mean((pooled - prior) ** 2) < np.mean((prior * 1.0 - prior.mean()) ** 2)


def test_variances_that_are_unknown_or_zero_do_no_harm():
    pooled, d = shrunken(np.array([np.nan, 1.0]), np.array([0, 2]))
    assert (pooled.tolist(), d.tolist()) == ([1.0, 1.0], [2.0, 2.0])
    assert shrunken(np.zeros(3), np.full(3, 2))[0].tolist() == [0, 0, 0]
    assert np.isfinite(shrunken(np.array([0.0, 1.0, 2.0]), np.full(3, 2))[0]).all()
    assert np.isnan(shrunken(np.full(2, np.nan), np.zeros(2))[0]).all()


def test_the_reference_point_is_fixed_and_printed():
    found = hypervolume(generated(KNOBS), "points").iloc[0]
    assert (found["axis"], found["reference_overhead"], found["reference_gap"]) == ("points", 10.0, np.log(2))
    assert hypervolume(generated(KNOBS), "overhead").iloc[0]["reference_overhead"] == 1.0
    assert hypervolume(generated(KNOBS), "steps", (5000.0, 1.0)).iloc[0]["axis"] == "steps"
    with pytest.raises(ConfigError, match=r"overhead: found 'steps'; accepted: points, .*or state the reference"):
        hypervolume(generated(KNOBS), "steps")


def test_what_is_drawn_depends_on_neither_the_order_of_rows_nor_how_texts_are_kept():
    """With a recipe that trains to the bits of another of other techniques, and rows older than a column."""
    knobs = ("*.g.rounding", "wgrad.rotation", "*.scale", "dgrad.rotation")
    runs = generated(knobs, truth=lambda codes: 0.02 + 0.01 * codes["*.g.rounding"], noise=0.01)
    ids, losses = runs["config_id"].unique(), dict(iter(runs.groupby("config_id")["val_loss"]))
    for twin, of in ((ids[0], ids[-2]), (ids[3], ids[7])):
        for name in ("val_loss", "val_loss_bf16"):
            runs.loc[runs["config_id"].eq(twin), name] = losses[of].to_numpy()
    runs.loc[runs["seed"].eq(0) & runs.index % 2, "ramping"] = None
    runs = add_gap(runs)
    shuffled = runs.sample(frac=1, random_state=1).reset_index(drop=True)
    coded = shuffled.copy()
    for name in ("config_id", "recipe_label", "dgrad_rotation", "task"):
        texts = sorted(coded[name].dropna().unique(), reverse=True)
        coded[name] = pd.Categorical(coded[name], texts)
    chance, [verdict], held = front_chance(runs), verdicts(runs), against(runs)
    for other in (shuffled, coded):
        numbers = ["p_front", "expected", "expected_low", "expected_high"]
        found = front_chance(other).astype({"config_id": str}).set_index("config_id")[numbers]
        np.testing.assert_allclose(found.loc[chance["config_id"]], chance[numbers], rtol=1e-9)
        [one] = verdicts(other)
        assert (one.config_id, one.open, one.more_seeds) == (verdict.config_id, verdict.open, verdict.more_seeds)
        np.testing.assert_allclose(
            [*one.time, one.gap, one.p_front], [*verdict.time, verdict.gap, verdict.p_front], 1e-9
        )
        numbers = ["difference", "low", "high", "p", "more_seeds"]
        found = against(other).astype({"config_id": str}).set_index("config_id")[numbers]
        np.testing.assert_allclose(found.loc[held["config_id"]], held[numbers], rtol=1e-9)


def test_factors_of_other_rows_are_an_error():
    runs = rows_at_best_lr(generated(KNOBS))
    with pytest.raises(KeyError):
        codes_of(runs, varied_by(runs.assign(task="another")))
    assert list(codes_of(runs, varied_by(runs))) == list(KNOBS)
    assert codes_of(runs[runs["is_baseline"]], varied_by(runs)).empty
