"""BlockDialect (2501.01144): of 16 codebooks each block has the one with the least error, in integer arithmetic."""

import math

import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.kernels import quantize
from fp4dse.kernels.inspection.catalogue import gaussian_error
from fp4dse.kernels.quant.spec.codecs.dialects import DIALECTS

BLOCKDIALECT = Quantizer.named("blockdialect")
FORMATBOOK = """0 1 2 3 4 6 11 15
0 1 2 3 4 6 9 15
0 1 2 3 4 6 11 14
0 1 2 3 4 6 9 14
0 1 2 3 4 6 10 13
0 1 2 3 4 6 8 13
0 1 2 3 4 6 10 12
0 1 2 3 4 6 8 12
0 1 2 3 4 6 9 11
0 1 2 3 4 6 7 11
0 1 2 3 4 6 9 10
0 1 2 3 4 6 7 10
0 1 2 3 4 6 8 9
0 1 2 3 4 6 7 9
0 1 2 3 4 6 7 8
0 1 2 3 4 5 6 8"""


def dialect_block(block: list[float]) -> tuple[float, int, list[int]]:
    """(scale, dialect, signless codes), with Python's integers."""
    amax = max(map(abs, block))
    scale = 2.0 ** max(-127, math.frexp(amax)[1] - 3) if amax >= 2.0**-126 else 2.0**-127
    z = [min(round(2 * abs(v) / scale), 15) for v in block]
    best = None
    for number, levels in enumerate(DIALECTS):
        codes = [min(range(8), key=lambda k, v=v, levels=levels: (abs(levels[k] - v), k % 2)) for v in z]
        error = sum((levels[k] - v) ** 2 for k, v in zip(codes, z, strict=True))
        if best is None or error < best[0]:
            best = error, number, codes
    return scale, *best[1:]


def test_the_formatbook_is_the_published_one():
    assert [" ".join(map(str, levels)) for levels in DIALECTS] == FORMATBOOK.splitlines()


def test_every_block_has_the_dialect_with_the_least_error(draw):
    x = draw(32)
    got = quantize(x, BLOCKDIALECT)
    for i, row in enumerate(x.tolist()):
        scale, dialect, codes = dialect_block(row)
        assert got.scales[i].item() == scale
        assert got.meta["dialect"][i].item() == dialect
        assert (got.codes[i] & 7).tolist() == codes
        magnitude = torch.tensor(DIALECTS[dialect])[codes] / 2
        assert torch.equal(got.elements[i], torch.copysign(magnitude, x[i]))


def test_a_block_made_of_one_dialect_is_kept_as_it_is():
    x = torch.tensor(DIALECTS).repeat(1, 4) / 2 * torch.tensor([1.0, -1.0]).repeat(16)
    got = quantize(x, BLOCKDIALECT)
    assert got.meta["dialect"].tolist() == list(range(16))
    assert torch.equal(got.values, x)


def test_error_on_gaussian_numbers():
    assert gaussian_error(BLOCKDIALECT) == pytest.approx(1.07e-2, rel=0.01)
