"""What the page of reinforcement learning says fixes do to what is recorded is what the store beside it has."""

import re
from functools import partial
from itertools import combinations, product

import numpy as np
import pytest

from fp4dse.results import open_store
from fp4dse.results.stats.estimates.intervals import adjusted
from tests.results.rl.rl_page import DOCS, MACRO, interval, numbers, queries_of, section, table

pytestmark = pytest.mark.usefixtures("few_views")


@pytest.fixture(scope="module")
def again():
    """The effects of noise under BF16 in the lanes that were trained again for their records."""
    return open_store(DOCS / "study" / "rl-noise-store").sql("FROM rollout_effects")


def test_what_noise_does_to_entropy_at_equal_reward_is_what_the_store_says(page, every_effect, again):
    order = [("noise weights", "fp4"), ("noise weights", "bf16"), ("noise weights", "qat"), ("noise qerl", "qat")]
    order += [("noise weights", "bf16"), ("noise qerl", "bf16")] * 3
    order.insert(6, ("noise weights", "bf16"))
    columns = ["preset", "treatment", "trainer", "lr"]
    shown = [of[of["number"].eq("entropy_at_reward")] for of in (every_effect, again)]
    by, by_again = (of.set_index(columns).sort_index() for of in shown)
    of_walks = []
    for cells, key in zip(table(page, "| noise, under | rate |"), order, strict=True):
        preset = (re.findall(r"`(walks-\w+)`", cells[0]) or ["small"])[0]
        of = by_again if preset == "small" and cells[2].endswith(" 32") else by
        found = of.loc[(preset, *key, float(cells[1]))]
        assert numbers(cells[2]) == [found["pairs"], found["seeds"]]
        assert float(cells[3]) == round(found["without"], 4)
        assert numbers(cells[4]) == [round(found[name], 5) for name in ("difference", "low", "high")], key
        assert found["low"] < 0, "none is shown to raise it"
        of_walks += [found] if preset != "small" else []
    text = section(page, "Does noise explore?")
    assert max(abs(line[name]) for line in of_walks for name in ("low", "high")) < 0.0013
    assert "noise is within 0.0013 nats of none" in text
    small = shown[1]
    assert len(small) == 2
    assert small[["low", "high"]].abs().max(axis=None) < 0.0005
    assert "no more than 0.0005 nats either way" in text
    diverges = again.set_index("number").loc["mismatch_kl"]
    assert [f"{q:.3f}" for q in diverges["q"]] == ["0.007"] * 2
    assert "2·10⁻⁶ nats (`q` .007)" in text
    assert diverges["difference"].between(1e-6, 3e-6).all()
    [lower] = [line for line in of_walks if line["high"] < 0]
    assert lower.name[0] == "walks-medium"
    assert f"entropy is lower (`q` {lower['q']:.2f})".replace("0.", ".") in text
    both = (
        every_effect.set_index(["preset", "treatment", "number"])
        .sort_index()
        .loc[("walks-small", "rollout mxfp4-rceil")]
    )
    more, equal = both.loc["entropy"], both.loc["entropy_at_reward"]
    expected = f"({more['difference']:+.4f}, `q` {more['q']:.4f}), and not at equal reward (`q` {equal['q']:.2f})"
    assert expected.replace("0.", ".") in text


def test_lanes_trained_again_for_their_records_end_where_they_did(store):
    asked = "SELECT recipe_label, seed, val_metric FROM runs WHERE preset = 'small' AND lr = 2.4e-4"
    ends = [of.sql(asked) for of in (store, open_store(DOCS / "study" / "rl-noise-store"))]
    before, now = (end.set_index(["recipe_label", "seed"])["val_metric"] for end in ends)
    assert len(now) == 96
    assert before.loc[now.index].tolist() == now.tolist()


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
    errors = ["{:.2f} ({:.2f} to {:.2f})".format(*np.exp(interval(of["gradient_error", (fix,)])[:3])) for fix in fixes]
    at_the_top = section(page, "What was found")
    assert f"they take the error to {errors[0]} and {errors[1]} of what it was" in at_the_top
    assert (
        f"takes it to {errors[2]}: significant alone, not after correction (`q` {q[2]:.2f})".replace("` 0", "` ")
        in at_the_top
    )
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
