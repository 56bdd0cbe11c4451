"""What the page of fine-tuning says is recovered is what the store beside it has."""

import re
from pathlib import Path

import pytest

from fp4dse.dse import recipe_to_dict
from fp4dse.results import open_store
from fp4dse.sweeps.arguments import find_space

DOCS = Path(__file__).parents[2] / "docs"
COLUMNS = [
    *("bf16, fprop.w nvfp4", "bf16, fprop.w mxfp4-rceil", "bf16, fprop.w e2m1 tensor one T1"),
    *("bf16, forward nvfp4", "bf16, forward mxfp4-rceil"),
]
"""What is rounded, in the order of the table."""
QAD, ALONE = ", qad", ", trains what is learned"
METHODS = [
    *(("", ""), ("", QAD)),
    *((", fprop.w factors", ALONE), (", fprop.w factors", QAD + ALONE)),
    *((", fprop.w lora", ALONE), (", fprop.w lora", QAD + ALONE)),
    *((", fprop.w scales", ALONE), (", fprop.w scales", QAD + ALONE)),
    *((", fprop.w lsq", ""), (", fprop.w lsq", QAD), (", fprop.w lsq", ALONE), (", fprop.w lsq", QAD + ALONE)),
]
"""The rows of the table, what a label has before and behind the backward pass."""


@pytest.fixture(scope="module")
def page():
    return (DOCS / "finetune.md").read_text(encoding="utf-8").replace("−", "-").replace("**", "")


@pytest.fixture(scope="module")
def recovered():
    return open_store(DOCS / "study" / "finetune-store").sql("FROM recovered").set_index("label")


def test_the_table_has_all_that_the_store_has(page, recovered):
    rows = [row.strip("|").split("|")[1:] for row in page.partition("| | weights, NVFP4 |")[2].splitlines()[2:15]]
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


def test_lanes_of_a_seed_began_alike():
    """They compute the same before any update: a lane that reads what is another's shows by its first loss."""
    store = open_store(DOCS / "study" / "finetune-store")
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
