"""The block-scaled quantizers of all lanes in one slot, ready to be called.

Kernels take a record (`Call`), the reference takes arguments by name (`reference.quantize_blocks`). Both are made here,
of the quantizers' tables on the device and of what they carry from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.dse.own_formats import element_format
from fp4dse.dse.quantizer import MACRO_BLOCK, tile
from fp4dse.kernels.ops.philox import STREAMS, random16
from fp4dse.kernels.quant.backend import Backend
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.operand.records import Term, Use
from fp4dse.kernels.quant.operand.state import Average, Maxima
from fp4dse.kernels.quant.spec import blocks
from fp4dse.kernels.quant.spec.reference import tensor_maxima, widened
from fp4dse.kernels.quant.triton.features import Features, features_of
from fp4dse.kernels.quant.triton.limits import MAGNITUDES

NO_KERNEL = "the backend has no such kernel"


class LaneQuantizers:
    """Canonical quantizers of equal layout (`Quantizer.layout`), one a lane.

    each           one a lane
    first          one of them: block, codec, and what has a tensor factor of its own, are the same in all
    number         of the slot, a key of its random numbers
    why_not_operand, why_not_by_scales   why the backend's kernels of these names do not take them, None if they do
    state          tensors carried from step to step
    counts         what was lost while counting, [L]; see counters.COUNTERS and SQUARED_ERRORS
    """

    def __init__(self, quantizers: Sequence[Quantizer], number: int, device: torch.device, backend: Backend) -> None:
        self.each, first = tuple(quantizers), quantizers[0]
        self.first = first
        self.number, self.backend = number, backend
        self.block, self.edge = first.block, tile(first.block)
        self.tables = descriptor(quantizers, device)
        self.features = features_of(*self.tables)
        self.evaluated_tables, self.evaluated_features = self.tables, self.features
        if (evaluated := [q.evaluated() for q in quantizers]) != list(quantizers):
            self.evaluated_tables = descriptor(evaluated, device)
            either = zip(self.features, features_of(*self.evaluated_tables), strict=True)
            self.evaluated_features = Features(*(a or b for a, b in either))  # mostly those of kernels that there are
        self.stochastic_scales = any(q.stochastic_scales for q in quantizers)
        self.maxima, self.average = Maxima(quantizers, device), Average(quantizers, device)
        self.state: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.why_not_operand: str | None = NO_KERNEL
        self.why_not_by_scales: str | None = NO_KERNEL
        both = [self.tables] if self.evaluated_tables is self.tables else [self.tables, self.evaluated_tables]
        if backend.operand:
            self.why_not_operand = next(filter(None, (backend.why_not_operand(first, tables) for tables in both)), None)
        if backend.by_scales:
            reasons = (backend.why_not_by_scales(first, tables) for tables in both)
            self.why_not_by_scales = next(filter(None, reasons), None)

    @property
    def why_not_codes(self) -> str | None:
        """The reason why no kernel writes the codes of an operand of 4 bits, None if one does."""
        if self.backend.packed is None or self.why_not_operand:
            return self.why_not_operand or NO_KERNEL
        if self.first.codec != "block" or not isinstance(self.block, int):
            return "quantizer: accepted: those of the general codec, blocks along the contraction"
        counts = {len(element_format(of).magnitudes()) for of in {q.element for q in self.each}} - {MAGNITUDES}
        return f"element: found {counts.pop()} magnitudes; accepted: {MAGNITUDES}" if counts else None

    @property
    def why_not_fused(self) -> str | None:
        """The reason why the reference quantizes although the backend has kernels, None if it does not."""
        return self.why_not_operand if self.backend.operand and self.why_not_by_scales else None

    def tables_for(self, use: Use) -> tuple[Tensor, Tensor]:
        """The descriptor tables of one use: under evaluation those without rounding by chance."""
        return self.evaluated_tables if use.evaluating else self.tables

    def features_for(self, use: Use) -> Features:
        """The features of kernels that one use takes: under evaluation all that training needs, and perhaps more."""
        return self.evaluated_features if use.evaluating else self.features

    def cut(self, x: Tensor) -> Tensor:
        """x [L, R, C] in blocks [L, n, B], contiguous and detached."""
        return blocks.cut(blocks.pad(x, 1, self.edge or 1), self.block).contiguous().detach()

    def joined(self, cut: Tensor, shape: torch.Size) -> Tensor:
        """Blocks [L, n, B] as the operand of this shape [L, R, C]: the inverse of `cut`."""
        lanes, rows, columns = shape
        padded = lanes, rows + -rows % (self.edge or 1), columns
        return blocks.join(cut, padded, self.block)[:, :rows]

    def as_term(self, values: Tensor, dec: Tensor, shape: torch.Size) -> Term:
        """Blocks q · scale [L, n, B] with their decode factors as an operand of this shape [L, R, C]."""
        if self.first.scales_partial_sums:
            lanes, rows, columns = shape
            by_tile = dec.view(lanes, -1, columns // MACRO_BLOCK)
            by_row = by_tile.repeat_interleave(self.edge, 1)[:, :rows] if self.edge else by_tile
            return Term(self.joined(values, shape), by_row)
        if self.first.factors_over == "segment":  # factors change along the contraction: a product cannot apply them
            return Term(self.joined(values * widened(dec, values.shape[1])[:, :, None], shape), None)
        return Term(self.joined(values, shape), dec)

    def call(self, block: int, use: Use, amax: Tensor | None = None) -> Call:
        """The record for one use, with the tensor maxima [L] that are given."""
        size, signs = (use.rotation.size, use.rotation.signs) if use.rotation else (0, None)
        (floats, ints), site, codec = self.tables_for(use), use.site(self.number), self.first.codec
        return Call(block, floats, ints, self.features_for(use), use.seeds, use.step, site, amax, size, signs, codec)

    def call_for(self, x: Tensor, block: int, use: Use, columns: bool = False) -> Call:
        """The record for a kernel that takes x [L, R, C] ([L, C, R] if columns): with maxima where some follow from
        earlier steps."""
        call = self.call(block, use)
        amax = self.maxima(self.state, lambda: self.backend.maxima(x, columns, call.rotation, call.signs), use)
        return call if amax is None else call._replace(tensor_amax=amax)

    def call_for_blocks(self, cut: Tensor, use: Use) -> Call:
        """The same for blocks [L, n, B] whose scales are made before their elements."""
        amax = self.maxima(self.state, lambda: tensor_maxima(cut)[:, 0], use)
        return self.call(cut.shape[2], use, amax)

    def with_maxima(self, call: Call, x: Tensor) -> Call:
        """The record with the maxima of x [L, R, C] where some lane needs maxima and it has none."""
        if call.tensor_amax is not None or not self.features.tensor_scale:
            return call
        return call._replace(tensor_amax=self.backend.maxima(x, False, call.rotation, call.signs))

    def reference_arguments(self, x: Tensor, cut: Tensor, use: Use) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All that `reference.quantize_blocks` takes for x [L, R, C], cut into blocks, by place and by name."""
        call, random = self.call_for_blocks(cut, use), None
        if call.features.stochastic:
            drawn = random16(stream=STREAMS["rounding"], count=cut[0].numel(), **_random_keys(call))
            random = drawn.view_as(cut)
        more = self.extra_arguments(x, cut, call, use)
        if call.codec != "block":
            more["codec"] = call.codec
        if call.tensor_amax is not None:
            more["tensor_amax"] = call.tensor_amax[:, None]
        return (cut, call.floats, call.ints, random, call.features.adaptive), more

    def extra_arguments(self, x: Tensor, cut: Tensor, call: Call, use: Use) -> dict[str, Any]:
        """The arguments that no `Call` has and only some quantizers need, by their names in the reference."""
        more: dict[str, Any] = {}
        if self.first.codec == "sawb" and use.length:
            more["unpadded"] = use.length * (x.shape[1] if self.block == "tensor" else 1)
        if self.first.factors_over != "tensor":
            more["factors"] = self.first.factors(x.shape[1], x.shape[2])
        if self.stochastic_scales:
            more["scale_random"] = random16(stream=STREAMS["scales"], count=cut.shape[1], **_random_keys(call))
        if self.average.betas is not None:
            more["guide"] = self.cut(self.average(self.state, x, use))
        return more


def _random_keys(call: Call) -> dict[str, Any]:
    """The keys of random numbers by their names in kernels/ops/philox/__init__.py."""
    site = torch.full((), call.site, device=call.step.device)  # made there: nothing waits for a copy
    return {"seeds": call.seeds, "step": call.step, "site": site}
