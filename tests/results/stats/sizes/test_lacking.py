"""Rows that cannot support a statistic say what is missing, and the command that they name gives it."""

import re

import numpy as np
import pandas as pd
import pytest

from fp4dse.results.bench.scaling_studies import scaling_study
from fp4dse.results.published import tables
from fp4dse.results.stats.paired import add_gap
from fp4dse.results.stats.sizes.agreement import agreement
from fp4dse.results.stats.sizes.lacking import FOR_A_LAW, SMALL, recipes_lacking, sizes_lacking
from fp4dse.results.stats.sizes.loss_law import LEAST_SIZES
from fp4dse.results.stats.sizes.scaling import scaling
from fp4dse.sweeps.arguments import find_space
from fp4dse.tasks import find_facts


def presets_of(says: str) -> list[str]:
    return re.findall(r"--task (\S+)", says)


def test_rows_without_sizes_name_two_presets_of_one_data_set_and_those_of_a_law(runs):
    says = sizes_lacking(runs(bf16=[0.5, 0.6], nvfp4=[0.6, 0.7]), "runs/x/store")
    assert says.startswith("no row states parameters and tokens")
    assert "--store runs/x/store" in says
    assert presets_of(says) == list(SMALL)
    for family in (SMALL, FOR_A_LAW):
        assert len({find_facts(*preset.split(":")).digest for preset in family}) == 1
    facts = [find_facts(*preset.split(":")) for preset in FOR_A_LAW]
    assert all(len({getattr(one, name) for one in facts}) >= LEAST_SIZES for name in ("parameters", "tokens"))


def test_sizes_that_are_too_few_name_the_others_on_their_data():
    whole, _ = scaling_study(np.random.default_rng(0), "law, entropy known")
    assert sizes_lacking(whole, "s") == ""
    one = whole[whole["preset"].eq("1M")].assign(task="language")
    says = sizes_lacking(one, "s")
    assert "too few sizes for a law" in says
    assert presets_of(says) == [preset for preset in FOR_A_LAW if preset != "language:1M"]
    assert len(scaling(one))  # it has lines, with nothing in them
    alone = one[one["is_baseline"]]
    assert "no recipe finished beside BF16" in sizes_lacking(alone, "s")
    assert scaling(alone).empty


@pytest.mark.parametrize(("tried", "least", "enough"), [(0, 1, False), (1, 1, True), (1, 2, False), (2, 2, True)])
def test_recipes_of_no_published_table_name_the_space_that_has_them(row, tried, least, enough):
    wanted = [scheme.recipe for scheme in tables()["quartet2"].schemes.values() if scheme.group == "backward"]
    rows = [row("bf16", seed, 0.5) for seed in range(2)] + [row("nvfp4-sr", seed, 0.6) for seed in range(2)]
    for config_id in list(dict.fromkeys(wanted))[:tried]:
        rows += [row("nvfp4", seed, 0.7, config_id=config_id) for seed in range(2)]
    found = add_gap(pd.DataFrame(rows))
    says = recipes_lacking(found, "runs/x/store", least)
    assert (says == "") == enough
    if least == 2:
        assert agreement(found.assign(lane_s=1.0)).empty != enough
    if not enough:
        assert f"{tried} of the 28 of quartet2" in says
        [space] = re.findall(r"fp4dse sweep (\S+) --task vision:quickstart --seeds 3 --store runs/x/store", says)
        assert {recipe.config_id for recipe in find_space(space).recipes()} >= set(wanted) - {None}
