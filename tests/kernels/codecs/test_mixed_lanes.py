"""Lanes of one codec that differ in all that a descriptor carries: each is what it is alone."""

import msgspec
import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import BF16, E4M3, E8M0, FP32, UE4M4, UE5M3, TensorScale
from fp4dse.kernels.ops.philox import random16
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec.codecs import CODECS
from fp4dse.kernels.quant.spec.reference import decode_operand
from fp4dse.kernels.selftest import odd_blocks

CHANCE = Stochastic(bits=8)
EDEN = E4M3(zero="one", rounding="stochastic")
VARIANTS: dict[str, list[dict]] = {
    "mbs-mxfp4": [
        {"scale": E8M0(rule="rceil"), "rounding": CHANCE},
        {"scale": E8M0(), "range": "3/4"},
        {"element": "int4", "range": "aligned"},
        {"element": "e3m0"},
    ],
    "ms-eden": [
        {"tensor_scale": TensorScale(target=128.0)},
        {"scale": UE5M3(rounding="stochastic")},
        {"element": "int4", "scale": E4M3(zero="keep", rounding="stochastic")},
        {"scale": BF16(rounding="stochastic", zero="min")},
    ],
    "quest-mxfp4": [{"rounding": CHANCE}],
    "int4-sawb": [{"rounding": Stochastic()}],
    "radix4": [
        {"element": "radix4-odd"},
        {"rounding": CHANCE},
        {"scale": E8M0(), "range": "3/4"},
        {"scale": E4M3(), "tensor_scale": TensorScale(), "rounding": Stochastic(), "range": "16/17"},
        {"element": "radix4-odd", "scale": UE4M4(convention="encode", zero="min", hybrid=True)},
        {"scale": E4M3(rounding="stochastic")},
    ],
    "nvfp4-exact": [
        {"element": "int4", "scale": UE5M3()},
        {"element": "e3m0", "scale": E4M3(rounding="up"), "tensor_scale": None},
        {"element": "e4m3", "scale": FP32(), "tensor_scale": TensorScale(target=1.0)},
        {"scale": E4M3(rounding="stochastic", zero="min")},
    ],
}
LANES = {
    name: [msgspec.structs.replace(Quantizer.named(name), **change) for change in ({}, *changes)]
    for name, changes in VARIANTS.items()
}
ROW = 128


def decode(name: str, lanes: list[int], function=decode_operand, nan: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Some lanes of a population, decoded. Every second one holds NaN and Inf."""
    quantizers = LANES[name]
    block = quantizers[0].block
    x = odd_blocks()[torch.arange(len(quantizers)) % 2]
    x = x if nan else x.nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)
    x = x.reshape(len(x), -1, block) if isinstance(block, int) else x
    zero = torch.tensor(0)
    random, scale_random = (
        random16(torch.arange(len(x)), stream, zero, zero, n) for stream, n in ((1, x[0].numel()), (6, x.shape[1]))
    )
    tables = descriptor([quantizers[lane] for lane in lanes])
    more = {"codec": quantizers[0].codec, "scale_random": scale_random[lanes]}
    more |= {"unpadded": 100} if name == "int4-sawb" else {}
    return function(x[lanes], *tables, random.view_as(x)[lanes], False, **more)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=7e7).view(torch.int32), b.nan_to_num(nan=7e7).view(torch.int32))


@pytest.mark.parametrize("name", LANES)
def test_the_lanes_make_sense_and_share_a_codec(name):
    assert {q.codec for q in LANES[name]} <= set(CODECS)
    assert len({q.codec for q in LANES[name]}) == 1
    assert not [fault for q in LANES[name] for fault in quantizer_faults(q)]


@pytest.mark.parametrize("name", LANES)
def test_a_lane_has_the_same_bits_in_any_company(name):
    lanes = list(range(len(LANES[name])))
    together = decode(name, lanes)
    for lane in lanes:
        assert all(same_bits(a[[lane]], b) for a, b in zip(together, decode(name, [lane]), strict=True))
    backwards = decode(name, lanes[::-1])
    assert all(same_bits(a, b.flip(0)) for a, b in zip(together, backwards, strict=True))


@pytest.mark.parametrize("name", LANES)
def test_nan_spreads_no_further_than_what_shares_a_factor(name):
    lanes = list(range(len(LANES[name])))
    (values, _), (clean, _) = decode(name, lanes), decode(name, lanes, nan=False)
    assert torch.isfinite(clean).all()
    bad = ~torch.isfinite(odd_blocks()).all(2)  # rows of 128: a macro block, or several blocks
    for lane, q in enumerate(LANES[name]):
        rows = bad[lane % 2].repeat_interleave(ROW // clean.shape[2])
        if q.tensor_scale is not None:
            rows = rows | rows.any()
        assert torch.equal(values[lane][~rows], clean[lane][~rows])
        if q.codec == "macro" or q.tensor_scale is not None:
            assert values[lane][rows].isnan().all()
