"""What SwiGLU keeps in MXFP8: the numbers of the reference, in 33 bytes for 32, and a gradient that is taken there."""

import pytest
import torch
from msgspec.structs import replace

from fp4dse.dse import QUANTIZERS
from fp4dse.kernels.ops.swiglu import swiglu
from fp4dse.kernels.quant.backend import PLAIN, backend
from fp4dse.kernels.quant.operand import in_mxfp8 as module
from fp4dse.kernels.quant.operand.in_mxfp8 import from_mxfp8, in_mxfp8
from fp4dse.kernels.quant.quantize import quantize
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.tasks.engine.kept import keeping
from tests.kernels.comparing import randn, same, take_kernels

DTYPES = [torch.float32, torch.bfloat16]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of many sizes, with zeros."""
    x = randn(*shape) * torch.exp2(torch.arange(shape[-2])[:, None].remainder(60) * 4.0 - 120.0)
    x[..., 0, :] = 0.0
    return x.to(dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x in MXFP8 by the reference, its last axis filled up to whole blocks."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 32))
    return quantize(padded, QUANTIZERS["mxfp8"]).values[..., : x.shape[-1]].to(x.dtype)


@pytest.fixture(params=["fused", "own"])
def quantizer(request, place, monkeypatch):
    """Blocks quantized by Triton's kernel, and as the CPU does it."""
    if request.param == "fused":
        monkeypatch.setattr(module, "backend", lambda _: replace(PLAIN, operand=fused.operand))
    module._quantizers.cache_clear()
    yield place
    module._quantizers.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 32, 40, 352])
def test_numbers_are_the_references(quantizer, width, dtype):
    x = numbers(3, 61, width, dtype=dtype)
    codes, scales = in_mxfp8(x.to(quantizer.device))
    blocks = -(-width // 32)
    assert (codes.shape, scales.shape) == ((1, 183, 32 * blocks), (1, 183, blocks))
    assert codes.nbytes + scales.nbytes == 183 * 33 * blocks
    assert same(rounded(x), from_mxfp8(codes, scales, x.shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 96])
def test_a_gradient_is_that_of_the_rounded_input(quantizer, monkeypatch, width, dtype):
    take_kernels(monkeypatch, "swiglu")
    x = (4 * randn(2, 3, 5, 2, width)).to(dtype)
    x[1, 0, 0, 1, 3] = torch.nan
    at, g = rounded(x).flatten(-2), randn(2, 3, 5, width, seed=1, dtype=dtype)
    x, at, g = (t.to(quantizer.device) for t in (x.flatten(-2), at, g))
    x, at = x.requires_grad_(), at.requires_grad_()
    y, plain = swiglu(x, keeps_mxfp8=True), swiglu(x)
    assert same(plain.detach().cpu(), y.detach())
    [found], [expected] = torch.autograd.grad(y, x, g), torch.autograd.grad(swiglu(at), at, g)
    assert same(expected.cpu(), found)
    assert not found[0].isnan().any()
    alone = x[:1].detach().requires_grad_()
    assert same(found[:1].cpu(), torch.autograd.grad(swiglu(alone, keeps_mxfp8=True), alone, g[:1])[0])
    assert not same(torch.autograd.grad(plain, x, g)[0].cpu(), found)


def test_a_pass_without_gradients_keeps_nothing(monkeypatch):
    monkeypatch.setattr(module, "_quantizers", None)
    x = randn(2, 4, 64)
    swiglu(x, keeps_mxfp8=True)
    with torch.no_grad():
        swiglu(x.requires_grad_(), keeps_mxfp8=True)


def test_what_is_kept_is_codes_alone():
    x = randn(2, 4, 128).requires_grad_()
    with keeping([]) as kept:
        swiglu(x, keeps_mxfp8=True)
    assert kept.bytes() == 2 * 4 * 128 * 33 // 32


def test_the_backend_of_a_device_is_taken():
    of, _ = module._quantizers("cpu")
    assert of.backend is backend("cpu")
