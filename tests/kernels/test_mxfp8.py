"""MXFP8 is held by BF16 down to its smallest block: every code and scale, in every implementation."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Quantizer
from fp4dse.dse.formats import ELEMENTS
from fp4dse.kernels import native, quantize
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec.reference import decode_operand
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton.features import features_of

MXFP8 = [name for name in QUANTIZERS if name.startswith("mxfp8")]
LEAST = {"e4m3": -124, "e5m2": -117}
"""Exponents of the smallest scales: 2^-133 over the smallest element, 2^-9 or 2^-16."""


def binades() -> torch.Tensor:
    """[276, 4, 32]: blocks of a maximum in each binade of float32, with all of its bits, and what is far below it."""
    g = torch.Generator().manual_seed(0)
    x = (torch.rand(276, 4, 32, generator=g) * 2 - 1).double()
    x[:, :, 16:] *= torch.exp2(torch.randint(-16, 0, (276, 4, 16), generator=g).double())
    x[:, :, 0] = torch.tensor([1.0, 1.5, 1.75, 1.9999]).double()
    return (x * torch.exp2(torch.arange(-149, 127).double())[:, None, None]).float()


@pytest.mark.parametrize(("element", "least"), LEAST.items())
def test_bf16_holds_every_code_times_every_scale_from_the_smallest_on_and_not_below(element, least):
    codes = np.array(ELEMENTS[element].magnitudes())
    for exponent in range(-127, 128):
        values = codes * 2.0**exponent
        values = values[values <= np.finfo(np.float32).max]
        held = values.astype(ml_dtypes.bfloat16).astype(np.float64) == values
        assert held.all() == (exponent >= least)
        assert np.array_equal(torch.from_numpy(values).to(torch.bfloat16).double().numpy() == values, held)


@pytest.mark.parametrize("name", MXFP8)
def test_scales_are_the_rules_down_to_the_smallest_and_elements_below_are_numbers_of_bf16(name):
    q, x = QUANTIZERS[name], binades()
    got, element = quantize(x, q), ELEMENTS[q.element]
    amax = x.abs().amax(2).double().numpy()
    divisor = element.max if q.scale.rule == "rceil" else 2.0**element.emax
    fraction, exponent = np.frexp(amax / divisor)  # fraction in [1/2, 1)
    up = 0 if q.scale.rule == "floor" else fraction > 0.5
    by_rule = np.ldexp(1.0, np.maximum(exponent - 1 + up, LEAST[q.element]))
    assert np.array_equal(got.scales[..., 0].double().numpy(), by_rule)
    small = x.abs().amax(2) < 2.0 ** (LEAST[q.element] + element.emin)  # elements are subnormal: steps of 2^-133
    assert small.sum() > 40
    assert torch.equal(got.values[small], x[small].to(torch.bfloat16).float())


def test_a_block_of_zeros_has_the_smallest_scale():
    for name in MXFP8:
        got = quantize(torch.zeros(1, 32), QUANTIZERS[name])
        assert got.scales.item() == 2.0 ** LEAST[QUANTIZERS[name].element]
        assert not got.values.any()
    assert quantize(torch.zeros(1, 32), Quantizer.named("mxfp4")).scales.item() == 2.0**-127


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_implementations_have_the_references_bits_in_every_binade(place, dtype):
    x = binades().flatten(0, 1)[None].expand(len(MXFP8), -1, -1).contiguous()
    quantizers = [QUANTIZERS[name] for name in MXFP8]
    tables, seeds = descriptor(quantizers), torch.zeros(len(MXFP8), dtype=torch.int64)
    call = Call(32, *tables, features_of(*tables), seeds, torch.tensor(0), 0)
    expected, dec = decode_operand(x, *tables)
    assert torch.equal(expected.to(torch.bfloat16).float(), expected)
    compiled = native.operand(x, False, call)
    assert torch.equal(compiled[0].view(torch.int32), expected.view(torch.int32))
    moved = [t.to(place.device) if isinstance(t, torch.Tensor) else t for t in call]
    values, factors = fused.operand(x.to(place.device), False, Call(*moved), dtype)
    assert values.dtype == dtype
    assert torch.equal(values.cpu().float().view(torch.int32), expected.view(torch.int32))
    assert torch.equal(factors.cpu(), dec)
