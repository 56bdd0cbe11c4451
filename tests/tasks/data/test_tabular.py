"""A user's table with a target: how it is read and split, and what can be wrong with it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe
from fp4dse.tasks import Lane, get_task, regression, train
from fp4dse.tasks.data.tabular import read_table


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def columns(rows=400) -> dict:
    x = np.random.default_rng(0).normal(size=(rows, 3)) * [1, 50, 0.01] + [0, 7, 0]
    price = x[:, 0] + x[:, 1] / 50 + 3
    return {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "flag": x[:, 2] > 0, "price": price, "n": np.arange(rows) % 7}


def write(name="t.csv", **more) -> None:
    table = pa.table({**columns(), **more})
    pa.csv.write_csv(table, name) if name.endswith(".csv") else pq.write_table(table, name)


def test_a_fifth_is_held_out_and_the_rest_is_standardized():
    write()
    table = read_table("t.csv:price")
    assert table.train_x.shape == (320, 5)
    assert table.val_y.shape == (80, 1)
    for part in (table.train_x, table.train_y):
        assert part.mean(0).abs().max() < 1e-5
        assert (part.std(0, correction=0) - 1).abs().max() < 1e-5
    assert 0.5 < table.val_y.std() < 1.5


def test_csv_and_parquet_are_the_same_table():
    exact = {"b": np.arange(400) / 4, "a": np.arange(400) % 5, "c": np.arange(400) % 3, "price": np.arange(400) / 8}
    for name in ("t.csv", "t.parquet"):
        write(name, **exact)
    assert read_table("t.csv:price").digest == read_table("t.parquet:price").digest
    assert read_table("t.csv:price").digest != read_table("t.csv:a").digest


def test_a_constant_feature_is_zero():
    write(c=np.full(400, 3.3))
    assert (read_table("t.csv:price").train_x[:, 2].abs() < 1e-5).all()


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_table(path)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_what_is_wrong_with_a_table_is_said():
    assert "a .csv or .parquet file that exists" in refused("nothing.csv:price")
    write()
    assert "FILE:COLUMN with one of a, b, c, flag, price, n" in refused("t.csv")
    assert "FILE:COLUMN with one of a, b, c, flag, price, n" in refused("t.csv:cost")
    write("t.parquet", c=[1.5, None, float("nan"), *range(397)])
    said = "column c, row 2: found nothing; accepted: a finite number (2 rows have none)"
    assert refused("t.parquet:price") == f"--data t.parquet: {said}"
    Path("t.csv").write_text("a,price\n1,2\n3,4\n5,\n7,8\n1,2\n")
    assert refused("t.csv:price").startswith("--data t.csv: column price, row 3: found nothing; accepted: a finite")
    write(price=[3] * 400)
    assert "a target that varies (price is 3 in every row)" in refused("t.csv:price")
    Path("t.csv").write_text("a,price\n1,2\n3,4\n")
    assert "5 rows or more (found 2)" in refused("t.csv:price")
    Path("t.csv").write_text("a,price\n1,2\n3,4,5\n")
    assert "a readable table" in refused("t.csv:price")
    Path("t.xls").write_text("a")
    assert "ends in .csv or .parquet" in refused("t.xls:price")


HOUSES = "town,kind,n,price\n" + "".join(f"{'AB'[i % 2]},{'xyz'[i % 3]},{i},{i % 2 + i % 3}\n" for i in range(30))


def test_a_column_of_words_is_refused_with_its_row_and_the_way_to_take_it():
    Path("t.csv").write_text(HOUSES)
    said = "--data t.csv: column town, row 1: found 'A'; accepted: a finite number (30 rows have none); or words as"
    assert refused("t.csv:price") == f"{said} categories, t.csv:price?categories=town,kind"
    Path("t.csv").write_text(HOUSES.replace("\nA,x,0,", "\n4,x,0,").replace(",7,", ",seven,"))
    assert "column n, row 8: found 'seven'; accepted: a finite number; or words" in refused(
        "t.csv:price?categories=kind,town"
    )
    Path("t.csv").write_text("a,price\n1,2\n3,cheap\n")
    assert refused("t.csv:price").endswith("column price, row 2: found 'cheap'; accepted: a finite number")


def test_categories_are_a_feature_for_each_value():
    Path("t.csv").write_text(HOUSES)
    table = read_table("t.csv:price?categories=town,kind")
    assert table.train_x.shape == (24, 2 + 3 + 1)
    for column in range(5):
        assert len(table.train_x[:, column].unique()) == 2
    assert read_table("t.csv:price?categories=town,kind,n").train_x.shape == (24, 2 + 3 + 30)
    assert read_table("t.csv:n?categories=town,kind").digest != table.digest
    task = get_task("regression", "smoke", "t.csv:price?categories=town,kind")
    assert task.problem([0]).init["w0"].shape[2] == 6
    assert task.size == 6 * 32 + 32 + 32 + 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("price?categories=street", "categories: found 'street'; accepted: town, kind, n"),
        ("price?categories=price", "categories: found 'price'; accepted: town, kind, n"),
        ("price?categories=", "FILE:COLUMN?categories=COLUMN,COLUMN"),
        ("price?kinds=town", "FILE:COLUMN?categories=COLUMN,COLUMN"),
        ("cost?categories=town", "FILE:COLUMN with one of town, kind, n, price"),
        ("town?categories=kind", "column town, row 1: found 'A'; accepted: a finite number (30 rows have none)"),
    ],
)
def test_categories_that_cannot_be_had_are_named(asked, words):
    Path("t.csv").write_text(HOUSES)
    assert words in refused(f"t.csv:{asked}")


def test_gaps_among_categories_and_too_many_of_them_are_refused():
    Path("t.csv").write_text(HOUSES.replace("\nB,y,1,", "\n,y,1,"))
    assert "column town, row 2: found ''; accepted: a category in every row" in refused("t.csv:price?categories=town")
    write(name_of=[f"n{i}" for i in range(400)])
    assert "found '400 different values'; accepted: 256" in refused("t.csv:price?categories=name_of")


@pytest.mark.parametrize(("header", "found"), [("a,a,price", "'a'"), ("a,,price", "''"), ("price,b,price", "'price'")])
def test_a_header_has_a_name_for_each_column_once(header, found):
    Path("t.csv").write_text(header + "\n" + "1,2,3\n" * 9)
    assert f"header: found {found}; accepted: a name for each column, each once" in refused("t.csv:price")


def test_every_preset_has_a_model_for_tables():
    assert set(regression.PRESETS) <= set(regression.HIDDEN)
    write()
    for preset in regression.PRESETS:
        task = get_task("regression", preset, "t.csv:price")
        init = task.problem([0, 1]).init
        assert init["w0"].shape[2] == 5
        assert init[f"w{len(regression.HIDDEN[preset])}"].shape[1] == 1


def test_a_table_is_learnt_and_lanes_are_their_own():
    write()
    task = get_task("regression", "smoke", "t.csv:price")
    lanes = [Lane(Recipe.named(name), 1e-2, seed) for name in ("bf16", "bf16") for seed in (0, 1)]
    together = train(task, lanes).lanes
    assert together[0].val_loss < 0.1
    assert train(task, [lanes[1], lanes[0]]).lanes == [together[1], together[0]]
    assert torch.equal(task.problem([0, 1]).init["w1"][1], task.problem([1]).init["w1"][0])
