"""What counts as the same is what 2 % more tokens are worth to BF16, from its own training; what is assumed says so."""

import numpy as np
import pandas as pd
import pytest

from fp4dse.results import against, compare, open_store
from fp4dse.results.bench.scaling_studies import LAW, scaling_study
from fp4dse.results.report import write_report
from fp4dse.results.stats.recipes.margins import BY_CURVE, BY_LAW, MARGIN, Margin, margin_of
from fp4dse.results.stats.recipes.recommendation import verdicts
from fp4dse.results.stats.recipes.tokens_worth import margins, with_margins, worth_by_curve
from fp4dse.results.text.labels import short_labels
from fp4dse.results.text.verdict_text import verdict_text

STEPS = [1, 2, 4, 8, 16, 32, 50, 64, 80, 100, 128, 160, 200]


def curve(slope: float, end: float = 1.0, noise: float = 0.0, seed: int = 0) -> dict[str, list]:
    rng = np.random.default_rng(seed)
    log = slope * np.log(np.array(STEPS) / STEPS[-1]) + noise * rng.normal(size=len(STEPS))
    return {"curve_step": STEPS, "curve_loss": list(end * np.exp(log))}


def worth(slope: float, end: float, held_out: float, **more) -> float | str:
    one = curve(slope, end, **more)
    return worth_by_curve([np.array(one["curve_step"])], [np.array(one["curve_loss"])], held_out)


def test_the_slope_of_a_power_law_is_found_and_its_beginning_does_not_count():
    assert worth(-0.3, 1.0, 1.0) == pytest.approx(0.3 * np.log(1.02))
    bent = curve(-0.3)
    bent["curve_loss"][:4] = [9.0, 8.0, 7.0, 6.0]
    found = worth_by_curve([np.array(STEPS)], [np.array(bent["curve_loss"])], 1.0)
    assert found == pytest.approx(0.3 * np.log(1.02))


def test_a_training_loss_below_the_held_out_one_counts_by_what_it_falls_in_units_of_that():
    assert worth(-0.3, end=0.5, held_out=1.0) == pytest.approx(0.15 * np.log(1.02))
    assert worth(-0.3, end=2.0, held_out=1.0) == pytest.approx(0.3 * np.log(1.02))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (worth(-0.01, 1.0, 1.0, noise=0.1), "does not fall clearly"),
        (worth(-0.3, -1.0, 1.0), "not positive"),
        (worth(-0.3, 1.0, float("nan")), "not positive"),
        (worth_by_curve([np.array([1, 100, 200])], [np.ones(3)], 1.0), "too few points"),
    ],
)
def test_a_curve_that_does_not_tell_says_why(found, words):
    assert words in found


@pytest.mark.parametrize("world", ["law, entropy known", "law"])
def test_a_law_over_sizes_gives_each_size_its_own_margin(world):
    runs, _ = scaling_study(np.random.default_rng(0), world, noise=1e-7, common=1e-7)
    runs = runs.assign(curve_step=[STEPS] * len(runs), curve_loss=[curve(-0.9)["curve_loss"]] * len(runs))
    found = with_margins(runs, runs)
    lines = margins(found)
    assert set(lines["margin_of"]) == {BY_LAW}
    bf16 = found[found["is_baseline"]].drop_duplicates("preset").set_index("preset")
    n, d = bf16["parameters"] / 1e7, bf16["tokens"] / 2e8

    def loss(d):
        a, b = LAW["parameters_exponent"], LAW["tokens_exponent"]
        return LAW["floor"] + LAW["parameters_term"] * n**-a + LAW["tokens_term"] * d**-b

    expected = np.log(loss(d) / loss(1.02 * d))
    assert bf16["margin"].to_numpy(float) == pytest.approx(expected.to_numpy(float), rel=1e-3)
    few = runs[runs["preset"].isin(["1M", "3M"])]
    assert set(with_margins(few, few)["margin_of"]) == {BY_CURVE}


def sized(world: str) -> pd.DataFrame:
    """Rows of BF16 at six presets that follow a law, with curves that are far steeper than it."""
    runs = scaling_study(np.random.default_rng(0), world, noise=1e-7, common=1e-7)[0].query("is_baseline")
    return runs.assign(curve_step=[STEPS] * len(runs), curve_loss=[curve(-0.9)["curve_loss"]] * len(runs))


@pytest.mark.parametrize("world", ["law, entropy known", "law"])
def test_a_revision_with_too_few_sizes_takes_the_law_of_another_and_says_which(world):
    """One size at engine revision 1, all at 2 and, with tokens worth more, at 3, of which the newest counts."""
    now = sized(world).assign(rev_engine=2)
    early = now[now["preset"].eq("0.4M")].assign(rev_engine=1)
    steep = now.assign(rev_engine=3, val_loss=now["val_loss"] + 1000 / np.sqrt(now["tokens"]))
    steep["val_metric"] = steep["val_loss"] - LAW["floor"]

    def found(*parts):
        lines = margins(with_margins(rows := pd.concat(parts, ignore_index=True), rows))
        return lines.set_index(["preset", "rev_engine"])

    both = found(early, now)
    assert both.loc[("0.4M", 1), "margin"] == pytest.approx(both.loc[("0.4M", 2), "margin"], rel=1e-9)
    assert both.loc[("0.4M", 1), "margin_of"] == f"{BY_LAW}, fitted at engine revision 2"
    assert both.loc[("0.4M", 2), "margin_of"] == BY_LAW
    three = found(early, now, steep)
    assert three.loc[("0.4M", 1), "margin"] == pytest.approx(three.loc[("0.4M", 3), "margin"], rel=1e-9)
    assert three.loc[("0.4M", 1), "margin"] > 1.05 * three.loc[("0.4M", 2), "margin"]
    larger = found(early, now, steep[steep["preset"].ne("0.4M")])
    assert larger.loc[("0.4M", 1), "margin_of"] == f"{BY_LAW}, fitted at engine revision 2"
    older = early.assign(rev_quantizers=0)
    said = found(older, now).loc[("0.4M", 1), "margin_of"]
    assert said == f"{BY_LAW}, fitted at engine revision 2 and quantizer revision 1"
    assert "worth to BF16, by the law of its loss over sizes, fitted at engine" in Margin(0.01, said).sentence()


@pytest.mark.parametrize(
    "other",
    [{"rev_task": 2}, {"dataset_digest": "other"}, {"task": "other"}, {"tokens": 1e6}, {"parameters": 1e9}],
    ids=lambda other: next(iter(other)),
)
def test_a_law_is_of_its_task_and_data_and_says_nothing_beyond_its_sizes(other):
    now = sized("law")
    early = now[now["preset"].eq("0.4M")].assign(rev_engine=0, **other)
    rows = pd.concat([early, now], ignore_index=True)
    lines = margins(with_margins(rows, rows))
    assert set(lines.loc[lines["rev_engine"].eq(0), "margin_of"]) == {BY_CURVE}
    assert set(lines.loc[lines["rev_engine"].eq(1), "margin_of"]) == {BY_LAW}


def test_a_law_above_a_known_entropy_is_not_used_where_that_is_unknown():
    now = sized("law, entropy known")
    early = now[now["preset"].eq("0.4M")].assign(rev_engine=0, metric_name="other")
    rows = pd.concat([early, now], ignore_index=True)
    assert margins(with_margins(rows, rows)).query("rev_engine == 0")["margin_of"].tolist() == [BY_CURVE]


def stored(store, row, slope: float | None) -> None:
    own = curve(slope, 0.5) if slope is not None else {"curve_step": [], "curve_loss": []}
    losses = {"bf16": 0.5, "nvfp4": 0.5004, "mxfp4": 0.504}
    seeds = {
        name: loss * (1 + 1e-4 * np.arange(4) + 1e-5 * np.sin(np.arange(4) * 1e3 * loss))
        for name, loss in losses.items()
    }
    store.add([row(name, s, loss, **own) for name, of in seeds.items() for s, loss in enumerate(of)], "job")


def test_the_verdict_goes_by_the_margin_of_the_store_and_says_where_it_is_from(store, row, tmp_path):
    stored(store, row, -0.1)
    runs = store.runs(margins=True)
    [margin] = runs["margin"].unique()
    assert margin == pytest.approx(0.1 * np.log(1.02), rel=1e-3)
    assert list(store.sql("FROM margins")["margin"]) == [pytest.approx(margin)]
    assert against(runs)["margin"].eq(margin).all()
    [verdict] = verdicts(runs)
    assert verdict.margin == (margin, BY_CURVE)
    assert verdict.bf16 == "same"  # 0.08 % off: within 0.2 %
    words = " ".join(verdict_text(verdict, short_labels([], [])).split())
    assert "as good as BF16 within ±0.2 %" in words
    assert "losses within ±0.2 % count as the same: what 2 % more tokens, or samples, are worth to BF16" in words
    ids = runs.set_index("recipe_name")["config_id"].to_dict()
    assert compare(runs, ids["mxfp4"], ids["bf16"])["verdict"][0].startswith("vision (quickstart): bf16 has a lower")
    wider = compare(runs, ids["mxfp4"], ids["bf16"], margin=0.02)
    assert (wider["margin"][0], wider["margin_of"][0]) == (0.02, "given")
    assert "are the same within ±2 %" in wider["verdict"][0]
    write_report(store, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "count as the same: what" in page
    assert BY_CURVE in page


def test_where_nothing_is_known_the_margin_is_assumed_and_says_so_everywhere(store, row, tmp_path):
    stored(store, row, None)
    runs = open_store(store.path).runs(margins=True)
    assert set(runs["margin"]) == {MARGIN}
    assert set(runs["margin_of"]) == {"assumed: BF16's training curve is not stored"}
    [verdict] = verdicts(runs)
    assert "±0.5 % count as the same, which is assumed: BF16's" in " ".join(
        verdict_text(verdict, short_labels([], [])).split()
    )
    assert margin_of(runs.drop(columns=["margin", "margin_of"])).of.startswith("assumed")
    assert set(store.sql("FROM margins")["margin_of"]) == set(runs["margin_of"])
    write_report(store, tmp_path / "report.html")
    assert "which is assumed: BF16's training curve is not stored" in (tmp_path / "report.html").read_text()


def test_a_setting_where_bf16_did_not_finish_has_none_of_another(store, row):
    store.add([row("bf16", 0, 0.5, **curve(-0.1, 0.5)), row("nvfp4", 0, 0.5, task="regression")], "job")
    of = store.runs(margins=True).set_index("task")["margin_of"].to_dict()
    assert of == {"vision": BY_CURVE, "regression": "assumed: BF16 did not finish here"}
    assert isinstance(store.runs(["margin"]), pd.DataFrame)
