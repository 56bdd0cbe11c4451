"""RaZeR (2501.04052): NVFP4 whose code of -0 stands for +5 or -5, as the block prefers."""

from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.dse.rounding import Nearest
from fp4dse.kernels import quantize
from fp4dse.kernels.inspection.catalogue import gaussian_error

RAZER, NVFP4 = Quantizer.named("razer"), Quantizer.named("nvfp4")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
LEVELS = [v * sign for sign in (1, -1) for v in E2M1]


def multipliers(x: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """What NVFP4 with these block scales multiplies each row by, in float32."""
    f = np.float32
    amax = x.abs().max().item()
    enc = min(f(2688) / f(amax), f(3.4028235e38)) if amax > 0 else f(1)
    return np.minimum(f(1) / (scales.numpy().ravel() * (f(1) / enc)), f(3.4028235e38))


def razer_block(z: list[float], ties=lambda k: k % 2) -> tuple[float, list[float]]:
    """(special, elements): for each special value the nearest of 15 levels and it, then the smaller error, exactly."""
    z = [Fraction(max(-6.0, min(6.0, v))) for v in z]
    candidates = {}
    for special in (5.0, -5.0):
        q = []
        for v in z:
            plain = min(range(8), key=lambda k, v=v: (abs(Fraction(E2M1[k]) - abs(v)), ties(k)))
            level = E2M1[plain] * (-1 if v < 0 and plain else 1)
            q.append(special if abs(Fraction(special) - v) < abs(Fraction(level) - v) else level)
        candidates[special] = q
    plus, minus = (sum((Fraction(w) - v) ** 2 for v, w in zip(z, q, strict=True)) for q in candidates.values())
    special = -5.0 if minus < plus else 5.0
    return special, candidates[special]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:divide by zero")
@pytest.mark.parametrize("ties", ["even", "away"])
def test_every_block_has_the_better_special_value(draw, ties):
    x = draw(16)
    got = quantize(x, msgspec.structs.replace(RAZER, rounding=Nearest(ties=ties)))
    assert torch.equal(got.scales, quantize(x, NVFP4).scales)
    z = x.numpy() * multipliers(x, got.scales)[:, None]
    for i, row in enumerate(z.tolist()):
        special, q = razer_block(row, {"even": lambda k: k % 2, "away": lambda k: -k}[ties])
        assert got.meta["special"][i].item() == special
        assert got.elements[i].tolist() == q


def test_five_is_kept_and_a_tie_between_it_and_a_level_goes_to_the_level():
    x = torch.zeros(3, 16)
    x[0, :6] = torch.tensor([6, 5, 4.5, 5.5, -5.25, -4.75])
    x[1, :4] = torch.tensor([-6, -5, -4.625, 5.25])
    x[2, :2] = torch.tensor([6, -6])
    got = quantize(x, RAZER)
    assert got.meta["special"].tolist() == [5, -5, 5]  # the first where both are as good
    assert got.elements[0, :6].tolist() == [6, 5, 4, 6, -6, -4]
    assert got.elements[1, :4].tolist() == [-6, -5, -5, 6]


def test_error_on_gaussian_numbers():
    assert gaussian_error(RAZER) == pytest.approx(6.21e-3, rel=0.01)


def test_code_eight_is_the_special_value_and_no_element_is_minus_zero(draw):
    got = quantize(draw(16), RAZER)
    values = torch.tensor(LEVELS)[got.codes.long()]
    values = torch.where(got.codes == 8, got.meta["special"][:, None], values)
    assert torch.equal(values, got.elements)
    assert not torch.signbit(got.elements[got.elements == 0]).any()
