"""The call record: all that a kernel is told of how to quantize an operand, beside the operand itself.

It is built once for an operand (operand/lane_quantizers.py) and handed on whole, to C++ and to the Triton kernels.
Operators of PyTorch take no records: their schemas are flat, and are made from the fields, in the order of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from fp4dse.kernels.quant.triton.features import Features


class Call(NamedTuple):
    """The arguments by which L lanes of an operand are quantized.

    block         elements that share a scale, one after another along the contraction; in `squares` the edge of a tile
    floats, ints  descriptor tables, a row a lane: float32 and int32 (kernels/quant/descriptor.py)
    features      what some lane needs of the kernel
    seeds, step   int64 [L] and an int64 scalar on the operand's device; with site, the keys of random bits
    site          number of this use of this slot in this layer (`operand.records.Use.site`)
    tensor_amax   float32 [L] that tensor scales follow, or None for the maxima of the operand
    rotation      size of the groups along the contraction that are rotated first, by `rotation.rotate`; 0: none are
    signs         float32 [L, rotation] of the rotation, [1, rotation] for all lanes, or None
    codec         of all lanes, one of `codecs.CODECS`
    """

    block: int
    floats: Tensor
    ints: Tensor
    features: Features
    seeds: Tensor
    step: Tensor
    site: int
    tensor_amax: Tensor | None = None
    rotation: int = 0
    signs: Tensor | None = None
    codec: str = "block"


_KINDS = {int: "SymInt", Tensor: "Tensor", Tensor | None: "Tensor?", Features: "bool[]", str: "str"}


def schema(suffix: str = "") -> str:
    """The fields as the arguments of an operator of PyTorch's, their names with a suffix."""
    return ", ".join(f"{_KINDS[kind]} {name}{suffix}" for name, kind in get_type_hints(Call).items())


def unflat(arguments: Sequence[Any]) -> Call:
    """The record of the arguments that an operator got in its place."""
    call = Call(*arguments)
    return call._replace(features=Features(*call.features))
