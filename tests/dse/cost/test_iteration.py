"""The price of an iteration of reinforcement learning: its rollout and its updates, by hand and at the limits."""

import math
import tomllib
from pathlib import Path

import msgspec
import pytest

import fp4dse.dse.cost as cost
from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.cost import (
    load_chip,
    load_model,
    load_workload,
    overhead,
    report,
    rollout_overhead,
    rollout_share,
    scenarios,
    step_cost,
    workload_names,
)
from fp4dse.dse.cost.chip import Number
from fp4dse.dse.cost.decoding import CONTEXT, SEQUENCES, token_seconds
from fp4dse.dse.cost.iteration import DEFAULT_WORKLOAD, Iteration, Workload, iteration
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.tasks.rl.presets import _PRESETS

BF16, MODEL, CHIP = Recipe.named("bf16"), load_model("llama-8b"), load_chip("gb200")
REASONING = load_workload(DEFAULT_WORKLOAD)
SMALL = Workload("small", "", "", answers=64, prompt=512, tokens=1024, at_once=32, asked=2.0, epochs=3.0)
RECIPES = [
    Recipe.named("nvidia-nvfp4"),
    msgspec.structs.replace(
        BF16, training=msgspec.structs.replace(BF16.training, rollout=ROLLOUT_NAMES["mxfp4-w4a16"])
    ),
]


def test_an_iteration_is_its_rollout_and_its_updates():
    """A rollout of 3 s and updates of 1 s, BF16's 4 s and 2 s: 4 s of 6 s."""
    found = Iteration(3.0, 1.0, 4.0, 2.0)
    assert found.share == pytest.approx(2 / 3)
    assert found.overhead() == pytest.approx(4 / 6)
    assert found.overhead(0.5) == pytest.approx((3 / 4 + 1 / 2) / 2)


def test_a_rollout_reads_the_weights_and_what_was_sampled_for_each_token():
    """By hand: four times 32 answers of 1,024 tokens, with 512 + 512 before each in the mean."""
    fast = Number(1e30, "")
    h200 = load_chip("h200")
    chip = msgspec.structs.replace(
        h200, vector=fast, special=fast, convert=fast, launch=Number(0, ""), matrix={"bf16": fast}
    )
    weights = 2 * sum(linear.count * linear.inputs * linear.outputs for linear in MODEL.linears)
    cache = 32 * 1024 * 32 * 2 * 1024 * 2
    seconds = 4 * 1024 * (weights + cache) / (chip.bandwidth.value * chip.achieved.bandwidth.value)
    assert iteration(BF16, MODEL, chip, SMALL).rollout == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("recipe", RECIPES, ids=["nvidia-nvfp4", "rollout mxfp4-w4a16"])
def test_it_is_what_token_after_token_and_step_after_step_take(recipe):
    for scenario in scenarios():
        found = iteration(recipe, MODEL, CHIP, SMALL, scenario)
        tokens = [token_seconds(recipe, MODEL, CHIP, 32, 512 + t + 0.5, scenario) for t in range(1024)]
        assert found.rollout == pytest.approx(2 * 64 / 32 * sum(tokens))
        micro_batches = 3 * 64 * (512 + 1024) / 8192
        assert found.update == pytest.approx(micro_batches * step_cost(recipe, MODEL, CHIP, scenario).total)


@pytest.mark.parametrize("recipe", RECIPES, ids=["nvidia-nvfp4", "rollout mxfp4-w4a16"])
def test_all_rollout_is_a_rollout_and_none_is_a_training_step(recipe):
    found = iteration(recipe, MODEL, CHIP, REASONING)
    assert found.overhead(1.0) == pytest.approx(rollout_overhead(recipe))
    for scenario in scenarios():
        under = iteration(recipe, MODEL, CHIP, REASONING, scenario)
        assert under.overhead(0.0) == pytest.approx(overhead(recipe, scenario=scenario))
    assert found.overhead() == pytest.approx(
        found.share * rollout_overhead(recipe) + (1 - found.share) * overhead(recipe)
    )


def test_the_default_workload_has_the_rollouts_of_rows():
    assert (REASONING.at_once, REASONING.prompt + REASONING.tokens / 2) == (SEQUENCES, CONTEXT)
    assert rollout_share() == iteration(BF16, MODEL, CHIP, REASONING).share
    assert iteration(BF16, MODEL, CHIP, REASONING).overhead() == 1


def test_longer_answers_give_the_rollout_more_and_more_epochs_less():
    share = iteration(BF16, MODEL, CHIP, SMALL).share
    longer, again = (msgspec.structs.replace(SMALL, **more) for more in ({"tokens": 8192}, {"epochs": 6.0}))
    assert iteration(BF16, MODEL, CHIP, again).share < share < iteration(BF16, MODEL, CHIP, longer).share


@pytest.mark.parametrize("name", workload_names())
def test_every_workload_says_where_it_is_from(name):
    path = Path(cost.__file__).parent / "workloads" / f"{name}.toml"
    assert {"summary", "source"} <= set(tomllib.loads(path.read_text(encoding="utf-8")))
    assert any(word in load_workload(name).source for word in ("assumed", "this project's"))


def test_the_workload_of_this_project_is_that_of_its_task():
    plan, found = _PRESETS["small"].plan, load_workload("chains")
    assert found.answers == found.at_once == plan.prompts * plan.samples
    assert (found.prompt, found.tokens) == (plan.problems.prompt_length, plan.problems.answer_length)


def test_a_share_that_the_reader_gives_replaces_the_modelled_one():
    rows = report.iterations(RECIPES[0], MODEL, CHIP, REASONING, 0.25)
    assert [row["scenario"] for row in rows] == list(scenarios())
    for row in rows:
        ratios = row["rollout_s"] / row["bf16_rollout_s"], row["update_s"] / row["bf16_update_s"]
        assert row["iteration_overhead"] == pytest.approx(0.25 * ratios[0] + 0.75 * ratios[1])
        assert row["rollout_share"] == 0.25
    assert report.iterations(RECIPES[0], load_model("vit-b"), CHIP, REASONING) == []
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="--rollout-share: found"):
            report.iterations(RECIPES[0], MODEL, CHIP, REASONING, share)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("answers = 0", "answers is 0, but must be a finite number above 0"),
        ("prompt = -1", "prompt is -1, but must be a number of tokens, 0 or above"),
        ("asked = 0.5", "asked is 0.5, but must be a finite number, 1 or above"),
        ("epochs = inf", "epochs is inf, but must be a finite number above 0"),
        ("at_once = 65", "at_once is 65, but only 64 answers are sampled"),
    ],
)
def test_a_wrong_workload_is_refused_with_its_place(tmp_path, line, words):
    lines = {"answers": "answers = 64", "prompt": "prompt = 8", "tokens": "tokens = 8", "at_once": "at_once = 8"}
    lines |= {"summary": 'summary = ""', "source": 'source = ""', line.split()[0]: line}
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(lines.values()))
    with pytest.raises(ConfigError, match=rf"mine.toml: found '{words}"):
        load_workload(str(path))
