"""The call record: all that an operand is quantized by, beside the operand itself, as every path takes it.

It is built once for an operand (`operand.Slot`) and handed on whole: to C++, to the Triton kernels, and to the
reference that both are compared with. PyTorch's operators take no records: their schemas are flat, and are made from
the fields, in whose order they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_type_hints

from torch import Tensor

from fp4dse.kernels.fused.features import Features


class Call(NamedTuple):
    """How L lanes of an operand are quantized.

    block         elements that share a scale, one after another along the contraction; in `squares` the edge of a tile
    floats, ints  descriptor tables, a row a lane: float32 and int32 (kernels/descriptor.py)
    features      what some lane of the tables needs
    seeds, step   int64 [L] and an int64 scalar on the operand's device; with site, the keys of the random bits
    site          which use of which slot of which layer it is
    tensor_amax   float32 [L] that tensor scales follow ([L, 1] in `by_scales`), or None for the maxima of the operand
    rotation      the operand is rotated first, in groups of so many along the contraction, by `rotation.rotate`; 0: not
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


def unflat(arguments: Sequence) -> Call:
    """The record, of the arguments that an operator got for it."""
    call = Call(*arguments)
    return call._replace(features=Features(*call.features))
