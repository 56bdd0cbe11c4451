"""MixFP4 (2605.31035): each block as E2M1 or as E1M2, each with its own scale, whichever is nearer."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.kernels import quantize
from fp4dse.kernels.inspection.catalogue import gaussian_error
from fp4dse.kernels.inspection.tensors import statistics

MIXFP4, NVFP4 = Quantizer.named("mixfp4"), Quantizer.named("nvfp4")
E2M1, INTEGERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6], list(range(8))


def blocks(*rows: list[float]) -> torch.Tensor:
    """Blocks that begin with these numbers, after one whose maximum makes the tensor factor 1."""
    x = torch.zeros(len(rows) + 1, 16)
    x[0, 0] = 2688
    for i, row in enumerate(rows):
        x[i + 1, : len(row)] = torch.tensor(row)
    return x


def test_a_worked_example():
    """By hand, E4M3 scales: 7/6 is stored as 1.125, 6/7 as 0.875.

    7 6 5 4 3 2 1: exact as integers with scale 1.             6 4 3 2 1.5 1 0.5: exact as E2M1 with scale 1.
    7 -4 -4 -4: 6.75 and 4.5 as E2M1, an error of 0.8125.      7, 15 × 0.5: 6.75 and 0.5625, error 0.0625 + 15/256; as
    As integers exact.                                        integers the halves are ties that go to 0, error 3.75.
    """
    x = blocks([7, 6, 5, 4, 3, 2, 1], [6, 4, 3, 2, 1.5, 1, 0.5], [7, -4, -4, -4], [7] + [0.5] * 15)
    got = quantize(x, MIXFP4)
    assert got.tensor_scale == 1
    assert got.meta["e1m2"][1:].tolist() == [True, False, True, False]
    assert got.scales[1:, 0].tolist() == [1, 1, 1, 1.125]
    assert torch.equal(got.values[1:4], x[1:4])
    assert got.values[4].tolist() == [6.75] + [0.5625] * 15
    assert got.codes[1:4, :7].tolist() == [[7, 6, 5, 4, 3, 2, 1], [7, 6, 5, 4, 3, 2, 1], [7, 12, 12, 12, 0, 0, 0]]


def test_an_equal_error_takes_e1m2():
    """42 is 6 · 7 as E2M1 with scale 7, and 7 · 6 as an integer with scale 6."""
    got = quantize(blocks([42.0], [0.0]), MIXFP4)
    assert got.meta["e1m2"][1:].all()
    assert got.scales[1:, 0].tolist() == [6, 0]
    assert got.values[1, 0] == 42


def encoded(x: np.ndarray, enc: np.float32, largest: int, levels: list) -> tuple[np.float32, list[int], Fraction]:
    """Scale, codes and squared error (in the square of the tensor's unit) of a block: float32 where the definition has
    it, exact where it compares."""
    f = np.float32
    scale = min(np.abs(x).max() * (enc * (f(1) / f(largest))), f(448)).astype(ml_dtypes.float8_e4m3fn).astype(f)
    mult = min(f(1) / (scale * (f(1) / enc)), np.finfo(f).max)
    codes = []
    for v in np.abs(x) * mult:
        z = Fraction(float(min(v, f(largest))))
        codes.append(min(range(8), key=lambda k, z=z: (abs(Fraction(levels[k]) - z), k % 2)))
    wanted = [Fraction(float(v)) * Fraction(float(enc)) for v in np.abs(x)]
    error = sum((Fraction(float(scale)) * Fraction(levels[k]) - w) ** 2 for k, w in zip(codes, wanted, strict=True))
    return scale, codes, error


@pytest.mark.filterwarnings("ignore:overflow", "ignore:divide by zero", "ignore:invalid")
def test_every_block_has_the_type_with_the_smaller_error(draw):
    x = draw(16)
    got = quantize(x, MIXFP4)
    amax = np.abs(x.numpy()).max()
    enc = min(np.float32(2688) / amax, np.finfo(np.float32).max) if amax > 0 else np.float32(1)
    types = {False: (6, E2M1), True: (7, INTEGERS)}
    for i, row in enumerate(x.numpy()):
        of = {e1m2: encoded(row, enc, *types[e1m2]) for e1m2 in types}
        kept = got.meta["e1m2"][i].item()
        scale, codes, error = of[kept]
        assert got.scales[i].item() == scale
        assert (got.codes[i] & 7).tolist() == codes
        assert error <= of[not kept][2] * Fraction(100001, 100000)  # errors nearer than FP32 tells are equal
        if error == of[not kept][2]:
            assert kept
    e2m1 = ~got.meta["e1m2"]
    assert torch.equal(got.values[e2m1], quantize(x, NVFP4).values[e2m1])


def test_errors_of_a_tiny_and_a_huge_tensor_are_compared_as_those_of_any_other():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    kept = quantize(x, MIXFP4).meta["e1m2"]
    assert kept.any()
    assert not kept.all()
    for power in (2.0**-110, 2.0**110):
        assert torch.equal(quantize(x * power, MIXFP4).meta["e1m2"], kept)


def test_error_and_share_of_e1m2_on_gaussian_numbers():
    """Between the types: less than either alone has, as each block has the better one."""
    error = gaussian_error(MIXFP4)
    assert error == pytest.approx(6.18e-3, rel=0.01)
    assert error < min(gaussian_error(NVFP4), gaussian_error(Quantizer.named("nvint4")))
    x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))
    assert quantize(x, MIXFP4).meta["e1m2"].double().mean() == pytest.approx(0.635, abs=0.01)


def test_flat_blocks_are_e1m2_and_peaked_ones_e2m1():
    """The paper's model of both errors has them equal at a maximum of 2.224 times the rms."""
    x = torch.randn(16384, 16, generator=torch.Generator().manual_seed(1)).double()
    crest = x.abs().amax(1) / x.square().mean(1).sqrt()
    kept = quantize(x, MIXFP4).meta["e1m2"].double()
    assert kept[crest < 1.9].mean() > 0.85
    assert kept[(crest > 2.17) & (crest < 2.28)].mean() == pytest.approx(0.5, abs=0.08)
    assert kept[crest > 2.6].mean() < 0.15


def test_codes_and_types_give_the_elements(draw):
    got = quantize(draw(16), MIXFP4)
    index = (got.codes & 7).long()
    magnitude = torch.where(got.meta["e1m2"][:, None], index.float(), torch.tensor(E2M1)[index])
    assert torch.equal(torch.where(got.codes >= 8, -magnitude, magnitude), got.elements)


def test_clipping_is_counted_against_the_largest_element_of_the_type():
    """7 is E1M2's largest with scale 1; beside halves the block is E2M1, whose largest with scale 1.125 is 6.75."""
    assert statistics(blocks([7.0]), MIXFP4)["clipped"] == 0
    assert statistics(blocks([7.0] + [0.5] * 15), MIXFP4)["clipped"] == 1 / 32
