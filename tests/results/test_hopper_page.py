"""What the pages say of FP4 storage with FP8 products is what the rows beside them and the cost model have."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from scipy.stats import t, ttest_1samp

from fp4dse.dse import Quantizer, Recipe
from fp4dse.dse.cost import load_chip, load_model
from fp4dse.dse.cost.memory import at_share, kept_bytes, memory
from fp4dse.results import compare, open_store
from fp4dse.tasks import get_task

DOCS = Path(__file__).parents[2] / "docs"
PAGE, COST = (
    " ".join((DOCS / name).read_text("utf-8").split()).replace("−", "-") for name in ("language.md", "cost.md")
)
KEPT = Recipe.named("hopper-moe-fp4")
CONVERTED = replace(KEPT, wgrad=replace(KEPT.wgrad, source="converted"))
FP8 = replace(KEPT, fprop=replace(KEPT.fprop, x=Quantizer.named("fp8-1x128")))
RECIPES = {"BF16": Recipe.named("bf16"), "FP8": FP8, "kept": KEPT, "converted": CONVERTED}


@pytest.fixture(scope="module")
def store():
    return open_store(DOCS / "study" / "hopper-store")


@pytest.fixture(scope="module")
def recipes(store):
    """Lines of the view `recipes`, by preset and by which of RECIPES it is."""
    names = {recipe.canonical().config_id: name for name, recipe in RECIPES.items()}
    lines = store.sql("FROM recipes")
    return lines.assign(which=lines["config_id"].map(names)).set_index(["preset", "which"])


@pytest.fixture(scope="module")
def lanes(store):
    """Of moe8-4B, one lane of each of RECIPES."""
    runs = store.runs()
    names = {recipe.canonical().config_id: name for name, recipe in RECIPES.items()}
    runs = runs[runs["preset"].eq("moe8-4B")]
    return runs.assign(which=runs["config_id"].map(names)).set_index("which")


def percents(line, column):
    """As the page writes a gap: `+0.32 % (+0.27 to +0.37)`."""
    mean, low, high = (100 * line[f"{column}{limit}"] for limit in ("", "_low", "_high"))
    return f"{mean:+.2f} % ({low:+.2f} to {high:+.2f})"


def test_decoders_lose_what_the_page_says(recipes):
    rows = re.findall(r"\| (?:MXFP4|FP8)[^|]*\|[^|]*\| ([^|]*) \| ([^|]*) \|", PAGE)
    wanted = []
    for preset in ("1M", "moe8-1M"):
        for which in ("kept", "converted", "FP8"):
            line = recipes.loc[(preset, which)]
            assert line["pairs"] == 8
            assert max(abs(line["gap_low"]), abs(line["gap_high"])) < 0.0061
            wanted.append((percents(line, "gap"), percents(line, "gap_bf16")))
    assert rows == wanted


def by_seeds(store, preset, one, other):
    """Differences of gaps over seeds, in percent: mean, ends of the t interval, and p, without the package."""
    runs = store.runs()
    runs = runs[runs["preset"].eq(preset)]
    gaps = runs.pivot_table(index="seed", columns="config_id", values="gap", observed=True)
    of_seeds = gaps[RECIPES[one].canonical().config_id] - gaps[RECIPES[other].canonical().config_id]
    half = t.ppf(0.975, len(of_seeds) - 1) * of_seeds.std(ddof=1) / len(of_seeds) ** 0.5
    return *(100 * (of_seeds.mean() + side) for side in (0, -half, half)), ttest_1samp(of_seeds, 0).pvalue


def test_the_order_of_recipes_is_that_of_the_dense_decoder(store, recipes):
    text = {}
    for preset in ("1M", "moe8-1M"):
        gap = recipes.loc[preset]["gap"]
        assert gap["FP8"] < min(gap["kept"], gap["converted"])
        mean, low, high, _ = by_seeds(store, preset, "kept", "FP8")
        text[preset] = f"{mean:.2f}", f"{low:.2f} to {high:.2f}"
    (here, ends), (dense, dense_ends) = text["moe8-1M"], text["1M"]
    assert f"FP8 alone is ahead of MXFP4 by {here} % ({ends}; dense {dense}, {dense_ends})" in PAGE
    assert f"its difference of 0.32 is dense {dense} and with experts {here}." in PAGE
    share = recipes.loc["moe8-1M"]["gap"] / recipes.loc["1M"]["gap"]
    assert "MXFP4 costs two thirds of that" in PAGE
    assert share[["kept", "converted"]].between(0.6, 0.75).all()
    assert (recipes.loc["moe8-1M"]["gap"][["kept", "converted"]] / 0.0061).between(0.3, 0.4).all()


def test_converted_operands_lose_what_kept_ones_do(store):
    (here, p), (dense, _) = (
        ("{:+.2f} % ({:+.2f} to {:+.2f}".format(*found), f"p = {found[3]:.2f}".replace("0.", "."))
        for found in ([*by_seeds(store, preset, "converted", "kept")] for preset in ("moe8-1M", "1M"))
    )
    assert f"are the same: {here}, {p}; dense {dense.replace(' (', ', ')})" in PAGE
    runs = store.runs(margins=True)
    for preset in ("1M", "moe8-1M"):
        mine = runs[runs["preset"].eq(preset)]
        [line] = compare(mine, CONVERTED.canonical().config_id, KEPT.canonical().config_id).to_dict("records")
        assert "are the same within ±0.07 %" in line["verdict"] or "are the same within ±0.069 %" in line["verdict"]
    mine = runs[runs["preset"].eq("moe8-1M")]
    [line] = compare(mine, FP8.canonical().config_id, RECIPES["BF16"].config_id).to_dict("records")
    assert line["low"] < 0 < line["high"]


def test_a_step_of_3_6_billion_parameters_takes_what_the_page_says(lanes):
    shape, chip = load_model("moe8-4b"), load_chip("h200")
    assert set(lanes["steps"]) == {20}
    for name, recipe in RECIPES.items():
        lane = lanes.loc[name]
        sizes = kept_bytes(recipe, shape), lane["kept_bytes"], memory(recipe, shape), lane["peak_memory_bytes"]
        speeds = round(at_share(recipe, shape, chip, 0).tokens_per_s, -2), round(lane["tokens"] / lane["train_s"], -1)
        cells = [f"{of / 1e9:.1f} GB" for of in sizes] + [f"{of:,.0f}" for of in speeds] + [f"{lane['setup_s']:.0f} s"]
        assert f"| {' | '.join(cells)} |" in COST, name
        assert lane["gemm_backend"] == "bf16-exact"
        assert lane["dtype"] == "float32"
    peak, took = lanes["peak_memory_bytes"] / 1e9, lanes["train_s"]
    saved, more = peak["kept"] - peak["converted"], took["converted"] / took["kept"] - 1
    assert (
        f"saves {saved:.1f} GB of the peak beside the kept copy and takes {more:.1%} more time".replace("%", " %")
        in COST
    )
    assert f"has BF16's peak but for {peak['converted'] - peak['BF16']:.1f} GB" in COST
    assert (
        f"80.3 GB for `hopper-moe-fp4` and 77.6 for BF16, where {peak['kept']:.1f} and {peak['BF16']:.1f} [were" in PAGE
    )
    setup = lanes.sort_values("created_at")["setup_s"].round()
    others = f"{setup.iloc[1:].min():.0f} to {setup.iloc[1:].max():.0f} s for the next three"
    assert f"took {setup.iloc[0]:.0f} s for the first lane and {others}" in PAGE


def test_what_is_kept_beyond_the_model_follows_from_shapes(lanes):
    """Inputs of layers, all else in FP32, and copies of experts' weights, empty places included."""
    [shape] = get_task("language", "moe8-4B").model.args
    width, of = shape.width, shape.mixture
    room = of.capacity * of.chosen
    assert (width, shape.ffn, of.shared, shape.depth, room) == (2048, 4096, 1024, 16, 3.0)
    inputs = {places: 3 * width + of.shared + places * (width + shape.ffn) for places in (of.chosen, room)}
    others = {
        places: 2 * width + 3 * width + 2 * of.shared + places * 2 * shape.ffn + of.chosen * width
        for places in (of.chosen, room)
    }
    assert [f"{n:,.0f}" for n in (*inputs.values(), *others.values())] == ["19,456", "25,600", "32,768", "40,960"]
    assert "25,600 numbers of layers' inputs a token and block for 19,456, and 40,960 others for 32,768" in COST
    places, weights = 16 * 8192, 16 * 8 * 3 * width * shape.ffn
    kept = lanes["kept_bytes"]
    code = 4.25 / 8
    assert kept["kept"] - kept["converted"] == pytest.approx(inputs[room] * (4 - code) * places, abs=2000)
    assert f"are {inputs[room] * (4 - code) * places / 1e9:.2f} GB, which is what the two measured rows" in COST
    found = {
        name: places * (size * inputs[room] + 4 * others[room]) + copy * weights
        for name, size, copy in (("BF16", 2, 2), ("kept", 4, 4), ("converted", code, 4))
    }
    said = "Together {:.1f}, {:.1f} and {:.1f} GB of the {:.1f}, {:.1f} and {:.1f} that were measured"
    assert said.format(*(n / 1e9 for n in (*found.values(), *(kept[name] for name in found)))) in COST
    assert kept["FP8"] == kept["kept"]
    assert f"experts' results): {2 * others[of.chosen] * places / 1e9:.1f} GB" in COST
    empty = [4 * (others[room] - others[2]) + size * (inputs[room] - inputs[2]) for size in (2, code)]
    assert (
        "That is {:.1f} GB with inputs in BF16 and {:.1f} with codes".format(*(n * places / 1e9 for n in empty)) in COST
    )
    rest = (lanes["peak_memory_bytes"] - kept) / 1e9
    states = load_model("moe8-4b").parameters * 16 / 1e9
    assert f"is {rest.min():.1f} to {rest.max():.1f} GB, modelled {states:.1f}" in COST
