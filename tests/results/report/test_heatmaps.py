"""Maps of pairs of techniques: what is marked is told from nothing with all pairs in mind."""

import numpy as np

from fp4dse.results import effects
from fp4dse.results.bench.studies import SIZES, drawn
from fp4dse.results.report.heatmaps import crossed, interaction_values
from fp4dse.results.stats.paired import add_gap


def test_pairs_of_techniques_that_do_nothing_have_a_star_in_one_study_of_twenty():
    starred = 0
    for seed in range(12):
        study = drawn(SIZES["48"], "null", np.random.default_rng([5, seed]))
        names, _, stars = interaction_values(crossed(effects(add_gap(study.runs("a")))))
        starred += stars.any()
        assert names
    assert starred <= 2  # 5 % of 12, and three standard errors
