"""What the page of reinforcement learning says of its recipes is what the store beside it has."""

import re
from functools import partial
from itertools import combinations, product

import numpy as np
import pytest
from scipy.stats import t, wilcoxon

from fp4dse.results.stats.estimates.intervals import adjusted, holm, mean_interval, p_value
from fp4dse.sweeps.arguments import find_space
from tests.results.asked_once import views_made_once
from tests.results.rl.rl_page import (
    FIXED,
    IN_ROLLOUTS,
    MACRO,
    MANY,
    interval,
    numbers,
    queries_of,
    section,
    table,
)

WEIGHTS = "bf16, rollout mxfp4-rceil-w4a16"
RATES = ["bf16", "mxfp4-rceil", IN_ROLLOUTS, FIXED, "bf16, noise weights", "bf16, noise qerl"]
"""The columns of the table of rates."""
AFTER = {
    "none": "",
    "macro blocks": "",
    "fallback": "forward residual",
    "rotation": "hadamard32",
    "noise on the weights": "noise weights",
    "noise `qerl`": "noise qerl",
}
"""A fix in the table of fixes -> what a label has for it behind its quantizer."""
PAPER = ["bf16", "mxfp4-rceil", MACRO, "mxfp4-rceil, forward residual", "mxfp4-rceil, noise weights"]
PAPER += [f"{MACRO}, forward residual", FIXED]
"""The rows of the table beside the seed paper's."""
PARTS = [*("dead", "grid", "scale", "dead+grid", "scale+dead", "scale+grid", "scale+dead+grid"), "w4a4"]
"""The rows of the table of parts of the error."""
STEPS = [("scale+dead", "dead"), ("scale+grid", "grid"), ("scale+dead+grid", "dead+grid"), ("scale+dead", "scale")]
STEPS += [("dead+grid", "grid"), ("scale+dead+grid", "scale+grid"), ("scale+grid", "scale"), ("dead+grid", "dead")]
STEPS += [("scale+dead+grid", "scale+dead"), ("w4a4", "scale+dead+grid")]
"""The ten pairs that differ in one part, or in activations."""
ROW_SCALED = "bf16, fprop.x e2m1 1x16 e4m3 T256 row, fprop.w e2m1 1x16 e4m3 T256, forward 4over6-mae, "
ROW_SCALED += "backward x+w from forward, precise embedding+head+router, last 0.15"
QAT = "bf16, forward mxfp4-rceil"
FLAT = ["bf16", "mxfp4-rceil", QAT, ROW_SCALED, f"{QAT}, fprop.w lora, trains what is learned", WEIGHTS]
FLAT += [f"bf16, rollout {MACRO} residual", f"{QAT}, rollout mxfp4-rceil, KV fp8-row"]
FLAT += ["bf16, fprop.w mxfp4-rceil, rollout mxfp4-rceil", f"{QAT}, noise weights"]
FLAT += [IN_ROLLOUTS, "bf16, tis 2, rollout mxfp4-rceil", "bf16, rollout mxfp4-rceil residual"]
"""The rows of the table of 500 updates."""
SPREAD = """
SELECT recipe_label, median(-gap) AS middle, count(*) FILTER (gap > 0) AS worse, count(*) FILTER (gap < 0) AS better,
    count(*) FILTER (gap > .05) AS far_worse, count(*) FILTER (gap < -.05) AS far_better, min(val_metric) AS least,
    count(*) FILTER (val_metric < .9) AS below, count(*) FILTER (val_metric > .99) AS above, avg(val_metric) AS mean
FROM runs WHERE preset = 'small' AND lr = 2.4e-4 GROUP BY ALL HAVING count(*) = 32
"""
THREE = """
SELECT recipe_label, lr, 100 * avg(val_metric) AS solved, 100 * min(val_metric) AS least
FROM runs WHERE preset = 'small' AND seed < 3 AND recipe_label NOT LIKE '%inject%' AND recipe_label NOT LIKE '%w4a16%'
GROUP BY ALL
"""


@pytest.fixture(scope="module", autouse=True)
def few_views():
    with views_made_once():
        yield


@pytest.fixture(scope="module")
def every_effect(store, few_views):
    return store.sql("FROM rollout_effects")


@pytest.fixture(scope="module")
def effects(every_effect):
    """The effects of fixes on `rl:small`."""
    return every_effect[every_effect["preset"].eq("small")]


@pytest.fixture(scope="module")
def three(store):
    return store.sql(THREE).set_index(["recipe_label", "lr"])


def test_what_32_seeds_lose_and_how_they_spread_is_what_the_store_has(page, store):
    said = table(page, "| points against BF16 |")
    recipes = store.sql("FROM recipes WHERE preset = 'small' AND seeds = 32").set_index("label")
    spread = store.sql(SPREAD).set_index("recipe_label")
    assert set(recipes.index) == {*MANY, "bf16"}
    for cells, name in zip(said, MANY, strict=True):
        of, own = recipes.loc[name], spread.loc[name]
        expected = [-100 * of[column] for column in ("gap", "gap_high", "gap_low")]
        assert numbers(cells[1]) == [round(number, 2) for number in expected], name
        expected = [-100 * of[column] for column in ("gap_bf16", "gap_bf16_high", "gap_bf16_low")]
        assert numbers(cells[4]) == [round(number, 2) for number in expected], name
        assert numbers(cells[5]) == [round(100 * own["middle"], 2)], name
        counts = [own[column] for column in ("worse", "better", "far_worse", "far_better", "below")]
        assert [number for cell in cells[6:] for number in numbers(cell)] == counts, name
    bf16 = spread.loc["bf16"]
    assert bf16["below"] == 0
    said = section(page, "What MXFP4 rollouts cost")
    assert f"It ends at {100 * bf16['mean']:.1f} %: its lowest seed has {100 * bf16['least']:.1f} %" in said
    assert f"and {bf16['above']:.0f} of the 32 are above 99 %" in said


def test_the_headline_has_its_adjusted_p(page, store):
    rows = store.sql("SELECT recipe_label, gap FROM runs WHERE preset = 'small' AND lr = 2.4e-4 ORDER BY seed")
    p = [interval(rows.loc[rows["recipe_label"].eq(name), "gap"])[3] for name in MANY]
    by_rule = [p_value(-100 * rows.loc[rows["recipe_label"].eq(name), "gap"].to_numpy()[None])[0] for name in MANY]
    for column, of in ((2, by_rule), (3, p)):
        said = [cells[column] for cells in table(page, "| points against BF16 |")]
        assert [float(cell) for cell in said] == [round(x, 3 if x < 0.1 else 2) for x in of]
    text = section(page, "What MXFP4 rollouts cost")
    at_the_top = section(page, "What was found")
    assert (
        f"(p = {by_rule[0]:.3f}), not with five recipes in mind ({holm(by_rule)[0]:.3f})".replace("0.", ".")
        in at_the_top
    )
    first, second, *_ = holm(by_rule)
    assert f"after Holm's adjustment p is {first:.3f} for each".replace("0.", ".") in text
    assert first == second
    first, second, *_ = holm(p)
    assert f"after Holm's adjustment {first:.2f} and {second:.2f}".replace("0.", ".") in text
    wilcoxons = [wilcoxon(rows.loc[rows["recipe_label"].eq(name), "gap"]).pvalue for name in MANY[:2]]
    assert f"Wilcoxon's test has {wilcoxons[0]:.3f} and {wilcoxons[1]:.3f}".replace("0.", ".") in text


def test_what_the_verdict_hangs_on(page, store):
    rows = store.sql(
        "SELECT seed, gap FROM runs WHERE recipe_label = 'mxfp4-rceil' AND preset = 'small' AND lr = 2.4e-4 "
        "ORDER BY seed"
    )
    kept = -100 * rows.loc[~rows["seed"].isin([13, 17]), "gap"].to_numpy()
    found = mean_interval(kept[None]).iloc[0]
    said = section(page, "What MXFP4 rollouts cost").partition("without these two it is")[2].partition("). That")[0]
    assert numbers(said) == [*(round(found[name], 2) for name in ("mean", "low", "high")), round(found["p"], 3)]


@pytest.mark.parametrize(
    ("first", "second", "before"),
    [(FIXED, "mxfp4-rceil", "All three against none:"), (IN_ROLLOUTS, "mxfp4-rceil", "better than in all operands")],
)
def test_recipes_beside_one_another_of_32_seeds(page, store, first, second, before):
    rows = store.sql("SELECT recipe_label, gap FROM runs WHERE preset = 'small' AND lr = 2.4e-4 ORDER BY seed")
    one, other = (-100 * rows.loc[rows["recipe_label"].eq(name), "gap"].to_numpy() for name in (first, second))
    found = mean_interval((one - other)[None]).iloc[0]
    said = section(page, "What MXFP4 rollouts cost").partition(before)[2].partition(")")[0].partition("; t-test")[0]
    expected = [round(found[name], 2) for name in ("low", "high")]
    assert numbers(said)[-3:] in ([round(found["mean"], 2), *expected], [*expected, round(found["p"], 3)])


def test_three_seeds_at_three_rates_are_what_the_store_has(page, three):
    rows = {cells[0].strip("*"): cells[1:] for cells in table(page, "| learning rate | BF16 |")}
    for rate in ("1.2e-4", "2.4e-4", "4.8e-4"):
        found = [round(three.loc[(name, float(rate)), "solved"], 1) for name in RATES]
        assert [float(cell) for cell in rows[rate]] == found, rate
    of_bf16 = {rate: three.loc[("bf16", rate), "solved"] for rate in (1.2e-4, 2.4e-4, 4.8e-4)}
    assert max(of_bf16, key=lambda rate: of_bf16[rate]) == 2.4e-4, "the rate of the preset, not at the edge"
    least = three.xs(4.8e-4, level="lr")["least"].loc[[IN_ROLLOUTS, "bf16, noise qerl", "bf16", "mxfp4-rceil"]]
    said = section(page, "Which rate?")
    found = re.search(r"ends at (\d+) % with MXFP4 rollouts, at (\d+) with .{6}, at (\d+) with BF16, at (\d+)", said)
    assert [int(number) for number in found.groups()] == [round(number) for number in least]


def test_the_table_of_fixes_is_what_the_store_has(page, store, three):
    means = three["solved"].xs(2.4e-4, level="lr")
    written = {}
    for [fixes, *cells] in table(page, "| fixes | MXFP4 in all operands |"):
        for trainer, cell in zip(("fp4", "rollout", "qat"), cells, strict=True):
            written[_label(fixes, trainer)] = cell
    trained = {name: float(cell) for name, cell in written.items() if cell != "–"}
    assert len(trained) == 38
    assert trained == {name: round(means[name], 1) for name in trained}
    assert set(means.index) == {*trained, "bf16", "bf16, noise weights", "bf16, noise qerl", ROW_SCALED}
    assert f"`rl-row-scaled`, beside it, has {means[ROW_SCALED]:.1f}." in page
    ids = set(store.sql("SELECT DISTINCT config_id FROM runs WHERE preset = 'small'")["config_id"])
    of_space = list(find_space("rl-fixes").recipes())
    assert f"One of {len(of_space)} has to be the best." in page
    assert ids >= {recipe.config_id for recipe in of_space}


def _label(fixes, trainer):
    """The label of a recipe with these fixes."""
    named = {"all four": "macro blocks, fallback, rotation, noise on the weights"}.get(fixes, fixes)
    of = [{"fallback for outliers": "fallback", "Hadamard rotation": "rotation"}.get(x, x) for x in named.split(", ")]
    quantizer = MACRO if "macro blocks" in of else "mxfp4-rceil"
    if trainer == "rollout":
        quantizer = f"bf16, rollout {quantizer}" + " residual" * ("fallback" in of)
        of = [fix for fix in of if fix != "fallback"]
    before = {"fp4": "", "rollout": "", "qat": "bf16, forward "}[trainer]
    after = [AFTER[fix] for fix in of if AFTER[fix]]
    if trainer == "qat":
        after = [{"hadamard32": "fprop hadamard32"}.get(x, x) for x in after]
    return ", ".join([before + quantizer, *after])


def test_the_rows_of_the_seed_papers_table_are_ours(page, store):
    eight = store.sql(
        "SELECT recipe_label, 100 * avg(val_metric) AS solved FROM runs "
        "WHERE preset = 'small' AND lr = 2.4e-4 AND seed < 8 GROUP BY ALL HAVING count(*) = 8"
    ).set_index("recipe_label")["solved"]
    spread = store.sql(SPREAD).set_index("recipe_label")["mean"]
    for cells, name in zip(table(page, "| fixes | their experts |"), PAPER, strict=True):
        assert float(cells[3]) == round(eight[name], 1), name
        assert numbers(cells[4]) == ([round(100 * spread[name], 1)] if name in spread else []), name


@pytest.mark.heavy
def test_every_query_of_the_page_answers_with_its_views(page, store):
    queries = queries_of(page) + re.findall(r'fp4dse query --store docs/study/rl-store "(.*)"', page)
    assert len(queries) >= 12
    for query in queries:
        assert len(store.sql(query)), query


def test_what_noise_does_to_entropy_at_equal_reward_is_what_the_store_says(page, every_effect):
    order = [("noise weights", "fp4"), ("noise weights", "bf16"), ("noise weights", "qat"), ("noise qerl", "qat")]
    order += [("noise weights", "bf16"), ("noise qerl", "bf16")] * 2
    order.insert(6, ("noise weights", "bf16"))
    lines = every_effect[every_effect["number"].eq("entropy_at_reward")]
    by = lines.set_index(["preset", "treatment", "trainer", "lr"])
    of_walks = []
    for cells, key in zip(table(page, "| noise, under | rate |"), order, strict=True):
        preset = (re.findall(r"`(walks-\w+)`", cells[0]) or ["small"])[0]
        found = by.loc[(preset, *key, float(cells[1]))]
        assert numbers(cells[2]) == [found["pairs"], found["seeds"]]
        assert float(cells[3]) == round(found["without"], 4)
        assert numbers(cells[4]) == [round(found[name], 5) for name in ("difference", "low", "high")], key
        assert found["low"] < 0, "none is shown to raise it"
        of_walks += [found] if preset != "small" else []
    text = section(page, "Does noise explore?")
    assert max(abs(line[name]) for line in of_walks for name in ("low", "high")) < 0.0013
    assert "noise is within 0.0013 nats of none" in text
    [lower] = [line for line in of_walks if line["high"] < 0]
    assert lower.name[0] == "walks-medium"
    assert f"entropy is lower (`q` {lower['q']:.2f})".replace("0.", ".") in text
    both = every_effect.set_index(["preset", "treatment", "number"]).loc[("walks-small", "rollout mxfp4-rceil")]
    more, equal = both.loc["entropy"], both.loc["entropy_at_reward"]
    expected = f"({more['difference']:+.4f}, `q` {more['q']:.4f}), and not at equal reward (`q` {equal['q']:.2f})"
    assert expected.replace("0.", ".") in text


def test_what_is_told_among_the_effects_of_fixes_is_what_the_view_tells(page, effects):
    said = section(page, "Which fix?").replace("−", "-")
    assert f"Of the {effects['q'].notna().sum()} lines" in said
    told = effects[effects["q"] < 0.05].sort_values("p")
    assert len(told) == 9
    assert "nine are below .05. Seven are of the gradient's error" in said
    errors = told[told["number"].str.startswith("gradient_error")]
    depths = ["", *(f"/blocks.{depth}" for depth in range(4))]
    lowered = {("fallback", f"gradient_error{depth}") for depth in depths}
    lowered |= {("macro blocks", f"gradient_error{depth}") for depth in ("", "/blocks.3")}
    assert set(zip(errors["treatment"], errors["number"], strict=True)) == lowered
    assert (errors["high"] < 0).all()
    assert set(errors["trainer"]) == {"fp4"}
    by = effects[effects["trainer"].eq("bf16")].set_index(["treatment", "number"])["q"]
    rollouts, turned = "rollout mxfp4-rceil", "rollout mxfp4-rceil, hadamard32"
    others = [("entropy", rollouts), ("entropy_at_reward", rollouts), ("mismatch_kl", f"{rollouts} residual")]
    assert set(zip(told["number"], told["treatment"], strict=True)) - {of[::-1] for of in lowered} == {
        others[0],
        others[2],
    }
    rest = [by[key, number] for number, key in (*others, ("reward", rollouts), ("reward", turned))]
    rounded = [round(q, digits) for q, digits in zip([errors["q"].max(), *rest], (3, 3, 2, 3, 2, 2), strict=True)]
    places = r"`q` (.\d+) at most.*entropy \((.\d+)\), at equal reward not \((.\d+)\).*none \((.\d+) with the fallback"
    places += r".*lower \((.\d+); with a rotation (.\d+)\)"
    assert [float(x) for x in re.search(places, said).groups()] == rounded
    after = effects[effects["q"].ge(0.05) & ~effects["number"].str.startswith("mismatch_kl")].sort_values("p").head(2)
    assert list(zip(after["treatment"], after["number"], strict=True)) == [(rollouts, "reward"), (turned, "reward")]
    assert not told["number"].str.startswith("accuracy").any()


def test_the_view_has_the_ratios_of_the_pages_table(page, effects, factorial):
    of, _ = factorial
    by = effects[effects["trainer"].eq("fp4")].set_index(["treatment", "number"])
    for treatment, fix in (("macro blocks", "macro"), ("fallback", "fallback"), ("noise weights", "noise")):
        for number in ("gradient_error", "gradient_error/blocks.0", "gradient_error/blocks.3"):
            line = by.loc[(treatment, number)]
            found = list(line[["difference", "low", "high", "p"]])
            assert found == pytest.approx(list(interval(of[number, (fix,)]))), (treatment, number)
    said = " ".join(page.partition("has the same ratios, as logarithms:")[2].partition("Medians")[0].split())
    lines = [by.loc[(fix, "gradient_error")] for fix in ("macro blocks", "fallback")]
    expected = [round(line[name], 3) for line in lines for name in ("difference", "low", "high")]
    assert numbers(said.replace("−", "-")) == expected


@pytest.fixture(scope="module")
def factorial(store, effects):
    """(number, effect) -> the effect in each seed, of logarithms where the page has ratios; and geometric means of the
    cell without a fix, by number."""
    recorded = store.sql(
        "SELECT recipe_label, seed, step, name, value FROM recorded JOIN runs USING (run_id) "
        "SEMI JOIN (SELECT run_id, step FROM recorded WHERE name = 'accuracy') USING (run_id, step) "
        "WHERE preset = 'small' AND lr = 2.4e-4 AND (name LIKE 'gradient_error%' OR name = 'mismatch_kl')"
    )
    rows = store.sql("SELECT * FROM runs WHERE preset = 'small' AND lr = 2.4e-4")
    rows = rows.assign(accuracy=100 * rows["val_metric"], bf16=100 * (1 - rows["val_loss_bf16"]))
    out, plain = {}, {}

    def add(name, values, label, seeds, fixes=("macro", "fallback", "noise"), log=True):
        """values: indexed by recipe and seed; label: of a setting (macro, fallback, noise)."""
        cells = {of: label(*of) for of in product((0, 1), repeat=3)}
        if "noise" not in fixes:
            cells = {of: text for of, text in cells.items() if of[2]}
        y = np.array([values.loc[text].reindex(range(seeds)) for text in cells.values()])
        assert np.isfinite(y).all(), name
        plain[name] = np.exp(y[0].mean()) if log else y[0].mean()
        signs = {fix: 2 * np.array([of[i] for of in cells]) - 1 for i, fix in enumerate(fixes)}
        for size in range(1, len(fixes) + 1):
            for of in combinations(fixes, size):
                out[name, of] = np.prod([signs[fix] for fix in of], axis=0) @ y / (len(cells) / 2)

    def logs(name, of=lambda values: np.log(values).mean(), steps=200):
        there = recorded["name"].eq(name) & recorded["value"].gt(0) & recorded["step"].le(steps)
        return recorded[there].groupby(["recipe_label", "seed"])["value"].agg(of)

    fp4 = partial(_fixed, "")
    for name in ("gradient_error", "gradient_error/blocks.0", "gradient_error/blocks.3"):
        add(name, logs(name), fp4, 8)
    add("early", logs("gradient_error", steps=20), fp4, 8)
    add("medians", logs("gradient_error", of=lambda values: np.log(values.median())), fp4, 8)
    kl = logs("mismatch_kl", of=lambda values: np.log(values.mean()))
    add("KL, bf16", kl, partial(_fixed, "bf16, rollout "), 3)
    add("KL, fp4", kl, fp4, 8, fixes=("macro", "fallback"))
    for name in ("accuracy", "bf16"):
        add(name, rows.set_index(["recipe_label", "seed"])[name], fp4, 8, log=False)
    return out, plain


def _fixed(before, macro, fallback, noise):
    """The label of MXFP4 with these fixes."""
    fallback = (" residual" if before else ", forward residual") * fallback
    return before + (MACRO if macro else "mxfp4-rceil") + fallback + ", noise weights" * noise


def test_what_each_of_three_fixes_moves_is_what_the_store_says(page, effects, factorial):
    of, plain = factorial
    entropy = effects[effects["number"].eq("entropy_at_reward") & effects["trainer"].eq("fp4")].set_index("treatment")
    entropies = [entropy.loc[fix] for fix in ("macro blocks", "fallback", "noise weights")]
    fixes, rows = ("macro", "fallback", "noise"), table(page, "| number | none of the three |")
    names = ["gradient_error", "gradient_error/blocks.0", "gradient_error/blocks.3", "KL, bf16", "KL, fp4"]
    names += ["accuracy", "bf16"]
    p, bold = [], []
    for cells, name in zip(rows[:-1], names, strict=True):
        log = name not in {"accuracy", "bf16"}
        digits = 1 if not log else 2 if "KL" in name else 3
        assert numbers(cells[1])[0] == round(plain[name] * (1e4 if "KL" in name else 1), digits)
        for cell, fix in zip(cells[2:], fixes, strict=True):
            if (name, (fix,)) not in of:
                assert "by construction" in cell
                continue
            *found, least = interval(of[name, (fix,)])
            assert numbers(cell) == [round(x, 2) for x in (np.exp(found) if log else found)], (name, fix)
            p, bold = [*p, least], [*bold, "**" in cell]
    for cell, line in zip(rows[-1][2:], entropies, strict=True):
        assert (line["pairs"], line["seeds"]) == (4, 8)
        assert numbers(cell) == [round(1e4 * line[name], 1) for name in ("difference", "low", "high")]
    p, bold = [*p, *(line["p"] for line in entropies)], [*bold, *["**" in cell for cell in rows[-1][2:]]]
    q, said = adjusted(p), section(page, "Three fixes, three numbers")
    assert bold == (q < 0.05).tolist()
    assert f"for the {len(p)} effects of the table" in said
    assert round(max(q[q < 0.05]), 2) == 0.03
    assert [round(x, 2) for x in sorted(q[q > 0.05])[:4]] == [0.06, 0.07, 0.08, 0.09]


def test_early_updates_and_medians_say_the_same(page, factorial):
    of, _ = factorial
    said = section(page, "Three fixes, three numbers")
    found = [round(x, 2) for x in np.exp(interval(of["early", ("noise",)])[:3])]
    found += [round(np.exp(of["early", (fix,)].mean()), 2) for fix in ("macro", "fallback")]
    early = said.partition("when policies hardly differ, it is")[2].partition("* **KL")[0]
    assert numbers(early.rstrip(". ")) == found
    found = [round(np.exp(of["medians", (fix,)].mean()), 2) for fix in ("macro", "fallback", "noise")]
    assert numbers(said.partition("Medians give")[2].partition(". ```")[0]) == found


def test_macro_blocks_and_the_fallback_do_more_together(page, factorial):
    of, _ = factorial
    pair, said = ("macro", "fallback"), section(page, "Three fixes, three numbers").partition("**Interactions.**")[2]
    found = []
    for name in ("gradient_error", "gradient_error/blocks.3"):
        both = interval(of[name, ("macro",)] + of[name, ("fallback",)])[:3]
        found += [round(x, 2) for x in np.exp(both)]
    between = [round(np.exp(of[name, pair].mean()), 2) for name in ("gradient_error", "gradient_error/blocks.3")]
    assert numbers(said.partition("times what")[0]) == [*found, *between]
    *points, p = interval(of["accuracy", pair])
    assert numbers(said.partition("Accuracy has")[2].partition(" there:")[0]) == [
        *(round(x, 2) for x in points),
        round(p, 3),
    ]


def test_the_pages_query_of_the_three_fixes_has_the_same_effects(page, store, factorial):
    of, _ = factorial
    [query] = [q for q in queries_of(page) if "UNPIVOT" in q]
    found = store.sql(query).set_index(["trainer", "number", "effect"])["mean"]
    names = {"bf16": "accuracy in BF16", "KL, bf16": "mismatch_kl", "KL, fp4": "mismatch_kl"}
    asked = set()
    for (name, fixes), values in of.items():
        key = ("bf16" if name == "KL, bf16" else "fp4", names.get(name, name), "_".join(fixes))
        if key in found.index and not (name == "KL, fp4" and "noise" in fixes):
            assert found[key] == pytest.approx(values.mean()), key
            asked.add(key)
    inner = {"gradient_error/blocks.1", "gradient_error/blocks.2"}  # the page shows the first and the last
    assert {number for _, number, _ in asked} == set(found.index.get_level_values("number")) - inner


def _recipe(part):
    return {"w4a4": IN_ROLLOUTS}.get(part, f"bf16, inject {part}")


def test_what_each_part_of_the_error_does_is_what_the_store_says(page, store, effects):
    gaps = store.sql("SELECT recipe_label, gap_bf16 FROM runs WHERE preset = 'small' AND lr = 2.4e-4 AND seed < 8")
    gaps = gaps.set_index("recipe_label")
    lanes = store.sql(
        "SELECT recipe_label, seed, ln(avg(value)) AS kl FROM recorded JOIN runs USING (run_id) "
        "SEMI JOIN (SELECT run_id, step FROM recorded WHERE name = 'accuracy') USING (run_id, step) "
        "WHERE preset = 'small' AND lr = 2.4e-4 AND name = 'mismatch_kl' GROUP BY ALL HAVING avg(value) > 1e-9"
    ).pivot(index="recipe_label", columns="seed", values="kl")
    by = store.sql("FROM rollout_numbers WHERE preset = 'small'").set_index(["label", "number"])
    columns = ["difference", "difference_low", "difference_high"]
    rows = table(page, "| in the weights that sample |")
    for cells, name in zip(rows, map(_recipe, PARTS), strict=True):
        assert by.loc[(name, "accuracy"), "pairs"] == 8
        assert numbers(cells[1]) == [round(100 * x, 2) for x in by.loc[(name, "accuracy"), columns]], name
        found = interval(-100 * gaps.loc[name, "gap_bf16"])
        assert numbers(cells[2]) == [round(x, 2) for x in found[:3]], name
        assert float(cells[3]) == round(1e4 * np.exp(lanes.loc[name].mean()), 2), name
        for cell, number in zip(cells[4:], ("entropy", "entropy_at_reward"), strict=True):
            assert numbers(cell) == [round(1e4 * x, 1) for x in by.loc[(name, number), columns]], (name, number)
    assert lanes.loc[WEIGHTS].equals(lanes.loc[_recipe("scale+dead+grid")].rename(WEIGHTS)), "the same to the bit"
    names = [_recipe(part) for part in PARTS]
    q = {
        number: adjusted(by.loc[[(name, number) for name in names], "p"])
        for number in ("accuracy", "entropy", "reward")
    }
    assert q["accuracy"].min() > 0.5
    solved = effects.query("number == 'accuracy'").set_index("treatment")
    moved = [solved.loc[f"inject {part}", ["difference", "low", "high"]] for part in ("scale", "dead", "grid")]
    said = section(page, "Which part of the error does what?").partition("scale moves accuracy by")[2]
    assert numbers(said.partition("* **KL**")[0]) == [round(100 * x, 2) for effect in moved for x in effect]
    assert [bool(x) for x in q["entropy"] < 0.05] == [False] * 7 + [True]
    assert [bool(x) for x in q["reward"] < 0.05] == [False] * 7 + [True]


def test_the_ratios_of_divergences_are_what_the_store_says(page, store):
    [query] = [q for q in queries_of(page) if "AS ratio" in q]
    found = store.sql(query).set_index(["recipe", "beside"])
    lines = found.loc[[(_recipe(a), _recipe(b)) for a, b in STEPS]]
    q = dict(zip(STEPS, adjusted(2 * t.sf(lines["t"].abs(), 7)), strict=True))
    told = {pair for pair in STEPS if q[pair] < 0.05}
    assert told == {STEPS[i] for i in (0, 7, 8, 9)}
    assert min(q[pair] for pair in STEPS if pair not in told) > 0.1
    said = (
        section(page, "Which part of the error does what?").partition("`q` for ten")[2].partition("scale bias and")[0]
    )
    ratios = re.findall(r"×([\d.]+) \(([\d.]+) to ([\d.]+), (?:`q` )?(\.\d+)\)", said)
    order = [STEPS[i] for i in (9, 0, 7, 8)]
    for written, (a, b) in zip(ratios, order, strict=True):
        line = found.loc[(_recipe(a), _recipe(b))]
        for text, value in zip(written, [line["ratio"], line["low"], line["high"], q[(a, b)]], strict=True):
            assert float(text) == pytest.approx(value, abs=0.51 * 10 ** -len(text.partition(".")[2])), (a, b)


def test_500_updates_are_what_the_store_has(page, store):
    [query] = [q for q in queries_of(page) if "each_100" in q]
    found = store.sql(query).set_index("recipe")
    said = table(page, "| trainer and rollout | accuracy |")
    assert set(found.index) == set(FLAT)
    for cells, name in zip(said, FLAT, strict=True):
        line = found.loc[name]
        assert float(cells[1]) == round(line["solved"], 1), name
        if not cells[4]:
            assert (cells[2], cells[3]) == ("0", "0"), name
            assert line["largest"] < 0.01, name
            continue
        assert (float(cells[2]), float(cells[3])) == (round(line["kl"], 1), round(line["largest"])), name
        limits = [line[column] for column in ("each_100", "low", "high")]
        assert numbers(cells[4].replace("to", "")) == [round(number, 2) for number in limits], name
    ids = set(store.sql("SELECT DISTINCT config_id FROM runs WHERE preset = 'small-500'")["config_id"])
    lacking = [recipe.label() for recipe in find_space("rl-kl").recipes() if recipe.config_id not in ids]
    assert not lacking
    moving = found[found["largest"] > 0.01]
    assert (len(moving), (moving["last"] < moving["first"]).sum()) == (8, 6)


def test_replay_of_routes_is_what_the_store_has(page, store):
    rows = store.sql("SELECT recipe_label, lr, seed, 100 * val_metric AS solved FROM runs WHERE preset = 'moe-small'")
    said = section(page, "Does replaying routes help?")
    for rate, sentence in ((1.2e-4, "for 92.1 % at 1.2e-4"), (2.4e-4, "for 93.9 at 2.4e-4")):
        lanes = rows[rows["lr"].eq(rate)].pivot(index="seed", columns="recipe_label", values="solved")
        plain, replayed = lanes[QAT], lanes[f"{QAT}, router replay"]
        mean, low, high, _ = interval(replayed - plain)
        assert f"{replayed.mean():.1f} {sentence}" in said
        assert f"{mean:+.1f}" in said
        assert f"{low:+.1f} to {high:+.1f})" in said
        assert f"{plain.mean():.1f}" in sentence


def test_the_seeds_that_lose_most_make_up_what_the_page_says(page, store):
    rows = store.sql(
        "SELECT -100 * gap AS points FROM runs WHERE recipe_label = 'mxfp4-rceil' AND preset = 'small' AND lr = 2.4e-4"
    )
    points = sorted(rows["points"])
    assert points[7] < -5 < points[8]
    said = " ".join(page.partition("**Much in a few.**")[2].partition("\n\n")[0].split())
    assert f"add up to −{-sum(points[:8]) / 32:.2f} points of the mean of −{-sum(points) / 32:.2f};" in said
    assert f"the other 24 are {sum(points[8:]) / 24:.1f} points ahead" in said
    assert f"{100 * sum(points[:2]) / sum(points):.0f} % of all." in said
