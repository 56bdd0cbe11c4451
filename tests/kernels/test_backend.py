"""The compiled path is the reference, whatever draws and shapes it meets, and in whatever order."""

import sys
from functools import cache

import msgspec
import pytest
import torch

from fp4dse.dse import Quantizer, Recipe
from fp4dse.dse.rounding import Stochastic
from fp4dse.kernels import LaneNumerics, backend, reference, warm_up
from fp4dse.kernels.backend import _compiled, _eager
from fp4dse.kernels.descriptor import descriptor
from fp4dse.kernels.ops.philox import STREAMS, random16


def test_every_draw_has_its_own_threshold_on_the_compiled_path():
    """4 + 2·fraction goes up to 6 at the threshold of its draw, 1 - (2r + 1) / 2^17, and down to 4 just below it."""
    r = torch.arange(1 << 16, dtype=torch.int32)
    at = 4 + 2 * (1 - (2 * r + 1).to(torch.float32) * 2.0**-17)
    just_below = torch.nextafter(at, torch.tensor(0.0))
    mxfp4 = msgspec.structs.replace(Quantizer.named("mxfp4"), rounding=Stochastic())  # the scale of [4, 8) is one
    tables, path = descriptor([mxfp4, mxfp4]), backend("cpu")
    assert path.name == "compiled", path.why_not
    draws = r.view(1, -1, 32).repeat(2, 1, 1)
    for drawn in (draws, draws.to(torch.int16)):  # the same bits in 32 and in 16
        values, _ = path.decode_operand(torch.stack([at, just_below]).view(2, -1, 32), *tables, drawn, False)
        assert (values[0] == 6).all()
        assert (values[1] == 4).all()


def test_draws_are_those_of_the_reference():
    seeds, step, site = torch.tensor([3, 4]), torch.tensor(5), torch.tensor(6)
    drawn = backend("cpu").draws(seeds, STREAMS["rounding"], step, site, 4096)
    wanted = random16(seeds, STREAMS["rounding"], step, site, 4096)
    assert torch.equal(drawn.to(torch.int32) & 0xFFFF, wanted)


def test_many_threads_have_the_bits_of_the_reference():
    x = torch.randn(2, 1000, 16)
    tables = descriptor([Quantizer.named("nvfp4")] * 2)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            with torch.no_grad():
                got = backend("cpu").decode_operand(x, *tables, None, False)
            for a, b in zip(got, reference.decode_operand(x, *tables, None, False), strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def refused(monkeypatch):
    """A path whose compiler of torch's cannot be had, and how often that was asked."""
    asked = []

    @cache
    def why_not_torch():
        asked.append(1)
        return "compiled quantizer not taken: CppCompileError: no Python.h"

    monkeypatch.setattr(sys.modules[_compiled.__module__], "why_not_torch", why_not_torch)
    path = _compiled()
    monkeypatch.setattr("fp4dse.kernels.lanes.backend", lambda device: path)
    return path, asked


def step(name):
    """What a layer of two lanes computes, forward and backward."""
    numerics = LaneNumerics([Recipe.named(name)] * 2, [0, 1])
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    y = numerics.forward(0, x, x, save=(True, True))[0]
    return [y, numerics.gemm("dgrad", 0, x, 2, x, 2), numerics.gemm("wgrad", 0, x, 2, x, 2)]


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-sr-rht", "mxfp4"])
def test_what_native_code_has_never_asks_torchs_compiler(name, refused):
    """Setting it up takes seconds, at the start of every worker."""
    step(name)
    path, asked = refused
    assert (path.name, path.reasons(), asked) == ("compiled", (), [])


def test_what_recording_calls_is_compiled_by_who_is_warm(refused):
    _, asked = refused
    for record, times in ((False, []), (True, [1])):
        warm_up([Recipe.named("nvfp4")], record)
        assert asked == times


def test_without_torchs_compiler_the_reference_goes_on_and_the_reason_is_told(refused, monkeypatch):
    refused_so = step("tetrajet-qema")
    path, asked = refused
    assert path.reasons() == ("compiled quantizer not taken: CppCompileError: no Python.h",)
    assert asked == [1]
    monkeypatch.setattr("fp4dse.kernels.lanes.backend", lambda device: _eager())
    for ours, theirs in zip(refused_so, step("tetrajet-qema"), strict=True):
        assert torch.equal(ours, theirs)
