"""What the page of fine-tuning says is recovered is what the store beside it has."""

import re
from pathlib import Path

import pytest

from fp4dse.dse import recipe_to_dict
from fp4dse.results import open_store
from fp4dse.results.stats.estimates.intervals import mean_interval
from fp4dse.sweeps.arguments import find_space
from tests.results.asked_once import asked_once, views_made_once

DOCS = Path(__file__).parents[2] / "docs"
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


@pytest.fixture(scope="module")
def page():
    return (DOCS / "finetune.md").read_text(encoding="utf-8").replace("−", "-").replace("**", "")


@pytest.fixture(scope="module")
def store():
    with views_made_once():
        yield asked_once(open_store(DOCS / "study" / "finetune-store"))


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


def test_every_query_of_the_page_answers(page, store, queries):
    for query in [*queries, *re.findall(r'fp4dse query --store docs/study/finetune-store "(.*)"', page)]:
        assert len(store.sql(query)), query


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
