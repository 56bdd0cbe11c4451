"""IF4 (2603.28765): NVFP4's scales, and for each block E2M1 or integers, whichever is nearer."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.kernels import quantize
from fp4dse.kernels.inspection.catalogue import gaussian_error

IF4, NVFP4 = Quantizer.named("if4"), Quantizer.named("nvfp4")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def multipliers(x: np.ndarray) -> np.ndarray:
    """What NVFP4 multiplies each row of x by, a row a block, in float32 operation by operation."""
    f = np.float32
    amax = np.abs(x).max()
    enc = min(f(2688) / amax, f(3.4028235e38)) if amax > 0 else f(1)
    wanted = np.minimum(np.abs(x).max(1) * (enc * (f(1) / f(6))), f(448))
    scale = wanted.astype(ml_dtypes.float8_e4m3fn).astype(f)
    return np.minimum(f(1) / (scale * (f(1) / enc)), f(3.4028235e38))


def nearest_code(v: Fraction, levels: list) -> int:
    return min(range(8), key=lambda k: (abs(levels[k] - v), k % 2))


def if4_block(z: list[float]) -> tuple[bool, list[int]]:
    """(integers?, codes) of magnitudes in units of the scale, exactly."""
    z = [Fraction(min(v, 6.0)) for v in z]
    candidates = []
    for levels in ([Fraction(v) for v in E2M1], [Fraction(6, 7) * k for k in range(8)]):
        codes = [nearest_code(v, levels) for v in z]
        candidates.append((sum((levels[k] - v) ** 2 for k, v in zip(codes, z, strict=True)), codes))
    (real, real_codes), (whole, whole_codes) = candidates
    return (True, whole_codes) if whole < real else (False, real_codes)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:divide by zero", "ignore:invalid")
def test_every_block_has_the_encoding_with_the_smaller_error(draw):
    x = draw(16)
    got = quantize(x, IF4)
    assert torch.equal(got.scales, quantize(x, NVFP4).scales)
    z = np.abs(x.numpy()) * multipliers(x.numpy())[:, None]
    for i, row in enumerate(z.tolist()):
        integers, codes = if4_block(row)
        assert got.meta["integer"][i].item() == integers
        assert (got.codes[i] & 7).tolist() == codes


def test_elements_are_counted_in_sevenths():
    x = torch.zeros(2, 16)
    x[0, :8], x[1, :8] = torch.tensor(E2M1), -torch.arange(8) * 6 / 7
    got = quantize(x, IF4)
    assert got.meta["integer"].tolist() == [False, True]
    assert got.elements[0, :8].tolist() == [7 * v for v in E2M1]
    assert got.elements[1, :8].tolist() == [-6 * k for k in range(8)]
    assert got.codes[:, :8].tolist() == [list(range(8)), [0 if k == 0 else 8 + k for k in range(8)]]
    assert torch.allclose(got.values, x, rtol=1e-6)


def test_an_equal_error_keeps_e2m1():
    x = torch.zeros(3, 16)
    x[1], x[2, ::2] = 6, -6
    assert not quantize(x, IF4).meta["integer"].any()


def test_error_and_share_of_integers_on_gaussian_numbers():
    assert gaussian_error(IF4) == pytest.approx(6.16e-3, rel=0.01)
    x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))
    assert quantize(x, IF4).meta["integer"].double().mean() == pytest.approx(0.63, abs=0.01)


def test_codes_and_selectors_give_the_elements(draw):
    got = quantize(draw(16), IF4)
    index = (got.codes & 7).long()
    magnitude = torch.where(got.meta["integer"][:, None], 6.0 * index, 7 * torch.tensor(E2M1)[index])
    assert torch.equal(torch.where(got.codes >= 8, -magnitude, magnitude), got.elements)


def test_the_operand_has_nine_significant_bits():
    got = quantize(torch.randn(256, 64), IF4)
    operand = got.elements * got.scales.repeat_interleave(16, 1)
    assert ((operand.view(torch.int32) & (1 << 23 - 8) - 1) == 0).all()
