"""The code that is stored for each element: the index of its magnitude in the codebook, the sign above it.

Of a table of values it is the index of the value, ascending from 0.

Training has no use for codes; they are what a user compares with another implementation or packs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp4dse.dse.exactness import OF_ONE_CODEBOOK
from fp4dse.dse.own_formats import Element, TableElement, element_format
from fp4dse.kernels.quant.spec.codecs.block import Encoded
from fp4dse.kernels.quant.spec.codecs.dialects import DIALECTS

FEW = 16
"""Magnitudes that are compared one after the other, which is faster than a search."""


def element_codes(encoded: Encoded, codec: str, element: Element) -> Tensor:
    """uint8 codes [L, n, B] of encoded blocks. element: the codebook of codecs that have one; of no use to others.

    Codes of a block that decodes to NaN mean nothing. KeyError for a codec of which nothing is known.
    """
    if codec in CODES or codec not in OF_ONE_CODEBOOK:
        return CODES[codec](encoded)
    of = element_format(element)
    if isinstance(of, TableElement):
        return torch.searchsorted(torch.tensor(of.values, device=encoded.q.device), encoded.q).to(torch.uint8)
    return _signed(_index(encoded.q, element), encoded.q, of.bits)


def hif4(encoded: Encoded) -> Tensor:
    """S1P2 codes, without the exponent bits of the parts."""
    e8, e16 = (encoded.meta[name].repeat_interleave(size, dim=2) for name, size in (("e1_8", 8), ("e1_16", 4)))
    return _signed(encoded.q.abs() * 4 / (1 << e8.int() + e16.int()), encoded.q)


def if4(encoded: Encoded) -> Tensor:
    """Magnitude indices of E2M1 or INT4, as the block has it."""
    integers, e2m1 = _index(encoded.q, "int4", 6), _index(encoded.q, "e2m1", 7)
    return _signed(torch.where(encoded.meta["integer"][:, :, None], integers, e2m1), encoded.q)


def mixfp4(encoded: Encoded) -> Tensor:
    """Magnitude indices of E2M1 or E1M2, as the block has it."""
    e1m2, e2m1 = _index(encoded.q, "int4"), _index(encoded.q, "e2m1")
    return _signed(torch.where(encoded.meta["e1m2"][:, :, None], e1m2, e2m1), encoded.q)


def razer(encoded: Encoded) -> Tensor:
    """E2M1 codes; 8, which would be -0, is the special value."""
    codes = _signed(_index(encoded.q, "e2m1"), encoded.q)
    return torch.where(encoded.q == encoded.meta["special"][:, :, None], 8, codes).to(torch.uint8)


def dialects(encoded: Encoded) -> Tensor:
    """Index in the block's own codebook."""
    levels = torch.tensor(DIALECTS, device=encoded.q.device)[encoded.meta["dialect"]] * 0.5
    return _signed((levels[:, :, None, :] < encoded.q.abs()[:, :, :, None]).sum(3), encoded.q)


CODES: dict[str, Callable[[Encoded], Tensor]] = {
    "hif4": hif4,
    "if4": if4,
    "mixfp4": mixfp4,
    "razer": razer,
    "dialects": dialects,
}
"""Codecs whose elements are not those of one codebook."""


def _index(q: Tensor, element: Element, unit: int = 1) -> Tensor:
    """Magnitude indices of elements that are counted in units of 1/unit."""
    levels, magnitudes = [level * unit for level in element_format(element).magnitudes()], q.abs()
    if len(levels) > FEW:
        return torch.searchsorted(torch.tensor(levels, device=q.device), magnitudes.contiguous())
    found = torch.zeros_like(q, dtype=torch.uint8)
    for level in levels[1:]:
        found += magnitudes >= level
    return found


def _signed(index: Tensor, q: Tensor, bits: int = 4) -> Tensor:
    return (index.to(torch.int32) + (torch.signbit(q).int() << bits - 1)).to(torch.uint8)
