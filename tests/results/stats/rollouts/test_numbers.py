"""Numbers of reinforcement learning, and the effects of what recipes can do without: true effects come back."""

import msgspec
import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.inject import INJECT_NAMES
from fp4dse.dse.noise import NOISE_NAMES
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.results import open_store
from fp4dse.results.stats.estimates.intervals import BOOTSTRAP_FROM, adjusted
from fp4dse.results.stats.rollouts.effects import (
    complete_block,
    rollout_effects,
    trainer_of,
    treatment_pairs,
    without_each,
)
from fp4dse.results.stats.rollouts.numbers import at_equal_reward, nothing_recorded, recorded_rows, rollout_numbers
from fp4dse.results.views import MORE_READ, columns_read
from fp4dse.sweeps.arguments import find_space

replace = msgspec.structs.replace
STEPS = np.array([1.0, 2, 4, 8, 10, 20, 30, 40])
SEEDS = (0, 1, 2, 3)
BF16 = Recipe.named("bf16")


def fixed(scaling="amax", outliers="none", noise="none"):
    """MXFP4 in trainer and rollout."""
    q = {"like": "mxfp4-rceil", "scaling": scaling}
    stages = {"fprop": "xw", "dgrad": "gw", "wgrad": "gx"}
    of = {stage: {operand: dict(q) for operand in operands} for stage, operands in stages.items()}
    for operand in "xw":
        of["fprop"][operand]["outliers"] = outliers
    return recipe_from_dict(of | {"training": {"noise": noise}})


@pytest.fixture
def stored(tmp_path, row):
    """A function that stores lanes, {recipe: function of the seed -> series}, and returns what views read."""

    def store_of(lanes, loss=lambda recipe, seed: 0.2, seeds=SEEDS):
        store = open_store(tmp_path / "store", create=True)
        of_rl = {"task": "rl", "preset": "small", "gap_unit": "points"}
        rows = [
            row(recipe, seed, loss(recipe, seed), recorded={"step": STEPS.tolist(), **made(seed)}, **of_rl)
            for recipe, made in lanes.items()
            for seed in seeds
        ]
        store.add(rows, "job")
        return store, store.runs(columns_read(MORE_READ))

    return store_of


def series(reward=0.0, **numbers):
    """Made of a lane: reward rises, everything else is level."""
    of = {"reward": (0.4 + reward + 0.005 * STEPS).tolist(), "entropy": (0.3 - 0.001 * STEPS).tolist()}
    return of | {name: np.broadcast_to(value, STEPS.shape).tolist() for name, value in numbers.items()}


def test_values_and_differences_to_bf16_are_paired_by_seed(stored):
    def of(apart):
        return lambda seed: series(mismatch_kl=apart * (1 + 1e-7 * seed) + seed + 0.02 * STEPS, gradient_error=1.0)

    _, runs = stored({BF16: of(0.0), fixed(): of(0.5)}, lambda recipe, seed: 0.2 + (recipe != BF16) * 0.01 * seed)
    lines = rollout_numbers(runs).set_index(["label", "number"])
    kl, slope, worst, solved = (
        lines.loc["mxfp4-rceil", name] for name in ("mismatch_kl", "mismatch_kl_slope", "mismatch_kl_max", "accuracy")
    )
    assert kl["value"] == pytest.approx(0.5 + 1.5 + 0.02 * STEPS.mean())
    assert kl["difference"] == pytest.approx(0.5)
    assert kl["difference_high"] - kl["difference_low"] < 1e-6 < 1 < kl["high"] - kl["low"]
    assert (slope["value"], slope["difference"]) == pytest.approx((2.0, 0.0))
    assert worst["value"] == pytest.approx(0.5 + 1.5 + 0.8)
    assert solved["difference"] == pytest.approx(-0.015)
    assert (solved["pairs"], solved["seeds"]) == (4, 4)


def test_recipes_are_compared_at_one_rate_though_their_best_ones_differ(tmp_path, row):
    """1e-3 is the best of two recipes of three, and the third has another; one was never trained at it."""
    alone = fixed(noise="qerl")
    losses = {BF16: {1e-3: 0.1, 2e-3: 0.2}, fixed(): {1e-3: 0.1, 2e-3: 0.2}, fixed("macro"): {1e-3: 0.2, 2e-3: 0.1}}
    losses[alone] = {4e-3: 0.1}
    store = open_store(tmp_path / "store", create=True)
    of_rl = {"task": "rl", "preset": "small", "gap_unit": "points"}
    rows = [
        row(recipe, seed, loss, lr=lr, recorded={"step": STEPS.tolist(), **series(mismatch_kl=lr)}, **of_rl)
        for recipe, of in losses.items()
        for lr, loss in of.items()
        for seed in SEEDS
    ]
    store.add(rows, "job")
    runs = store.runs(columns_read(MORE_READ))
    lines = rollout_numbers(runs).query("number == 'mismatch_kl'").set_index("config_id")
    assert {key: lines.loc[key.config_id, "value"] for key in losses} == pytest.approx(
        {BF16: 1e-3, fixed(): 1e-3, fixed("macro"): 1e-3, alone: 4e-3}
    )
    assert (lines["lr"] - lines["value"]).abs().max() < 1e-9
    blocks = rollout_effects(runs).set_index(["treatment", "number"]).loc["macro blocks"]["difference"]
    assert blocks["mismatch_kl"] == 0
    assert blocks["accuracy"] == pytest.approx(-0.1)


def test_the_two_of_a_pair_and_a_recipe_and_bf16_are_at_equal_rates(tmp_path, row):
    """Some recipes have records at another rate alone. KL is the rate: a pair of two rates would have a difference."""
    macro, noisy = fixed("macro"), replace(BF16, training=Training(noise=NOISE_NAMES["weights"]))
    losses = {BF16: {1e-3: 0.1, 4e-3: 0.2}, fixed(): {1e-3: 0.1}, macro: {4e-3: 0.1}, noisy: {4e-3: 0.3}}
    losses |= {fixed(noise="weights"): {1e-3: 0.15}, fixed("macro", noise="weights"): {1e-3: 0.2, 4e-3: 0.1}}
    store = open_store(tmp_path / "store", create=True)
    of_rl = {"task": "rl", "preset": "small", "gap_unit": "points"}
    rows = [
        row(recipe, seed, loss, lr=lr, recorded={"step": STEPS.tolist(), **series(100 * lr, mismatch_kl=lr)}, **of_rl)
        for recipe, of in losses.items()
        for lr, loss in of.items()
        for seed in SEEDS
    ]
    store.add(rows, "job")
    lines = store.sql("FROM rollout_effects WHERE number = 'mismatch_kl'")
    assert lines["difference"].eq(0).all()
    assert lines["pairs"].eq(1).all()
    assert list(zip(lines["treatment"], lines["trainer"], lines["lr"], strict=True)) == [
        ("macro blocks", "fp4", 1e-3),
        ("noise weights", "bf16", 4e-3),
        ("noise weights", "fp4", 1e-3),
        ("noise weights", "fp4", 4e-3),
    ]
    solved = store.sql("FROM rollout_effects WHERE number = 'accuracy' AND trainer = 'bf16'")
    assert solved["difference"].tolist() == pytest.approx([-0.1]), "0.3 against 0.2, both at 4e-3"
    found = store.sql("FROM rollout_numbers").set_index(["number", "config_id"])
    assert found.loc["mismatch_kl", "difference"].eq(0).all()
    line = found.loc[("accuracy", noisy.config_id)]
    assert (line["lr"], line["difference"], line["pairs"]) == pytest.approx((4e-3, -0.1, 4))
    assert found.loc[("entropy_at_reward", noisy.config_id), "difference"] == pytest.approx(0)


def test_the_slope_is_that_of_least_squares_over_what_was_recorded(stored):
    rng = np.random.default_rng(0)
    kl = rng.random((len(SEEDS), len(STEPS)))
    kl[:, 2] = np.nan
    _, runs = stored({BF16: lambda seed: series(mismatch_kl=kl[seed])})
    lines = rollout_numbers(runs).set_index("number")
    there = np.isfinite(kl[0])
    expected = [np.polyfit(STEPS[there] / 100, kl[seed][there], 1)[0] for seed in SEEDS]
    assert lines.loc["mismatch_kl_slope", "value"] == pytest.approx(np.mean(expected))


EVERY = np.arange(1.0, 41)
"""Steps of lanes that recorded rollouts at every one."""


def at_every_step(of, rng):
    """A lane that has the same at the steps of others, and anything between, but for what is measured."""
    out = {"step": STEPS.tolist()}
    for name, values in of.items():
        if name == "gradient_error":
            out[name] = values
            continue
        filled = 10 * rng.random(len(EVERY))
        filled[STEPS.astype(int) - 1] = values
        out |= {name: filled.tolist(), f"step/{name}": EVERY.tolist()}
    return out


def test_lanes_of_few_and_of_many_steps_are_compared_at_those_that_both_have(tmp_path, row):
    """A store that got rows of every step beside its older ones has the numbers of the older steps; nothing is filled
    in. One that has them alone counts every step."""
    rng = np.random.default_rng(5)
    recipes = {recipe: 0.1 * n for n, recipe in enumerate((BF16, fixed(), fixed("macro")))}
    found = []
    for newer in (set(), {1}, {0, 1, 2, 3}):
        store = open_store(tmp_path / str(len(newer)), create=True)
        rows = []
        for recipe, apart in recipes.items():
            for seed in SEEDS:
                noise = np.random.default_rng(seed).standard_normal(len(STEPS))
                of = series(mismatch_kl=apart + seed + noise**2, gradient_error=1 + apart)
                of["entropy"] = (np.array(of["entropy"]) + 0.01 * noise).tolist()
                many = seed in newer
                recorded = at_every_step(of, rng) if many else {"step": STEPS.tolist(), **of}
                of_rl = {"task": "rl", "preset": "small", "gap_unit": "points"}
                rows.append(row(recipe, seed, 0.2 + apart * 0.01 * seed, recorded=recorded, **of_rl))
        store.add(rows, "job")
        found.append([store.sql(f"FROM {view} ORDER BY ALL") for view in ("rollout_numbers", "rollout_effects")])
    few, mixed, many = found
    for one, other in zip(few, mixed, strict=True):
        pd.testing.assert_frame_equal(one, other)
    kl = [of[0].query("number == 'mismatch_kl' and label == 'bf16'")["value"].iloc[0] for of in (few, many)]
    assert abs(kl[0] - kl[1]) > 1, "every step counts where all lanes have it"
    errors = [of[0].query("number == 'gradient_error'")["value"].tolist() for of in (few, many)]
    assert errors[0] == errors[1]


def test_a_pruned_lane_takes_no_steps_from_the_others(stored, row):
    """Its series ends at the rung."""
    store, runs = stored(
        {BF16: lambda seed: series(mismatch_kl=STEPS), fixed(): lambda seed: series(mismatch_kl=STEPS)}
    )
    before = rollout_numbers(runs).set_index(["label", "number"])["value"]
    short = {"step": STEPS[:2].tolist()} | {name: of[:2] for name, of in series(mismatch_kl=STEPS).items()}
    of_rl = {"task": "rl", "preset": "small", "gap_unit": "points"}
    store.add([row(fixed("macro"), 0, 0.9, status="pruned", recorded=short, **of_rl)], "job-2")
    after = rollout_numbers(store.runs(columns_read(MORE_READ))).set_index(["label", "number"])["value"]
    assert after.loc[("bf16", "mismatch_kl")] == before.loc[("bf16", "mismatch_kl")] == pytest.approx(STEPS.mean())


def test_entropy_at_equal_reward_is_that_of_a_regression_with_a_column_a_lane():
    """numpy's least squares of the whole design, dummies and all, of two lanes that learn at different speeds."""
    rng = np.random.default_rng(1)
    true = [0.0, 0.1]
    rewards = [0.3 + speed * STEPS + 0.01 * rng.random(len(STEPS)) for speed in (0.002, 0.01)]
    lanes = [
        {"step": STEPS, "reward": r, "entropy": 1 - r + 0.5 * r**2 + of} for r, of in zip(rewards, true, strict=True)
    ]
    bf16, lane = lanes
    assert at_equal_reward(lane, bf16) - at_equal_reward(bf16, bf16) == pytest.approx(0.1), "exact where it is true"
    for of in lanes:
        of["entropy"] = of["entropy"] + 0.1 * rng.standard_normal(len(STEPS))
    lane["entropy"][3] = np.nan
    y, r = (np.concatenate([of[name] for of in lanes]) for name in ("entropy", "reward"))
    design = np.column_stack([np.repeat(np.eye(2), len(STEPS), axis=0), r, r**2])
    there = np.isfinite(y)
    whole, *_ = np.linalg.lstsq(design[there], y[there], rcond=None)
    of_bf16 = np.array([rewards[0].mean(), (rewards[0] ** 2).mean()])
    assert at_equal_reward(lane, bf16) == pytest.approx(whole[1] + whole[2:] @ of_bf16)
    assert at_equal_reward(bf16, bf16) == pytest.approx(bf16["entropy"].mean())
    few = [{name: of[name][:3] for name in of} for of in lanes]
    assert np.isnan([at_equal_reward(*few[::-1]), at_equal_reward({}, bf16), at_equal_reward(lane, {})]).all()


def test_entropy_at_equal_reward_does_not_depend_on_what_else_the_store_has(stored, row, tmp_path):
    """A lane that collapses has the slopes of its own pair and of no other."""
    rng = np.random.default_rng(3)

    def of(speed, more=0.0):
        def made(seed):
            reward = 0.3 + 0.01 * seed + speed * STEPS
            noise = 0.05 * np.random.default_rng(seed).standard_normal(len(STEPS))
            return {"reward": reward.tolist(), "entropy": (1 - reward + 0.3 * reward**2 + more + noise).tolist()}

        return made

    def collapsed(seed):
        return {"reward": (0.3 - 0.007 * STEPS).tolist(), "entropy": (2 + rng.random(len(STEPS))).tolist()}

    lanes, asked = {BF16: of(0.01), fixed(): of(0.004, 0.1)}, "FROM rollout_numbers WHERE number = 'entropy_at_reward'"
    alone = open_store(tmp_path / "alone", create=True)
    beside, _ = stored(lanes | {fixed("macro"): collapsed})
    of_rl = {"task": "rl", "preset": "small", "gap_unit": "points"}
    for recipe, made in lanes.items():
        rows = [row(recipe, seed, 0.2, recorded={"step": STEPS.tolist(), **made(seed)}, **of_rl) for seed in SEEDS]
        alone.add(rows, "job")
    found = [store.sql(asked).set_index("label")["value"] for store in (alone, beside)]
    assert found[0].to_dict() == pytest.approx(found[1].loc[found[0].index].to_dict())
    assert len(found[1]) == 3


def test_a_lane_that_learns_less_has_more_entropy_but_not_at_equal_reward(stored):
    """The trap of the question whether noise explores."""

    def of(speed, more=0.0):
        def made(seed):
            reward = 0.3 + 0.01 * seed + speed * STEPS
            return {"reward": reward.tolist(), "entropy": (1 - reward + 0.3 * reward**2 + more).tolist()}

        return made

    slow, noisy = fixed(noise="weights"), fixed(noise="qerl")
    _, runs = stored({BF16: of(0.01), fixed(): of(0.01), slow: of(0.002), noisy: of(0.002, more=0.05)})
    lines = rollout_effects(runs).set_index(["treatment", "number"])
    assert lines.loc["noise weights", "entropy"]["difference"] > 0.05
    assert lines.loc["noise weights", "entropy_at_reward"]["difference"] == pytest.approx(0, abs=1e-12)
    assert lines.loc["noise qerl", "entropy_at_reward"]["difference"] == pytest.approx(0.05)


def test_effects_of_a_factorial_design_are_the_true_ones_of_each_number(stored):
    """Each fix moves one number alone; and in pairs of which a half is missing, of the half that is there. An error of
    the gradient is multiplied, whatever its size is in a seed."""
    rng = np.random.default_rng(2)
    lanes = {}
    for scaling in ("amax", "macro"):
        for outliers in ("none", "residual"):
            for noise in ("none", "weights"):
                error = 0.8 * 0.6 ** (outliers == "residual")
                kl = 0.05 - 0.02 * (scaling == "macro")
                lanes[fixed(scaling, outliers, noise)] = lambda seed, error=error, kl=kl: series(
                    gradient_error=error * 10.0**-seed * np.exp(0.01 * rng.standard_normal()),
                    mismatch_kl=kl + 0.01 * seed,
                )
    lanes.pop(fixed("macro", "residual", "weights"))
    _, runs = stored({BF16: lambda seed: series(gradient_error=0.0, mismatch_kl=0.0), **lanes})
    lines = rollout_effects(runs)
    assert set(lines["treatment"]) == {"macro blocks", "fallback", "noise weights"}
    assert set(lines["trainer"]) == {"fp4"}
    assert lines["pairs"].eq(3).all()
    lines = lines.set_index(["treatment", "number"])
    fallback = lines.loc["fallback", "gradient_error"]
    assert fallback["low"] < np.log(0.6) < fallback["high"] < np.log(0.65)
    assert fallback["without"] == pytest.approx(0.8 * 10**-1.5, rel=0.02)
    assert lines.loc["macro blocks", "gradient_error"][["low", "high"]].abs().max() < 0.1
    assert lines.loc["macro blocks", "mismatch_kl"]["difference"] == pytest.approx(-0.02)
    assert lines.loc["fallback", "mismatch_kl"]["difference"] == pytest.approx(0, abs=1e-12)


def test_errors_of_the_gradient_have_geometric_means_over_steps_and_seeds(stored):
    """Steps of which one has a hundredfold error, one has none, and one is not known; BF16's error is 0."""

    def error(seed):
        steps = 2.0**seed * np.array([0.1, 0.1, 10.0, 0.1, 0.1, 10.0, 0.0, np.nan])
        return series(**{"gradient_error": steps, "gradient_error/blocks.0": 2 * steps, "mismatch_kl": steps + 1})

    plain = dict.fromkeys(("gradient_error", "gradient_error/blocks.0"), 0.0)
    _, runs = stored({BF16: lambda seed: series(mismatch_kl=0.0, **plain), fixed(): error})
    lines = rollout_numbers(runs).set_index(["label", "number"])
    of_lane = (0.1**4 * 10.0**2) ** (1 / 6)
    for number, factor in (("gradient_error", 1), ("gradient_error/blocks.0", 2)):
        line, bf16 = lines.loc["mxfp4-rceil", number], lines.loc["bf16", number]
        assert line["value"] == pytest.approx(factor * of_lane * 2.0 ** np.mean(SEEDS))
        assert line["value"] / line["low"] == pytest.approx(line["high"] / line["value"])
        assert (line["seeds"], line["pairs"]) == (4, 0), "nothing is a multiple of 0"
        assert line[["difference", "difference_low", "p"]].isna().all()
        assert (bf16["value"], bf16["seeds"], bf16["pairs"], bf16["difference"]) == (0.0, 4, 4, 0.0)
        assert bf16[["low", "high", "p"]].isna().all()
    mean = np.mean([0.1, 0.1, 10.0, 0.1, 0.1, 10.0, 0.0])
    assert lines.loc[("mxfp4-rceil", "mismatch_kl"), "value"] == pytest.approx(1 + mean * np.mean([1, 2, 4, 8]))


def test_each_fix_of_the_shipped_space_has_all_its_pairs_in_trainers_and_in_rollouts(row):
    """All combinations of four under MXFP4 and BF16 trainers, one at a time in QAT."""
    runs = [row(recipe, 0, 0.2) for recipe in find_space("rl-fixes").recipes()]
    found = {key: len(of) for key, of in treatment_pairs(pd.DataFrame(runs)).items()}
    for fix in ("macro blocks", "fallback", "rotation", "noise weights"):
        assert {trainer: found[fix, trainer] for trainer in ("bf16", "qat", "fp4")} == {"bf16": 8, "qat": 1, "fp4": 8}
    assert found["noise qerl", "qat"] == 1
    assert not any(treatment.startswith("rollout") for treatment, _ in found), "the space has no BF16 of its own"


def test_parts_of_an_error_are_a_full_factorial_with_bf16(row):
    runs = [row(recipe, 0, 0.2) for recipe in (BF16, *find_space("rl-inject").recipes())]
    found = treatment_pairs(pd.DataFrame(runs))
    assert {part: len(found[f"inject {part}", "bf16"]) for part in ("scale", "dead", "grid")} == dict.fromkeys(
        ("scale", "dead", "grid"), 4
    )
    ids = {name: replace(BF16, training=Training(inject=of)).config_id for name, of in INJECT_NAMES.items()}
    ids["none"] = BF16.config_id
    assert set(found["inject dead", "bf16"]) == {
        (ids[with_], ids[without])
        for with_, without in (
            ("dead", "none"),
            ("scale+dead", "scale"),
            ("dead+grid", "grid"),
            ("scale+dead+grid", "scale+grid"),
        )
    }


def test_what_a_recipe_can_do_without():
    rollout = ROLLOUT_NAMES["mxfp4-rceil"]
    recipe = replace(BF16, training=Training(rollout=rollout, tis=2.0))
    assert without_each(recipe) == {
        "tis 2.0": replace(BF16, training=Training(rollout=rollout)),
        "rollout mxfp4-rceil": replace(BF16, training=Training(tis=2.0)),
    }
    assert without_each(BF16) == {}
    assert [trainer_of(r) for r in (recipe, fixed())] == ["bf16", "fp4"]
    plain = recipe_to_dict(BF16)
    forward = recipe_from_dict(plain | {"fprop": recipe_to_dict(fixed())["fprop"]})
    assert trainer_of(forward) == "qat"


def test_rows_without_records_say_what_to_train(stored, row):
    store, runs = stored({BF16: lambda seed: series()})
    assert nothing_recorded(runs, "runs/a") == ""
    plain = runs.assign(recorded=None)
    assert recorded_rows(plain) == []
    assert len(rollout_numbers(plain)) == len(rollout_effects(plain.drop(columns="recorded"))) == 0
    assert "sweep rl --task rl:smoke --seeds 3 --record --store runs/a" in nothing_recorded(plain, "runs/a")
    assert len(store.sql("FROM rollout_numbers WHERE number = 'entropy'")) == 1


def test_a_diverged_lane_has_no_numbers_and_leaves_those_of_others(stored):
    lose = fixed()
    _, runs = stored(
        {BF16: lambda seed: series(), lose: lambda seed: series()}, lambda r, s: None if r == lose else 0.2
    )
    assert set(rollout_numbers(runs)["label"]) == {"bf16"}


def test_seeds_that_tie_give_neither_an_interval_nor_a_place_among_the_claims(stored):
    """Accuracies are counts of solved problems: each seed solves 8 of 4,096 more, by chance, and p is not 0."""

    def loss(recipe, seed):
        return (512 + 40 * seed - 8 * (recipe != BF16) - 8 * (recipe == fixed("macro"))) / 4096

    def of(apart):
        return lambda seed: series(mismatch_kl=apart * (1 + 0.5 * seed), gradient_error=0.0)

    _, runs = stored({BF16: of(0.1), fixed(): of(0.2), fixed("macro"): of(0.1)}, loss)
    numbers = rollout_numbers(runs).set_index(["label", "number"]).loc[("mxfp4-rceil", "accuracy")]
    assert numbers["difference"] == pytest.approx(8 / 4096)
    assert numbers[["difference_low", "difference_high", "p"]].isna().all()
    lines = rollout_effects(runs).query("treatment == 'macro blocks'").set_index("number")
    assert lines.loc["accuracy", "difference"] == pytest.approx(8 / 4096)
    for number in ("accuracy", "gradient_error"):
        assert lines.loc[number, ["low", "high", "p", "q"]].isna().all()
    told = lines[lines["p"].notna()]
    assert {"mismatch_kl", "mismatch_kl_max"} <= set(told.index)
    assert told["q"].tolist() == pytest.approx(adjusted(told["p"]))


def test_what_ties_by_definition_is_no_claim_with_any_number_of_seeds(stored):
    """A trainer in BF16 has no error of the gradient, with noise and without: 32 such seeds are no more known than
    three, and their p would be among those that the others' q is adjusted for."""

    def of(apart):
        return lambda seed: series(mismatch_kl=apart * (1 + 0.01 * seed), gradient_error=0.0, ratios_clipped=0.0)

    noisy = replace(BF16, training=Training(noise=NOISE_NAMES["weights"]))

    def loss(recipe, seed):
        return 0.2 + 0.001 * seed * (recipe == noisy)

    lanes = {BF16: of(0.0), noisy: of(1e-6)}
    for seeds in (range(BOOTSTRAP_FROM + 2), SEEDS):
        _, runs = stored(lanes, loss, seeds)
        lines = rollout_effects(runs).set_index("number")
        for number in ("gradient_error", "ratios_clipped"):
            assert lines.loc[number, "difference"] == 0
            assert lines.loc[number, ["low", "high", "p", "q"]].isna().all(), (number, len(seeds))
        told = lines[lines["p"].notna()]
        assert {"mismatch_kl", "mismatch_kl_max", "accuracy"} <= set(told.index)
        assert told["q"].tolist() == pytest.approx(adjusted(told["p"]))
        numbers = rollout_numbers(runs).set_index(["label", "number"])
        for label in ("bf16", "bf16, noise weights"):
            line = numbers.loc[label, "ratios_clipped"]
            assert line[["value", "difference"]].eq(0).all()
            assert line[["low", "high", "difference_low", "difference_high", "p"]].isna().all()
        assert numbers.loc[("bf16, noise weights", "mismatch_kl"), "p"] < 0.001


def test_seeds_of_an_effect_are_of_the_same_pairs(stored):
    """A lane is missing: pairs differ, so that the mean of a seed over the others would be of another thing."""
    lanes = {}
    for outliers in ("none", "residual"):
        for noise in ("none", "weights"):
            for scaling in ("amax", "macro"):
                size = 0.1 + 0.9 * (outliers == "residual")  # of the effect of macro blocks: it differs by pair
                by = size * (scaling == "macro")
                lanes[fixed(scaling, outliers, noise)] = lambda seed, by=by: series(
                    mismatch_kl=by + 0.01 * seed * (1 + by)
                )
    _, runs = stored({BF16: lambda seed: series(mismatch_kl=0.0), **lanes})
    gone = runs["config_id"].eq(fixed("macro", "residual").config_id) & runs["seed"].eq(0)
    line = rollout_effects(runs[~gone]).set_index(["treatment", "number"]).loc[("macro blocks", "mismatch_kl")]
    assert (line["pairs"], line["seeds"]) == (4, 3)
    each = {seed: np.mean([0.1, 0.1, 1.0, 1.0]) * (1 + 0.01 * seed) for seed in SEEDS}
    assert line["difference"] == pytest.approx(np.mean([each[seed] for seed in (1, 2, 3)]))
    assert line["high"] - line["low"] < 0.1


@pytest.mark.parametrize(
    ("known", "pairs", "seeds"),
    [
        (["111", "111"], [0, 1], [0, 1, 2]),
        (["111", "000", "111"], [0, 2], [0, 1, 2]),
        (["11110", "11111", "11111"], [0, 1, 2], [0, 1, 2, 3]),
        (["110", "111", "111", "111"], [1, 2, 3], [0, 1, 2]),
        (["110", "110", "111"], [0, 1, 2], [0, 1]),
        (["10", "01"], [1], [1]),
        (["00"], [], []),
    ],
)
def test_the_block_without_holes(known, pairs, seeds):
    rows, columns = complete_block(np.array([[mark == "1" for mark in row] for row in known]))
    assert (rows.ravel().tolist(), columns.ravel().tolist()) == (pairs, seeds)
