"""Keys and values of a rollout as a cache of few bits holds them.

Each token's key and value are quantized when they come, in blocks along the width of their head, which zeros fill up to
whole blocks; keys after their rotary embedding. A factor of the tensor is that of what comes at once: of the prompts,
then of one token of each answer. Attention reads nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.quant.backend import backend
from fp4dse.kernels.quant.operand.kinds import slot_of
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.quant.operand.slot import Slot
from fp4dse.kernels.quant.spec.blocks import pad


class CacheFormats:
    """The formats of the caches of lanes, one a lane. numerics: whose step and seeds count."""

    def __init__(self, quantizers: Sequence[Quantizer], numerics: LaneNumerics) -> None:
        self.numerics, device = numerics, numerics.seeds.device
        layouts: dict[str, list[int]] = {}
        for lane, q in enumerate(quantizers):
            if not q.is_plain:
                layouts.setdefault(q.canonical().layout, []).append(lane)
        self.slots: list[tuple[Tensor | None, Slot]] = []
        for lanes in layouts.values():
            slot = slot_of([quantizers[lane].canonical() for lane in lanes], 0, device, backend(str(device)))
            whole = len(lanes) == len(quantizers)
            self.slots.append((None if whole else torch.tensor(lanes, device=device), slot))

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Sentences for caches that the device's kernels do not quantize."""
        return tuple(dict.fromkeys(slot.why_not_fused for _, slot in self.slots if slot.why_not_fused))

    def held(self, x: Tensor, block: int) -> Tensor:
        """Keys or values x [L·B·heads, n, d] of a block of the model, as the cache holds them, in x's dtype."""
        if self.numerics.evaluation == "bf16" or not self.slots:
            return x
        rows = x.view(self.numerics.lanes, -1, x.shape[-1])
        out = rows if self.slots[0][0] is None else rows.clone()
        for lanes, slot in self.slots:
            if lanes is None:
                out = self._decoded(slot, rows, self.numerics.seeds, block).to(x.dtype)
            else:
                seeds = self.numerics.seeds[lanes]
                out[lanes] = self._decoded(slot, rows[lanes], seeds, block).to(x.dtype)
        return out.view_as(x)

    def _decoded(self, slot: Slot, rows: Tensor, seeds: Tensor, block: int) -> Tensor:
        width = rows.shape[2]
        use = Use(seeds, self.numerics.step, block, training=False, evaluating=True, length=width)
        return slot.quantize(pad(rows.contiguous(), 2, slot.unit), use).decoded()[:, :, :width]
