"""No finite tensor decodes to NaN, whatever its largest number; and the encode convention is as written."""

import itertools

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Quantizer
from fp4dse.dse.own_formats import FloatElement, TableElement
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import E4M3, SCALE_NAMES, UE5M3, FloatScale, TensorScale
from fp4dse.kernels import native, quantize
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec import reference
from fp4dse.kernels.quant.triton.features import features_of

replace = msgspec.structs.replace
FLT_MAX = torch.finfo(torch.float32).max
MAXIMA = torch.tensor(
    [2.0**-149, 1e-36, 3e-34, *(m * 2.0**k for k in range(-148, 128, 11) for m in (1, 1.75)), FLT_MAX]
)
"""Tensor maxima over the whole range, subnormal ones among them."""


def tensors(maxima=MAXIMA) -> torch.Tensor:
    """[len(maxima), 8, 64]: blocks that are all zero, or smaller than the largest by up to 2^-60; zeros among all."""
    shares = torch.tensor([1, 0.6, 2.0**-6, 2.0**-12, 2.0**-24, 2.0**-60, 0, 1])[:, None]
    x = torch.rand(8, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[:, 3] = 0
    x = (x * shares).double() * maxima.double()[:, None, None]
    x[:, 0, 0] = maxima.double()
    return x.to(torch.float32)


SMALL = (
    FloatElement(mantissa=1, emin=-30, max=2.0**-28),
    TableElement(values=(-0.75, 0.0, 0.5)),
    TableElement(values=(-1.0, 0.0, 0.3, 0.9)),
)
"""Elements whose largest is small: 1/val_max times the tensor's factor is beyond FP32 sooner than the factor is."""


def fits(q: Quantizer) -> bool:
    return not quantizer_faults(q.canonical())


def block_scaled() -> dict[str, Quantizer]:
    """Every scale format, convention, policy of zeros and kind of tensor scale, and the named quantizers."""
    factors = None, TensorScale(), TensorScale(target=2.0**-9), TensorScale(target=1e-30), TensorScale(target=1e30)
    scales = []
    for scale in SCALE_NAMES.values():
        of_floats = itertools.product(("decode", "encode"), (False, True), ("keep", "min", "one"), ("nearest", "up"))
        scales += [
            replace(scale, convention=convention, hybrid=hybrid, zero=zero, rounding=rounding)
            for convention, hybrid, zero, rounding in (of_floats if isinstance(scale, FloatScale) else ())
        ] or [scale]
    found = [Quantizer(block=32, scale=s, tensor_scale=t) for s in scales for t in factors]
    found += [
        Quantizer(element=e, block=32, scale=s, tensor_scale=t)
        for e in SMALL
        for s in SCALE_NAMES.values()
        for t in factors[:2]
    ]
    found.append(Quantizer(element=SMALL[-1], scale=E4M3(), tensor_scale=TensorScale(), range="16/17"))
    found += [replace(q, tensor_scale=t) for q in QUANTIZERS.values() for t in factors if not q.is_plain]
    found += [q for q in QUANTIZERS.values() if not q.is_plain]
    return {repr(q.canonical()): q.canonical() for q in found if fits(q)}


ALL = list(block_scaled().values())


def alike_in(quantizers: list[Quantizer], most: int = 8) -> list[tuple[tuple[int | str, str, bool], list[Quantizer]]]:
    """Some at a time that the reference takes side by side."""
    found: dict = {}
    for q in quantizers:
        found.setdefault((q.block, q.codec, "4over6" in q.adapt), []).append(q)
    return [(key, of[first : first + most]) for key, of in found.items() for first in range(0, len(of), most)]


@pytest.mark.parametrize("old", [None, 2.0**-149, 1.0, 3e38], ids=str)
def test_no_finite_tensor_decodes_to_nan_in_the_reference(old):
    """old: the maximum that tensor scales follow, which may be any other than the tensor's own."""
    x = tensors()
    chosen = [q for q in ALL if old is None or (q.tensor_scale and q.codec != "exact")]
    for (block, codec, adaptive), alike in alike_in(chosen):
        blocks = x.reshape(len(x), -1, block if isinstance(block, int) else x[0].numel()).repeat(len(alike), 1, 1)
        random = torch.full(blocks.shape[:2], 30_000, dtype=torch.int32)
        amax = None if old is None else torch.full((len(blocks), 1), old)
        more = {"codec": codec, "scale_random": random, "tensor_amax": amax}
        lanes = [q for q in alike for _ in x]
        encoded, dec = reference.quantize_blocks(blocks, *descriptor(lanes), None, adaptive, **more)
        operand = reference.decoded(encoded)
        wrong = (torch.isnan(operand) | torch.isnan(operand * dec[:, None, None])).any(2).any(1)
        assert not wrong.any(), lanes[int(wrong.int().argmax())]


def test_the_compiled_code_has_the_references_bits_over_the_whole_range():
    assert native.why_not_native() is None
    x, seeds, step = tensors(), torch.zeros(len(MAXIMA), dtype=torch.int64), torch.tensor(0)
    lanes = [q for q in ALL if q.codec == "block" and q.adapt == "none" and isinstance(q.block, int)]
    lanes = [q for q in lanes if not q.stochastic_scales]
    assert len(lanes) > 100
    for q in lanes:
        tables = descriptor([q] * len(x))
        got = native.operand(x, False, Call(q.block, *tables, features_of(*tables), seeds, step, 0))
        expected = reference.decode_operand(x.reshape(len(x), -1, q.block), *tables)
        assert torch.equal(got[0].view(torch.int32), expected[0].reshape(x.shape).view(torch.int32)), q
        assert torch.equal(got[1], expected[1]), q


def encode_chain(x: np.ndarray, scale_type, largest: float, target: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales under the encode convention, operation by operation in float32 with casts of ml_dtypes."""
    f, top = np.float32, np.finfo(np.float32).max
    with np.errstate(all="ignore"):
        enc = f(1) if target == 0 else np.clip(f(6 / target) / np.abs(x).max(), np.finfo(f).tiny, top).astype(f)
        blocks = x.reshape(-1, 16)
        stored = np.minimum(f(1) / (np.abs(blocks).max(1) * (enc * f(1 / 6))), f(largest)).astype(scale_type).astype(f)
        mult = np.minimum(stored * enc, top)
        codes = np.clip(blocks * mult[:, None], f(-6), f(6)).astype(ml_dtypes.float4_e2m1fn)
        scale = np.where(stored == 0, f(0), np.minimum(f(1) / stored, top))
    return codes.view(np.uint8) & 15, scale


@pytest.mark.parametrize("target", [0.0, 6.0, 1 / 448, 100.0])
@pytest.mark.parametrize("zero", ["keep", "min"])
def test_the_encode_convention_is_what_numpy_makes_of_its_formulas(target, zero):
    scale = E4M3(convention="encode", zero=zero)
    q = Quantizer(scale=scale, tensor_scale=TensorScale(target=target) if target else None)
    for x in tensors():
        got = quantize(x, q)
        codes, scales = encode_chain(x.numpy(), ml_dtypes.float8_e4m3fn, 448.0, target)
        if zero == "min":
            lost = scales == 0
            codes, scales = codes[~lost], scales[~lost]
            kept = torch.from_numpy(~lost)
            assert (got.scales.flatten()[torch.from_numpy(lost)] == 512).all()
        else:
            kept = torch.ones(len(scales), dtype=torch.bool)
        assert np.array_equal(got.scales.flatten()[kept].numpy(), scales)
        assert np.array_equal(got.codes.view(-1, 16)[kept].numpy(), codes)


@pytest.mark.parametrize(("scale", "largest"), [("e4m3-encode", 1e-36), ("ue5m3-encode", 3e-34)])
def test_blocks_that_are_zero_stay_zero_however_small_the_tensor(scale, largest):
    """Their multiplier is the largest of the format: times the tensor's factor it was infinite, and 0 · Inf is NaN."""
    x = torch.zeros(4, 16)
    x[0] = largest
    got = quantize(x, Quantizer(scale=SCALE_NAMES[scale], tensor_scale=TensorScale())).values
    assert torch.equal(got[1:], x[1:])
    assert torch.allclose(got[0], x[0], rtol=0.1)


def test_a_stored_multiplier_of_zero_is_a_lost_block():
    for scale in (E4M3(convention="encode"), UE5M3(convention="encode", zero="keep")):
        x = torch.full((1, 16), 1e30)
        assert torch.equal(quantize(x, Quantizer(scale=scale)).values, torch.zeros(1, 16))
