"""The program that times ways to convert runs but for its clock: its ways launch, and their bits are compared."""

import importlib.util
from types import ModuleType

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from fp4dse.kernels.ops import mxfp4
from tests.kernels.comparing import take_kernels

ROWS, COLUMNS = 256, 128
"""Two tiles below each other, and four blocks across."""


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


def by_the_definition(x: tuple[Tensor, Tensor], monkeypatch, *, columns: bool) -> mxfp4.Fp8:
    """In rows or in columns."""
    with monkeypatch.context() as patch:
        take_kernels(patch, "mxfp4", taken=False)
        return (mxfp4.columns_to_fp8 if columns else mxfp4.to_fp8)(*x)


def test_every_way_has_the_bits_of_the_definition(variants, place, monkeypatch):
    x = operand(0)
    wanted = {columns: by_the_definition(x, monkeypatch, columns=columns) for columns in (False, True)}
    assert all(of.outside.any() and not of.outside.all() for of in wanted.values())
    launched = {}
    for way in variants.ways():
        found = way.call(*(of.to(place.device) for of in x))
        launched[way.name()] = variants.differing(mxfp4.Fp8(*(of.cpu() for of in found)), wanted[way.columns])
    assert {name: bad for name, bad in launched.items() if bad} == {}
    assert len(launched) == len(variants.ways()) >= 8


def test_every_byte_that_differs_is_counted_however_tensors_lie(variants, monkeypatch):
    """Factors and marks of columns are transposed."""
    x = operand(1)
    wanted = by_the_definition(x, monkeypatch, columns=True)
    factor, outside = (of.mT.clone(memory_format=torch.contiguous_format).mT for of in wanted[1:])
    assert factor.stride(-1) != 1
    found = mxfp4.Fp8(wanted.values.clone(), factor, outside)
    assert variants.differing(found, wanted) == 0
    found.values.view(torch.uint8)[0, 5, 7] ^= 1
    found.factor[0, 3, 1].neg_()  # the sign is in one of its four bytes
    found.outside[0, 2, 0] ^= True
    assert variants.differing(found, wanted) == 3
