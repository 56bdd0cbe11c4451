"""The records of a slot: one use of it, the quantized operand, and what the gradient needs later.

A quantized operand [L, rows, contraction] is a sum of terms, values · factor. There is one term, but two of a
`Residual`, and one for each sample of a `Sampled`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from fp4dse.kernels.ops.fp8 import History, Shift, to_fp8
from fp4dse.kernels.ops.rotation import rotate, rotate_back
from fp4dse.kernels.quant.operand.low_rank import Part
from fp4dse.kernels.quant.spec.channels import put_back

TERM = 1 << 28
"""Added to a site for each term of an operand after the first."""
PART = 1 << 20
"""Added to a site for each part of a batch after the first."""


class Rotation(NamedTuple):
    """A rotation of groups of `size` along the contraction: signs [L, size] or [1, size], or None; order as in
    `ops.rotation.rotate`."""

    size: int
    signs: Tensor | None
    order: str

    def rotate(self, x: Tensor, dim: int) -> Tensor:
        """float32 x, rotated along `dim`."""
        return rotate(x, self.size, dim, self.signs, self.order)

    def rotate_back(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `rotate`, up to rounding."""
        return rotate_back(x, self.size, dim, self.signs, self.order)


class Journal:
    """The values that a forward pass found in the states that it changed, so that it can be made again with the same
    bits (kernels/recompute.py).

    mode    `first` and `again` are such passes, at all other times it is empty
    before  (id of a slot's state, key) -> a copy of the value, None where there was none
    """

    def __init__(self) -> None:
        self.mode: Literal["", "first", "again"] = ""
        self.before: dict[tuple[int, str], Tensor | None] = {}


class Use(msgspec.Struct, frozen=True):
    """One use of a slot: all that `Slot.quantize` is told beside the operand.

    seeds, step  int64 [L] and an int64 scalar on the device: with `site`, the keys of random numbers
    layer        number of the layer
    training     state changes
    counting     what the quantizer loses is counted (counters.py)
    measuring    a held maximum may have to be taken anew in this step (`Maxima.due`)
    part         number of the part of the batch, where gradients are accumulated over several
    term         number of the term
    dim          dimension of x that is contracted, 1 or 2
    length       of the contraction without the zeros that pad it to whole blocks; 0: nothing was padded
    dtype        what the product takes: values come in it or in float32
    takes_fp8    the product is one of FP8 units, if the stage has such (`Stage.takes_fp8`)
    fp8          the FP8 that values may come in, under a power of two (ops/fp8); None: they may not
    save         `Slot.backward` will be called
    keeping      the operand is wanted as codes, too (`Operand.stored`)
    evaluating   what is rounded by chance in training is rounded to nearest (`Quantizer.evaluated`)
    journal      of the forward pass that this is part of, None for one that is not made again
    rotation     the slot rotates x first, which it must be able to do (`Slot.rotates`); None: x comes as it is to be
    chosen       the channels whose errors are quantized, too, int64 [L, k], where they stay in their places
    clip         the maxima that tensor scales follow, [L]: bounds that are learned and x is clamped to; None: x's own
    fixed        signs of rotations and of the first vectors of components are those of step 0, whatever the step
    key          number of the layer by which random numbers are drawn, None: `layer`
    members      the layers whose lanes stand side by side, as experts that are multiplied in one product: x has as many
                 lanes for each lane. Empty: x is of `layer` alone
    """

    seeds: Tensor
    step: Tensor
    layer: int
    training: bool
    counting: bool = False
    measuring: bool = True
    part: int = 0
    term: int = 0
    dim: int = 2
    length: int = 0
    dtype: torch.dtype = torch.float32
    takes_fp8: bool = False
    fp8: torch.dtype | None = None
    save: bool = False
    keeping: bool = False
    evaluating: bool = False
    rotation: Rotation | None = None
    chosen: Tensor | None = None
    clip: Tensor | None = None
    fixed: bool = False
    journal: Journal | None = None
    key: int | None = None
    members: tuple[int, ...] = ()

    @property
    def sign_step(self) -> Tensor:
        """The step whose random signs are taken, an int64 scalar."""
        return torch.zeros_like(self.step) if self.fixed else self.step

    def site(self, number: int) -> int:
        """The key that no other use in a step has. number: of the slot, below 8."""
        key = self.layer if self.key is None else self.key
        return 8 * key + number + PART * self.part + TERM * self.term

    def contracted_last(self, x: Tensor) -> Tensor:
        """x [L, ·, ·] with its contraction as the last dimension."""
        return x if self.dim == 2 else x.mT


class Term(NamedTuple):
    """values [L, R, C], float32 or the product's dtype; factor [L], [L, R] for one per row, [L, R, C / 128] for one per
    segment of a row, or None for 1. shift: what values in FP8 stand for (ops/fp8), None for what they are."""

    values: Tensor
    factor: Tensor | None
    shift: Shift | None = None

    def decoded(self) -> Tensor:
        """values · factor, float32."""
        values = self.values.to(torch.float32) if self.shift is None else self.shift.decoded(self.values)
        if self.factor is None:
            return values
        if self.factor.ndim == 3:
            return (values.unflatten(2, (self.factor.shape[2], -1)) * self.factor[..., None]).flatten(2)
        return values * self.factor.view(len(values), -1, 1)


def _in_fp8(term: Term, dtype: torch.dtype, history: AbstractContextManager[History] | None) -> Term:
    if term.values.dtype == dtype:
        return term
    if history is None:
        return term._replace(values=term.values.to(dtype))
    with history as known:
        values, shift = to_fp8(term.values, dtype, known)
    return term._replace(values=values, shift=shift)


class Stored(NamedTuple):
    """An operand [L, R, C] of one term, as it is stored between the passes (stored.py).

    codes   uint8 [L, R, C / 2], or FP8 or BF16 [L, R, C]
    scales  uint8 [L, R, C / B], empty where codes are not of 4 bits
    factor  as in Term, empty for None
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor


class SavedInput(NamedTuple):
    """Saved by a kernel that makes elements and scales again in the backward pass: the operand [L, R, C] as it came,
    and the tensor maxima [L] that it was scaled by, None where no lane has a tensor scale."""

    x: Tensor
    amax: Tensor | None


class SavedBlocks(NamedTuple):
    """Saved by the reference: the operand, padded and rotated, and its elements [L, n, B], scales [L, n] or [L, n, B],
    decode factors [L] or [L, R]."""

    x: Tensor
    q: Tensor
    scale: Tensor
    dec: Tensor


Saved = SavedInput | SavedBlocks


class Apart(NamedTuple):
    """Channels of an operand that are treated apart.

    order  of all channels, [L, K] (spec/channels.py); None for a gradient, which has none of them
    held   the first `chosen` channels, in another format: the operand is of the others. None: it is of all
    """

    order: Tensor | None
    chosen: int
    held: Operand | None


class Operand(NamedTuple):
    """A quantized operand [L, R, C], the sum of its terms.

    raw     the operand before it was quantized, in its own dtype
    rest    float32, what clamping cut off, in lanes that multiply it too; None where no lane does
    saved   for the backward pass through the quantizer; None where gradients pass straight through
    part    of low rank that was taken off before, None where nothing was: raw and terms are without it
    apart   channels that are treated apart, None where there are none: all else is without those held
    stored  its codes, where they were wanted and a kernel wrote them beside the values, else None
    """

    terms: list[Term]
    raw: Tensor
    rest: Tensor | None = None
    saved: Saved | None = None
    part: Part | None = None
    apart: Apart | None = None
    stored: Stored | None = None

    def decoded(self) -> Tensor:
        """The sum of the terms, float32 [L, R, C]; without `rest` and `part`."""
        first, *others = (term.decoded() for term in self.terms)
        return sum(others, first)

    def with_rest(self) -> Tensor:
        """`decoded`, and what clamping cut off."""
        return self.decoded() if self.rest is None else self.decoded() + self.rest

    def in_fp8(self, dtype: torch.dtype, history: Callable[[int], AbstractContextManager[History]] | None) -> Operand:
        """The same with terms in this FP8, which holds all numbers but for their powers of two. history: that of the
        term with this number; None: values are numbers of this FP8 themselves."""
        found = enumerate(self.terms)
        return self._replace(terms=[_in_fp8(t, dtype, history and history(number)) for number, t in found])

    def whole(self) -> Operand:
        """The same with a single term that has no factor."""
        return self._replace(terms=[Term(self.decoded(), None)])

    def restored(self, rotation: Rotation | None, length: int) -> Tensor:
        """`decoded`, rotated back and without padding, the part of low rank and the channels that are held apart, each
        in its place: float32 [L, R, length]."""
        if self.apart is not None:
            order, chosen, held = self.apart
            assert order is not None  # a gradient is not restored
            others, parts = self._replace(apart=None), []
            if held is not None:
                parts, length = [held.restored(None, chosen)], length - chosen
            return put_back(torch.cat([*parts, others.restored(rotation, length)], 2), order, 2)
        values = self.decoded()
        values = (rotation.rotate_back(values, 2) if rotation else values)[:, :, :length]
        return values if self.part is None else values + self.part.dense
