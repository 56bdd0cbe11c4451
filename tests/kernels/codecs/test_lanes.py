"""Lanes of different recipes go through a codec together and are what each is alone."""

import msgspec
import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.dse.rounding import Nearest, Stochastic
from fp4dse.dse.scale import BF16, E4M3, E5M2, FP32, UE4M4, UE5M3, TensorScale
from fp4dse.kernels.ops.philox import random16
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec.reference import decode_operand
from fp4dse.kernels.selftest import odd_blocks


def lanes_of(name: str, **fields) -> list[Quantizer]:
    """The named quantizer, and variants of it: one for each value given."""
    q = Quantizer.named(name)
    return [q] + [msgspec.structs.replace(q, **{key: value}) for key, values in fields.items() for value in values]


LANES = {
    "hif4": lanes_of("hif4", rounding=[Stochastic(), Stochastic(bits=8)]),
    "if4": lanes_of(
        "if4",
        scale=[E4M3(zero="min"), E5M2(), FP32(), E4M3(rounding="up")],
        tensor_scale=[None, TensorScale(target=256.0)],
        rounding=[Stochastic(), Nearest(ties="away")],
        range=["16/17"],
    ),
    "mixfp4": lanes_of(
        "mixfp4",
        scale=[E4M3(zero="one"), E5M2(), FP32(), E4M3(rounding="stochastic")],
        tensor_scale=[None, TensorScale(target=256.0)],
        rounding=[Stochastic(), Nearest(ties="away")],
        range=["16/17", "3/4"],
    ),
    "razer": lanes_of(
        "razer",
        scale=[UE5M3(), BF16()],
        tensor_scale=[None],
        rounding=[Nearest(ties="away")],
        range=["16/17", "3/4"],
    ),
    "blockdialect": lanes_of("blockdialect", rounding=[Nearest()]),
    "amxfp4": lanes_of(
        "amxfp4",
        element=["e1m2", "int4", "e3m0"],
        scale=[E4M3(), UE4M4(zero="min"), E5M2(zero="one", rounding="stochastic")],
        tensor_scale=[TensorScale()],
        rounding=[Stochastic(), Stochastic(bits=8)],
    ),
}


def population(name: str) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Odd blocks, some with NaN and Inf in every second lane, tables, random bits for elements and scales."""
    quantizers = LANES[name]
    lanes = len(quantizers)
    x = odd_blocks()[torch.arange(lanes) % 2].view(lanes, -1, quantizers[0].block)
    draws = [
        random16(torch.arange(lanes), stream, torch.tensor(0), torch.tensor(0), n)
        for stream, n in ((1, x[0].numel()), (2, x.shape[1]))
    ]
    return x, descriptor(quantizers), draws[0].view_as(x), draws[1]


def decode(name: str, lanes=slice(None), function=decode_operand) -> tuple[torch.Tensor, torch.Tensor]:
    x, tables, random, scale_random = population(name)
    codec = LANES[name][0].codec
    arguments = (x[lanes], *(table[lanes] for table in tables), random[lanes])
    return function(*arguments, codec=codec, scale_random=scale_random[lanes])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=7e7).view(torch.int32), b.nan_to_num(nan=7e7).view(torch.int32))


@pytest.mark.parametrize("name", LANES)
def test_a_lane_has_the_same_bits_in_any_company(name):
    together = decode(name)
    for lane in range(len(LANES[name])):
        alone = decode(name, slice(lane, lane + 1))
        assert all(same_bits(a[lane : lane + 1], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("name", LANES)
def test_a_block_with_nan_or_inf_is_nan_and_no_other_is(name):
    x = population(name)[0]
    got = decode(name)[0]
    bad = ~torch.isfinite(x).all(2)
    for lane, q in enumerate(LANES[name]):
        everywhere = q.tensor_scale is not None and bad[lane].any()
        assert torch.equal(got[lane].isnan().all(1), bad[lane] | everywhere)
        assert torch.equal(got[lane].isnan().any(1), bad[lane] | everywhere)
