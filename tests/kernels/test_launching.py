"""No launch asks for a launch grid that a device does not take, and lanes beyond 32 bits have the bits of others."""

import ast
from pathlib import Path

import msgspec
import pytest
import torch

from fp4dse import kernels
from fp4dse.dse import QUANTIZERS
from fp4dse.dse.rounding import Stochastic
from fp4dse.kernels.ops import launching
from fp4dse.kernels.ops.launching import FIRST, OTHERS, is_large, launch_grid
from fp4dse.kernels.ops.rotation import rotate
from fp4dse.kernels.quant.spec import blocks
from fp4dse.kernels.quant.spec.reference import decode_operand, tensor_maxima
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton import unfused
from fp4dse.kernels.quant.triton.by_scales import elements

pytest.importorskip("triton", reason="triton is not installed")
from tests.kernels.test_triton import arguments_for, assert_same_bits, both, call_for, odd_rows, signs_of, to

NV, MX = QUANTIZERS["nvfp4"], QUANTIZERS["mxfp4"]
SR = msgspec.structs.replace(NV, rounding=Stochastic())


def test_a_launch_grid_that_no_device_takes_is_refused():
    assert launch_grid(FIRST) == (FIRST, 1, 1)
    assert launch_grid(2**15, OTHERS) == (2**15, OTHERS, 1)
    for sizes in ((FIRST + 1,), (1, OTHERS + 1), (1, 1, OTHERS + 1), (2**15, 2**15, 2)):
        with pytest.raises(ValueError, match=r"launch grid: found .* accepted: 2,147,483,647 in all, 65,535 along"):
            launch_grid(*sizes)


def launches():
    """Every `kernel[programs](...)` in the sources of the Triton kernels, and what stands for the grid."""
    folder = Path(kernels.__file__).parent
    sources = [(str(file.relative_to(folder)), file.read_text()) for file in folder.rglob("*.py")]
    for name, text in sources:
        for function in ast.walk(ast.parse(text)) if "@triton.jit" in text else ():
            if not isinstance(function, ast.FunctionDef):
                continue
            assigned = {
                target.id: node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                    programs = node.func.slice
                    found = assigned.get(programs.id) if isinstance(programs, ast.Name) else programs
                    yield f"{name}:{node.lineno}", found


def test_every_launch_asks_launch_grid():
    found = dict(launches())
    assert len(found) > 25
    for where, programs in found.items():
        chosen = [programs.body, programs.orelse] if isinstance(programs, ast.IfExp) else [programs]
        for one in chosen:
            assert isinstance(one, ast.Call), where
            assert isinstance(one.func, ast.Name), where
            assert one.func.id == "launch_grid", where


@pytest.fixture
def meta(monkeypatch):
    """Kernels are not run: what is asked of the device is noted. For tensors without memory."""
    from triton.runtime.jit import JITFunction

    asked = []

    def run(self, *_, grid, **__):
        asked.append(grid)

    monkeypatch.setattr(JITFunction, "run", run)
    return asked


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


LONG = 512 * 112 * 112
"""Rows of the first convolution of a ResNet on 512 images of 224 × 224."""


@pytest.mark.parametrize("shape", [(2, LONG, 160), (1, LONG, 576), (560, 512 * 32 * 32, 32), (1, 16, LONG)], ids=str)
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_the_largest_operands_fit_their_launch_grids(meta, shape, columns):
    from fp4dse.kernels.ops.products import triton as products
    from fp4dse.kernels.quant.triton import elements, launch, squares

    lanes, rows, width = shape
    x = empty(*shape)
    dec, signs = empty(lanes, dtype=torch.float32), empty(lanes, 16, dtype=torch.float32)
    call = to("meta", call_for([SR] * lanes))._replace(tensor_amax=dec)
    launch.launch(x, columns, call._replace(rotation=16, signs=signs), (x, None, dec))
    launch.tensor_maxima(x)
    launch.tensor_maxima(x, columns, 16, signs)
    launch.launch_both(x, (call, call), [(x, dec), (x, dec)])
    squares.squares(x, call, torch.bfloat16)
    cut = empty(lanes, rows, width, dtype=torch.float32)
    elements.launch_elements(cut, dec, dec, None, call, cut)
    products.multiply(x, empty(lanes, 64, width), "ieee")
    products.multiply(x.mT, empty(lanes, 64, rows), "ieee")
    products.multiply(empty(lanes * 2**16, 1, 64), empty(lanes * 2**16, 33, 64), "ieee")  # attention to a cache
    assert len(meta) == 9
    for first, second, third in meta:
        assert 0 < first * second * third <= FIRST
        assert max(second, third) <= OTHERS


@pytest.mark.parametrize("rows", [LONG, 128 * OTHERS + 1, 2**30])
def test_rows_that_are_converted_to_columns_fit_the_launch_grid(meta, rows):
    from fp4dse.kernels.ops.mxfp4 import triton as mxfp4

    mxfp4.columns_to_fp8(empty(2, rows, 16, dtype=torch.uint8), empty(2, rows, 1, dtype=torch.uint8))
    tiles = -(-rows // 128)
    assert meta == [(1, tiles, 2) if tiles <= OTHERS else (tiles, 1, 2)]


@pytest.fixture
def all_large(monkeypatch):
    """Every lane is one of 2^30 elements or more."""
    monkeypatch.setattr(launching, "NEAR", 0)
    assert is_large(1)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_lane_has_the_bits_of_the_reference(place, all_large, columns, dtype):
    for rows in (13, 14):
        assert_same_bits(*both(place, odd_rows(2, 96, rows).to(dtype), [NV, SR], columns))
    x = odd_rows(2, 96, 14).to(dtype)
    for lanes in ([NV, NV], [NV, SR]):
        arguments = arguments_for(x, lanes, columns)
        got = fused.packed(*to(place.device, arguments))
        expected = unfused.packed(*arguments, lanes)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_a_large_lane_is_rotated_and_its_maximum_taken(place, all_large, columns):
    x, signs = odd_rows(2, 256), signs_of(2, 128)
    assert_same_bits(*both(place, x, [NV, SR], columns, rotation=128, signs=signs))
    x[1] = 1.0
    there = (x.mT.contiguous() if columns else x).to(place.device)
    got = place.module.tensor_maxima(there, columns, 128, signs.to(place.device)), place.module.tensor_maxima(there)
    expected = rotate(x, 128, 2, signs).abs().amax((1, 2)), tensor_maxima(x)[:, 0]
    assert torch.equal(got[0].cpu()[1:], expected[0][1:])
    assert torch.equal(got[1].cpu()[1:], expected[1][1:])


@pytest.mark.parametrize("name", ["ms-eden", "mbs-mxfp4", "if4"])
def test_a_large_lane_of_a_codec_has_the_bits_of_the_reference(place, all_large, name):
    q = QUANTIZERS[name]
    for columns in (False, True):
        assert_same_bits(*both(place, torch.randn(2, 14, 2 * q.unit), [q] * 2, columns))


def test_columns_of_a_tall_lane_in_fp8_are_those_of_others(place, monkeypatch):
    codes, scales = (torch.randint(100, 120, (2, 160, n), dtype=torch.uint8).to(place.device) for n in (80, 5))
    usual = place.mxfp4.columns_to_fp8(codes, scales)
    monkeypatch.setattr(place.mxfp4, "OTHERS", 1)
    for got, expected in zip(place.mxfp4.columns_to_fp8(codes, scales), usual, strict=True):
        assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
def test_both_operands_of_a_tall_lane_are_those_of_two_calls(place, monkeypatch, dtype):
    monkeypatch.setattr(place.module, "OTHERS", 0)
    x = torch.randn(2, 192, 128).to(torch.bfloat16)
    x, call = to(place.device, (x, call_for([NV, NV])))
    got = fused.both(x, (call, call), dtype)
    one = fused.packed if dtype == torch.uint8 else lambda *a: fused.operand(*a, dtype)
    expected = [t for columns in (False, True) for t in one(x, columns, call)]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_tiles_of_a_large_lane_are_quantized_where_they_lie(place, all_large):
    q = QUANTIZERS["nvfp4-2d"]
    x = odd_rows(3, 160, rows=96)
    call = call_for([q] * 3, block=16, tensor_amax=tensor_maxima(x)[:, 0])
    got = place.squares.squares(*to(place.device, (x, call)), torch.float32)
    expected, dec = decode_operand(blocks.cut(x, q.block), call.floats, call.ints)
    assert_same_bits([t.cpu() for t in got], [blocks.join(expected, x.shape, q.block), dec])


def test_elements_of_a_large_lane_are_those_of_others(place, monkeypatch):
    x = torch.randn(2, 9, 384)
    scale = x.abs().amax(2)
    call = call_for([MX, msgspec.structs.replace(MX, rounding=Stochastic())])
    arguments = to(place.device, (x, scale, 1 / scale, None, call))
    usual = elements(*arguments, torch.float32)
    monkeypatch.setattr(launching, "NEAR", 0)
    assert torch.equal(elements(*arguments, torch.float32), usual)
    assert usual.count_nonzero() > x.numel() // 4
