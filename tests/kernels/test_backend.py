"""The path of a device is chosen once, with its reason; what native code takes, and what the reference does."""

import msgspec
import pytest
import torch

from fp4dse.dse import Quantizer, Recipe
from fp4dse.dse.rounding import Stochastic
from fp4dse.kernels import LaneNumerics, backend, native, native_library, why_not_compiled
from fp4dse.kernels.quant.backend import PLAIN, _compiled
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.tasks.threads import torch_threads


def test_every_draw_has_its_own_threshold_in_native_code():
    """4 + 2·fraction goes up to 6 at the threshold of its draw, 1 - (2r + 1) / 2^17, and down to 4 just below it."""
    r = torch.arange(1 << 16, dtype=torch.int32)
    at = 4 + 2 * (1 - (2 * r + 1).to(torch.float32) * 2.0**-17)
    just_below = torch.nextafter(at, torch.tensor(0.0))
    mxfp4 = msgspec.structs.replace(Quantizer.named("mxfp4"), rounding=Stochastic())  # the scale of [4, 8) is one
    tables, path = descriptor([mxfp4, mxfp4]), backend("cpu")
    assert path.name == "compiled", path.why_not
    draws = r.view(1, -1, 32).repeat(2, 1, 1)
    encoded, _ = path.quantize_blocks(torch.stack([at, just_below]).view(2, -1, 32), *tables, draws, False)
    assert (encoded.q[0] == 6).all()
    assert (encoded.q[1] == 4).all()


def test_many_threads_have_the_bits_of_the_reference():
    x = torch.randn(3, 2000, 16)
    arguments = x, *descriptor([Quantizer.named("hif4")] * 3)
    for n in (1, 2):
        with torch_threads(n):
            got, expected = (path.quantize_blocks(*arguments, codec="if4")[0] for path in (backend("cpu"), PLAIN))
        assert torch.equal(got.q, expected.q)
        assert torch.equal(got.scale, expected.scale)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    cached = native_library.library, native.why_not_native, backend
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def step(name):
    """What a layer of two lanes computes, forward and backward."""
    numerics = LaneNumerics([Recipe.named(name)] * 2, [0, 1])
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    y = numerics.forward(0, x, x, save=(True, True))[0]
    return [y, numerics.gemm("dgrad", 0, x, 2, x, 2), numerics.gemm("wgrad", 0, x, 2, x, 2)]


@pytest.mark.parametrize("name", ["nvfp4", "tetrajet-qema", "hif4-ascend"])
def test_without_a_compiler_the_reference_goes_on_and_the_reason_is_told(name, request):
    expected = step(name)
    request.getfixturevalue("no_compiler")
    reason = "native code not taken: no C++ compiler found (install g++ or set CXX)"
    assert why_not_compiled("cpu") == reason
    assert (backend("cpu").name, backend("cpu").why_not) == ("eager", (reason,))
    for ours, theirs in zip(step(name), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_to_be_eager_is(monkeypatch):
    monkeypatch.setenv("FP4DSE_EAGER", "1")
    native.why_not_native.cache_clear()
    try:
        assert why_not_compiled("cpu") == "native code not taken: FP4DSE_EAGER is set"
    finally:
        native.why_not_native.cache_clear()
    assert why_not_compiled("cuda").startswith("compiled quantizer not taken on cuda: ")


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-2d", "hif4", "int4-sawb", "ms-eden"])
def test_native_code_has_blocks_of_every_kind(name):
    q = Quantizer.named(name).canonical()
    path, tables = _compiled(), descriptor([q] * 2)
    assert path.why_not_by_scales(q, tables) is None
    later = msgspec.structs.replace(
        path, scale_codecs=("block",), scale_heeded=lambda codec, _: native.heeded(codec) - {"elem_max"}
    )
    reason = later.why_not_by_scales(q, tables)
    assert reason.startswith("elem_max: found " if q.codec == "block" else f"codec: found {q.codec}; accepted: block")
