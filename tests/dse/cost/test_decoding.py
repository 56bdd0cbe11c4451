"""The price of a token of a rollout: the bytes of weights and cache, then the rate of the units."""

import msgspec
import pytest

from fp4dse.dse import QUANTIZERS, Recipe
from fp4dse.dse.cost import load_chip, load_model, overhead, report, rollout_overhead, step_cost
from fp4dse.dse.cost.chip import Number
from fp4dse.dse.cost.decoding import memory_bytes, token_seconds
from fp4dse.dse.cost.step import TEACHER
from fp4dse.dse.outliers import OUTLIER_NAMES
from fp4dse.dse.rollout import ROLLOUT_NAMES
from fp4dse.dse.training import Distill, Training

BF16, MODEL = Recipe.named("bf16"), load_model("llama-8b")
WEIGHTS = sum(linear.count * linear.inputs * linear.outputs for linear in MODEL.linears)
FAST = Number(1e30, "")
BYTES_ALONE = msgspec.structs.replace(
    load_chip("h200"), vector=FAST, special=FAST, convert=FAST, launch=Number(0, ""), matrix={"bf16": FAST}
)
BANDWIDTH = BYTES_ALONE.bandwidth.value * BYTES_ALONE.achieved.bandwidth.value


def with_rollout(name: str) -> Recipe:
    return msgspec.structs.replace(BF16, training=msgspec.structs.replace(BF16.training, rollout=ROLLOUT_NAMES[name]))


def test_one_sequence_takes_what_the_bytes_of_weights_take():
    cache = 32 * 4096 * 2 * 1024 * 2
    found = token_seconds(BF16, MODEL, BYTES_ALONE, 1, 4096)
    assert found == pytest.approx((2 * WEIGHTS + cache) / BANDWIDTH, rel=0.01)
    head = 4096 * 128256
    quantized = token_seconds(with_rollout("nvfp4-w4a16"), MODEL, BYTES_ALONE, 1, 4096)
    assert quantized == pytest.approx((4.5 / 8 * (WEIGHTS - head) + 2 * head + cache) / BANDWIDTH, rel=0.01)


def test_sequences_add_their_cache_and_nothing_of_the_weights():
    one, many = (token_seconds(BF16, MODEL, BYTES_ALONE, n, 4096) for n in (1, 65))
    assert many - one == pytest.approx(64 * 32 * 4096 * 2 * 1024 * 2 / BANDWIDTH, rel=0.05)


@pytest.mark.parametrize(("name", "bits"), [("fp8-row", 8), ("mxfp4", 4.25), ("nvfp4", 4.5)])
def test_a_cache_of_few_bits_is_read_as_it_is_stored(name, bits):
    """Against the bytes of all keys and values, by hand; the rest of the token takes what it took."""
    bare = with_rollout("nvfp4-w4a16")
    rollout = msgspec.structs.replace(bare.training.rollout, kv_cache=QUANTIZERS[name])
    recipe = msgspec.structs.replace(bare, training=msgspec.structs.replace(bare.training, rollout=rollout))
    elements = 128 * 32 * 4096 * 2 * 1024
    saved = token_seconds(bare, MODEL, BYTES_ALONE, 128, 4096) - token_seconds(recipe, MODEL, BYTES_ALONE, 128, 4096)
    assert saved == pytest.approx(elements * (16 - bits) / 8 / BANDWIDTH, rel=0.01)
    less = memory_bytes(bare, MODEL, 128, 4096) - memory_bytes(recipe, MODEL, 128, 4096)
    assert less == pytest.approx(elements * (16 - bits) / 8, rel=0.01)


def test_many_sequences_are_limited_by_products_where_units_count():
    chip = load_chip("gb200")
    plain, fp4 = (token_seconds(r, MODEL, chip, 4096, 1) for r in (BF16, with_rollout("nvfp4")))
    only_weights = token_seconds(with_rollout("nvfp4-w4a16"), MODEL, chip, 4096, 1)
    assert fp4 < 0.7 * plain
    assert only_weights == pytest.approx(plain, rel=0.02)


def test_a_recipe_without_a_rollout_samples_with_its_forward_pass():
    recipe = Recipe.named("nvfp4-sr")
    rows = report.rollout(recipe, MODEL, load_chip("h200"))
    assert [row["sequences"] for row in rows] == list(report.SHOWN)
    assert rows == report.rollout(with_rollout("nvfp4"), MODEL, load_chip("h200"))
    assert all(row["faster"] == 1 for row in report.rollout(BF16, MODEL, load_chip("h200")))
    assert report.rollout(recipe, load_model("vit-b"), load_chip("h200")) == []
    assert report.rollout(recipe, load_model("mlp"), load_chip("h200")) == []


def test_a_residual_is_stored_and_multiplied_twice():
    q = msgspec.structs.replace(ROLLOUT_NAMES["nvfp4"].w, outliers=OUTLIER_NAMES["residual"])
    twice = with_rollout("nvfp4-w4a16")
    rollout = msgspec.structs.replace(twice.training.rollout, w=q)
    twice = msgspec.structs.replace(twice, training=msgspec.structs.replace(twice.training, rollout=rollout))
    once = token_seconds(with_rollout("nvfp4-w4a16"), MODEL, BYTES_ALONE, 1, 4096)
    head = 4096 * 128256
    more = token_seconds(twice, MODEL, BYTES_ALONE, 1, 4096) - once
    assert more == pytest.approx((WEIGHTS - head) * q.bits_per_element / 16 / BANDWIDTH, rel=0.02)


def test_rows_hold_the_time_of_the_default_model():
    """128 answers of 4,096 tokens; without a rollout of its own, of the recipe's forward pass."""
    chip = load_chip("gb200")
    for name in "nvfp4", "mxfp4-w4a16":
        mine, bf16 = (token_seconds(r, MODEL, chip, 128, 4096) for r in (with_rollout(name), BF16))
        assert rollout_overhead(with_rollout(name)) == mine / bf16 < 1
    assert rollout_overhead(Recipe.named("nvfp4-sr")) == rollout_overhead(with_rollout("nvfp4"))
    assert rollout_overhead(BF16) == 1


def test_a_teacher_adds_its_forward_pass_in_bf16():
    """One of three products of every layer, and as much of all else: a third of BF16's step, whatever the recipe."""
    for name in "bf16", "nvfp4":
        plain = Recipe.named(name)
        taught = msgspec.structs.replace(plain, training=Training(distill=Distill(weight=0.5)))
        assert overhead(taught) == pytest.approx(overhead(plain) + 1 / 3)
        cost = step_cost(taught, MODEL, load_chip("gb200"))
        assert cost.total == pytest.approx(step_cost(plain, MODEL, load_chip("gb200")).total + cost.seconds[TEACHER])
