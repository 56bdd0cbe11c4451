"""The columns of the descriptor tables that the kernels heed, by codec and by what is compiled in.

Lanes that need another column are refused: the reference takes them, and the row says why. `blocks.numbers_of` loads
what most codecs need for all of them, and this counts as read; that each does with it what the reference does is seen
in tests/kernels/test_triton.py, with all values that the rules allow.
"""

from __future__ import annotations

from functools import cache

from fp4dse.kernels.quant.reading import columns_read
from fp4dse.kernels.quant.spec.codecs import SCALES
from fp4dse.kernels.quant.spec.codecs.block import general_scales
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
    """The same of `by_scales`, whose scales a kernel or the reference makes."""
    from fp4dse.kernels.quant.triton import elements, scales

    read = columns_read(elements.elements_kernel, **elements.compiled_for(codec, features))
    if SCALES[codec] is not general_scales:
        return read | columns_read(with_numbers, SCALES[codec])
    by_chance = {"scale_stochastic"}  # then it is the reference
    return read | by_chance | columns_read(scales.scales_kernel, **scales.compiled_for(features))
