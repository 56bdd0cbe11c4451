"""The price of the attention core: what its products, its tiles and the passes before it take."""

import msgspec
import pytest

from fp4dse.dse import QUANTIZERS, Recipe
from fp4dse.dse.attention import (
    ATTENTION_PRODUCTS,
    Attention,
    Context,
    KeyGradient,
    QueryGradient,
    Scores,
    ValueGradient,
    WeightGradient,
)
from fp4dse.dse.cost import load_chip, load_model, overhead, points, report, step_cost
from fp4dse.dse.cost.chip import Number
from fp4dse.dse.cost.core import _kernels, core
from fp4dse.dse.cost.scenario import MID, under
from fp4dse.dse.layers.precision import Finish
from fp4dse.dse.rounding import Stochastic

CHIP, MODEL = load_chip("gb200"), load_model("llama-8b")
FAST = Number(1e30, "nothing but products takes time")
PRODUCTS_ALONE = msgspec.structs.replace(
    CHIP, vector=FAST, special=FAST, convert=FAST, bandwidth=FAST, launch=Number(0, "")
)
SCORES = 8192 * 8192 / 2
PRODUCT = 32 * 2 * SCORES * 4096
"""FLOPs of one of the core's products in all 32 blocks: 8,192 causal tokens, width 4,096."""
MXFP4, NVFP4 = (Recipe.named(name).fprop.x for name in ("mxfp4", "nvfp4"))
TYPES = (Scores, Context, ValueGradient, WeightGradient, QueryGradient, KeyGradient)


def everywhere(q, **more) -> Attention:
    """All twelve operands the same."""
    products = zip(ATTENTION_PRODUCTS.items(), TYPES, strict=True)
    return Attention(**{name: kind(*[q] * len(operands)) for (name, operands), kind in products}, **more)


def with_core(attention: Attention, **changes) -> Recipe:
    return msgspec.structs.replace(Recipe.named("mxfp4"), attention=attention, **changes)


def seconds(attention: Attention, chip=CHIP, model=MODEL, **changes) -> float:
    """Under the scenario of `overhead`, as far as it concerns passes and random bits."""
    return core(with_core(attention, **changes), model, under(chip, MID))


def test_seven_products_in_bf16_at_the_share_that_attention_reaches():
    rate = CHIP.matrix["bf16"].value * CHIP.achieved.attention.value
    assert CHIP.attention_flops("bf16") == pytest.approx(rate)
    assert seconds(Attention()) == pytest.approx(7 * PRODUCT / rate + 32 * 2 * CHIP.launch.value)
    assert seconds(Attention()) == step_cost(Recipe.named("bf16"), MODEL, CHIP).seconds["attention core"]


def test_quantized_weights_take_their_scores_twice():
    """P's rows are known in full before its first tile is quantized."""
    fp4, bf16 = (PRODUCTS_ALONE.attention_flops(unit) for unit in ("fp4", "bf16"))
    assert seconds(everywhere(MXFP4), PRODUCTS_ALONE) == pytest.approx(8 * PRODUCT / fp4)
    assert seconds(Attention(context=Context(MXFP4, MXFP4)), PRODUCTS_ALONE) == pytest.approx(
        PRODUCT * (1 / fp4 + 7 / bf16)
    )
    assert seconds(Attention(context=Context(v=MXFP4)), PRODUCTS_ALONE) == pytest.approx(7 * PRODUCT / bf16)


def test_a_tensor_scale_of_the_scores_gradient_takes_two_products_more():
    fp4, bf16 = (PRODUCTS_ALONE.attention_flops(unit) for unit in ("fp4", "bf16"))
    found = seconds(Attention(dq=QueryGradient(NVFP4, NVFP4)), PRODUCTS_ALONE)
    assert found == pytest.approx(PRODUCT * (8 / bf16 + 1 / fp4))
    held = msgspec.structs.replace(NVFP4, tensor_scale=msgspec.structs.replace(NVFP4.tensor_scale, amax="previous"))
    assert seconds(Attention(dq=QueryGradient(held, held)), PRODUCTS_ALONE) == pytest.approx(
        PRODUCT * (6 / bf16 + 1 / fp4)
    )


def test_exponentials_limit_what_products_in_fp4_could_save():
    """Two exponentials an element of P where it is normalized, one where its sums divide the product."""
    pairs = 32 * SCORES * 4096 / 128
    rate = CHIP.special.value * CHIP.achieved.vector.value
    normalized, later = (
        seconds(Attention(scores=Scores(MXFP4, MXFP4), context=Context(MXFP4, MXFP4), weights=weights))
        for weights in ("normalized", "unnormalized")
    )
    assert normalized - later == pytest.approx(pairs / rate, rel=0.05)
    assert later < seconds(Attention()) < seconds(everywhere(NVFP4), load_chip("h200"))


def test_passes_before_are_over_the_channels_of_their_tensor():
    """Eight keys and values are shared by 32 queries; smoothing reads the keys once more."""
    queries, keys = (seconds(Attention(scores=Scores(**{name: MXFP4}))) - seconds(Attention()) for name in "qk")
    assert queries - 32 * CHIP.launch.value == pytest.approx(4 * (keys - 32 * CHIP.launch.value))
    smooth = seconds(Attention(scores=Scores(k=MXFP4), smooth_k=True)) - seconds(Attention(scores=Scores(k=MXFP4)))
    bandwidth = CHIP.bandwidth.value * CHIP.achieved.bandwidth.value
    assert smooth >= 32 * (8192 * 1024 * 2 / bandwidth + CHIP.launch.value) * 0.999
    apart = msgspec.structs.replace(MODEL, attention=[msgspec.structs.replace(MODEL.attention[0], kv=0)])
    assert seconds(Attention(scores=Scores(k=MXFP4)), model=apart) > seconds(Attention(scores=Scores(k=MXFP4)))


def test_the_last_steps_are_those_of_the_stages_that_end():
    quantized, plain = seconds(everywhere(MXFP4)), seconds(Attention())
    forward = seconds(Attention(scores=Scores(MXFP4, MXFP4), context=Context(MXFP4, MXFP4)))
    ended = seconds(everywhere(MXFP4), finish=Finish(0.25))
    assert ended == seconds(everywhere(MXFP4), finish=Finish(0.25, "all-but-weights"))
    assert ended == pytest.approx(0.75 * quantized + 0.25 * plain)
    backward = seconds(everywhere(MXFP4), finish=Finish(0.5, "backward"))
    assert backward == pytest.approx(0.5 * quantized + 0.5 * forward)


def test_it_is_part_of_overhead_points_split_and_notes():
    recipe, plain = with_core(everywhere(NVFP4, smooth_k=True)), Recipe.named("mxfp4")
    difference = seconds(everywhere(NVFP4, smooth_k=True)) - seconds(Attention())
    bf16 = step_cost(Recipe.named("bf16"), MODEL, CHIP).total
    assert overhead(recipe) - overhead(plain) == pytest.approx(difference / bf16)
    assert points(recipe) == points(plain) + 2  # a tensor scale, the mean of keys
    rows = {row["part"]: row for row in report.split(recipe, MODEL, CHIP)}
    assert rows["attention core"]["us"] - rows["attention core"]["bf16_us"] == pytest.approx(1e6 * difference)
    assert any(
        line.startswith("attention core: no FP4 unit")
        for line in report.summary(
            msgspec.structs.replace(Recipe.named("bf16"), attention=everywhere(NVFP4)), MODEL, load_chip("h200")
        )["notes"]
    )


def test_fp4_attention_is_not_modelled_faster_than_was_published():
    """SageAttention3's forward pass on an RTX 5090, 1,038 TFLOP/s (arXiv 2505.11594), which forms S once."""
    chip = under(load_chip("rtx-5090"), MID)
    block = msgspec.structs.replace(NVFP4, tensor_scale=None)
    forward, _ = _kernels(Attention(scores=Scores(block, block), context=Context(block, block)), chip, "exact")
    assert forward.tile.seconds(chip) < 2 * 2 * 128 / chip.attention_flops("fp4")  # products are what takes longest
    assert 0.7 * 1038e12 < chip.attention_flops("fp4") < 1038e12


def test_scales_of_whole_rows_are_known_before_the_first_tile():
    fp4, bf16 = (PRODUCTS_ALONE.attention_flops(unit) for unit in ("fp4", "bf16"))
    row = msgspec.structs.replace(NVFP4, tensor_scale=msgspec.structs.replace(NVFP4.tensor_scale, over="row"))
    found = seconds(Attention(dq=QueryGradient(row, row)), PRODUCTS_ALONE)
    assert found == pytest.approx(PRODUCT * (8 / bf16 + 1 / fp4))
    found = seconds(Attention(dv=ValueGradient(row, row)), PRODUCTS_ALONE)
    assert found == pytest.approx(PRODUCT * (7 / bf16 + 1 / fp4))


def test_samples_are_products_and_factors_within_sums_are_instructions():
    fp4, bf16 = (PRODUCTS_ALONE.attention_flops(unit) for unit in ("fp4", "bf16"))
    two = msgspec.structs.replace(MXFP4, rounding=Stochastic(samples=2))
    found = seconds(Attention(dv=ValueGradient(two, MXFP4)), PRODUCTS_ALONE)
    assert found == pytest.approx(PRODUCT * (6 / bf16 + 2 / fp4))
    slow = msgspec.structs.replace(PRODUCTS_ALONE, vector=Number(1e12, ""))
    macro = Attention(scores=Scores(QUANTIZERS["mbs-mxfp4"], QUANTIZERS["mbs-mxfp4"]))
    instructions = 3 * PRODUCT / 2 * 2 / 128  # S is formed once forward and once backward, of which one is longer
    assert seconds(macro, slow) > instructions / 3 / (slow.vector.value * slow.achieved.vector.value)
