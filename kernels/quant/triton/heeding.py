"""The columns of the descriptor tables that the kernels heed, by codec and by what is compiled in.

Lanes that need another column are refused: the reference takes them, and the row says why. `blocks.numbers_of` loads
what most codecs need for all of them, and this counts as read; that each does with it what the reference does is seen
in tests/kernels/test_triton.py, with all values that the rules allow.
"""

from __future__ import annotations

from functools import cache

from fp4dse.kernels.quant.reading import columns_read
from fp4dse.kernels.quant.spec.codecs import SCALES
from fp4dse.kernels.quant.spec.reference import with_numbers
from fp4dse.kernels.quant.triton.features import Features


@cache
def heeded(codec: str, features: Features) -> frozenset[str]:
    """Columns of the descriptor tables that the kernels of whole operands read, all of those that take the codec;
    lanes that need others they refuse."""
    from fp4dse.kernels.quant.triton import estimators, programs, squares
    from fp4dse.kernels.quant.triton.launch import flags

    kernels = [programs.quantize_kernel, estimators.through_kernel]
    if codec == "block":
        kernels += [programs.both_kernel, squares.squares_kernel]
    constants = flags(features) | {"CODEC": codec}
    read = (columns_read(kernel, **constants) for kernel in kernels)
    return frozenset.intersection(*read)


@cache
def heeded_by_scales(codec: str, features: Features) -> frozenset[str]:
    """The same of `by_scales`, whose scales are the reference's."""
    from fp4dse.kernels.quant.triton.elements import compiled_for, elements_kernel

    return columns_read(with_numbers, SCALES[codec]) | columns_read(elements_kernel, **compiled_for(codec, features))
