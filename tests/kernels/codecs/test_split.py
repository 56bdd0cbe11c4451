"""AMXFP4 (2411.09909): positive and negative elements have scales of their own."""

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.scale import E4M3, E5M2
from fp4dse.kernels import quantize
from fp4dse.kernels.inspection.catalogue import gaussian_error

AMXFP4 = Quantizer.named("amxfp4")
SCALES = {"e5m2": (E5M2(zero="one"), ml_dtypes.float8_e5m2), "e4m3": (E4M3(zero="one"), ml_dtypes.float8_e4m3fn)}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def split_block(block: np.ndarray, dtype) -> tuple[list[float], list[float]]:
    """(scales of positive and negative elements, elements)."""
    f = np.float32
    scales = []
    for side in (block, -block):
        ideal = max(side.max(), f(0)) * (f(1) / f(6))
        scale = float(f(min(ideal, f(ml_dtypes.finfo(dtype).max))).astype(dtype))
        scales.append(scale or 1.0)
    q = []
    for v in block:
        inverse = f(1) / f(scales[int(v < 0)])
        z = min(float(abs(v) * inverse), 6.0)
        code = min(range(8), key=lambda k: (abs(E2M1[k] - z), k % 2))
        q.append(float(np.copysign(E2M1[code], v)))
    return scales, q


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", SCALES)
def test_every_block_has_a_scale_for_each_sign(draw, name):
    x = draw(32)
    scale, dtype = SCALES[name]
    got = quantize(x, msgspec.structs.replace(AMXFP4, scale=scale))
    for i, row in enumerate(x.numpy()):
        (positive, negative), q = split_block(row, dtype)
        assert got.meta["scale_positive"][i].item() == positive
        assert got.meta["scale_negative"][i].item() == negative
        assert got.elements[i].tolist() == q
        assert torch.equal(got.scales[i], torch.where(torch.signbit(x[i]), negative, positive))


def test_each_sign_uses_the_whole_range_of_elements():
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([6, 4, 0.5, 0.2, -3, -1.5, -0.25, -0.1])
    got = quantize(x, AMXFP4)
    assert (got.meta["scale_positive"].item(), got.meta["scale_negative"].item()) == (1, 0.5)
    assert got.elements[0, :8].tolist() == [6, 4, 0.5, 0, -6, -3, -0.5, 0]
    assert got.values[0, :8].tolist() == [6, 4, 0.5, 0, -3, -1.5, -0.25, 0]
    assert got.scales.shape == x.shape


@pytest.mark.parametrize(("name", "error"), [("e5m2", 9.60e-3), ("e4m3", 9.07e-3)])
def test_error_on_gaussian_numbers(name, error):
    assert gaussian_error(msgspec.structs.replace(AMXFP4, scale=SCALES[name][0])) == pytest.approx(error, rel=0.01)


def test_stochastic_rounding_has_the_mean_of_what_is_rounded():
    n = 4096
    x = torch.zeros(n, 32)
    x[:, :4] = torch.tensor([6.0, 2.3, -3.0, -2.2])  # scales 1 and 1/2: 2.3 between 2 and 3, -2.2 between -2 and -3
    got = quantize(x, msgspec.structs.replace(AMXFP4, rounding=Stochastic())).values
    for column, low, high in ((1, 2.0, 3.0), (3, -3.0, -2.0)):
        mean, wanted = got[:, column].mean().item(), x[0, column].item()
        assert set(got[:, column].tolist()) == {low, high}
        assert abs(mean - wanted) < 5 * ((wanted - low) * (high - wanted) / n) ** 0.5 + 2**-16


def test_codes_give_the_elements(draw):
    got = quantize(draw(32), AMXFP4)
    magnitude = torch.tensor(E2M1)[(got.codes & 7).long()]
    assert torch.equal(torch.where(got.codes >= 8, -magnitude, magnitude), got.elements)
