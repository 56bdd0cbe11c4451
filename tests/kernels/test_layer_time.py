"""Layers are timed at a model's shapes, beside what is modelled."""

import math

import msgspec
import pytest

from fp4dse.dse import Recipe
from fp4dse.dse.cost import load_chip, load_model
from fp4dse.dse.precision import Precise
from fp4dse.kernels import backend, layer_time
from fp4dse.kernels.layer_time import LayerTime, layer_rows, layer_times, measured_overhead

TINY = msgspec.structs.replace(load_model("mlp"), tokens=8)
FIRST, SECOND = TINY.linears


@pytest.fixture
def quick(monkeypatch):
    """The reference as it is, nothing to compile, and few turns."""
    monkeypatch.setenv("FP4DSE_EAGER", "1")
    monkeypatch.setattr(layer_time, "LEAST_S", 0.0)
    monkeypatch.setattr(layer_time, "MOST_S", 0.0)
    backend.cache_clear()
    yield
    backend.cache_clear()


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
        assert (row["quantized"], row["precise"], row["backend"]) == (1, 0, "eager")


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


def test_the_measured_overhead_weighs_layers_by_their_number_and_time():
    times = [line(quantized=3, precise=1), line(SECOND, quantized=2, us=4.0, bf16_us=2.0)]
    assert measured_overhead(times) == pytest.approx((3 * 30 + 10 + 2 * 4) / (4 * 10 + 2 * 2))


def test_a_time_that_is_not_steady_is_no_figure():
    assert math.isnan(measured_overhead([line(), line(SECOND, steady=False)]))


def test_turns_go_on_until_the_five_fastest_agree(monkeypatch):
    """The clock says what each turn took: long, but for five of them, far apart; the first two may compile."""
    turns = iter([0.5] * 2 + ([5.0] * 7 + [1.0]) * 4 + [5.5, 1.04, 7.0])
    now = 0.0

    def clock() -> float:
        return now

    def call() -> None:
        nonlocal now
        now += next(turns)

    monkeypatch.setattr(layer_time, "LEAST_S", 0.0)
    monkeypatch.setattr(layer_time, "MOST_S", 1e9)
    monkeypatch.setattr(layer_time.time, "perf_counter", clock)
    [us], steady = layer_time._fastest_us([call], "cpu")
    assert (us, steady) == (pytest.approx(1e6), True)
    assert list(turns) == [7.0]


def test_turns_that_never_agree_end_and_are_not_steady(monkeypatch):
    now, long = 0.0, 1.0

    def clock() -> float:
        return now

    def call() -> None:
        nonlocal now, long
        now, long = now + long, long * 1.1

    monkeypatch.setattr(layer_time, "MOST_S", 100.0)
    monkeypatch.setattr(layer_time.time, "perf_counter", clock)
    _, steady = layer_time._fastest_us([call], "cpu")
    assert not steady
    assert now > 100
