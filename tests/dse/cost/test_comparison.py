"""The model beside what was measured, and the page that says so."""

import tomllib
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from fp4dse.dse.cost import chip_names, load_chip, model_names, scenarios, validation
from fp4dse.dse.cost.cost_page import TABLES, fill
from fp4dse.dse.cost.validation import fits, kernels, median_error, published, ratios, tokens_per_second

PAGE = (Path(__file__).parents[3] / "docs" / "cost.md").read_text(encoding="utf-8")


def test_the_tables_of_the_page_are_those_that_the_code_makes():
    assert fill(PAGE) == PAGE, "run: python -m fp4dse.dse.cost.cost_page docs/cost.md"


@pytest.mark.parametrize("name", TABLES)
def test_every_table_stands_on_the_page(name):
    assert f"<!-- {name} -->\n| " in PAGE


def test_what_was_fitted_and_what_was_held_back_share_no_measurement():
    fitted, held = ({(row.source, row.chip, row.measured) for row in rows} for rows in (fits(), ratios()))
    assert len(held) == len(ratios()) >= 12
    assert not fitted & held
    assert all(row.source for row in (*fits(), *ratios()))


def test_a_ratio_whose_bf16_run_was_used_to_fit_says_so_and_the_others_are_enough():
    data = tomllib.loads(files("fp4dse.dse.cost").joinpath("published.toml").read_text(encoding="utf-8"))
    said = {(row["model"], row["chip"], f"{row['published']} {row['source']}") for row in data["throughput"]}
    used = {(model, chip, word) for model, chip, text in said for word in text.replace(",", "").split()}
    for row in data["ratio"]:
        over, shape = row["over"], row.get("model")
        is_used = over["recipe"] == "bf16" and (shape, row["chip"], str(over["published"])) in used
        assert over.get("fitted", False) == is_used, row["what"]
    rest = [row for row in ratios() if not row.over_is_fitted]
    assert len(rest) >= 12
    assert median_error(rest) < 0.1


def test_the_median_error_of_the_ratios_that_were_held_back_is_at_most_ten_per_cent():
    """A change of the model that makes it worse must be seen, and the page's words with it."""
    assert median_error(ratios()) < 0.1
    models = [row for row in ratios() if row.shape in model_names()]
    worst = max(models, key=lambda row: abs(row.error))
    assert worst.what.startswith("torchao FP8 by rows")
    assert abs(worst.error) < 0.3


def test_of_whole_models_against_bf16_it_is_as_little_and_most_lie_in_the_band():
    models = [row for row in ratios() if row.shape in model_names() and "against BF16" in row.what]
    assert len(models) >= 20
    assert median_error(models) < 0.08
    assert sum(row.within for row in models) > 0.75 * len(models)


def test_blocks_in_bf16_cost_what_was_published_with_the_kernels_that_were_measured(monkeypatch):
    """torchao's kernels take 2.8 times what is counted. The page says what they cost with them and without."""
    what = "torchao NVFP4, 5 blocks in BF16, against all in NVFP4"
    [row] = (row for row in published()["ratio"] if row["what"] == what)
    wanted = row["published"] / row["over"]["published"] - 1
    slow = load_chip(row["chip"])
    slow = msgspec.structs.replace(slow, passes=scenarios()["high"].passes.value / scenarios()["mid"].passes.value)
    found = []
    for chip in (load_chip(row["chip"]), slow):
        monkeypatch.setattr(validation, "load_chip", lambda name, chip=chip: chip)
        found.append(tokens_per_second(row, "mid") / tokens_per_second({**row, **row["over"]}, "mid") - 1)
    assert found[0] < found[1] < wanted < 0
    assert found[1] == pytest.approx(wanted, abs=0.01)
    words = [f"−{-100 * change:.1f} %" for change in (wanted, *found)]
    assert [word in PAGE for word in words] == [True] * 3, words


@pytest.mark.parametrize(
    ("own", "faster"),
    [
        ({"recomputed": 0.5}, False),
        ({"products_again": {"bf16": 0.5, "scaled": 0.0}}, False),
        ({"products_again": {"bf16": 0.0, "scaled": 0.5}}, None),
        ({"context": 2048}, True),
        ({"context": 16384}, False),
        ({"shards": 8}, True),
        ({"tokens": 16384}, True),
        ({"micro_batches": 1}, False),
    ],
)
def test_a_run_is_priced_as_it_was_made(own, faster):
    row = {"model": "llama-8b", "chip": "gb200", "recipe": "bf16"}
    plain, changed = tokens_per_second(row, "mid"), tokens_per_second(row | own, "mid")
    assert (changed > plain) is bool(faster)
    assert (changed == plain) is (faster is None)


def test_stochastic_rounding_in_software_is_where_the_model_is_worst_and_the_page_says_so():
    """A polyfill of a small layer that stays in the cache: no count of instructions explains what it takes."""
    plain, polyfill = (row for row in ratios() if row.chip == "rtx-5080")
    assert (plain.measured, polyfill.measured) == (1.77, 1.16)
    assert max(ratios(), key=lambda row: abs(row.error)) == polyfill
    assert 0.2 < plain.error < polyfill.error
    assert "1.77" in PAGE
    assert "1.16" in PAGE


def test_the_error_of_every_chip_that_something_was_published_for_stands_on_the_page():
    for chip in {row.chip for row in ratios()}:
        assert f"| on `{chip}` |" in PAGE
    assert all(row.chip in chip_names() for row in (*ratios(), *fits()))


def test_a_band_goes_from_the_worst_software_to_the_best_and_has_the_figure_in_it():
    for row in ratios():
        assert row.band[0] <= row.modelled <= row.band[1]


def test_the_model_gives_what_it_was_fitted_to():
    errors = sorted(abs(row.error) for row in fits())
    assert errors[len(errors) // 2] < 0.02
    assert errors[-1] < 0.25


def test_kernels_take_what_the_page_owns_up_to():
    assert max(abs(row.error) for row in kernels()) < 0.4
    assert sorted(abs(row.error) for row in kernels())[len(kernels()) // 2] < 0.15
