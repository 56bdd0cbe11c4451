"""Trainings of these tests: native code and, for what it does not have, the reference itself."""

from functools import partial

import msgspec
import pytest

from fp4dse.kernels import backend, native, reference
from fp4dse.kernels.ops import philox


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """What torch's compiler would make has the reference's bits (tests/kernels), and takes longer than the tests."""
    assert native.why_not_native() is None
    drawn = partial(philox.random16, words=native.words)
    reference_s = {"decode_operand": reference.decode_operand, "quantize_blocks": reference.quantize_blocks}
    path = msgspec.structs.replace(backend("cpu"), draws=drawn, **reference_s)
    monkeypatch.setattr("fp4dse.kernels.lanes.backend", lambda device: path)
