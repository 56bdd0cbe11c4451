import msgspec
import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import Recipe
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Training
from fp4dse.results import learning_rates
from fp4dse.results.bench.generated import generated


def test_learning_rates_say_what_was_chosen_from_which_grid(runs):
    frame = runs(
        **{"bf16@0.001": [0.5], "bf16@0.002": [0.4], "bf16@0.004": [0.6]},
        **{"nvfp4@0.001": [0.7], "nvfp4@0.002": [0.8], "nvfp4@0.004": [0.9]},
        **{"mxfp4@0.002": [0.9]},
    )
    found = learning_rates(frame).set_index("label")
    by_name = {name: found.loc[label] for name, label in zip(frame["recipe_name"], frame["recipe_label"], strict=True)}
    assert [by_name[n]["lr"] for n in ("bf16", "nvfp4", "mxfp4")] == [0.002, 0.001, 0.002]
    assert [by_name[n]["at_edge"] for n in ("bf16", "nvfp4", "mxfp4")] == [False, True, False]
    assert [by_name[n]["same_grid"] for n in ("bf16", "nvfp4", "mxfp4")] == [True, True, False]
    assert by_name["nvfp4"]["grid"] == "0.001, 0.002, 0.004"


def test_optimism_is_the_bias_of_choosing_on_the_losses_that_are_reported():
    """All rates are equally good, so the mean at the chosen one is too low by the expected minimum of their means."""
    knobs = ("*.scale", "*.tensor_scale", "*.g.rounding", "wgrad.rotation", "dgrad.rotation")
    rates = [generated(knobs, seeds=4, common=0.0, seed=i) for i in range(5)]
    frame = pd.concat([frame.assign(lr=1e-3 * 2**i) for i, frame in enumerate(rates)], ignore_index=True)
    tried = frame[~frame["is_baseline"]]
    log = np.log(tried["val_loss"])
    at_best = log.groupby([tried["config_id"], tried["lr"]]).mean().groupby("config_id").min()
    bias = log.mean() - at_best.mean()
    found = learning_rates(frame)
    assert bias > 0.004
    assert found[~found["is_baseline"]]["optimism"].mean() == pytest.approx(bias, abs=0.001)


def test_with_one_rate_there_is_nothing_to_choose_and_with_one_seed_nothing_to_tell(runs):
    assert learning_rates(runs(bf16=[0.5, 0.6]))["optimism"].tolist() == [0]
    one = learning_rates(runs(**{"bf16@0.001": [0.5], "bf16@0.002": [0.6]}))
    assert np.isnan(one["optimism"].iloc[0])
    hole = learning_rates(runs(**{"bf16@0.001": [0.5, 0.5], "bf16@0.002": [0.6, None]}))
    assert np.isnan(hole["optimism"].iloc[0])


def test_a_recipe_that_trains_nothing_has_one_rate_and_no_other_grid(row):
    """Its rates would all be one (sweeps/planning/plan.py), so that nothing is unfair about it; what trains at one has
    another. What trains nothing does not say which grid is the usual one, either."""
    plain, nothing = Recipe.named("nvfp4"), Recipe.named("mxfp4")
    nothing = msgspec.structs.replace(nothing, training=Training(trains="none")).canonical()
    lanes = [row(plain, seed, 0.5, lr=lr) for seed in (0, 1) for lr in (1e-3, 2e-3)]
    lanes += [row(recipe, seed, 0.5, lr=1e-3) for recipe in (nothing, Recipe.named("ue5m3-sr")) for seed in (0, 1)]
    lanes += [row("bf16", seed, 0.5, lr=lr) for seed in (0, 1) for lr in (1e-3, 2e-3)]
    rounded = [f"{name}-w4a16" for name in ("nvfp4", "mxfp4", "mxfp4-rceil")]
    for name in rounded:
        of = msgspec.structs.replace(nothing.fprop, x=ROLLOUT_NAMES[name].x, w=ROLLOUT_NAMES[name].w)
        lanes += [row(msgspec.structs.replace(nothing, fprop=of), seed, 0.5, lr=1e-3) for seed in (0, 1)]
    found = learning_rates(pd.DataFrame(lanes)).set_index("config_id")
    assert found["same_grid"].sum() == 3 + len(rounded)
    assert found.loc[nothing.config_id, "same_grid"]
    assert not found.loc[nothing.config_id, "tuned"]
    assert not found.loc[Recipe.named("ue5m3-sr").config_id, "same_grid"]
