"""Parts of the error of rounding weights, added to the weights that sample (`dse.inject.Inject` says which).

With Q* the quantizer under ideal scales, as in kernels/inspection/decompose.py,

    E = (Q(W) - Q*(W))        scale
      + (Q*(W) - W)           dead where Q*(W) = 0, grid elsewhere

Weights of quantized products have it, those that a recipe keeps in BF16 do not. All three parts together are Q(W), to
the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fp4dse.dse.inject import Inject
from fp4dse.dse.layers.precision import Precise
from fp4dse.dse.quantizer import Quantizer
from fp4dse.kernels import LaneNumerics, QuantLinear
from fp4dse.kernels.inspection.decompose import ideal_scale
from fp4dse.kernels.quant.backend import backend
from fp4dse.kernels.quant.operand.kinds import slot_of
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.quant.operand.slot import Slot
from fp4dse.kernels.quant.spec.blocks import pad
from fp4dse.tasks.language.decoder import Decoder


class Injected:
    """The errors of lanes, one Inject or None a lane. numerics: whose step and seeds count."""

    def __init__(self, wanted: Sequence[Inject | None], model: Decoder, numerics: LaneNumerics) -> None:
        self.numerics, device = numerics, numerics.seeds.device
        self.layers: dict[str, QuantLinear] = {}
        """Name of noise.py -> layer."""
        for number, block in enumerate(model.blocks):
            for name, layer in block.named_modules():
                if isinstance(layer, QuantLinear) and Precise().why(layer.place) is None:
                    self.layers[f"{number}.{name}"] = layer
        self.groups: list[tuple[Tensor, Tensor, Slot, Slot]] = []
        """Lanes with one quantizer, int64 [n]; their share of each part, float64 [3, n, 1, 1]; Q and Q*."""
        of = [None if one is None else one.of.canonical() for one in wanted]
        for quantizer in dict.fromkeys(q for q in of if q is not None):
            lanes = [lane for lane, q in enumerate(of) if q == quantizer]
            parts = [one.has for lane in lanes if (one := wanted[lane]) is not None]
            share = torch.tensor(parts, dtype=torch.float64, device=device).T[..., None, None]
            slots = (_slot(q, len(lanes), device) for q in (quantizer, ideal_scale(quantizer).canonical()))
            self.groups.append((torch.tensor(lanes, device=device), share, next(slots), next(slots)))

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Sentences for quantizers that the device's kernels have not."""
        slots = (slot for *_, stored, ideal in self.groups for slot in (stored, ideal))
        return tuple(dict.fromkeys(slot.why_not_fused for slot in slots if slot.why_not_fused))

    def applied(self, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name of a parameter -> its value: those of `changed`, of noise, and all weights with their errors."""
        out = dict(changed)
        for name, layer in self.layers.items():
            weight = changed.get(name, layer.weight.detach())
            found = weight.clone()
            for lanes, share, stored, ideal in self.groups:
                found[lanes] = self._with_error(weight[lanes], lanes, layer.layer, share, (stored, ideal))
            out[name] = found
        return out

    def _with_error(self, w: Tensor, lanes: Tensor, layer: int, share: Tensor, slots: tuple[Slot, Slot]) -> Tensor:
        """Weights [n, N, K] with their parts."""
        seeds = self.numerics.seeds.index_select(0, lanes)
        use = Use(seeds, self.numerics.step, layer, training=False, evaluating=True, length=w.shape[2])
        stored, at_ideal = (
            slot.quantize(pad(w.contiguous(), 2, slot.unit), use).decoded()[:, :, : w.shape[2]].double()
            for slot in slots
        )
        wide = w.double()
        rest, is_dead = at_ideal - wide, at_ideal == 0
        scale, dead, grid = stored - at_ideal, torch.where(is_dead, rest, 0.0), torch.where(is_dead, 0.0, rest)
        return (wide + (share[0] * scale + share[1] * dead + share[2] * grid)).to(w.dtype)


def _slot(quantizer: Quantizer, lanes: int, device: torch.device) -> Slot:
    return slot_of([quantizer] * lanes, 0, device, backend(str(device)))
