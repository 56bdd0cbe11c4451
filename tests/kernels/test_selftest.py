"""The self-test passes on a sound machine, fails on a broken one, and its vectors are those of the reference."""

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.kernels import selftest
from fp4dse.kernels.backend import backend


@pytest.mark.parametrize("check", selftest.CHECKS, ids=lambda check: check.__name__)
def test_every_check_passes_here(check, monkeypatch):
    if check is selftest.fast_path:  # test_reference.py compiles them all
        few = {name: selftest.BLOCK_SCALED[name] for name in ("mxfp4", "nvfp4", "nvfp4-2d", "ms-eden")}
        monkeypatch.setattr(selftest, "BLOCK_SCALED", few)
    results = list(check("cpu"))
    assert results
    assert all(result.cases > 0 for result in results)
    assert [result for result in results if result.wrong] == []


def test_the_shipped_vectors_are_those_of_the_reference():
    made = selftest.make_vectors()
    assert set(made) == set(selftest.vectors())
    for name, values in made.items():
        assert np.array_equal(values, selftest.vectors()[name], equal_nan=values.dtype.kind == "f"), name


@pytest.mark.parametrize("path", ["decode_operand", "operand"])
def test_a_path_that_is_off_by_one_bit_is_caught(path, monkeypatch):
    sound = backend("cpu")

    def off(*arguments, **more):
        values, factor = getattr(sound, path)(*arguments, **more)
        values.view(torch.int32)[0, 0, 0] ^= 1 << 22  # a mantissa bit of one element
        return values, factor

    spoiled = msgspec.structs.replace(sound, **{"operand": None, path: off})
    monkeypatch.setattr(selftest, "backend", lambda device: spoiled)
    monkeypatch.setattr(selftest, "BLOCK_SCALED", {"nvfp4": selftest.BLOCK_SCALED["nvfp4"]})
    assert all(check.wrong for check in selftest.fast_path("cpu"))


def test_wrong_rounding_is_caught_by_every_check_of_values(monkeypatch):
    original = selftest.quantize

    def shrunk(x, q, **keys):
        return original(x * 0.97, q, **keys)

    monkeypatch.setattr(selftest, "quantize", shrunk)
    for check in (selftest.codes_and_midpoints, selftest.scale_rules, selftest.frozen_vectors):
        assert any(result.wrong for result in check("cpu")), check.__name__
    assert any(result.wrong for result in selftest.stochastic_statistics("cpu"))
