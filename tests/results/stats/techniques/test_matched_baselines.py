"""A recipe that changes the training is compared with BF16 trained like it; both models are evaluated in two ways."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from msgspec.structs import replace

from fp4dse.dse import Recipe, Space
from fp4dse.dse.optimizer import SGD, StableSPAM
from fp4dse.dse.training import Training
from fp4dse.results import against, effects, marginal, open_store, summarize
from fp4dse.results.stats.paired import add_gap
from fp4dse.results.stats.recipes.recommendation import verdicts
from fp4dse.results.stats.recipes.summary import SUMMARIZED
from fp4dse.results.store.inbox import encode_ipc
from fp4dse.results.text.pareto_table import MATCHED
from fp4dse.results.views import VIEWS

SPAM = Training(optimizer=StableSPAM())
BF16, NVFP4, MXFP4 = (Recipe.named(name) for name in ("bf16", "nvfp4", "mxfp4"))
SPACE = Space.from_dict(
    {
        "base": "nvfp4",
        "axes": {
            "*": ["nvfp4", "mxfp4"],
            "wgrad.rotation": ["none", "rht16"],
            "training.optimizer": ["task", "stable-spam"],
        },
    }
)
HELP = -0.4
"""What the planted optimizer does to the log loss of BF16 and of FP4 alike."""


def with_spam(recipe):
    return replace(recipe, training=SPAM)


def planted(row, matched=True, beyond=0.0):
    """Rows of SPACE and both baselines. The optimizer lowers everybody's loss by HELP, FP4's `beyond` that."""
    rng, seeds = np.random.default_rng(3), range(4)
    common, lanes = 0.3 * rng.normal(size=4), []
    for recipe in [BF16, *([with_spam(BF16)] if matched else []), *SPACE.recipes()]:
        spam = isinstance(recipe.training.optimizer, StableSPAM)
        cost = 0.0 if recipe.is_plain else 0.2 - 0.05 * bool(recipe.wgrad.rotation) + beyond * spam
        for seed in seeds:
            loss = np.exp(common[seed] + cost + HELP * spam + 0.001 * rng.normal())
            lanes.append(row(recipe, seed, loss, val_loss_bf16=loss * (1 if recipe.is_plain else 0.9)))
    return lanes


def optimizer_effect(found):
    """The line of the optimizer's level."""
    return found[found["factor"].eq("optimizer") & found["level"].eq("stable-spam")].iloc[0]


@pytest.mark.parametrize("beyond", [0.0, -0.1])
def test_what_an_optimizer_does_to_gaps_is_a_difference_of_differences(row, beyond):
    runs = add_gap(pd.DataFrame(planted(row, beyond=beyond)))
    found = optimizer_effect(effects(runs))
    assert found["effect"] == pytest.approx(beyond, abs=0.005)
    assert (found["low"] < beyond < found["high"]) or abs(found["effect"] - beyond) < 0.002
    pairs = marginal(runs)
    assert optimizer_effect(pairs)["difference"] == pytest.approx(beyond, abs=0.005)
    table = summarize(runs).set_index("config_id")
    own, other = table.loc[NVFP4.config_id], table.loc[with_spam(NVFP4).config_id]
    assert other["gap"] - own["gap"] == pytest.approx(HELP + beyond, abs=0.005)
    assert other["gap_matched"] - own["gap_matched"] == pytest.approx(beyond, abs=0.005)
    assert own["gap_matched"] == own["gap"]
    assert (own["baseline_id"], other["baseline_id"]) == (BF16.config_id, with_spam(BF16).config_id)
    differences = against(runs, NVFP4.config_id).set_index("config_id")["difference"]
    assert differences[with_spam(NVFP4).config_id] == pytest.approx(other["gap"] - own["gap"])


def test_bf16_with_another_optimizer_is_compared_with_plain_bf16(row):
    table = summarize(pd.DataFrame(planted(row))).set_index("config_id")
    assert table["gap"][with_spam(BF16).config_id] == pytest.approx(HELP, abs=0.005)
    assert not table["on_front"][with_spam(BF16).config_id]
    assert table["gap"][BF16.config_id] == 0


def test_without_the_matched_baseline_an_optimizer_has_no_effect_and_the_lowest_loss_is_still_the_best(row):
    runs = pd.DataFrame(planted(row, matched=False))
    table = summarize(runs).set_index("config_id")
    spam = table.loc[with_spam(NVFP4).config_id]
    assert np.isnan(spam["gap_matched"])
    assert spam["gap"] < table["gap"][NVFP4.config_id]
    assert np.isnan(optimizer_effect(effects(runs))["effect"])


@pytest.mark.parametrize("lost", [BF16, with_spam(BF16)])
def test_a_seed_on_which_a_baseline_diverged_tells_nothing_of_the_optimizer(row, lost):
    lanes = planted(row)
    bad = [one for one in lanes if one["config_id"] == lost.config_id and one["seed"] in (2, 3)]
    for one in bad:
        one |= {"status": "diverged", "val_loss": None, "val_loss_bf16": None}
    for found in (effects(add_gap(pd.DataFrame(lanes))), marginal(add_gap(pd.DataFrame(lanes)))):
        line = optimizer_effect(found)
        assert line["effect" if "effect" in found else "difference"] == pytest.approx(0.0, abs=0.005)


def test_who_ruins_bf16_as_well_is_not_on_the_front(row):
    """A gap to a bad baseline is no quality: the front is of losses."""
    sgd = replace(NVFP4, training=Training(optimizer=SGD()))
    bad = [row(replace(BF16, training=sgd.training), seed, 10 + 0.01 * seed) for seed in range(3)]
    runs = pd.DataFrame([
        *bad,
        *(row(BF16, seed, 1 + 0.01 * seed) for seed in range(3)),
        *(row(NVFP4, seed, 1.5 + 0.01 * seed) for seed in range(3)),
        *(row(sgd, seed, 10.1 + 0.01 * seed) for seed in range(3)),
    ])  # fmt: skip
    table = summarize(runs).set_index("config_id")
    assert table["gap_matched"][sgd.config_id] < table["gap_matched"][NVFP4.config_id]
    assert table["on_front"].to_dict()[NVFP4.config_id]
    assert not table["on_front"].to_dict()[sgd.config_id]
    [found] = verdicts(runs)
    assert found.config_id == NVFP4.config_id


def test_the_second_gap_is_that_of_both_models_in_bf16(row):
    table = summarize(pd.DataFrame(planted(row))).set_index("config_id")
    lines = table[table["points"].gt(0)]
    assert lines["gap_bf16"].to_numpy() == pytest.approx(lines["gap"].to_numpy() + np.log(0.9))
    width = lines["gap_high"] - lines["gap_low"]
    assert (lines["gap_bf16_high"] - lines["gap_bf16_low"]).to_numpy() == pytest.approx(width.to_numpy())


def test_the_gap_of_the_reducible_loss_is_that_above_the_entropy_in_frames_and_in_sql(store, row):
    losses = {BF16: (2.0, 2.1), NVFP4: (2.2, 2.3), MXFP4: (2.4, None)}
    rows = [
        row(
            recipe,
            seed,
            loss,
            metric_name="excess",
            val_metric=loss and loss - 1.5,
            status="done" if loss else "diverged",
        )
        for recipe, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    store.add(rows, "some")
    runs = store.runs()
    found = runs.set_index(["config_id", "seed"])["gap_reducible"]
    wanted = [np.log(0.7 / 0.5), np.log(0.8 / 0.6)]
    assert found[NVFP4.config_id].to_numpy() == pytest.approx(wanted)
    assert found[MXFP4.config_id].tolist() == pytest.approx([np.log(0.9 / 0.5), np.inf])
    assert summarize(runs).set_index("config_id")["gap_reducible"][NVFP4.config_id] == pytest.approx(np.mean(wanted))
    asked = store.sql("SELECT config_id, seed, gap_reducible FROM runs").set_index(["config_id", "seed"])
    assert asked["gap_reducible"].reindex(found.index).to_numpy() == pytest.approx(found.to_numpy())
    other = pd.DataFrame([line | {"metric_name": "accuracy"} for line in rows])
    assert summarize(other)["gap_reducible"].isna().all()


def test_the_verdict_says_when_the_two_evaluations_disagree(row):
    rows = [row(BF16, seed, 1 + 0.001 * seed, val_loss_bf16=1 + 0.001 * seed) for seed in range(4)]
    rows += [row(NVFP4, seed, 1.1 + 0.001 * seed, val_loss_bf16=0.9 + 0.001 * seed) for seed in range(4)]
    [found] = verdicts(pd.DataFrame(rows))
    [said] = [warning for warning in found.warnings if "in BF16" in warning]
    assert "worse" in said
    assert "better" in said
    agreeing = [line | {"val_loss_bf16": line["val_loss"]} for line in rows]
    [found] = verdicts(pd.DataFrame(agreeing))
    assert not any("in BF16" in warning for warning in found.warnings)


def old_store(store, rows, version=5):
    """The store with these rows as an older program wrote them."""
    store.add(rows, "old")
    file = next((store.path / "inbox").iterdir())
    table = pa.ipc.open_file(pa.py_buffer(file.read_bytes())).read_all()
    file.unlink()
    (store.path / "inbox" / "old.arrow").write_bytes(
        encode_ipc(
            table.drop_columns([name for name in ("baseline_id", "val_loss_bf16") if name in table.column_names])
        )
    )
    (store.path / "store.json").write_text(json.dumps({"schema_version": version}))
    return open_store(store.path)


@pytest.mark.parametrize("categories", [False, True])
def test_an_older_store_is_compared_alike(store, row, categories):
    given = planted(row)
    older = old_store(store, given)
    runs = older.runs(SUMMARIZED, categories=categories)
    table = summarize(runs).set_index("config_id").rename(str)
    now = summarize(pd.DataFrame(given)).set_index("config_id")
    table.index = table.index.astype(str)
    pd.testing.assert_series_equal(table["gap"], now["gap"], check_index_type=False)
    assert table["gap_bf16"].isna().all()
    assert table["baseline_id"].astype(str).to_dict() == now["baseline_id"].to_dict()
    wanted = with_spam(NVFP4).config_id
    few = older.runs(SUMMARIZED, recipes=[wanted])
    assert summarize(few).set_index("config_id")["gap"][wanted] == now["gap"][wanted]


def test_an_older_store_answers_queries_alike(store, row):
    given = planted(row)
    older = old_store(store, given)
    now = add_gap(pd.DataFrame(given)).set_index(["config_id", "seed"])
    found = older.sql("SELECT config_id, seed, baseline_id, gap, gap_bf16 FROM runs").set_index(["config_id", "seed"])
    found = found.reindex(now.index)
    assert found["gap"].to_numpy() == pytest.approx(now["gap"].to_numpy())
    assert found["baseline_id"].to_list() == now["baseline_id"].to_list()
    assert found["gap_bf16"].isna().all()
    assert len(older.sql("FROM recipes")) == 10
    older.sql("SELECT " + ", ".join(f"(SELECT count(*) FROM {name})" for name in VIEWS))
    older.add([line | {"seed": line["seed"] + 10} for line in given], "new")
    both = older.sql("SELECT count(gap) g, count(gap_bf16) b FROM runs").iloc[0]
    assert (both["g"], both["b"]) == (2 * len(given), len(given))


def test_tables_say_where_baselines_are_matched(row):
    from fp4dse.results import noise_floor
    from fp4dse.results.text.pareto_table import pareto_table

    runs = pd.DataFrame(planted(row))
    text = pareto_table(summarize(runs), noise_floor(runs), width=1000)
    assert MATCHED in text
    plain = runs[runs["baseline_id"].eq(BF16.config_id) & ~runs["config_id"].eq(with_spam(BF16).config_id)]
    assert MATCHED not in pareto_table(summarize(plain), noise_floor(plain), width=1000)
