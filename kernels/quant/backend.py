"""The implementation of the quantizer on a device, chosen once, with the reason.

`triton`    the fused kernels, on a CUDA device; all but quantizing is the reference's
`eager`     the reference itself, on any device
`compiled`  native.py, on a CPU with a C++ compiler: 6–10 times faster, with the same bits
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

import msgspec
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.kernels import dispatch, native, native_library
from fp4dse.kernels.ops.fp8 import Shift
from fp4dse.kernels.quant.descriptor import unheeded
from fp4dse.kernels.quant.spec import low_rank, reference
from fp4dse.kernels.quant.spec.codecs import Encoded
from fp4dse.kernels.quant.triton import heeding, limits
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton.by_scales import by_scales
from fp4dse.kernels.quant.triton.features import Features, features_of


class Backend(msgspec.Struct, frozen=True):
    """A named implementation of the functions that take the reference's place, as far as it has them.

    why_not: what was passed over, one sentence each
    operand: quantizes a whole operand (`triton.operators.operand`, or one that computes the same). It takes `codecs`,
        `blocks` and, of operands that it is to rotate, `rotations`. It refuses lanes that need a column of the
        descriptor tables which its code does not read; heeded(codec, features) has those that it reads
    fp8: `triton.operators.fp8`, for calls of `operand`, where there is such a kernel
    both_fp8: `triton.operators.both_fp8`, for calls of `operand`, where there is such a kernel
    packed: `triton.operators.packed`, for calls of `operand`, where there is such a kernel
    maxima: `reference.rotated_maxima`, for calls of `operand`
    squares: `triton.operators.squares`, where there is such a kernel
    by_scales: quantizes blocks of any size (`triton.by_scales.by_scales`, or one that computes the same). It takes
        `scale_codecs`, and reads the columns scale_heeded(codec, features)
    quantize_blocks: `reference.quantize_blocks` for what `by_scales` takes: elements and scales for the backward pass
    through: `triton.operators.through`, which makes these again in the backward pass, where there is such a kernel
    orthonormal: `low_rank.orthonormal`
    """

    name: str
    why_not: tuple[str, ...] = ()
    operand: Callable[..., tuple[Tensor, Tensor]] | None = None
    codecs: tuple[str, ...] = limits.CODECS
    blocks: tuple[int, ...] = limits.BLOCKS
    heeded: Callable[[str, Features], Collection[str]] = heeding.heeded
    rotations: tuple[int, ...] = limits.ROTATIONS
    fp8: Callable[..., tuple[Tensor, Shift, Tensor]] | None = None
    both_fp8: Callable[..., list[tuple[Tensor, Shift, Tensor]]] | None = None
    packed: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    maxima: Callable[..., Tensor] = reference.rotated_maxima
    squares: Callable[..., tuple[Tensor, Tensor]] | None = None
    by_scales: Callable[..., tuple[Tensor, Tensor]] | None = None
    scale_codecs: tuple[str, ...] = limits.SCALE_CODECS
    scale_heeded: Callable[[str, Features], Collection[str]] = heeding.heeded_by_scales
    quantize_blocks: Callable[..., tuple[Encoded, Tensor]] = reference.quantize_blocks
    through: Callable[..., Tensor] | None = None
    orthonormal: Callable[[Tensor], Tensor] = low_rank.orthonormal

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
        return self._why_not_columns(q.codec, tables, self.heeded)

    def why_not_by_scales(self, q: Quantizer, tables: tuple[Tensor, Tensor]) -> str | None:
        """The same of `by_scales`."""
        if q.codec not in self.scale_codecs:
            return f"codec: found {q.codec}; accepted: {', '.join(self.scale_codecs)}"
        return self._why_not_columns(q.codec, tables, self.scale_heeded)

    @staticmethod
    def _why_not_columns(
        codec: str, tables: tuple[Tensor, Tensor], heeded: Callable[[str, Features], Collection[str]]
    ) -> str | None:
        """The first column that some lane needs and code does not heed; not one that the codec has no use for."""
        known = {*heeded(codec, features_of(*tables))}
        found = unheeded(*tables, known)
        if found:
            found = unheeded(*tables, known | reference.unread(codec))
        return next(iter(found), None)


def why_not_compiled(device: str) -> str | None:
    """The reason why the compiled path is not taken on this device, or None if it is."""
    if dispatch.by_device(device, cpu=False, cuda=True):
        return f"compiled quantizer not taken on {device}: only on the CPU does it keep the reference's bits"
    return native.why_not_native()


@cache
def backend(device: str) -> Backend:
    """The backend for a device: `triton` or `compiled` where possible, else `eager` with the reason."""
    if dispatch.by_device(device, cpu=False, cuda=True):
        if reason := dispatch.why_not_fused(device):
            return _eager(reason)
        kernels = {"operand": fused.operand, "fp8": fused.fp8, "both_fp8": fused.both_fp8, "packed": fused.packed}
        kernels |= {"maxima": fused.rotated_maxima, "squares": fused.squares}
        kernels |= {"by_scales": by_scales, "through": fused.through}
        return msgspec.structs.replace(_eager(), name="triton", **kernels)
    reason = why_not_compiled(device)
    return _eager(reason) if reason else _compiled()


PLAIN = Backend("plain")
"""The reference, for populations without a block-scaled slot."""


def _eager(*reasons: str) -> Backend:
    return Backend("eager", why_not=reasons)


def _compiled() -> Backend:
    return Backend(
        "compiled",
        operand=native.operand,
        codecs=native.OPERAND_CODECS,
        blocks=native.BLOCKS,
        heeded=lambda codec, _: native.heeded(codec) - {*native.BESIDE},
        rotations=(),
        by_scales=native.by_scales,
        scale_codecs=native_library.CODECS,
        scale_heeded=lambda codec, _: native.heeded(codec),
        quantize_blocks=native.quantize_blocks,
        orthonormal=native.orthonormal,
    )
