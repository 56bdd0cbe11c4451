import numpy as np
import pandas as pd
import pytest

from fp4dse.results import effects, pooled_effects
from fp4dse.results.bench.generated import generated

SR, RHT, FWD = "*.g.rounding", "wgrad.rotation", "forward.rounding"


def tasks(*sizes: float) -> pd.DataFrame:
    """Stochastic gradients help everywhere, in proportion to the task's spread; a rotation helps on the first only."""

    def truth(size: float, first: bool):
        return lambda codes: 0.5 - size * (codes[SR] + 0.4 * first * (codes[RHT] == 1))

    parts = [
        generated((SR, RHT, FWD), truth=truth(size, i == 0), noise=size / 10, common=size, seed=i, task=f"task {i}")
        for i, size in enumerate(sizes)
    ]
    return pd.concat(parts, ignore_index=True)


def main(found: pd.DataFrame, factor: str, level: str) -> pd.Series:
    return found[found["kind"].eq("main") & found["factor"].eq(factor) & found["level"].eq(level)].iloc[0]


def test_ranks_pool_tasks_whose_losses_differ_by_orders_of_magnitude():
    found = pooled_effects(tasks(0.2, 0.002, 0.02))
    assert found["factor"].iloc[0] == SR
    best = main(found, SR, "stochastic")
    assert best["effect"] == pytest.approx(-0.5, abs=0.05)
    assert (best["settings"], best["agree"]) == (3, 3)
    assert best["high"] < -0.4
    assert main(found, FWD, "stochastic")["high"] > 0


def test_the_pooled_effect_is_the_mean_of_the_tasks_effects():
    runs = tasks(0.2, 0.02)
    each, found = effects(runs, "rank"), pooled_effects(runs)
    mean = np.mean([main(part, RHT, "rht16")["effect"] for _, part in each.groupby("task")])
    assert main(found, RHT, "rht16")["effect"] == pytest.approx(mean)


def test_recipes_that_were_not_run_everywhere_are_left_out():
    runs = tasks(0.2, 0.02)
    fewer = runs[~(runs["task"].eq("task 1") & runs["wgrad_rotation"].eq("rht32"))]
    assert "rht32" not in set(pooled_effects(fewer)["level"])
    apart = runs[runs["task"].eq("task 0") == runs["wgrad_rotation"].eq("rht32")]
    assert pooled_effects(apart).empty


def test_techniques_that_do_nothing_are_told_in_one_study_of_twenty():
    told = 0
    for seed in range(10):
        parts = [generated((SR, RHT, FWD), seed=2 * seed + i, task=f"task {i}") for i in range(2)]
        told += pooled_effects(pd.concat(parts, ignore_index=True))["q"].lt(0.05).any()
    assert told <= 2  # 5 % of 10, and three standard errors
