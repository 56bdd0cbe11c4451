"""Exact arithmetic: every stored number is one rounding of a quotient of exact and stored numbers."""

from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.dse.formats import ELEMENTS, SCALES
from fp4dse.dse.scale import BF16, E4M3, FP32, UE5M3, TensorScale, scale_key
from fp4dse.kernels import quantize
from fp4dse.kernels.selftest import odd_blocks

EXACT = Quantizer.named("nvfp4-exact").canonical()


def round_to_bits(x: Fraction, mantissa: int, emin: int, largest: float) -> Fraction:
    """x >= 0 to a float format, ties to even, saturating: rational arithmetic alone."""
    if x == 0:
        return x
    e = x.numerator.bit_length() - x.denominator.bit_length()
    e -= Fraction(2) ** e > x
    step = Fraction(2) ** (max(e, emin) - mantissa)
    return min(round(x / step) * step, Fraction(largest))  # Python rounds halves of fractions to even


def element_of(x: Fraction, name: str) -> Fraction:
    grid = [Fraction(v) for v in ELEMENTS[name].magnitudes()]
    return min(enumerate(grid), key=lambda item: (abs(item[1] - x), item[0] % 2))[1]


def oracle(x: np.ndarray, q: Quantizer) -> tuple[Fraction, list[Fraction], list[list[Fraction]]]:
    """g, the block scales and the element magnitudes of x [n, B]."""
    magnitude = [[abs(Fraction(float(v))) for v in block] for block in x]
    amax = [max(block) for block in magnitude]
    val_max, scale = Fraction(ELEMENTS[q.element].max), SCALES[scale_key(q.scale)]
    g = Fraction(1)
    if q.tensor_scale and max(amax):
        g = round_to_bits(max(amax) / (Fraction(q.tensor_scale.target) * val_max), 23, -126, 3.4028234663852886e38)
        g = max(g, Fraction(2) ** -149)
    scales = [round_to_bits(a / (val_max * g), scale.mantissa, scale.emin, scale.max) for a in amax]
    zero = {"keep": Fraction(0), "one": Fraction(1)}[q.scale.zero]
    scales = [s or zero for s in scales]
    elements = [
        [element_of(v / (s * g), q.element) if s else v for v in b] for b, s in zip(magnitude, scales, strict=True)
    ]
    return g, scales, elements


CASES = {
    "nvfp4": EXACT,
    "bf16 scales": Quantizer(scale=BF16(), arithmetic="exact"),
    "fp32 scales": Quantizer(element="int4", scale=FP32(), tensor_scale=TensorScale(target=1.0), arithmetic="exact"),
    "e3m0": Quantizer(element="e3m0", scale=UE5M3(), tensor_scale=TensorScale(), arithmetic="exact"),
    "fp8": Quantizer(element="e4m3", scale=FP32(), arithmetic="exact"),
    "no tensor scale": Quantizer(scale=E4M3(zero="one"), arithmetic="exact"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "wide", "ties", "odd"])
def test_stored_numbers_equal_rational_arithmetic(name, kind):
    q = CASES[name].canonical()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 16, generator=generator)
    if kind == "bf16":
        x = x.bfloat16().float()
    elif kind == "wide":
        x *= torch.exp2(torch.randint(-40, 8, (48, 1), generator=generator).float())
    elif kind == "ties":  # small integers: quotients are often midpoints, or next to them
        x = torch.randint(-64, 65, (48, 16), generator=generator) * 2.0**-4
        x[::2] = torch.nextafter(x[::2], torch.tensor(9.0))
    elif kind == "odd":
        x = odd_blocks()[0, 14:18].reshape(-1, 16)  # zero and subnormal blocks among others
    got = quantize(x, q)
    g, scales, elements = oracle(x.numpy(), q)
    assert Fraction(got.tensor_scale.item()) == g
    for i, scale in enumerate(scales):
        assert Fraction(got.scales[i, 0].item()) == scale
        if scale:
            assert [Fraction(v) for v in got.elements[i].abs().tolist()] == elements[i]
        else:
            assert (got.values[i] == 0).all()


def test_a_tensor_of_subnormal_numbers_keeps_finite_factors():
    for magnitude in (1e-42, 1e-39, 1e-36):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)) * magnitude
        got = quantize(x, EXACT)
        g, scales, _ = oracle(x.numpy(), EXACT)
        assert Fraction(got.tensor_scale.item()) == g
        assert [Fraction(s) for s in got.scales[:, 0].tolist()] == scales
        assert torch.isfinite(got.values).all()


def test_the_decoded_value_is_the_product_of_the_stored_numbers():
    x = torch.randn(32, 64)
    got = quantize(x, EXACT)
    scales = got.scales.repeat_interleave(16, 1)
    assert torch.equal(got.values, (got.elements * scales) * got.tensor_scale)


def test_it_differs_from_the_fp32_chain_at_ties_alone():
    x = torch.randn(2048, 512, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    exact, chain = quantize(x, EXACT), quantize(x, Quantizer.named("nvfp4"))
    differing = exact.codes != chain.codes
    assert 0 < float(differing.double().mean()) < 2e-3
    error = [float(((v.values - x) ** 2).sum() / (x**2).sum()) for v in (exact, chain)]
    assert error[0] == pytest.approx(error[1], rel=1e-3)
    assert error[0] == pytest.approx(9.05e-3, rel=0.01)


def test_nan_stays_in_its_tensor_and_without_tensor_scale_in_its_block():
    x = odd_blocks()[1]
    assert quantize(x, EXACT).values.isnan().all()
    blocks = x.reshape(-1, 16)
    values = quantize(blocks, msgspec.structs.replace(EXACT, tensor_scale=None)).values
    assert torch.equal(values.isnan().all(1), ~torch.isfinite(blocks).all(1))
    assert torch.equal(values.isnan().any(1), ~torch.isfinite(blocks).all(1))
