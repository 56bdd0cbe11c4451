"""MS-EDEN has the error of rounding to nearest and no bias over random rotations."""

from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.dse.formats import SCALES
from fp4dse.kernels import quantize
from fp4dse.kernels.ops.philox import random16, signs
from fp4dse.kernels.ops.rotation import rotate, rotate_back
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec.reference import decode_operand, quantize_blocks
from fp4dse.kernels.selftest import odd_blocks

EDEN = Quantizer.named("ms-eden")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(SCALES["e4m3"].magnitudes())
VAL_MAX = 6 / (0.93 * 17 / 16)


def nearest(grid: np.ndarray, y: float) -> float:
    """The nearest magnitude, ties to the even code; saturating."""
    away = np.abs(grid - y)
    return float(grid[min(np.flatnonzero(away == away.min()), key=lambda code: code % 2)])


def oracle(block: np.ndarray, amax_tensor: float) -> tuple[np.ndarray, float]:
    """Elements and the corrected scale before it is rounded, from the definition in float64."""
    g = amax_tensor / (VAL_MAX * 255.99)
    s = nearest(E4M3, np.abs(block).max() / (VAL_MAX * g)) or 1.0
    q = np.array([nearest(E2M1, abs(z) / (s * g)) for z in block]) * np.sign(block)
    z_hat = q * s * g
    product = (block * z_hat).sum()
    return q, s * ((block**2).sum() / product if product else 1.0)


def blocks_of(rows: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-3, 0, rows)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_and_scales_are_those_of_the_definition(dtype):
    x = blocks_of(256).to(dtype).float()
    x[7], x[8, 1:] = 0, 0
    got = quantize(x, EDEN)
    amax, differing = float(x.abs().max()), 0
    for block, q, scale in zip(x.double().numpy(), got.elements.numpy(), got.scales[:, 0].tolist(), strict=True):
        wanted, corrected = oracle(block, amax)
        if not np.array_equal(wanted, q):  # FP32 chain and float64 take different sides of a midpoint
            differing += 1
            continue
        above = int(np.searchsorted(E4M3, corrected * (1 - 1e-6)))
        assert E4M3[max(0, above - 1)] <= scale <= E4M3[np.searchsorted(E4M3, corrected * (1 + 1e-6))]
    assert differing <= 3


def test_the_scale_goes_up_with_the_probability_of_its_fraction():
    x = blocks_of(32, seed=3)
    lanes, amax = 4096, float(x.abs().max())
    random = random16(torch.arange(lanes), 6, torch.tensor(0), torch.tensor(0), 32)
    tables = descriptor([EDEN] * lanes)
    encoded, _ = quantize_blocks(x.expand(lanes, -1, -1), *tables, codec="eden", scale_random=random)
    assert (encoded.q == encoded.q[0]).all()
    for block, drawn in zip(x.double().numpy(), encoded.scale.double().T, strict=True):
        _, corrected = oracle(block, amax)
        above = int(np.searchsorted(E4M3, corrected))
        step = float(E4M3[above] - E4M3[above - 1])
        assert abs(float(drawn.mean()) - corrected) < 5 * step / 2 / lanes**0.5 + step * 1e-4


def test_the_correction_makes_each_block_keep_its_length_along_itself():
    """⟨x, q · s S g⟩ = ⟨x, x⟩ before the scale is rounded, exactly: the definition, in rational numbers."""
    x = blocks_of(64, seed=5)
    amax = float(x.abs().max())
    for block in x.double().numpy():
        q, corrected = oracle(block, amax)
        g = Fraction(amax) / Fraction(VAL_MAX * 255.99)
        along = sum(Fraction(z) * Fraction(c) for z, c in zip(block, q, strict=True)) * Fraction(corrected) * g
        assert float(along / sum(Fraction(z) ** 2 for z in block)) == pytest.approx(1, abs=1e-12)


def test_gaussian_error_and_gain():
    """Averaged over where the largest number lies between two powers of two, on which E4M3's relative steps depend."""
    error, gain, uncorrected = 0.0, 0.0, 0.0
    for k in range(8):
        x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(k))
        x[0, 0] = 5 * 2 ** (k / 8)
        square = float((x.double() ** 2).sum())
        got = quantize(x, EDEN, seed=k).values.double()
        error += float(((got - x) ** 2).sum()) / square / 8
        gain += float((got * x).sum()) / square / 8
        nearest_alone, dec = decode_operand(x.view(1, -1, 16), *descriptor([EDEN]))
        uncorrected += float((nearest_alone.double().view_as(x) * dec * x).sum()) / square / 8
    assert error == pytest.approx(9.43e-3, rel=0.01)
    assert abs(gain - 1) < 3e-4
    assert uncorrected - 1 == pytest.approx(-0.008, abs=0.001)


def test_the_mean_of_many_rotated_draws_has_the_error_of_one_divided_by_their_number():
    rows, draws, lanes = 16, 3000, 250
    x = torch.randn(1, rows, 128, generator=torch.Generator().manual_seed(0))
    total, single = torch.zeros(rows, 128, dtype=torch.float64), 0.0
    tables, zero = descriptor([EDEN] * lanes), torch.tensor(0)
    for first in range(0, draws, lanes):
        seeds = torch.arange(first, first + lanes)
        flips = signs(seeds, zero, zero, 128)
        z = rotate(x.expand(lanes, -1, -1), 128, 2, flips)
        random = random16(seeds, 6, zero, zero, rows * 8)
        blocks = z.reshape(lanes, rows * 8, 16)
        decoded, dec = decode_operand(blocks, *tables, codec="eden", scale_random=random)
        back = rotate_back((decoded * dec[:, None, None]).view_as(z), 128, 2, flips).double()
        total += back.sum(0)
        single += float(((back - x) ** 2).mean()) * lanes / draws
    assert float(((total / draws - x[0]) ** 2).mean()) == pytest.approx(single / draws, rel=0.1)


def test_lost_blocks_and_old_maxima_give_finite_numbers():
    x = blocks_of(64)
    x[0], x[1] = 0, 1e-30
    for zero in ("keep", "one", "min"):
        q = msgspec.structs.replace(EDEN, scale=msgspec.structs.replace(EDEN.scale, zero=zero))
        random = random16(torch.arange(2), 6, torch.tensor(0), torch.tensor(0), 64)
        old = torch.tensor([[0.1], [1e-6]])  # a maximum that the tensor has outgrown
        encoded, _ = quantize_blocks(
            x.expand(2, -1, -1), *descriptor([q, q]), codec="eden", scale_random=random, tensor_amax=old
        )
        assert torch.isfinite(encoded.q).all()
        assert torch.isfinite(encoded.scale).all()
        assert (encoded.scale <= 448).all()
        assert (encoded.q * encoded.scale[:, :, None])[:, :2].abs().max() < 1e-3


def test_nan_stays_in_its_tensor():
    x = odd_blocks()
    for lane in (0, 1):
        values = quantize(x[lane], EDEN).values
        assert bool(values.isnan().all()) == (lane == 1)
        assert bool(values.isnan().any()) == (lane == 1)
