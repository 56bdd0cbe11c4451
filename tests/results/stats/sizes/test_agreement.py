"""Published tables are whole, and agreement with them is what it is said to be."""

import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import Recipe
from fp4dse.results.bench.scaling_studies import QUOTED, published_scores
from fp4dse.results.published import tables
from fp4dse.results.stats.sizes.agreement import agreement, agreement_with_fewer_seeds, ceiling, published, recipe_gaps

QUARTET2 = tables()["quartet2"]


def figures(group: str) -> list[float]:
    return [figure for name, figure in QUARTET2.gaps().items() if QUARTET2.schemes[name].group == group]


def runs_like(row, scale=2.0, noise=0.0, seeds=3, seed=0, **columns) -> pd.DataFrame:
    """Runs of BF16 and of every recipe of the table, with gaps that are `scale` times the published ones."""
    rng = np.random.default_rng(seed)
    rows = [row("bf16", s, 2.0, lane_s=1.0, **columns) for s in range(seeds)]
    for group in QUARTET2.groups():
        for config_id, gap in recipe_gaps(QUARTET2, group).items():
            losses = 2.0 * np.exp((scale * gap + noise * rng.normal(size=seeds)) / 100)
            own = {"config_id": config_id, "recipe_label": config_id, "is_baseline": False, "lane_s": 7.0, **columns}
            rows += [row("nvfp4", s, loss, **own) for s, loss in enumerate(losses)]
    return pd.DataFrame(rows)


def test_the_table_of_quartet_ii_has_its_33_schemes_in_three_groups():
    sizes = {group: len(figures(group)) for group in QUARTET2.groups()}
    assert sizes == {"forward": 9, "backward": 16, "whole": 8}
    assert len(QUARTET2.columns) == 6


@pytest.mark.parametrize("name", tables())
def test_a_table_states_its_source_and_every_recipe_or_why_there_is_none(name):
    table = tables()[name]
    assert "arXiv" in table.source
    assert table.licence
    assert table.primary in table.columns
    for scheme in table.schemes.values():
        assert len(scheme.gaps) == len(table.columns)
        assert (scheme.recipe is None) == bool(scheme.not_expressible)


@pytest.mark.parametrize(("group", "reached"), [("forward", 0.78), ("whole", 0.45)])
def test_a_perfect_proxy_with_a_little_error_often_misses_nine_tenths(group, reached):
    """The chances that the plan of the study quotes; 4,000 draws have a standard error of 0.008."""
    assert ceiling(figures(group), QUOTED)[2] == pytest.approx(reached, abs=0.03)
    assert ceiling(figures(group), 1e-9) == pytest.approx((1, 1, 1))


def test_a_task_that_orders_as_the_table_agrees_and_the_cheaper_of_two_is_named(row):
    small = runs_like(row, noise=0.02, preset="small")
    large = runs_like(row, noise=0.02, preset="large").assign(lane_s=70.0)
    lines = agreement(pd.concat([small, large], ignore_index=True))
    ours = lines[lines["published"].eq("quartet2")]
    assert ours["agree"].tolist() == [1.0] * 6
    assert ours["missing"].tolist() == [0] * 6
    assert ours["cheapest"].tolist() == ours["preset"].eq("small").tolist()
    assert sorted(set(ours["lane_s"])) == [21.0, 210.0]
    assert ours["ceiling_spearman"].gt(0.95).all()
    assert (ours["spearman_low"] <= ours["spearman"]).all()


def test_the_opposite_order_agrees_on_nothing(row):
    ours = agreement(runs_like(row, scale=-2.0))
    assert ours["agree"].eq(0).all()
    assert ours["spearman"].to_numpy() == pytest.approx(-1)
    assert not ours["cheapest"].any()


def test_fewer_seeds_agree_as_often_as_their_noise_lets_them(row):
    runs = runs_like(row, scale=1.0, noise=0.3, seeds=5)
    lines = agreement_with_fewer_seeds(runs).set_index(["group", "seeds"])
    everything = agreement(runs).set_index("group")
    assert sorted(set(lines.index.get_level_values("seeds"))) == [1, 2, 3, 4, 5]
    for group in QUARTET2.groups():
        assert lines.loc[(group, 5), "agree"] == everything.loc[group, "agree"] == lines.loc[(group, 5), "agree_least"]
        assert lines.loc[(group, 5), "spearman"] == pytest.approx(everything.loc[group, "spearman"])
        assert lines.loc[(group, 1), "agree"] < lines.loc[(group, 4), "agree"]
        assert lines.loc[(group, 1), "agree_least"] < lines.loc[(group, 1), "agree"]
    by_hand = [agreement(runs[runs["seed"].eq(seed)]).set_index("group").loc["whole", "agree"] for seed in range(5)]
    assert lines.loc[("whole", 1), "agree"] == pytest.approx(np.mean(by_hand))


def test_recipes_without_a_gap_are_counted_as_missing_and_one_seed_has_no_limits(row):
    runs = runs_like(row, seeds=1)
    forward = list(recipe_gaps(QUARTET2, "forward"))
    blown = runs["config_id"].eq(forward[0])
    lines = agreement(runs.assign(status=np.where(blown, "diverged", "done")))
    line = lines[lines["group"].eq("forward")].iloc[0]
    assert (line["recipes"], line["missing"]) == (len(forward) - 1, 1)
    assert lines[["agree_low", "spearman_high", "ceiling_agree"]].isna().all(axis=None)


def test_published_gaps_stand_beside_ours_scheme_by_scheme(row):
    lines = published(runs_like(row))
    assert lines["gap"].to_numpy() == pytest.approx(2 * lines["published_gap"].to_numpy(), abs=0.001)  # twice: a mean
    expressible = [name for name, scheme in QUARTET2.schemes.items() if scheme.recipe]
    assert lines["scheme"].tolist() == expressible


def test_recipes_that_are_shipped_are_found_by_their_id(row):
    found = published(pd.DataFrame([row("bf16", 0, 2.0), row("hif4-ascend", 0, 2.1), row("mxfp4-ascend", 0, 2.2)]))
    assert found["config_id"].tolist() == [Recipe.named(name).config_id for name in ("hif4-ascend", "mxfp4-ascend")]
    line = agreement(pd.DataFrame([row("bf16", 0, 2.0), row("hif4-ascend", 0, 2.1), row("mxfp4-ascend", 0, 2.2)]))
    assert line[["published", "pairs", "agree"]].to_numpy().tolist() == [["hifloat4", 1, 1.0]]


def test_limits_of_agreement_cover_it():
    """120 studies: with a coverage of 95 % fewer than 104 have a chance of 1e-4."""
    hits = [
        score
        for seed in range(40)
        for what, score, _ in published_scores(np.random.default_rng(seed))
        if what.endswith("spearman covers")
    ]
    assert sum(hits) >= 104
