"""The self-test passes on a sound machine, fails on a broken one, and its vectors are those of the reference."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.kernels import selftest, vectors
from fp4dse.kernels.quant.backend import backend


@pytest.mark.parametrize("check", selftest.CHECKS, ids=lambda check: check.__name__)
def test_every_check_passes_here(check):
    results = list(check("cpu"))
    assert results
    assert all(result.cases > 0 for result in results)
    assert [result for result in results if result.wrong] == []


def test_the_shipped_vectors_are_those_of_the_reference():
    made = vectors.make_vectors()
    assert set(made) == set(vectors.vectors())
    for name, values in made.items():
        assert np.array_equal(values, vectors.vectors()[name], equal_nan=values.dtype.kind == "f"), name


@pytest.mark.parametrize("path", ["by_scales", "operand"])
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


def test_a_new_name_has_no_vectors_until_they_are_made(monkeypatch, tmp_path, capsys):
    """The self-test says so; making them says what is new, and that nothing else changed."""
    monkeypatch.setattr(vectors, "BLOCK_SCALED", vectors.BLOCK_SCALED | {"later": Quantizer.named("nvfp4")})
    monkeypatch.setattr(selftest, "BLOCK_SCALED", {"later": Quantizer.named("nvfp4")})
    [check] = selftest.frozen_vectors("cpu")
    assert check.wrong
    assert "python -m fp4dse.kernels.vectors makes them" in check.name
    monkeypatch.setattr(vectors, "VECTORS", tmp_path / "vectors.npz")
    (tmp_path / "vectors.npz").write_bytes(Path(vectors.__file__).with_name("vectors.npz").read_bytes())
    vectors.main()
    said = capsys.readouterr().out.splitlines()
    assert said[:-1] == [f"later/{field}: new" for field in ("codes", "oracle", "scales", "values")]
    vectors.vectors.cache_clear()
    assert not any(check.wrong for check in selftest.frozen_vectors("cpu"))
    vectors.vectors.cache_clear()
