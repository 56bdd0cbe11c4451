"""The implementation of the quantizer on a device, chosen once, with the reason.

`triton`    the fused kernels, on a CUDA device; all but quantizing is the reference's
`eager`     the reference itself, on any device
`compiled`  native.py, on a CPU with a C++ compiler: 6–10 times faster, with the same bits
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.kernels import dispatch, native
from fp4dse.kernels.ops import philox
from fp4dse.kernels.quant.descriptor import unheeded
from fp4dse.kernels.quant.spec import reference
from fp4dse.kernels.quant.spec.codecs import SCALES, Encoded
from fp4dse.kernels.quant.triton import limits
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton.by_scales import by_scales


class Backend(msgspec.Struct, frozen=True):
    """A named implementation of `philox.words` and, where it has them, of functions that take the reference's place.

    why_not: what was passed over, one sentence each
    operand: `triton.operators.operand`, or a twin, for these codecs and blocks, for lanes that need no other columns of
        the descriptor tables than are `heeded` (of a codec), and for operands that are to be rotated in groups of one
        of these sizes
    by_scales: `triton.by_scales.by_scales`, or a twin, for blocks of any size of these codecs (`scale_codecs`), and for
        lanes that need no other columns than it heeds (`scale_heeded`); and, for such, `reference.quantize_blocks`, for
        operands whose elements and scales the backward pass needs
    through: `triton.operators.through`, which makes them again where there is such a kernel
    """

    name: str
    words: Callable[..., Tensor] = philox.words
    why_not: tuple[str, ...] = ()
    operand: Callable[..., tuple[Tensor, Tensor]] | None = None
    codecs: tuple[str, ...] = limits.CODECS
    blocks: tuple[int, ...] = limits.BLOCKS
    heeded: Callable[[str], Collection[str]] = limits.heeded
    rotations: tuple[int, ...] = limits.ROTATIONS
    by_scales: Callable[..., tuple[Tensor, Tensor]] | None = None
    scale_codecs: tuple[str, ...] = tuple(SCALES)
    scale_heeded: Callable[[], Collection[str]] = limits.heeded_by_scales
    quantize_blocks: Callable[..., tuple[Encoded, Tensor]] = reference.quantize_blocks
    through: Callable[..., Tensor] | None = None

    def why_not_operand(self, q: Quantizer, tables: tuple[Tensor, Tensor]) -> str | None:
        """The reason why `operand` does not take lanes of these descriptor tables; None if it does, or if there is no
        `operand`. q: the canonical quantizer of one, of which codec, block and factors are those of all."""
        if self.operand is None:
            return None
        if q.codec not in self.codecs:
            return f"codec: found {q.codec}; accepted: {', '.join(self.codecs)}"
        if isinstance(q.block, int) and q.block not in self.blocks:
            return f"block: found {q.block}; accepted: {', '.join(map(str, self.blocks))}"
        if q.factors_over != "tensor":
            return f"tensor_scale.over: found {q.factors_over}; accepted: tensor"
        return next(iter(unheeded(*tables, self.heeded(q.codec))), None)

    def why_not_by_scales(self, q: Quantizer, tables: tuple[Tensor, Tensor]) -> str | None:
        """The same of `by_scales`."""
        if q.codec not in self.scale_codecs:
            return f"codec: found {q.codec}; accepted: {', '.join(self.scale_codecs)}"
        return next(iter(unheeded(*tables, self.scale_heeded())), None)


def why_not_compiled(device: str) -> str | None:
    """The reason why the compiled path is not taken on this device, or None if it is."""
    if torch.device(device).type != "cpu":
        return f"compiled quantizer not taken on {device}: only on the CPU does it keep the reference's bits"
    return native.why_not_native()


@cache
def backend(device: str) -> Backend:
    """The backend for a device: `triton` or `compiled` where possible, else `eager` with the reason."""
    if torch.device(device).type == "cuda":
        reason = dispatch.why_not_fused(device)
        if reason:
            return _eager(reason)
        kernels = {"operand": fused.operand, "by_scales": by_scales, "words": _words, "through": fused.through}
        return msgspec.structs.replace(_eager(), name="triton", **kernels)
    reason = why_not_compiled(device)
    return _eager(reason) if reason else _compiled()


PLAIN = Backend("plain")
"""The reference, for populations without a block-scaled slot."""


def _words(*arguments: Any) -> Tensor:
    """`philox.words` by one kernel."""
    from fp4dse.kernels.ops.philox import triton  # which needs it

    return triton.words(*arguments)


def _eager(*reasons: str) -> Backend:
    return Backend("eager", why_not=reasons)


def _compiled() -> Backend:
    return Backend(
        "compiled",
        native.words,
        operand=native.operand,
        codecs=native.OPERAND_CODECS,
        blocks=native.BLOCKS,
        heeded=lambda _: native.heeded() - {*native.BESIDE},
        rotations=(),
        by_scales=native.by_scales,
        scale_codecs=native.CODECS,
        scale_heeded=native.heeded,
        quantize_blocks=native.quantize_blocks,
    )
