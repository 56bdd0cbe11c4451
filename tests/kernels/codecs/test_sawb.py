"""SAWB clips INT4 at a value from two moments; padding does not count."""

import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import Hadamard, Quantizer, Recipe
from fp4dse.dse.scale import FP32
from fp4dse.kernels import LaneNumerics, lanes, quantize
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec.reference import quantize_blocks
from fp4dse.kernels.selftest import odd_blocks

SAWB = Quantizer.named("int4-sawb")
ROWS = msgspec.structs.replace(SAWB, block="row")


def oracle(x: np.ndarray) -> float:
    """The clipping value, moments in rational numbers."""
    exact = [abs(Fraction(float(v))) for v in x]
    mean = float(sum(exact) / len(exact))
    rms = math.sqrt(sum(v * v for v in exact) / len(exact))
    return max(12.68 * rms - 12.80 * mean, rms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_follow_from_the_moments_of_a_row(dtype):
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)) ** 3 * torch.logspace(-9, 9, 40)[:, None]
    x = x.to(dtype).float()
    x[1], x[2] = 0, torch.tensor([2.5, -2.5]).repeat(25)
    got = quantize(x, ROWS)
    for row, values, scale in zip(x.numpy(), got.values.numpy(), got.scales[:, 0].numpy(), strict=True):
        assert scale == pytest.approx(oracle(row) / 7, rel=3e-6)
        if scale:
            y = row.astype(np.float64) / scale
            code = np.clip(np.rint(y), -7, 7)
            sure = np.abs(np.abs(y - np.trunc(y)) - 0.5) > 1e-5  # an FP32 rounding away from a midpoint
            assert np.array_equal((code * scale).astype(np.float32)[sure], values[sure])
        else:
            assert (values == 0).all()


def test_a_normal_tensor_is_clipped_at_its_optimum():
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))
    got = quantize(x, SAWB)
    assert 7 * got.scales.item() == pytest.approx(2.466, rel=0.01)
    assert float(((got.values - x) ** 2).sum() / (x**2).sum()) == pytest.approx(1.287e-2, rel=0.01)


def test_numbers_of_nearly_one_magnitude_are_clipped_there():
    """The published expression is negative for them."""
    x = torch.tensor([1.0, -1.0]).repeat(512)[None] * 1.7
    x[0, 3] = 20.0
    for row in (x[:, 4:], x):
        got = quantize(row, SAWB)
        usual = row.abs() < 2
        assert torch.allclose(got.values[usual], row[usual], rtol=0.1)


def test_zeros_that_pad_do_not_count():
    x = torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(2))
    padded = torch.nn.functional.pad(x, (0, 108))
    for block, count in (("tensor", 240), ("row", 20)):
        tables = descriptor([msgspec.structs.replace(SAWB, block=block)] * 2)
        size = 1 if block == "tensor" else 12
        plain, _ = quantize_blocks(x.reshape(2, size, -1), *tables, codec="sawb")
        with_zeros, _ = quantize_blocks(padded.reshape(2, size, -1), *tables, codec="sawb", unpadded=count)
        assert torch.allclose(plain.scale, with_zeros.scale, rtol=1e-6)
        assert torch.equal(plain.q.view(2, 12, 20), with_zeros.q.view(2, 12, 128)[:, :, :20])


@pytest.fixture
def eager(monkeypatch):
    """The reference: nothing to compile."""
    monkeypatch.setattr(lanes, "backend", lambda device: PLAIN)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("block", ["tensor", "row"])
def test_a_layer_that_pads_for_the_other_operand_has_the_scales_of_the_bare_operand(block):
    """Contracted with an identity in blocks of 128: what comes out is the quantized operand."""
    recipe = recipe_of({"fprop.x": msgspec.structs.replace(SAWB, block=block), "fprop.w": Quantizer.named("mxfp4")})
    x = torch.randn(1, 12, 20, generator=torch.Generator().manual_seed(2)).repeat(2, 1, 1)
    eye = torch.eye(20).repeat(2, 1, 1)
    got = LaneNumerics([recipe] * 2, [0, 0]).gemm("fprop", 0, x, 2, eye, 2)
    assert torch.allclose(got[0], quantize(x[0], msgspec.structs.replace(SAWB, block=block)).values, rtol=1e-5)


@pytest.mark.usefixtures("eager")
def test_a_rotation_fills_its_last_group():
    """What it spreads over the padding is no padding any more."""
    recipe = recipe_of({"fprop.x": SAWB, "fprop.w": Quantizer.named("none")}, Hadamard(size=32, signs="none"))
    x = torch.randn(1, 12, 20, generator=torch.Generator().manual_seed(2)).repeat(2, 1, 1)
    eye = torch.eye(20).repeat(2, 1, 1)
    got = LaneNumerics([recipe] * 2, [0, 0]).gemm("fprop", 0, x, 2, eye, 2)
    padded = torch.nn.functional.pad(x[0], (0, 12))
    seen = quantize(padded, SAWB, rotation=Hadamard(size=32, signs="none")).values
    assert torch.allclose(got[0], seen[:, :20], rtol=1e-4, atol=1e-5)


def recipe_of(slots: dict[str, Quantizer], rotation: Hadamard | None = None) -> Recipe:
    """BF16 but for some slots, with a rotation of the forward product."""
    recipe = Recipe.named("bf16")
    for name, q in slots.items():
        stage, operand = name.split(".")
        part = msgspec.structs.replace(getattr(recipe, stage), **{operand: q})
        recipe = msgspec.structs.replace(recipe, **{stage: part})
    return msgspec.structs.replace(recipe, fprop=msgspec.structs.replace(recipe.fprop, rotation=rotation))


def test_options_of_the_scale_have_no_part_in_it():
    for scale in (FP32(rounding="up"), FP32(convention="encode", zero="min"), FP32(hybrid=True)):
        assert msgspec.structs.replace(SAWB, scale=scale).canonical() == SAWB.canonical()


def test_odd_rows_give_finite_numbers_and_nan_stays_in_its_row():
    x = odd_blocks()[1]
    values = quantize(x, ROWS).values
    bad = ~torch.isfinite(x).all(1)
    assert torch.equal(values.isnan().all(1), bad)
    assert torch.equal(torch.isfinite(values).all(1), ~bad)
