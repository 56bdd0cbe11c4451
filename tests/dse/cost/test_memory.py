"""What a training keeps and sends, and what follows for its speed at equal memory."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fp4dse.dse import Quantizer, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.cost import load_chip, load_model, model_names, step_cost
from fp4dse.dse.cost.chip import Number
from fp4dse.dse.cost.decoding import token_seconds
from fp4dse.dse.cost.exchange import WAYS, exchange_seconds, exchanged_bytes
from fp4dse.dse.cost.memory import at_share, fit, forward_seconds, kept_bytes, memory
from fp4dse.dse.cost.model import Model
from fp4dse.dse.cost.report import fits, sent
from fp4dse.dse.cost.step import EXCHANGE

BF16 = Recipe.named("bf16")
HERE = replace(Recipe.named("hopper-moe-fp4"), gemm="fp8-exact")
FP4 = replace(HERE, fprop=replace(HERE.fprop, w=Quantizer.named("fp8-current")))
"""As the paper multiplies: x in FP8 units, which here take MXFP4 beside FP8 with one factor of the tensor."""
FP8 = replace(HERE, fprop=replace(HERE.fprop, x=Quantizer.named("fp8-1x128")))
H100, LARGE = load_chip("h100"), load_model("deepseek-671b")
SHARE = 0.567
"""Of blocks that are made again: with the shape's `in_flight` it gives the published peaks."""


# --- the published training (arXiv 2603.02731) -------------------------------------------------------------------


def test_peaks_of_memory_are_the_published_ones_which_two_numbers_were_chosen_from():
    for recipe, published in ((FP8, 0.7420), (FP4, 0.5940)):
        assert memory(recipe, LARGE, SHARE) / 80e9 == pytest.approx(published, rel=0.005)


def test_at_equal_memory_it_is_as_much_faster_as_published_and_at_equal_recomputation_it_is_not():
    fp8, fp4 = (at_share(recipe, LARGE, H100, SHARE) for recipe in (FP8, FP4))
    assert fp4.tokens_per_s / fp8.tokens_per_s == pytest.approx(1156 / 1157, rel=0.005)
    roomy = fit(FP4, LARGE, H100, fp8.bytes)
    assert roomy.bytes == pytest.approx(fp8.bytes)
    ratio = roomy.tokens_per_s / fp8.tokens_per_s
    assert ratio == pytest.approx(1302 / 1157, rel=0.05)
    page = (Path(__file__).parents[3] / "docs" / "cost.md").read_text()
    ends = [
        fit(FP4, LARGE, H100, fp8.bytes, end).tokens_per_s / at_share(FP8, LARGE, H100, SHARE, end).tokens_per_s
        for end in ("high", "low")
    ]
    assert f"| at equal memory | 1.125 | {ratio:.3f} ({ends[0]:.2f} to {ends[1]:.2f}) |" in page
    here = [at_share(HERE, LARGE, H100, SHARE), fit(HERE, LARGE, H100, fp8.bytes)]
    slower = [of.tokens_per_s / fp8.tokens_per_s for of in here]
    assert f"modelled {slower[0]:.3f} at\nequal recomputation and {slower[1]:.3f} at equal memory" in page
    assert f"the model has {4 / 61 * fp8.tokens_per_s:,.0f} tokens a second" in page


def test_with_swiglus_inputs_in_fp8_in_both_runs_less_is_gained():
    same = replace(LARGE, kept=[replace(of, bits=8.25) for of in LARGE.kept])
    fp8 = at_share(FP8, same, H100, SHARE)
    ratio = fit(FP4, same, H100, fp8.bytes).tokens_per_s / fp8.tokens_per_s
    peak = memory(FP4, same, SHARE) / 80e9
    page = (Path(__file__).parents[3] / "docs" / "cost.md").read_text()
    assert f"MXFP4's peak would be {100 * peak:.1f} % and the ratio at equal memory {ratio:.2f}." in page.replace(
        "\n", " "
    )


def test_the_head_is_not_made_again_with_the_blocks():
    llama = load_model("llama-8b")
    alone = replace(llama, linears=[of for of in llama.linears if of.kind != "head"])
    assert forward_seconds(BF16, llama, H100) == forward_seconds(BF16, alone, H100)
    assert forward_seconds(BF16, replace(llama, linears=[]), H100) < forward_seconds(BF16, llama, H100)


def test_dispatches_are_as_small_as_their_formats():
    found, bf16 = exchanged_bytes(FP4, LARGE), exchanged_bytes(BF16, LARGE)
    share = {way: found[way] / bf16[way] for way in WAYS}
    assert share == {
        "forward dispatch": 4.25 / 16,
        "forward combine": 1.0,
        "backward dispatch": 8.25 / 16,
        "backward combine": 1.0,
    }
    assert bf16["forward dispatch"] == 4 * 4096 * 8 * 7168 * 2 * 15 / 16
    assert [row["of_bf16"] for row in sent(FP4, LARGE)] == list(share.values())
    assert sent(FP4, load_model("llama-8b")) == []


def test_an_exchange_that_nothing_hides_takes_the_time_of_its_bytes():
    [of] = LARGE.exchange
    bare = replace(LARGE, exchange=[replace(of, exposed=Number(1.0, "here"))])
    expected = sum(exchanged_bytes(FP4, LARGE).values()) / 50e9
    assert exchange_seconds(FP4, bare, H100) == pytest.approx(expected)
    assert step_cost(FP4, bare, H100).seconds[EXCHANGE] == pytest.approx(expected)
    assert exchange_seconds(FP4, LARGE, H100) == 0
    assert exchange_seconds(FP4, bare, replace(H100, network=None)) == 0
    halves = [exchange_seconds(FP4, bare, H100, ways) for ways in (WAYS[:2], WAYS[2:])]
    assert sum(halves) == pytest.approx(expected)


# --- memory ------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_inputs_in_their_bits_and_what_the_shape_names():
    assert kept_bytes(BF16, LARGE) / 4096 / 4 == 2 * (7168 + 1536 + 512 + 16384 + 7168 + 8 * 7168 + 36864)
    assert kept_bytes(FP4, LARGE) / kept_bytes(BF16, LARGE) == pytest.approx(4.25 / 16)
    llama = load_model("llama-8b")
    inputs = 32 * (3 * 4096 + 14336) + 4096
    beside = 32 * (2 * 4096 + 6144 + 2 * 14336) + 128256
    assert kept_bytes(BF16, llama) == 2 * 8192 * (inputs + beside)


def test_copies_of_experts_weights_are_kept_where_the_shape_has_them():
    moe = load_model("moe8-4b")
    weights = 16 * 8 * (2048 * 8192 + 4096 * 2048)
    bare = replace(moe, copies=False)
    for recipe, size in ((FP4, 4), (BF16, 2)):
        assert kept_bytes(recipe, moe) - kept_bytes(recipe, bare) == size * weights
    assert 4 * weights == pytest.approx(12.9e9, rel=2e-3)
    bf16, fp4 = fits(FP4, moe, H100)
    assert (bf16["made_again"], bf16["gb"]) == (0, pytest.approx(77.6, abs=0.05))
    assert fp4["made_again"] > 0
    assert fp4["gb"] == pytest.approx(80.3, abs=0.05)


@given(st.floats(0, 1), st.sampled_from([BF16, FP8, FP4]))
def test_making_more_blocks_again_takes_less_memory_and_more_time(share, recipe):
    some, all_of_them = (at_share(recipe, LARGE, H100, of) for of in (share, 1.0))
    assert all_of_them.bytes <= some.bytes <= memory(recipe, LARGE)
    assert some.seconds <= all_of_them.seconds
    found = fit(recipe, LARGE, H100, some.bytes)
    assert found.recomputed == pytest.approx(share, abs=1e-6)
    assert found.seconds == pytest.approx(some.seconds)


def test_what_does_not_fit_is_none_and_what_fits_makes_nothing_again():
    states = LARGE.parameters * LARGE.state_bytes
    assert fit(FP4, LARGE, H100, states) is None
    assert fit(FP4, LARGE, H100, 1e12).recomputed == 0
    rows = fits(FP4, LARGE, replace(H100, capacity=Number(states, "here")))
    assert [row["tokens_per_s"] for row in rows] == [None, None]
    assert fits(FP4, load_model("vit-b"), H100) == []


@pytest.mark.parametrize("name", model_names())
def test_a_forward_pass_is_a_third_of_a_step_or_less(name):
    model = load_model(name)
    for recipe in (BF16, Recipe.named("nvfp4")):
        step = step_cost(recipe, model, H100)
        assert 0.15 * step.total < forward_seconds(recipe, model, H100) < 0.4 * step.total


# --- experts -----------------------------------------------------------------------------------------------------


def alone(**more) -> Model:
    linear = {"name": "up", "inputs": 4096, "outputs": 4096, "kind": "mlp", "role": "up", **more}
    shape = {"name": "one", "summary": "", "source": "", "tokens": 4096, "micro_batches": 1, "blocks": 1}
    return msgspec.convert({**shape, "linears": [linear], "parameters": 0}, Model)


def test_experts_cost_the_products_of_their_own_tokens_and_one_launch():
    free = replace(H100, launch=Number(0.0, "here"))
    one, eight = alone(), alone(count=8, tokens=0.125, together=8, expert=True)
    for recipe in (BF16, FP4):
        dense, experts = (step_cost(recipe, of, free) for of in (one, eight))
        assert experts.total >= dense.total  # the same products, more weights
        launches = [step_cost(recipe, of, H100).total - step_cost(recipe, of, free).total for of in (one, eight)]
        assert launches[0] == pytest.approx(launches[1])
    assert step_cost(BF16, alone(count=8, tokens=0.125), H100).total > step_cost(BF16, eight, H100).total


def test_rules_for_experts_are_priced():
    rule = [{"kind": "expert", "*": "bf16"}]
    recipe = Recipe.named("mxfp4")
    ruled = recipe_from_dict({**recipe_to_dict(recipe), "layers": rule})
    b200 = load_chip("b200")
    found = [step_cost(of, alone(expert=True), b200).total for of in (recipe, ruled, BF16)]
    assert found[0] < found[1]
    assert found[1] == pytest.approx(found[2])


def test_a_rollout_reads_the_experts_that_some_sequence_chooses():
    model = alone(count=8, tokens=0.25, together=8, expert=True)
    one, many = (token_seconds(BF16, model, H100, rows, 16) for rows in (1, 128))
    dense = token_seconds(BF16, alone(count=8, together=8), H100, 1, 16)
    assert one < 0.3 * dense
    assert many > 0.9 * dense
