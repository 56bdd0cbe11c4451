"""A slot: what is done in all lanes to one operand of one product. All kinds of slots have the same protocol.

    Plain       no block scale: the operand is rounded to BF16, or left as it is
    Scaled      quantized in blocks that share a scale
    Sampled     a Scaled several times with other random bits, averaged
    Clamped     a Scaled of the operand without its largest elements, which may be multiplied apart
    Residual    a Scaled of the operand, and one of its error
    Repeated    a Scaled of the operand, and one of its error in some channels
    Centred     a Scaled of the operand without its mean over tokens, which is multiplied apart
    Spectral    a Scaled of the operand without its largest singular components, whose vectors are quantized apart
    Converted   a Scaled that may take the forward pass's codes as they are
    Estimated   a Scaled whose gradient does not pass straight through

`kinds.make_slot` chooses the kind, once. All lanes of a slot have one kind and one layout (`Quantizer.layout`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.kernels.quant.operand.lane_quantizers import LaneQuantizers
from fp4dse.kernels.quant.operand.records import Operand, Saved, Use
from fp4dse.kernels.quant.operand.stored import why_not_stored


class Slot(ABC):
    """One operand of one product, quantized in all lanes.

    unit             the contraction must be a multiple of it
    maxima           the tensor maxima that scales follow, None where there is no block scale
    state            tensors carried from step to step, the lane axis first
    counts           what was lost while counting, [L]; see counters.COUNTERS and SQUARED_ERRORS
    only_bf16        in every lane the operand is rounded to BF16, and nothing else is done to it
    multiplies_rest  what is cut off the operand is multiplied with the other operand, rotated and not quantized
    is_centred       `quantize` takes the operand without its mean over tokens, which the stage takes off and multiplies
    has_estimator    the gradient does not pass straight through
    lsq              1/sqrt(largest element), [L, 1], zero in lanes whose bound has not LSQ's gradient; None: in all
    learns_clip      the layer clamps the operand to a bound that is trained (kernels/learned.py)
    each             canonical quantizers, one a lane, of a slot whose operands are of one term alone, else empty
    why_not_codes    why codes of 4 bits are found from what was decoded; None: a kernel writes them, or they have more
    why_not_fused    why the reference quantizes although the backend has kernels, else None
    why_not_through  why gradients pass through the reference although the backend has a kernel for them, else None
    """

    only_bf16: bool = False
    multiplies_rest: bool = False
    is_centred: bool = False
    has_estimator: bool = False
    learns_clip: bool = False
    each: Sequence[Quantizer] = ()
    lsq: Tensor | None = None
    why_not_codes: str | None = None
    why_not_through: str | None = None

    def __init__(self, quantizers: LaneQuantizers | None = None) -> None:
        """quantizers: with block scales, if there are any."""
        self._quantizers = quantizers
        self.unit = quantizers.first.unit if quantizers else 1
        self.maxima = quantizers.maxima if quantizers else None
        self.why_not_fused = quantizers.why_not_fused if quantizers else None
        self.state: dict[str, Tensor] = quantizers.state if quantizers else {}
        self.counts: dict[str, Tensor] = quantizers.counts if quantizers else {}

    def why_not_stored(self) -> str | None:
        """The reason why operands are not stored as codes (stored.py), None if they are."""
        if not self.each:
            return f"slot: found {type(self).__name__}; accepted: one whose operands are of one term"
        return next(filter(None, map(why_not_stored, self.each)), None)

    def share_state(self, other: Slot) -> None:
        """Carry from step to step what another slot carries, of the same quantizers for other lanes."""
        self.state = other.state
        if self._quantizers is not None:
            self._quantizers.state = other.state

    @abstractmethod
    def quantize(self, x: Tensor, use: Use) -> Operand:
        """x [L, ·, ·], float32 or bfloat16, its contraction a multiple of `unit`, as an operand
        [L, rows, contraction]."""

    def rotates(self, _use: Use) -> bool:
        """True if `quantize` can rotate the operand itself; else it takes one that is rotated."""
        return False

    def backward(self, g: Tensor, _saved: Saved, _use: Use) -> Tensor:
        """The gradient of x from g, that of the decoded operand, both float32 [L, R, C], padded and rotated as the
        operand was; not rotated where `use.rotation` has the rotation. saved, use: those of `quantize`."""
        return g
