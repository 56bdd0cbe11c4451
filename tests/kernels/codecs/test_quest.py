"""Quartet's forward quantizer: power-of-two scales from standard deviations."""

import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import ConfigError, Quantizer
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import E8M0
from fp4dse.kernels import quantize
from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.kernels.selftest import odd_blocks

QUEST = Quantizer.named("quest-mxfp4")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def oracle(block: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Decoded values, scale, and the number whose power of two the scale is; moments in rational numbers."""
    exact = [Fraction(float(v)) for v in block]
    mean = sum(exact) / len(exact)
    variance = sum((v - mean) ** 2 for v in exact) / len(exact)
    exponent = 0 if variance == 0 else math.frexp(float(variance.numerator / variance.denominator) or 1e-300)[1] // 2
    std = math.sqrt(float(variance / Fraction(4) ** exponent)) * 2.0**exponent
    wanted = 2.92247856 / 6 * std + 1e-8
    scale = 2.0 ** (math.frexp(wanted)[1] - 1)
    codes = [min(range(8), key=lambda c: (abs(E2M1[c] - abs(float(v)) / scale), c % 2)) for v in block]
    return np.copysign(E2M1[codes] * scale, block).astype(np.float32), scale, wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_scales_equal_a_plain_transcription(dtype):
    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 200)[:, None] + 0.01
    x = torch.cat([x.to(dtype).float(), odd_blocks()[0, 8:20].reshape(-1, 32)])
    x[0], x[1, 1:], x[2] = 0, 0, 3.25
    got = quantize(x, QUEST)
    for block, values, scale in zip(x.numpy(), got.values.numpy(), got.scales[:, 0].tolist(), strict=True):
        expected, power, wanted = oracle(block)
        if math.frexp(wanted * (1 - 1e-6))[1] == math.frexp(wanted * (1 + 1e-6))[1]:  # else FP32 may be on either side
            assert scale == power
            assert np.array_equal(values, expected)


def test_worked_example():
    x = torch.tensor([1.0, -1.0]).repeat(16)[None]  # standard deviation 1
    got = quantize(x, QUEST)
    assert got.scales.item() == 0.25
    assert got.elements.abs().unique().tolist() == [4]
    spread = torch.tensor([3.0, -3.0, *[0.683130, -0.683130] * 15])[None]  # 1 again: the outliers saturate
    got = quantize(spread, QUEST)
    assert got.scales.item() == 0.25
    assert got.values[0, :2].tolist() == [1.5, -1.5]


def test_roots_are_rounded_once():
    x = torch.exp2(torch.rand(1_000_000, generator=torch.Generator().manual_seed(0)) * 250 - 125)
    x = torch.cat([x, torch.tensor([0.0, 1e-45, 4.0, float("inf")])])
    assert np.array_equal(sqrt(x).numpy(), np.sqrt(x.numpy()))  # numpy's is the processor's instruction
    assert sqrt(torch.tensor([-1.0])).isnan().all()


def test_the_mean_of_the_block_does_not_count_and_the_deviation_is_divided_by_its_size():
    step = 2.0 * 2**-2 * 6 / 2.92247856  # population deviation at which the scale becomes 1/2
    for factor, scale in ((1 - 1e-5, 0.25), (1 + 1e-5, 0.5)):
        x = torch.tensor([1.0, -1.0]).repeat(16)[None] * step * factor
        assert quantize(x, QUEST).scales.item() == scale
        assert quantize(x + 2, QUEST).scales.item() == scale


def test_the_clipping_value_lies_between_1_46_and_2_92_standard_deviations():
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 4096)[:, None] + 0.3
    clip = 6 * quantize(x, QUEST).scales[:, 0].double() / x.double().std(1, correction=0)
    assert (clip <= 2.92247856 * (1 + 1e-4)).all()  # 1e-8 is added to the deviation
    assert (clip > 2.92247856 / 2 * (1 - 1e-6)).all()
    assert clip.max() > 2.9
    assert clip.min() < 1.48


def test_the_rule_for_maxima_has_no_part_in_it():
    for rule in ("ceil", "rceil", "even", "nearest"):
        assert msgspec.structs.replace(QUEST, scale=E8M0(rule=rule)).canonical() == QUEST.canonical()


def test_its_constant_is_that_of_e2m1():
    faults = quantizer_faults(msgspec.structs.replace(QUEST, element="int4"))
    assert [str(error) for _, error in faults] == [str(ConfigError("element", "int4", "e2m1 (for quest)"))]


def test_nan_stays_in_its_block_and_scales_stay_powers_of_two():
    x = odd_blocks()[1].reshape(-1, 32)
    got = quantize(x, QUEST)
    bad = ~torch.isfinite(x).all(1)
    assert torch.equal(got.values.isnan().all(1), bad)
    assert torch.equal(got.values.isnan().any(1), bad)
    assert (torch.frexp(got.scales).mantissa == 0.5).all()
