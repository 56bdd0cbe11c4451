"""The program that times ways to convert runs but for its clock: its ways launch, and their bits are compared."""

import importlib.util
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.jit import JITFunction

from fp4dse.kernels.ops import mxfp4
from tests.kernels.comparing import take_kernels

ROWS, COLUMNS = 1024, 256
"""As few as all ways take: eight tiles below each other, and eight blocks across."""


@pytest.fixture(scope="module")
def variants(place):
    """The program where the kernels run, with the device functions that they have there."""
    spec = importlib.util.find_spec("tests.kernels.conversion_variants")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        if is_interpreted(place.mxfp4):
            patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


def is_interpreted(module: ModuleType) -> bool:
    """True if a module's kernels are."""
    return not any(isinstance(of, JITFunction) for name, of in vars(module).items() if name.endswith("_kernel"))


def operand(seed: int) -> tuple[Tensor, Tensor]:
    """Codes, and scales of which a few are below the window."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (1, ROWS, COLUMNS // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(120, 131, (1, ROWS, COLUMNS // 32), generator=g).to(torch.uint8)
    return codes, torch.where(torch.rand(scales.shape, generator=g) < 0.005, 100, scales).to(torch.uint8)


def columns(x: tuple[Tensor, Tensor], monkeypatch) -> mxfp4.Fp8:
    """By the definition."""
    with monkeypatch.context() as patch:
        take_kernels(patch, "mxfp4", taken=False)
        return mxfp4.columns_to_fp8(*x)


def apart(ways: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One of those that store alike, with as many blocks as any: an interpreter takes seconds for each tile, and has no
    warps, caches or stages. Those that keep rows in a thread have a test of their own."""
    return list({(how["REPEAT"] > 1, how["TMA"]): how for how in ways if not how["ROWS"]}.values())


def test_every_way_has_the_bits_of_the_definition(variants, place, monkeypatch):
    x = operand(0)
    wanted = columns(x, monkeypatch)
    assert wanted.outside.any()
    assert not wanted.outside.all()
    launched = {}
    for how in apart(variants.ways()) if is_interpreted(variants) else variants.ways():
        found = variants.columns(*(of.to(place.device) for of in x), how)
        launched[variants.name(how)] = variants.differing(mxfp4.Fp8(*(of.cpu() for of in found)), wanted)
    assert {name: bad for name, bad in launched.items() if bad} == {}
    assert len(launched) >= 4


TOP, DISTANCES = 140, 28


def every_byte() -> tuple[Tensor, Tensor]:
    """Codes and scales of five tiles. Four have every byte, at every place of a word, in blocks of each distance from
    their tile's largest scale, from 0 to 26, and at the 28th under NaN's, without signs. The first and the last have
    blocks of zeros under larger scales, the last in some columns nothing else."""
    number = torch.arange(4 * 127).view(4, 127)
    distance = F.pad(number % DISTANCES, (1, 0)).flatten()
    start = F.pad(number // DISTANCES, (1, 0)).flatten()[:, None]
    codes = (start % 4 * 64 + torch.arange(64) + start // 4) % 256
    is_nan = (distance == DISTANCES - 1)[:, None]
    codes = torch.where(is_nan, codes & 0x77, codes)
    rows = zip(distance.tolist(), codes.tolist(), strict=True)
    found = {(far, n % 4, byte) for far, line in rows for n, byte in enumerate(line)}
    assert len(found) == (DISTANCES - 1) * 4 * 256 + 4 * 64
    scales = torch.where(is_nan, 255, TOP - distance[:, None]).repeat(1, 4)
    codes[90], scales[90] = 0, 254
    zeros, large = torch.zeros(128, 64, dtype=torch.int64), torch.arange(127, 255)[:, None].repeat(1, 4)
    zeros[5, :32] = 3
    return torch.cat([codes, zeros])[None].to(torch.uint8), torch.cat([scales, large])[None].to(torch.uint8)


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_what_a_thread_keeps_is_every_byte_under_every_scale(variants, place, monkeypatch, rows):
    x = every_byte()
    how = next(how for how in variants.ways() if how["ROWS"] == rows)
    found = variants.columns(*(of.to(place.device) for of in x), how)
    assert variants.differing(mxfp4.Fp8(*(of.cpu() for of in found)), columns(x, monkeypatch)) == 0


def test_every_byte_that_differs_is_counted_however_tensors_lie(variants, monkeypatch):
    """Factors and marks of columns are transposed."""
    x = operand(1)
    wanted = columns(x, monkeypatch)
    factor, outside = (of.mT.clone(memory_format=torch.contiguous_format).mT for of in wanted[1:])
    assert factor.stride(-1) != 1
    found = mxfp4.Fp8(wanted.values.clone(), factor, outside)
    assert variants.differing(found, wanted) == 0
    found.values.view(torch.uint8)[0, 5, 7] ^= 1
    found.factor[0, 3, 1].neg_()  # the sign is in one of its four bytes
    found.outside[0, 2, 0] ^= True
    assert variants.differing(found, wanted) == 3
