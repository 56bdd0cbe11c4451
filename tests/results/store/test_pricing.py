"""Overheads of another model and chip are worked out from the recipes wherever rows are read, and agree with `cost`."""

import math

import pytest

from fp4dse.dse import ConfigError, Recipe, recipe_files
from fp4dse.dse.cost import OVERHEAD_OF, CostTarget, load_chip, load_model, overhead, report, scenarios
from fp4dse.results import Store, open_store, summarize
from fp4dse.results.report import read_findings, write_report
from fp4dse.results.stats.paired import OVERHEAD
from fp4dse.results.store.pricing import price
from tests.each import each

OTHER = CostTarget("llama-8b", "gb300")
NAMES = ("bf16", "nvfp4", "mxfp4")


@pytest.fixture
def trained(store, row) -> Store:
    store.add([row(name, seed, 0.5 + 0.01 * seed + 0.1 * i) for i, name in enumerate(NAMES) for seed in (0, 1)], "rows")
    return store


def other(store) -> Store:
    return open_store(store.path, cost=OTHER)


def expected(cost=OTHER) -> dict[str, float]:
    return {name: overhead(Recipe.named(name), cost.model, cost.chip) for name in NAMES}


@pytest.mark.parametrize("compact", [False, True])
def test_every_way_of_reading_gives_the_overhead_that_the_cost_model_gives(trained, compact):
    if compact:
        trained.compact(1)
    store = other(trained)
    runs = store.runs()
    assert dict(zip(runs["recipe_name"], runs["overhead"], strict=True)) == expected()
    assert set(runs["overhead_of"]) == {OTHER.of}
    for query, name in (
        ("SELECT DISTINCT recipe_name, overhead, overhead_of FROM runs", "recipe_name"),
        ("SELECT DISTINCT recipe_name, overhead FROM runs WHERE overhead IS NOT NULL", "recipe_name"),
        ("SELECT name, overhead FROM recipes", "name"),
    ):
        answer = store.sql(query)
        assert dict(zip(answer[name], answer["overhead"], strict=True)) == expected()
    assert store.runs(["overhead"])["overhead"].nunique() == len(NAMES)
    assert list(store.runs(["overhead", "recipe"]).columns) == ["overhead", "recipe"]
    front = store.pareto()
    assert set(front["overhead"]) <= set(expected().values())


def test_the_cost_command_and_the_report_say_the_same(trained, tmp_path):
    found = read_findings(other(trained))
    for name in NAMES:
        facts = report.summary(Recipe.named(name), load_model(OTHER.model), load_chip(OTHER.chip))
        assert set(found.runs[OVERHEAD][found.runs["config_id"].eq(facts["config_id"])]) == {facts["overhead"]}
    write_report(other(trained), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert OTHER.of.partition(", revision")[0] in page
    assert OVERHEAD_OF not in page


def test_what_is_stored_stays_and_is_of_the_default(trained):
    other(trained).runs()
    runs = trained.runs()
    assert set(runs["overhead_of"]) == {OVERHEAD_OF} == {CostTarget().of}
    assert dict(zip(runs["recipe_name"], runs["overhead"], strict=True)) == expected(CostTarget())


@pytest.mark.parametrize("cost", [OTHER, CostTarget()], ids=["another target", "the default"])
def test_rows_of_an_older_cost_model_are_priced_like_all_others(trained, row, cost):
    trained.add([row("nvfp4", 5, 0.6, overhead=9.0, overhead_of="llama-1b on b200, revision 1")], "old")
    store = open_store(trained.path, cost=cost)
    nvfp4 = store.runs().query("recipe_name == 'nvfp4'")
    assert set(nvfp4["overhead"]) == set(
        store.runs(["overhead", "recipe_name"]).query("recipe_name == 'nvfp4'")["overhead"]
    )
    assert set(nvfp4["overhead"]) == {expected(cost)["nvfp4"]}
    assert not summarize(store.runs())[OVERHEAD].isna().any()
    for query in ("SELECT overhead, overhead_of FROM runs", "SELECT overhead FROM recipes"):
        assert 9.0 not in store.sql(query)["overhead"].tolist()
    assert set(store.sql("SELECT overhead_of FROM runs")["overhead_of"]) == {cost.of}


@pytest.mark.parametrize("cost", [OTHER, CostTarget()], ids=["another target", "the default"])
def test_the_band_is_the_overhead_under_the_scenarios_wherever_rows_are_read(trained, cost):
    store = open_store(trained.path, cost=cost)
    bands = {name: cost.band(Recipe.named(name)) for name in NAMES}
    answers = [store.runs(), store.sql("SELECT recipe_name, overhead_low, overhead_high FROM runs")]
    answers += [store.sql("SELECT name AS recipe_name, * FROM recipes"), store.sql("FROM runs")]
    for answer in answers:
        ends = zip(answer["overhead_low"], answer["overhead_high"], strict=True)
        assert dict(zip(answer["recipe_name"], ends, strict=True)) == bands
    assert list(store.runs(["overhead_high"]).columns) == ["overhead_high"]


@each("name", recipe_files())
def test_a_row_is_priced_as_its_recipe_is(name, row):
    recipe = recipe_files()[name].recipe
    for scenario in scenarios():
        assert price(row(name)["recipe"], OTHER, scenario) == OTHER.overhead(recipe, scenario)


def test_a_recipe_that_cannot_be_read_has_no_overhead():
    assert math.isnan(price('{"fprop": {"x": {"element": "e9m9"}}}', OTHER))


def test_an_unknown_model_or_chip_is_named_with_its_place():
    with pytest.raises(ConfigError, match="--model: found 'llama'; accepted: deepseek-671b, llama-1b"):
        CostTarget("llama").check("--")
    with pytest.raises(ConfigError, match=r"mine.toml: cost.chip: found 'b20'.*b200"):
        CostTarget(chip="b20").check("mine.toml: cost.")
