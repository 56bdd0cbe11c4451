"""What the page of fine-tuning says is recovered is what the store beside it has."""

import re
from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import recipe_to_dict
from fp4dse.results import open_store
from fp4dse.results.stats.estimates.intervals import adjusted, holm, mean_interval, p_value, paired_interval
from fp4dse.sweeps.arguments import find_space
from tests.results.asked_once import asked_once, views_made_once
from tests.results.finetune_page import DOCS, finetune_page, percent

COLUMNS = [
    *("bf16, fprop.w nvfp4", "bf16, fprop.w mxfp4-rceil", "bf16, fprop.w e2m1 tensor one T1"),
    *("bf16, forward nvfp4", "bf16, forward mxfp4-rceil"),
]
"""What is rounded, in the order of the table."""
QAD, ALONE = ", qad", ", trains what is learned"
PACT = ", fprop.x learned-clip start=128 decay=0.0002 rate=1000"
METHODS = [
    *(("", ""), ("", QAD)),
    *((", fprop.w factors", ALONE), (", fprop.w factors", QAD + ALONE)),
    *((", fprop.w lora", ALONE), (", fprop.w lora", QAD + ALONE)),
    *((", fprop.w scales", ALONE), (", fprop.w scales", QAD + ALONE)),
    *((", fprop.w lsq", ""), (", fprop.w lsq", QAD), (", fprop.w lsq", ALONE), (", fprop.w lsq", QAD + ALONE)),
]
METHODS += [(PACT, ""), (PACT, QAD), (PACT, ALONE), (PACT, QAD + ALONE)]
"""The rows of the table, what a label has before and behind the backward pass."""
ROUNDED = [column for column in COLUMNS if "tensor" not in column]
"""What weights were fitted to, in the order of their table."""
ROTATED, TRAINED = ", fprop hadamard32", ", backward x+w from forward"


@pytest.fixture(scope="module")
def page():
    return finetune_page()


@pytest.fixture(scope="module")
def store():
    with views_made_once():
        yield asked_once(open_store(DOCS / "study" / "finetune-store"))


@pytest.fixture(scope="module")
def fitted_store(store):
    return asked_once(open_store(DOCS / "study" / "fitted-store"))


@pytest.fixture(scope="module")
def coreset_store(store):
    return asked_once(open_store(DOCS / "study" / "coreset-store"))


@pytest.fixture(scope="module")
def recovered(store):
    return store.sql("FROM recovered").set_index("label")


def test_the_table_has_all_that_the_store_has(page, recovered):
    rows = [row.strip("|").split("|")[1:] for row in page.partition("| | weights, NVFP4 |")[2].splitlines()[2:19]]
    [lost, *rows] = [[cell.strip() for cell in row] for row in rows]
    written = set()
    for (before, behind), [*cells, step] in zip(METHODS, rows, strict=True):
        overheads = []
        for rounded, cell in zip(COLUMNS, cells, strict=True):
            label = f"{rounded}{before}, backward x+w from forward{behind}"
            if not cell:
                assert label not in recovered.index
                continue
            line = recovered.loc[label]
            shares = [round(100 * line[column]) for column in ("of_base", "of_base_low", "of_base_high")]
            assert [int(number) for number in re.findall(r"-?\d+", cell)] == shares, label
            overheads.append(f"{line['overhead']:.2f}")
            written.add(label)
        assert {*re.findall(r"\d\.\d+", step)} == {*overheads}, behind
    assert [float(cell) for cell in lost[:-1]] == [
        round(recovered.loc[f"{rounded}, backward x+w from forward", "lost"], 4) for rounded in COLUMNS
    ]
    assert set(recovered.index) == written


def numbers(text):
    return [float(number) for number in re.findall(r"[+-]?\d*\.\d+", text)]


@pytest.fixture(scope="module")
def queries(page):
    return re.findall(r"```sql\n(.*?)```", page, re.DOTALL)


def test_shares_with_the_rate_chosen_by_other_seeds_are_what_the_page_says(page, store, queries):
    [query] = [text for text in queries if "rate_by_other_seeds" in text]
    found = store.sql(query)
    lower = 100 * (found["of_base"] - found["rate_by_other_seeds"])
    said = " ".join(page.partition("Chosen by the other four seeds")[2].partition("\n\n")[0].split())
    changed = lower[lower > 0.01]
    assert f"{len(found) - len(changed)} of the {len(found)} are what they were" in said
    nothing = found["of_base"] < 0.05
    for part in (changed[~nothing], changed[nothing]):
        assert f"by {part.min():.1f} to {part.max():.1f}" in said
    assert (lower > -0.01).all()
    worst = 100 * found.loc[changed[nothing].index, "rate_by_other_seeds"]
    assert f"which then have {worst.max():.1f} to {worst.min():.1f} %." in said


def test_merged_adapters_lose_what_the_page_says(page, store, queries):
    [query] = [text for text in queries if "AS half" in text]
    found = store.sql(query).set_index(["label", "rate"])
    rows = page.partition("| merged QPiSSA |")[2].partition("\n\n")[0].splitlines()[2:]
    for row, rounded in zip(rows, [COLUMNS[i] for i in (0, 1, 3, 4)], strict=True):
        columns = [("", 1e-4), ("", 4e-4), (QAD, 1e-4), (QAD, 4e-4)]
        for cell, (behind, rate) in zip(row.strip().strip("|").split("|")[1:], columns, strict=True):
            line = found.loc[(f"{rounded}, fprop.w factors, backward x+w from forward{behind}{ALONE}", rate)]
            more, half = line["more"], line["half"]
            assert numbers(cell) == [round(x, 4) for x in (more, more - half, more + half)], (rounded, behind, rate)
    exact = store.sql(next(text for text in queries if "AS merged" in text))
    means = exact.round(4)
    said = " ".join(page.partition("QLoRA, which changes less")[2].partition("all below PTQ")[0].split())
    least, _, kept = said.partition("by the mean: at 4e-4")
    expected = []
    for rounded in (COLUMNS[0], COLUMNS[3], COLUMNS[1], COLUMNS[4]):
        for behind in ("", QAD):
            lines = means[means["recipe_label"] == f"{rounded}, fprop.w lora, backward x+w from forward{behind}{ALONE}"]
            [line] = lines[lines["lr"] == 4e-4].to_dict("records")
            expected += [line["merged"], line["beside"]]
    assert numbers(kept) == expected
    adapted = exact[exact["recipe_label"].str.contains(", fprop.w lora")].set_index(["recipe_label", "lr"])
    more = found["more"].loc[adapted.index]  # than PTQ
    shares = 100 * more / (more + adapted["beside"] - adapted["merged"])
    assert len(shares) == 16
    assert f"{shares.min():.0f} % of what it recovers and all" in least
    lora = [label for label, _ in found.index if "lora" in label]
    assert (found.loc[lora, "more"] + found.loc[lora, "half"] < 0).all()


def test_what_a_trained_clip_adds_is_what_the_page_says(page, store):
    rows = store.sql("SELECT recipe_label, seed, val_loss FROM runs WHERE lr = 1e-4")
    lanes = rows.pivot_table(index="recipe_label", columns="seed", values="val_loss")
    plain, tail = COLUMNS[3], ", backward x+w from forward"
    said = page.partition("* PACT's clip adds nothing here.")[2].partition(" of a step.")[0].replace("\n ", "")
    expected = []
    for behind in ("", QAD):
        apart = lanes.loc[plain + PACT + tail + behind] - lanes.loc[plain + tail + behind]
        over = mean_interval(apart.to_numpy()[None]).iloc[0]
        expected += [round(-over["mean"], 5), round(over["low"], 5), round(over["high"], 5)]
    found = [float(number) for number in re.findall(r"[+-]?0\.\d{5}", said)]
    assert found == expected
    alone = [lanes.loc[plain + PACT + tail + behind + ALONE] for behind in ("", QAD)]
    assert (alone[0] == alone[1]).all(), "nothing but its decay moves the clip"


def test_every_query_of_the_page_answers(page, store, fitted_store, coreset_store, queries):
    for name, asked in {"finetune": store, "fitted": fitted_store, "coreset": coreset_store}.items():
        own = re.findall(rf'fp4dse query --store docs/study/{name}-store "(.*)"', page)
        assert own
        for query in [*queries, *own] if asked is store else own:
            assert len(asked.sql(query)), query


def test_lanes_of_a_seed_began_alike(store):
    """They compute the same before any update: a lane that reads what is another's shows by its first loss."""
    first = store.sql("SELECT recipe, recipe_label, seed, curve_loss[1] AS loss FROM curves JOIN runs USING (run_id)")
    first["rounded"] = first["recipe_label"].str.replace(r", (backward.*|untrained)$", "", regex=True)
    assert (first.groupby(["rounded", "seed"])["loss"].nunique() == 1).all()


def test_the_command_of_coresets_has_what_they_are_measured_from(page):
    """Each recipe that trains beside one of the same forward pass that does not, or `recovered` is empty."""
    [command] = [line.split() for line in page.splitlines() if "training.coreset" in line and "fp4dse sweep" in line]
    axes = [command[at + 1] for at, word in enumerate(command) if word == "-a"]
    recipes = [recipe.canonical() for recipe in find_space(command[2], axes).recipes()]
    untrained = [recipe.fprop for recipe in recipes if recipe.training.trains == "none"]
    trained = [recipe for recipe in recipes if recipe.training.trains == "all"]
    assert {recipe_to_dict(recipe).get("training", {}).get("coreset") is None for recipe in trained} == {True, False}
    assert len(trained) == 3
    assert all(recipe.fprop in untrained for recipe in trained)


def rounded_share(line):
    return [round(100 * x) for x in line]


def cells_of(page, head):
    rows = page.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [[[float(x) for x in re.findall(r"-?\d*\.?\d+", cell)] for cell in row.split("|")[2:-1]] for row in rows]


@pytest.fixture(scope="module")
def fits():
    return pd.read_json(DOCS / "study" / "fits.jsonl", lines=True, precise_float=True)


@pytest.fixture(scope="module")
def losses(fits):
    """(what is rounded, method) -> losses of the seeds, in their order; `rotated` is nearest under the rotation."""
    found = {}
    for (recipe, method), own in fits.groupby(["recipe", "method"]):
        own, rounded = own.sort_values("seed"), recipe.removesuffix(ROTATED)
        assert own["seed"].tolist() == [0, 1, 2, 3, 4]
        found[rounded, method] = own["loss_fitted"].to_numpy()
        found[rounded, "nearest" if rounded == recipe else "rotated"] = own["loss_nearest"].to_numpy()
        found[rounded, "bf16"] = own["loss_bf16"].to_numpy()
    return found


FITTED = ("gptq", "llm-fp4", "block-ap", "mr-gptq")


def test_what_fitting_gives_back_is_what_the_page_computes(page, losses, monkeypatch):
    [code] = re.findall(r"```python\n(import pandas.*?)```", page, re.DOTALL)
    monkeypatch.chdir(DOCS.parent)
    names = {}
    exec(compile(code, "finetune.md", "exec"), names)
    [lost, *rows] = cells_of(page, "| | weights, NVFP4 | weights, MXFP4 | both, NVFP4 |")
    assert lost == [[round((losses[of, "nearest"] - losses[of, "bf16"]).mean(), 4)] for of in ROUNDED]
    lines = [*((method, "", "") for method in FITTED[:3]), ("nearest", ROTATED, "")]
    lines += [("mr-gptq", ROTATED, ""), ("mr-gptq", ROTATED, ROTATED)]
    for cells, (method, rotated, measured) in zip(rows, lines, strict=True):
        for cell, of in zip(cells, ROUNDED, strict=True):
            assert cell == rounded_share(names["shares"][of + rotated, method, of + measured]), (method, of)
    best = [max(rows[i][column][0] for i in (0, 1, 2, 4)) for column in range(4)]
    assert best == [46, 54, 13, 30]
    assert "13 % with NVFP4 (GPTQ) and 30 % with MXFP4 (MR-GPTQ)" in " ".join(page.split())
    for of in ROUNDED:  # "any four of the bases choose the same one"
        every = np.array([losses[of, method] for method in FITTED])
        assert {np.delete(every, left_out, 1).mean(1).argmin() for left_out in range(5)} == {every.mean(1).argmin()}
    assert "13 % with NVFP4 in both operands and 30 % with MXFP4" in (DOCS / "weights.md").read_text(encoding="utf-8")


def test_which_methods_are_distinguishable_is_what_the_page_says(page, losses):
    def better(pairs, adjust):
        """Those with p < .05, the one with the smaller loss before the other."""
        p = adjust(p_value(np.array([losses[of, a] - losses[of, b] for of, a, b in pairs])))
        found = [pair for pair, own in zip(pairs, p, strict=True) if own < 0.05]
        return {(of, *sorted((a, b), key=lambda method: losses[of, method].mean())) for of, a, b in found}

    weights, weights_mx, both, both_mx = ROUNDED
    against = [(of, method, "nearest") for of in ROUNDED for method in FITTED]
    apart = better(against, adjusted)
    assert (len(against), len(apart), len(better(against, lambda p: p))) == (16, 7, 7)
    said = percent(page, "Distinguishable from rounding to nearest are the seven", "by Benjamini")
    assert said == [16, 0.05, 16]
    assert "llm-fp4" not in {method for _, method, _ in apart}
    surest = {(weights, "mr-gptq"), (weights_mx, "mr-gptq"), (weights_mx, "block-ap"), (both, "gptq")}
    assert better(against, holm) == {(*of, "nearest") for of in surest}
    assert "and four by Holm" in page
    assert "By Holm two remain: MR-GPTQ and Block-AP over LLM-FP4, with MXFP4's weights." in " ".join(page.split())
    pairs = [(of, a, b) for of in ROUNDED for a, b in combinations(FITTED, 2)]
    ahead = [(weights, "gptq"), (weights, "llm-fp4"), (weights_mx, "llm-fp4"), (weights_mx, "block-ap")]
    ahead += [(both_mx, method) for method in FITTED[:3]]
    said = {(of, "mr-gptq", method) for of, method in ahead}
    said |= {(both, "gptq", "mr-gptq"), (weights_mx, "block-ap", "llm-fp4")}
    assert (len(pairs), len(better(pairs, lambda p: p))) == (24, 11)
    assert (len(said), better(pairs, adjusted)) == (9, said)
    assert better(pairs, holm) == {(weights_mx, method, "llm-fp4") for method in ("mr-gptq", "block-ap")}
    rotation = p_value(np.array([losses[of, "rotated"] - losses[of, "nearest"] for of in ROUNDED]))
    assert (rotation < 0.05).tolist() == [True, False, True, False]
    more = [losses[of, "rotated"].mean() - losses[of, "nearest"].mean() for of in (weights, both)]
    lost = [losses[of, "nearest"].mean() - losses[of, "bf16"].mean() for of in (weights, both)]
    said = percent(page, "The rotation by itself costs NVFP4", "where MR-GPTQ")
    assert said == [round(100 * x / of) for x, of in zip(more, lost, strict=True)]
    assert percent(page, "Distinguishable from each other are eleven", "nine: MR-GPTQ is better") == [24]


def test_training_gives_back_more_than_fitting_where_the_page_says(page, losses, store, recovered):
    rows = store.sql("SELECT recipe_label, lr, seed, val_loss, val_loss_bf16 FROM runs ORDER BY seed")
    apart, close = [], []
    for of in ROUNDED:
        label = of + TRAINED
        own = rows[(rows["recipe_label"] == label) & (rows["lr"] == recovered.loc[label, "lr"])]
        untrained = rows[rows["recipe_label"].eq(f"{of}, untrained") & rows["lr"].eq(1e-4)]
        assert (untrained["val_loss"].to_numpy() == losses[of, "nearest"]).all(), "bases are the same"
        assert (untrained["val_loss_bf16"].to_numpy() == losses[of, "bf16"]).all()
        for method in FITTED:
            more = (losses[of, method] - own["val_loss"].to_numpy())[None]
            over = paired_interval(more).iloc[0]
            assert over["mean"] > 0
            apart.append(p_value(more)[0])
            if (of, method) == (ROUNDED[3], "mr-gptq"):
                said = numbers(page.partition("MR-GPTQ with MXFP4 in both operands (")[2].partition(")")[0])
                assert said == [round(over[name], 4) for name in ("mean", "low", "high")]
                close.append(len(apart) - 1)
            else:
                assert over["low"] > 0
    assert len(apart) == 16
    assert np.flatnonzero(holm(apart) >= 0.05).tolist() == close


def test_training_from_fitted_weights_gives_back_what_the_page_says(page, store, fitted_store, recovered, losses):
    both = ROUNDED[2]
    scales = f"{both}, fprop.w scales{TRAINED}"
    labels = [f"{both}, untrained", both + TRAINED, both + TRAINED + QAD, scales + ALONE, scales + QAD + ALONE, "bf16"]
    base = store.sql("SELECT recipe_label, lr, val_loss FROM runs WHERE seed = 0")
    base = base.set_index(["recipe_label", "lr"])["val_loss"].to_dict()
    lanes = fitted_store.sql("SELECT start_method, recipe_label, lr, seed, val_loss, val_loss_bf16 FROM runs")
    nearest, lost = losses[both, "nearest"][0], (losses[both, "nearest"] - losses[both, "bf16"])[0]
    assert f"the {lost:.4f}".replace("0.", ".") in page
    apart = {}
    rows = cells_of(page, "| | from the base | from GPTQ's |")
    for label, [from_base, *cells] in zip(labels, rows, strict=True):
        of_base = base[label, recovered["lr"].get(label, 1e-4)]
        assert from_base == [round(100 * (nearest - of_base) / lost)], label
        for method, cell in zip(FITTED, cells, strict=False):
            own = lanes[lanes["start_method"].eq(method) & lanes["recipe_label"].eq(label)]
            own = own[own["lr"] == own.groupby("lr")["val_loss"].mean().idxmin()]["val_loss"].to_numpy()
            assert len(own) == 5
            if label == labels[0]:
                assert (own == losses[both, method][0]).all(), "the fits that the store began with"
                assert cell == [round(100 * (nearest - own[0]) / lost)]
                continue
            over = mean_interval(((nearest - own) / lost)[None]).iloc[0]
            assert cell == rounded_share(over[["mean", "low", "high"]]), (label, method)
            beyond = (own.mean() - of_base) / (2.776 * own.std(ddof=1) * np.sqrt(1.2))
            apart[label, method] = np.sign(beyond) if abs(beyond) > 1 else 0
            if label != "bf16":  # "no training with quantizers from fitted weights"
                half = 2.776 * own.std(ddof=1) * np.sqrt(1.2)
                assert own.mean() + half > base[labels[1], recovered.loc[labels[1], "lr"]], (label, method)
    assert [apart[labels[1], method] for method in FITTED[:3]] == [1, 0, 0]  # 1: more loss than from the base
    for label in (labels[2], labels[5]):
        assert [apart[label, method] for method in FITTED[:3]] == [1, 1, 1]
    assert [apart[labels[3], method] for method in FITTED[:3]] == [-1, 0, -1]
    untrained = lanes[lanes["recipe_label"] == labels[0]].set_index("start_method")
    in_bf16 = untrained["val_loss_bf16"]
    ends = [round(x, 4) for x in (in_bf16.min(), in_bf16.max(), losses[both, "bf16"][0])]
    assert percent(page, "It is these weights in BF16, and they", ". BF16") == ends
    shares = fitted_store.sql("FROM recovered").set_index(["start", "label"])
    [block_ap] = {start for start, _ in shares.index if start.startswith("block-ap")}
    said = percent(page, "Of what Block-AP leaves, scales give", ". Scales with")
    lines = [shares.loc[(block_ap, label)] for label in labels[3:5]]
    assert said == [x for line in lines for x in rounded_share(line[["of_base", "of_base_low", "of_base_high"]])]
    said = percent(page, "Block-AP and then scales alone, gives", ". Of what")
    assert said == [rows[3][3][0], rows[4][3][0], rows[0][3][0]]
    alone = lanes[lanes["recipe_label"].eq(f"{ROUNDED[0]}, untrained") & lanes["start_method"].eq("block-ap")]
    means = [round(x, 4) for x in (alone["val_loss"].mean(), losses[ROUNDED[0], "block-ap"][0])]
    assert percent(page, "Block-AP's depend on that:", " when fitted") == means
    [gptq] = {start for start, _ in shares.index if start.startswith("gptq")}
    line = shares.loc[(gptq, ROUNDED[0] + TRAINED)]
    [said] = percent(page, "GPTQ's above, with weights alone rounded, have a `lost`", " All seeds")
    assert said == round(line["lost"], 5)
    assert np.isnan(line["of_base"])
    line = shares.loc[(block_ap, ROUNDED[0] + TRAINED)]
    said = percent(page, "Of Block-AP's, with a `lost` of", "; where little")
    assert said == [round(line["lost"], 4), round(100 * line["of_base"])]


def test_coresets_lose_what_the_page_says(page, coreset_store):
    shares = coreset_store.sql("FROM recovered").set_index("label")
    labels = [f"{ROUNDED[2]}{chosen}" for chosen in ("", ", coreset random", ", coreset acs")]
    found = [rounded_share(shares.loc[label, ["of_base", "of_base_low", "of_base_high"]]) for label in labels]
    assert percent(page, "`of_base` is", "; against BF16") == [x for line in found for x in line]
    lanes = coreset_store.sql("SELECT recipe_label, lr, seed, gap, val_loss, val_loss_bf16 FROM runs ORDER BY seed")
    losses = lanes.pivot_table(index=["recipe_label", "seed"], columns="lr", values="val_loss").loc[labels]
    assert (losses[1e-4] < losses[4e-4]).all(), "the lower rate is the better one on each seed"
    better = lanes[lanes["lr"] == 1e-4].set_index("recipe_label")
    gaps = 100 * np.array([better.loc[label, "gap"] for label in labels])
    over = mean_interval(gaps)[["mean", "low", "high"]].round(2)
    untrained = round(100 * better.loc[f"{ROUNDED[2]}, untrained", "gap"].mean(), 2)
    assert percent(page, "; against BF16", ". The random tenth") == [*over.to_numpy().ravel().tolist(), untrained]
    verdict = [better.loc[label, "val_loss"].to_numpy() for label in labels[1:]]
    apart = paired_interval(100 * (1 - verdict[0] / verdict[1])[None]).iloc[0]
    said = percent(page, "The random tenth is ahead of ACS's", "It is mostly")
    assert said == [round(apart[name], 2) for name in ("mean", "low", "high")]
    means = better.groupby("recipe_label")[["val_loss", "val_loss_bf16"]].mean()
    base = means.loc[f"{ROUNDED[2]}, untrained", "val_loss_bf16"]
    by = [(means["val_loss"] - means["val_loss_bf16"])[label] for label in (*labels[1:], labels[0])]
    assert percent(page, "and not their rounding: without", "after all texts") == [
        round(x, 4) for x in (*(means["val_loss_bf16"][label] for label in labels[1:]), base, *by)
    ]
