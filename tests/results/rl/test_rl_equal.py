"""What the page of reinforcement learning says is, and is not, as good as BF16 is what the store has."""

from functools import cache

import numpy as np
import pytest
from scipy.special import stdtrit
from scipy.stats import binomtest, ttest_1samp, ttest_ind

from fp4dse.results.stats.estimates.intervals import holm
from fp4dse.results.stats.recipes.equivalence import compare
from tests.results.rl.rl_page import (
    EQUAL,
    FIXED,
    FRESH,
    IN_ROLLOUTS,
    MANY,
    WALKS,
    chance_to_pass,
    interval,
    numbers,
    pairs_to_show_none,
    queries_of,
    section,
    short,
    table,
)

MARGIN = 0.007
PLAIN = 2.4e-4
"""The rate of the presets."""
TESTED = [(preset, name) for preset in WALKS for name in ("mxfp4-rceil", FIXED)]
"""The rows of the table of the equivalence test: what docs/study/rl-equal.toml has beside BF16, at two sizes."""
COMPARED = [("small", name) for name in MANY]
COMPARED += [("walks-small", name) for name in MANY if name != FIXED]
COMPARED += [("walks-medium", name) for name in ("mxfp4-rceil", "bf16, noise weights")]
"""The rows of the table of 2.4e-4."""


@pytest.fixture(scope="module")
def compared(store):
    """A function of two labels and a rate: the lines of `compare` on the rows of that rate, by preset."""
    runs = store.runs()
    ids = runs.drop_duplicates("recipe_label").set_index("recipe_label")["config_id"]

    @cache
    def lines(first, second="bf16", lr=PLAIN):
        return compare(runs[runs["lr"].eq(lr)], ids[first], ids[second], MARGIN).set_index("preset")

    return lines


@pytest.fixture(scope="module")
def deviations(store, page):
    """The page's query of pairs, by preset, rate and recipe."""
    [query] = [query for query in queries_of(page) if "pairs_to_show_none" in query]
    return store.sql(query).set_index(["preset", "lr", "recipe_label"]).sort_index()


@pytest.fixture(scope="module")
def fresh(store):
    """A function of preset, recipe and column: 100 times the losses of the equivalence test, by seed."""
    lanes = store.sql(f"FROM runs WHERE steps = 160 AND lr = {EQUAL} AND seed IN {tuple(FRESH)}")
    lanes = lanes.set_index(["preset", "recipe_label", "seed"]).sort_index()
    return lambda preset, name, column="val_loss": 100 * lanes.loc[(preset, name), column]


def points(line, names=("difference", "high", "low")):
    """A difference of losses and its limits as points of accuracy."""
    return [round(-100 * line[name], 2) for name in names]


def verdict(line):
    """The word of the table for a sentence of `compare`."""
    if "are not told apart" in line["verdict"]:
        return "open"
    return "as good" if "are the same" in line["verdict"] else "worse" if line["low"] > 0 else "better"


def without_zero(text):
    return text.replace("0.", ".")


def equivalence(mean, deviation, n):
    """The 90 % t-interval of a mean of n pairs."""
    half = stdtrit(n - 1, 0.95) * deviation / n**0.5
    return [round(mean - half, 2), round(mean + half, 2)]


def equivalent_without(values, seed):
    """The 90 % t-interval of all values but that of a seed, and p of the two one-sided tests of the margin."""
    rest = values.drop(seed)
    p = max(ttest_1samp(rest, side, alternative=of).pvalue for side, of in ((-0.7, "greater"), (0.7, "less")))
    return equivalence(rest.mean(), rest.std(), len(rest)), p


def test_the_equivalence_test_has_all_its_lanes(store, page):
    names = ["bf16", "mxfp4-rceil", FIXED]
    there = store.sql(f"SELECT preset, recipe_label, seed FROM runs WHERE preset LIKE 'walks-%' AND lr = {EQUAL}")
    wanted = {(preset, name, seed) for preset in WALKS for name in names for seed in FRESH}
    assert wanted <= set(there.itertuples(index=False, name=None))
    assert len(wanted) == 192
    assert "6e-5" not in section(page, "What is missing")
    starts = store.sql(
        "SELECT recipe_label, seed, 512 * value AS solved FROM recorded JOIN runs USING (run_id) "
        f"WHERE name = 'accuracy' AND step = 1 AND preset = 'walks-medium' AND lr = {EQUAL} AND seed IN {tuple(FRESH)}"
    ).pivot(index="seed", columns="recipe_label", values="solved")
    apart = starts[names[1:]].sub(starts["bf16"], axis=0).abs()
    assert apart.isin([0, 1]).all(axis=None), "base policies of the same seeds"
    assert list(apart.eq(0).sum()) == [30, 30]
    said = "in 30 seeds, and one more or one fewer in two; so do those of plain MXFP4."
    assert said in section(page, "As good as BF16?")


def test_the_equivalence_test_is_what_compare_says(page, compared, deviations, fresh):
    rows = table(page, "| preset, decoder | recipe | pairs | points against BF16, 95 % | p, of all four |")
    lines = {(preset, name): compared(name, lr=EQUAL).loc[preset] for preset, name in TESTED}
    tests = [ttest_1samp(fresh(preset, name) - fresh(preset, "bf16"), 0).pvalue for preset, name in TESTED]
    both = [[line["p"] for line in lines.values()], tests]
    of_four = [[alone, adjusted] for p in both for alone, adjusted in zip(p, holm(p), strict=True)]
    said = [", ".join(map(short, p)) for p in of_four]
    for cells, key, p, of_t_test in zip(rows, TESTED, said[:4], said[4:], strict=True):
        line, pairs = lines[key], deviations.loc[(key[0], EQUAL, key[1])]
        assert line["lr_a"] == line["lr_b"] == EQUAL
        assert int(cells[2]) == line["pairs"] == pairs["pairs"] == 32
        assert numbers(cells[3]) == points(line), key
        assert cells[4:6] == [p, of_t_test]
        limits = equivalence(pairs["points"], pairs["deviates"], 32)
        assert numbers(cells[6]) == limits
        assert cells[7] == verdict(line)
        assert (line["p_same"] < 0.05) == (limits[0] > -0.7 and limits[1] < 0.7) == (cells[7] == "as good")
        assert numbers(cells[8]) == [pairs["worse"], pairs["better"]]
        assert float(cells[9]) == round(pairs["deviates"], 1)
        assert int(cells[10]) == pairs["pairs_to_show_none"]
    assert [cells[7] for cells in rows] == ["worse", "worse", "worse", "as good"]
    assert set(deviations.xs(EQUAL, level="lr").index) == set(TESTED), "rows of walks came: the table lacks them"


def test_what_the_page_makes_of_the_equivalence_test(page, compared, deviations, fresh):
    text, at_the_top = section(page, "As good as BF16?"), section(page, "What was found")
    small, medium = (compared("mxfp4-rceil", lr=EQUAL).loc[preset] for preset in WALKS)
    size = "by {:.1f} points ({:.1f} to {:.1f}) with 1.9M parameters and by {:.1f} ({:.2f} to {:.1f}) with 10.9M"
    limits = [100 * line[name] for line in (small, medium) for name in ("difference", "low", "high")]
    assert size.format(*limits) in at_the_top
    of_four = dict(
        zip(TESTED, holm([compared(name, lr=EQUAL).loc[preset, "p"] for preset, name in TESTED]), strict=True)
    )
    first, second = (of_four[preset, "mxfp4-rceil"] for preset in WALKS)
    said = f"The first is significant after correction ({short(first)}), the second alone (p = {short(medium['p'])}; "
    assert f"{said}{short(second)} after correction)" in at_the_top
    assert first < 0.05 < second
    spread = deviations.xs(EQUAL, level="lr")["deviates"]
    assert f"A pair deviates by {spread.min():.1f} to {spread.max():.1f} points at this rate" in text
    assert without_zero(f"(p of equivalence {medium['p_same']:.3f})") in text
    of_medium = deviations.loc[("walks-medium", EQUAL, "mxfp4-rceil")]
    low = equivalence(of_medium["points"], of_medium["deviates"], 32)[0]
    assert f"leaves the margin by {-0.7 - low:.2f} points" in text
    found = []
    for preset in WALKS:
        d = fresh(preset, "bf16", "val_loss_bf16") - fresh(preset, "mxfp4-rceil", "val_loss_bf16")
        assert d.mean() == pytest.approx(deviations.loc[(preset, EQUAL, "mxfp4-rceil"), "in_bf16"])
        found += [round(x, 2) for x in interval(d)[:3]]
    said = "evaluated in BF16 it is {:.2f} points ({:.2f} to {:.2f}) and {:.2f} ({:.2f} to {:.2f})"
    assert said.format(*found) in text
    low, high = equivalence(of_medium["in_bf16"], of_medium["deviates_in_bf16"], 32)
    assert f"within the margin (90 %: {low:.2f} to {high:.2f})" in text
    assert low > -0.7
    first, second = (fresh(preset, "bf16") - fresh(preset, "mxfp4-rceil") for preset in WALKS)
    welch = ttest_ind(second, first, equal_var=False)
    limits = welch.confidence_interval(0.95)
    said = f"loses {(second.mean() - first.mean()):.2f} points less ({limits.low:.2f} to {limits.high:.2f}, p = "
    assert said + short(welch.pvalue) in text
    plain = [compared("mxfp4-rceil").loc[preset, "difference"] for preset in WALKS]
    assert plain[1] > plain[0], "at 2.4e-4 it is not so"


def test_what_the_page_makes_of_all_three_fixes(page, compared, deviations, fresh):
    text, at_the_top = section(page, "As good as BF16?"), section(page, "What was found")
    p = {preset: compared(FIXED, lr=EQUAL).loc[preset, "p_same"] for preset in WALKS}
    of = {preset: deviations.loc[(preset, EQUAL, FIXED)] for preset in WALKS}
    own = {preset: fresh(preset, "bf16") - fresh(preset, FIXED) for preset in WALKS}
    limits = {preset: equivalence(of[preset]["points"], of[preset]["deviates"], 32) for preset in WALKS}
    at_most = without_zero(f"{holm(list(p.values())).min():.3f}")
    said = "they end {:.2f} points below it (90 % interval {:.2f} to {:+.2f}) and {:.2f} ({:.2f} to {:.2f})"
    ends = [(-of[preset]["points"], *limits[preset]) for preset in reversed(WALKS)]
    assert said.format(*ends[0], *ends[1]) in at_the_top
    alone = without_zero(f"{p['walks-medium']:.3f}")
    said = f"significant alone (p of equivalence {alone}), not after correction for both sizes ({at_most})"
    assert said in at_the_top
    assert f"(Holm's p of two equivalences {at_most})" in text
    assert without_zero(f"On `walks-medium` yes (p of equivalence {p['walks-medium']:.3f})") in text
    assert without_zero(f"On `walks-small` it is not shown (p of equivalence {p['walks-small']:.2f})") in text
    low, high = equivalence(*of["walks-medium"][["in_bf16", "deviates_in_bf16"]], 32)
    assert f"{of['walks-medium']['in_bf16']:.2f} points (90 %: {low:.2f} to {high:+.2f})" in text
    welch = ttest_ind(own["walks-medium"], own["walks-small"], equal_var=False)
    less, between = own["walks-medium"].mean() - own["walks-small"].mean(), welch.confidence_interval(0.95)
    assert f"{less:.2f} ({between.low:.2f} to {between.high:.2f}, p = {short(welch.pvalue)})" in text


def test_whether_all_three_fixes_help_plain_mxfp4(page, compared, fresh):
    text, at_the_top = section(page, "As good as BF16?"), section(page, "What was found")
    small, medium = (compared(FIXED, "mxfp4-rceil", EQUAL).loc[preset] for preset in WALKS)
    assert medium["p_same"] < 0.05 < small["p_same"], "as good as plain MXFP4 at the larger size"
    (mean, low, high), (other, *limits) = points(small), points(medium)
    said = "add {:.1f} points to MXFP4 on `walks-small` ({:.1f} to {:+.1f}) and {:.1f} on `walks-medium` "
    said += "({:.1f} to {:+.1f})"
    assert said.format(mean, low, high, other, *limits) in at_the_top
    assert f"(p = {short(small['p'])} and {short(medium['p'])})" in at_the_top
    assert f"{mean:+.2f} points ({low:.2f} to {high:+.2f}, p = {short(small['p'])})" in text
    said = "{:+.2f} ({:.2f} to {:+.2f}, p = {}; p of equivalence {})"
    assert said.format(other, *limits, short(medium["p"]), short(medium["p_same"])) in text
    said = ("{} seeds are better and {} worse (sign test p = {})", "{} seeds better and {} worse ({})")
    for preset, words in zip(WALKS, said, strict=True):
        d = fresh(preset, "mxfp4-rceil") - fresh(preset, FIXED)
        better, worse = int((d > 0).sum()), int((d < 0).sum())
        assert words.format(better, worse, short(binomtest(better, better + worse).pvalue)) in text


def test_which_seeds_the_answers_on_all_three_fixes_hang_on(page, fresh):
    text = section(page, "As good as BF16?")
    own = {preset: fresh(preset, "bf16") - fresh(preset, FIXED) for preset in WALKS}
    small, medium = ({seed: equivalent_without(own[preset], seed) for seed in FRESH} for preset in WALKS)
    assert [seed for seed in FRESH if small[seed][1] < 0.05] == [65]
    assert [seed for seed in FRESH if medium[seed][1] >= 0.05] == [40, 52]
    loss, rest = -own["walks-small"][65], own["walks-small"].drop(65).mean()
    said = f"seed 65, which loses {loss:.1f} points: the other 31 pairs have {rest:.2f} points, and a 90 % interval "
    assert said + "within the margin, {:.2f} to {:.2f}.".format(*small[65][0]) in text
    said = f"without seed 40, which gains {own['walks-medium'][40]:.1f} points, the interval leaves the margin, "
    said += "{:.2f} to {:.2f} (p of equivalence {}), and without seed 52 it is {}."
    assert said.format(*medium[40][0], short(medium[40][1]), short(medium[52][1])) in text
    said = "Without seed 57, which loses {:.1f}, it is {:.2f} to {:+.2f}."
    assert said.format(-own["walks-medium"][57], *medium[57][0]) in text
    solved = 100 - fresh("walks-medium", "bf16")
    inside = solved.between(75, 90)
    assert solved.min() > 75, "the others are above"
    found = [number for some in (inside, ~inside) for number in (some.sum(), *interval(own["walks-medium"][some])[:3])]
    said = "within 75 to 90 % in {:.0f} seeds, where the fixes have {:.2f} points ({:.2f} to {:+.2f}), and above in "
    said += "{:.0f}, where they have {:.2f} ({:.2f} to {:+.2f})"
    assert said.format(*found) in text


def test_how_many_pairs_the_equivalence_test_would_take(page, deviations):
    text = section(page, "As good as BF16?")
    fixed, medium, small, passed = (
        deviations.loc[of]
        for of in (
            ("walks-small", EQUAL, FIXED),
            ("walks-medium", EQUAL, "mxfp4-rceil"),
            ("walks-small", EQUAL, "mxfp4-rceil"),
            ("walks-medium", EQUAL, FIXED),
        )
    )
    at_zero = [chance_to_pass(0, line["deviates"], 32) for line in (fixed, medium)]
    assert chance_to_pass(0, passed["deviates"], 32) == pytest.approx(at_zero[1], abs=0.01)
    said = "32 show it with a chance of {:.0f} %, if pairs deviate by {:.1f} points, and of {:.0f} % by {:.1f}"
    assert said.format(100 * at_zero[0], fixed["deviates"], 100 * at_zero[1], medium["deviates"]) in text
    n = np.arange(2, 2000)
    lines = (fixed, medium, passed)
    needed = [n[chance_to_pass(line["points"], line["deviates"], n) >= 0.8][0] for line in lines]
    assert "{} pairs would show the fixes on `walks-small` as good, {} MXFP4 on".format(*needed) in text
    had = chance_to_pass(passed["points"], passed["deviates"], 32)
    assert f"on `walks-medium` it takes {needed[2]}, and 32 had a chance of {100 * had:.0f} %" in text
    assert small["points"] < -0.7, "no number of pairs"


def test_what_is_as_good_as_bf16_at_the_rate_of_the_presets(page, compared, deviations):
    rows = table(page, "| preset, decoder | recipe | pairs | points against BF16, 95 % | p | verdict |")
    for cells, (preset, name) in zip(rows, COMPARED, strict=True):
        line, pairs = compared(name).loc[preset], deviations.loc[(preset, PLAIN, name)]
        assert line["lr_a"] == line["lr_b"] == PLAIN
        assert int(cells[2]) == line["pairs"] == pairs["pairs"], name
        assert numbers(cells[3]) == points(line), (preset, name)
        assert round(pairs["points"], 2) == numbers(cells[3])[0]
        assert cells[4:6] == [short(line["p"]), verdict(line)], (preset, name)
        assert float(cells[6]) == round(pairs["deviates"], 1)
        assert int(cells[7].replace(",", "")) == pairs["pairs_to_show_none"]
    assert set(deviations.xs(PLAIN, level="lr").index) == set(COMPARED), "rows of walks came: the table lacks them"
    assert set(deviations.index.get_level_values("lr")) == {EQUAL, PLAIN}


def test_the_pairs_that_would_show_none_are_those_of_the_package(page, deviations):
    needed = [pairs_to_show_none(deviates) for deviates in deviations["deviates"]]
    assert needed == pytest.approx(deviations["pairs_to_show_none"], rel=0.03, abs=2)
    text = section(page, "As good as BF16?")
    spread = deviations.xs(PLAIN, level="lr")["deviates"]
    least, most = deviations.xs(PLAIN, level="lr")["pairs_to_show_none"].agg(["min", "max"])
    said = f"by {spread.min():.1f} to {spread.max():.1f} points here, so that {least:.0f} to {most:,.0f} pairs would be"
    assert said in text
    half = (spread.min() / 100) * stdtrit(31, 0.95) / 32**0.5
    assert f"90 % interval of 32 pairs is ±{100 * half:.1f} points wide" in text
    assert half > MARGIN
    assert f"A pair deviates by {spread.min():.1f} to {spread.max():.1f} points" in text
    enough = max(tried for tried in np.arange(0.1, 2, 0.01) if pairs_to_show_none(tried) <= 32)
    assert f"chance of 80 % it takes {enough:.1f} points at most" in text


def test_what_the_page_makes_of_the_comparisons_at_the_rate_of_the_presets(page, store, compared):
    text, at_the_top = section(page, "As good as BF16?"), section(page, "What was found")
    small, medium = (compared("mxfp4-rceil").loc[preset] for preset in WALKS)
    alone = compared(IN_ROLLOUTS, "mxfp4-rceil").loc["walks-small"]
    said = "At 2.4e-4 it is {:.1f} points ({:.1f} to {:.1f}; {} seeds) and {:.1f} ({:.1f} to {:.1f}; {} seeds), each"
    found = said.format(
        *(100 * small["difference"], 100 * small["low"], 100 * small["high"], small["pairs"]),
        *(100 * medium["difference"], 100 * medium["low"], 100 * medium["high"], medium["pairs"]),
    )
    assert found in at_the_top
    assert f"significant alone (p = {short(small['p'])} and {short(medium['p'])}), not after" in at_the_top
    mean, low, high = (-100 * alone[name] for name in ("difference", "high", "low"))
    p = short(alone["p"])
    assert f"is {mean:.2f} points better than in all operands ({low:+.2f} to {high:+.2f}, p = {p})" in text
    other = compared(IN_ROLLOUTS, "mxfp4-rceil").loc["small"]
    assert f"On `rl:small` it is {-100 * other['difference']:.2f} (p = {short(other['p'])})" in text
    assert "(Holm's p {} and {})".format(*map(short, holm([alone["p"], other["p"]]))) in text
    ends = store.sql("SELECT preset, recipe_label, seed, 100 * val_metric AS solved FROM runs WHERE lr = 2.4e-4")
    ends = ends.set_index(["preset", "recipe_label", "seed"])["solved"].sort_index()
    on_walks, on_small = (
        (ends[preset, IN_ROLLOUTS] - ends[preset, "mxfp4-rceil"]).dropna() for preset in ("walks-small", "small")
    )
    assert f"only the first ({short(interval(on_walks)[3])} and {short(interval(on_small)[3])})" in text
    assert f"without its two worst seeds the second is {on_small.drop([13, 17]).mean():.2f}" in text
    p = [compared(name).loc[preset, "p"] for preset, name in COMPARED[5:]]
    assert len(p) == 6
    assert f"(Holm's p {holm(p).min():.2f})".replace("0.", ".") in text
    assert f"not after correction ({holm(p).min():.2f})".replace("0.", ".") in at_the_top
    means = [-100 * compared("mxfp4-rceil").loc[preset, "difference"] for preset in ("small", *WALKS)]
    assert f"by {-max(means):.1f} to {-min(means):.1f} points" in text
    lanes = store.sql(f"FROM runs WHERE steps = 160 AND lr = {PLAIN}").set_index(["preset", "recipe_label", "seed"])
    lanes = lanes.sort_index()
    for preset in WALKS:
        bf16, mxfp4 = (lanes.loc[(preset, name), "val_loss_bf16"] for name in ("bf16", "mxfp4-rceil"))
        mean, low, high, _ = interval(100 * (bf16 - mxfp4).dropna().sort_index())
        assert f"{mean:.2f} points ({low:.2f} to {high:+.2f})" in text
    assert f"the lowest of the {len(lanes)} lanes at 2.4e-4 ends at {100 * lanes['val_metric'].min():.1f} %" in text


def test_compare_sets_walks_small_side_by_side_at_two_rates(page, store):
    """What the page warns of."""
    runs = store.runs()
    ids = runs.drop_duplicates("recipe_label").set_index("recipe_label")["config_id"]
    line = compare(runs, ids["mxfp4-rceil"], ids["bf16"], MARGIN).set_index("preset").loc["walks-small"]
    assert (line["lr_a"], line["lr_b"], line["pairs"]) == (PLAIN, EQUAL, 3)
    assert "at different rates, by three seeds" in section(page, "As good as BF16?")
