"""Layers are timed at a model's shapes, beside what is modelled."""

import math

import msgspec
import numpy as np
import pytest

from fp4dse.dse import Quantizer, Recipe
from fp4dse.dse.cost import load_chip, load_model
from fp4dse.dse.cost.report import layer_overhead
from fp4dse.dse.layers.precision import Precise
from fp4dse.dse.layers.rule import QUANTIZERS, LayerRule
from fp4dse.kernels import layer_time
from fp4dse.kernels.layer_time import LayerTime, layer_rows, layer_times, measured_overhead, order_statistic

TINY = msgspec.structs.replace(load_model("mlp"), tokens=8)
FIRST, SECOND = TINY.linears


@pytest.fixture
def quick(monkeypatch):
    """Few turns."""
    monkeypatch.setattr(layer_time, "LOOKS", (2,))
    monkeypatch.setattr(layer_time, "SAMPLE_S", 0.0)


def line(linear=FIRST, quantized=1, precise=0, us=30.0, bf16_us=10.0, steady=True) -> LayerTime:
    return LayerTime(linear, quantized, precise, us, bf16_us, steady, "eager")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["mxfp4", "nvidia-nvfp4-finish"])
def test_every_quantized_layer_is_timed_and_modelled(name):
    recipe = msgspec.structs.replace(Recipe.named(name), precise=Precise())
    rows = layer_rows(layer_times(recipe, TINY, "cpu"), recipe, TINY, load_chip("h200"))
    assert [(row["layer"], row["rows"], row["inputs"], row["outputs"]) for row in rows] == [
        ("first", 8, 256, 256),
        ("second", 8, 256, 64),
    ]
    for row in rows:
        assert row["us"] > 0
        assert row["measured"] == row["us"] / row["bf16_us"]
        assert row["modelled"] > 1  # an H200 emulates
        assert (row["quantized"], row["precise"], row["backend"]) == (1, 0, "compiled")


@pytest.mark.usefixtures("quick")
def test_bf16_takes_and_is_modelled_as_one():
    bf16 = Recipe.named("bf16")
    rows = layer_rows(layer_times(bf16, TINY, "cpu"), bf16, TINY, load_chip("b200"))
    assert [(row["measured"], row["modelled"]) for row in rows] == [(1, 1), (1, 1)]


@pytest.mark.usefixtures("quick")
def test_layers_that_a_recipe_keeps_precise_take_what_bf16_takes():
    first = msgspec.structs.replace(Recipe.named("mxfp4"), precise=Precise(first=1))
    times = list(layer_times(first, TINY, "cpu"))
    assert [(found.quantized, found.precise) for found in times] == [(0, 1), (1, 0)]
    assert times[0].us == times[0].bf16_us


@pytest.mark.usefixtures("quick")
def test_layers_of_a_kind_that_rules_make_different_are_timed_each_as_its_own_recipe():
    model = msgspec.structs.replace(load_model("vit-b"), tokens=8, linears=[load_model("vit-b").linears[1]])
    fp8 = dict.fromkeys(QUANTIZERS, Quantizer.named("fp8"))
    bf16 = dict.fromkeys(QUANTIZERS, Quantizer.named("bf16"))
    recipe = msgspec.structs.replace(
        Recipe.named("mxfp4"), layers=(LayerRule(first=2, **fp8), LayerRule(last=3, **bf16))
    )
    times = list(layer_times(recipe, model, "cpu"))
    assert sorted((found.quantized, found.precise) for found in times) == [(2, 0), (7, 3)]
    assert {found.recipe.fprop.x.label() for found in times} == {"mxfp4", "fp8"}
    rows = layer_rows(times, recipe, model, load_chip("h200"))
    assert {row["modelled"] for row in rows} == {
        layer_overhead(Recipe.uniform(Quantizer.named(name)), model.linears[0], model, load_chip("h200"))
        for name in ("mxfp4", "fp8")
    }


def test_the_measured_overhead_weighs_layers_by_their_number_and_time():
    times = [line(quantized=3, precise=1), line(SECOND, quantized=2, us=4.0, bf16_us=2.0)]
    assert measured_overhead(times) == pytest.approx((3 * 30 + 10 + 2 * 4) / (4 * 10 + 2 * 2))


def test_a_time_that_is_not_steady_is_no_figure():
    assert math.isnan(measured_overhead([line(), line(SECOND, steady=False)]))


def test_the_interval_of_the_median_misses_as_seldom_as_is_said():
    """Exhaustive: each of n values is below or above the median, and all 2^n patterns are as likely."""
    for n in (8, 12, 16):
        below = np.array([pattern.bit_count() for pattern in range(2**n)])
        for miss in (0.5, 0.05, 0.01):
            k = order_statistic(n, miss)
            assert np.mean((below < k) | (below > n - k)) <= miss < np.mean((below < k + 1) | (below > n - k - 1))
    assert order_statistic(4, 0.01) == 0


def turns(ratio: float, noise: float, seed: int = 0) -> tuple:
    """BF16 and a recipe that takes `ratio` of its time, beside a machine that slows both down now and then."""
    rng = np.random.default_rng(seed)
    now = [0.0]

    def base() -> float:
        now[0] = 10 * rng.choice([1.0, 3.0])
        return now[0]

    return base, [lambda: ratio * now[0] * np.exp(noise * rng.normal())]


def test_what_slows_both_down_does_not_count():
    us, [ratio], steady = layer_time._paired(*turns(1.3, 0.0))
    assert us in (10, 20, 30)
    assert (ratio, steady) == (pytest.approx(1.3), True)


def test_a_steady_figure_is_within_two_percent_of_the_truth_in_95_of_100_cases():
    found = [layer_time._paired(*turns(1.3, 0.05, seed)) for seed in range(200)]
    steady = [ratio for _, [ratio], is_steady in found if is_steady]
    assert len(steady) > 150
    off = sum(abs(ratio / 1.3 - 1) > 0.02 for ratio in steady)
    assert off <= 0.05 * len(steady)


def test_turns_end_as_soon_as_the_interval_is_narrow():
    taken = []

    def base() -> float:
        taken.append(1.0)
        return 1.0

    layer_time._paired(base, [lambda: 1.2])
    assert len(taken) == layer_time.LOOKS[0]


def test_turns_that_never_agree_end_and_are_not_steady(monkeypatch):
    _, _, steady = layer_time._paired(*turns(1.3, 1.0))
    assert not steady
    monkeypatch.setattr(layer_time, "MOST_S", 0.0)
    base, others = turns(1.3, 1.0)
    taken = []
    layer_time._paired(lambda: taken.append(base()) or taken[-1], others)
    assert len(taken) == layer_time.LOOKS[0]


def test_short_calls_are_repeated_until_a_sample_is_long():
    times = []

    def clock(call: object, count: int) -> float:
        times.append(count)
        return 1e-4

    assert layer_time._timer(lambda: None, clock)() == pytest.approx(100)
    assert times == [1, 50]
