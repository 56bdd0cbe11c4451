import hashlib
from datetime import UTC, datetime

import msgspec
import pyarrow as pa
import pytest

from fp4dse.dse import Recipe, StoreError, recipe_files, recipe_from_dict
from fp4dse.dse.cost import OVERHEAD_OF, overhead
from fp4dse.results.store.matching import baseline_id
from fp4dse.results.store.schema import KEY, RECIPE, ROW, SCHEMA_VERSION, recipe_columns, run_id, to_table
from tests.each import each

DIGESTS = {
    1: "2d4e",
    2: "dfcd",
    3: "591b",
    4: "3264",
    5: "d7ab",
    6: "f894",
    7: "4d96",
    8: "e5cc",
    9: "9868",
    10: "5db8",
    11: "d231",
    12: "d9f1",
    13: "0fc4",
    14: "a5f3",
    15: "a675",
    16: "6d5c",
    17: "6d5c",
}
"""Schema version -> digest of its columns. A change of columns is a new version, never a new digest."""

OTHER = {pa.string(): "other", pa.int64(): 77, pa.float64(): 0.77}


def test_the_columns_of_a_version_never_change():
    text = ",".join(f"{field.name}:{field.type}" for field in ROW)
    digest = hashlib.sha256(text.encode()).hexdigest()[:4]
    assert DIGESTS.get(SCHEMA_VERSION) == digest, "columns changed: raise SCHEMA_VERSION, add its digest"


@each("name", recipe_files())
def test_every_axis_of_every_named_recipe_is_a_typed_column(name, row):
    recipe = Recipe.named(name)
    table = to_table([row(name)])
    for axis, value in recipe.columns().items():
        assert axis in RECIPE
        assert table[axis].to_pylist() == [value]


@each("name", recipe_files())
def test_the_recipe_column_reads_back_to_the_same_recipe(name):
    columns = recipe_columns(Recipe.named(name))
    recipe = recipe_from_dict(msgspec.json.decode(columns["recipe"]))
    assert recipe.config_id == columns["config_id"]
    assert columns["recipe_name"] == name
    assert columns["is_baseline"] == (name == "bf16")
    assert columns["baseline_id"] == recipe.baseline().config_id == baseline_id(columns["recipe"])


def test_a_row_says_what_its_recipe_costs_and_on_what():
    columns = recipe_columns(Recipe.named("nvfp4"))
    assert columns["overhead"] == overhead(Recipe.named("nvfp4"))
    assert columns["overhead_of"] == OVERHEAD_OF
    assert (columns["bits_per_element"], columns["activation_bits"]) == (4.5, 4.5)
    assert recipe_columns(Recipe.named("bf16"))["overhead"] == 1


def test_a_recipe_that_is_not_shipped_has_no_name():
    recipe = recipe_from_dict(
        {
            "fprop": {"x": "none", "w": "none"},
            "dgrad": {"g": "nvfp4", "w": "nvfp4"},
            "wgrad": {"g": "none", "x": "none"},
        }
    )
    assert recipe_columns(recipe)["recipe_name"] is None


def test_run_id_depends_on_every_key_column_and_on_nothing_else(row):
    plain = row()
    ids = {run_id(plain)} | {run_id({**plain, name: OTHER[column.type]}) for name, column in KEY.items()}
    assert len(ids) == 1 + len(KEY)
    assert run_id({**plain, "val_loss": 9.0, "host": "elsewhere", "created_at": datetime.now(UTC)}) == run_id(plain)


def test_run_id_does_not_depend_on_how_a_number_is_written(row):
    assert run_id({**row(), "lr": 1, "seed": 3}) == run_id({**row(), "lr": 1.0, "seed": 3.0})


def test_run_id_is_the_same_for_ever():
    assert (
        run_id(
            {name: {pa.string(): "a", pa.int64(): 1, pa.float64(): 0.5}[column.type] for name, column in KEY.items()}
        )
        == "29cb0586b03b16b5"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": None}, "seed is missing"),
        ({"speed": 3}, "unknown column 'speed'"),
        ({"steps": "many"}, "steps must be int32"),
        ({"threads": 2**40}, "threads must be int32"),
        ({"status": "finished"}, "status is 'finished'; accepted: done, diverged, pruned, failed"),
    ],
)
def test_a_wrong_row_is_refused_in_one_line_that_names_the_column(row, change, says):
    with pytest.raises(StoreError) as caught:
        to_table([row(), {**row(), **change}])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
