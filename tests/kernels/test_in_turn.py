"""Programs that quantize several regions write the codes that the reference has."""

import pytest
import torch

from fp4dse.dse import QUANTIZERS
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.triton import unfused
from fp4dse.kernels.quant.triton.features import features_of
from tests.kernels.test_batched import operand


def call_of(names, x):
    tables = descriptor([QUANTIZERS[name].canonical() for name in names], x.device)
    step = torch.zeros((), dtype=torch.int64, device=x.device)
    maxima = x.float().abs().amax((1, 2))
    block = int(QUANTIZERS[names[0]].block)
    return Call(block, *tables, features_of(*tables), torch.arange(len(x), device=x.device), step, 7, maxima)


PAIRS = {"one": (("nvfp4", "ue5m3-t448"),) * 2, "two": (("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"))}
"""Quantizers of two lanes, of rows and of columns."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PAIRS)
def test_regions_in_turn_have_the_codes_of_the_reference(place, name, dtype):
    x = operand(2, 160, 96, dtype).to(place.device)
    x[0, :32] = 0
    calls = [call_of(names, x) for names in PAIRS[name]]
    if name == "one":
        calls[1] = calls[0]
    for regions in (
        place.in_turn.Regions(64, 64, 1, 4, 2),
        place.in_turn.Regions(128, 64, 2, 4, 3),
        place.in_turn.Regions(128, 128, 4, 4, 100),
    ):
        got = place.in_turn.both_in_turn(x, calls, regions)
        expected = []
        for columns, (call, names) in enumerate(zip(calls, PAIRS[name], strict=True)):
            quantizers = [QUANTIZERS[of].canonical() for of in names]
            expected += unfused.packed(x, bool(columns), call, quantizers)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a.cpu(), b.cpu())


def test_what_it_does_not_take_is_refused(place):
    x = operand(1, 64, 64).to(place.device)
    call = call_of(["nvfp4"], x)._replace(rotation=16)
    with pytest.raises(ValueError, match="accepted: those to nearest"):
        place.in_turn.both_in_turn(x, [call, call], place.in_turn.Regions(64, 64, 1, 4, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("registers", [None, 80])
def test_on_a_gpu_large_operands_have_the_codes_that_one_program_a_region_writes(registers):
    from fp4dse.kernels.quant.triton import operators
    from fp4dse.kernels.quant.triton.in_turn import Regions, both_in_turn

    for shape in ((1, 4096, 2736), (16, 1024, 384), (64, 512, 256)):
        x = operand(*shape, torch.bfloat16).cuda()
        for name in ("nvfp4", "mxfp4"):
            call = call_of([name] * len(x), x)
            for regions in (Regions(128, 64, 2, 4, 528, registers), Regions(64, 64, 2, 4, 528, registers)):
                got = both_in_turn(x, [call, call], regions)
                assert all(map(torch.equal, got, operators.both(x, (call, call), torch.uint8)))
