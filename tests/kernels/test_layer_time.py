"""Layers are timed at a model's shapes, beside what is modelled."""

import msgspec
import pytest

from fp4dse.dse import Recipe
from fp4dse.dse.cost import load_chip, load_model
from fp4dse.kernels import backend
from fp4dse.kernels.layer_time import layer_times

TINY = msgspec.structs.replace(load_model("mlp"), tokens=8)


@pytest.fixture
def eager(monkeypatch):
    """The reference as it is: nothing to compile."""
    monkeypatch.setenv("FP4DSE_EAGER", "1")
    backend.cache_clear()
    yield
    backend.cache_clear()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["mxfp4", "nvidia-nvfp4"])
def test_every_quantized_layer_is_timed_and_modelled(name):
    rows = list(layer_times(Recipe.named(name), TINY, load_chip("h200"), "cpu"))
    assert [(row.layer, row.rows, row.inputs, row.outputs) for row in rows] == [
        ("first", 8, 256, 256),
        ("second", 8, 256, 64),
    ]
    for row in rows:
        assert row.us > 0
        assert row.measured == row.us / row.bf16_us
        assert row.modelled > 1  # an H200 emulates
        assert row.backend == "eager"


def test_bf16_is_modelled_as_one():
    assert [row.modelled for row in layer_times(Recipe.named("bf16"), TINY, load_chip("b200"), "cpu")] == [1, 1]
