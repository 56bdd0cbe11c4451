"""What tests of FP8 units share: operands, histories, and recipes of MXFP4 with a part changed."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Recipe
from fp4dse.dse.formats import ELEMENTS
from fp4dse.kernels.ops import fp8
from fp4dse.kernels.ops.fp8 import E4M3, E5M2, Fp8, History, Shift

MX = QUANTIZERS["mxfp4"]
INTERPRETED = pytest.mark.parametrize("place", ["interpreter"], indirect=True)
"""For what a device need not compile again."""

DTYPES = (E4M3, E5M2)
CODES = torch.tensor(ELEMENTS["e2m1"].magnitudes())
SIGNED = torch.cat([CODES, -CODES])


def drawn(lanes, rows, length, spread=3, seed=0):
    """E2M1 × powers of two of blocks of 32, float32 [L, R, C]."""
    g = torch.Generator().manual_seed(seed)
    codes = SIGNED[torch.randint(16, (lanes, rows, length), generator=g)]
    exponents = torch.randint(-spread, spread + 1, (lanes, rows, -(-length // 32)), generator=g)
    x = codes * torch.exp2(exponents.float()).repeat_interleave(32, 2)[:, :, :length]
    return x


def operand(x, dtype=E5M2):
    return Fp8(*fp8.to_fp8(x, dtype))


def there(device, of):
    """An operand, its tensors on a device."""
    shift = None if of.shift is None else Shift(*(x.to(device) for x in of.shift))
    return Fp8(of.values.to(device), shift)


def assert_same_operand(got, expected):
    """Notes are of programs, and so as many as these: only whether a lane has one is the same."""
    shift = got[1]
    for a, b in (
        (got[0].view(torch.uint8), expected[0].view(torch.uint8)),
        *zip(shift[:2], expected[1][:2], strict=True),
    ):
        assert torch.equal(a.cpu(), b)
    assert torch.equal((shift.notes != 0).any(1).cpu(), (expected[1].notes != 0).any(1))
    wide = (expected[1].flags > 0).repeat_interleave(128, 2)[:, :, : got[0].shape[2]]
    a, b = (x.cpu()[wide].nan_to_num(7.0) for x in (shift.wide, expected[1].wide))
    assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def lane_of(of, lanes):
    """Some lanes of an operand, views of its tensors."""
    return Fp8(of.values[lanes], of.shift and Shift(*(t[lanes] for t in of.shift)))


def history_of(lanes, top, training=True, step=5):
    """A history whose last step, or for lists whose places 0, 1, 2, had this exponent."""
    tops = torch.zeros(lanes, 3, dtype=torch.int32)
    tops[:, (step - 1) % 3] = top
    return History(tops, torch.tensor(step), training)


def odd_segments():
    """Segments of all sizes, within the window and not; NaN, infinities, and what FP8's digits do not hold."""
    x = drawn(2, 40, 390, 2)
    x[0, :, :128] *= torch.exp2(torch.arange(-130, 30, 4).float())[:, None]
    x[0, :, 128:160] *= torch.exp2(-torch.arange(40).float())[:, None]
    x[1, 3, 200], x[1, 4, 5], x[1, 5, 300], x[1, 6, 7] = float("nan"), float("inf"), 1.8125, 2.0**-133
    x[1, 7], x[1, 8, 128:256] = 0.0, -0.0
    x[1, 9, :128], x[1, 10, :128] = 15.0, 7.0  # of 4 digits, and the largest of 3
    return x


def changed(**more):
    """MXFP4 with other parts."""
    return msgspec.structs.replace(MX, **more)


def recipe(**stages):
    """MXFP4 with other stages."""
    return msgspec.structs.replace(Recipe.named("mxfp4"), **stages)
