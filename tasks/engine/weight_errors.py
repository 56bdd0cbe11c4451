"""The three parts of the error that a rollout's weights have, and of the error that their change since the start has.

With E_t = Q(W_t) - W_t, Q the quantizer of the weight that samples come from (`Recipe.sampling`), and its exact split
into scale bias, dead zone and grid noise (kernels/inspection/decompose.py),

    weight_error   E_t                                             over ‖W_t‖²
    change_error   (Q(W_t) - Q(W_0)) - (W_t - W_0) = E_t - E_0     over ‖W_t - W_0‖²

over all quantized weights of a lane, and as `NAME/scale`, `/dead`, `/grid` the energies of the parts, as
`/scale·dead` … twice their inner products: these six add up to the whole. The part of a change is the change of the
part. A change_error of 1 is that of a rollout that sees nothing of the change; it is above while a few weights cross a
rounding point and jump by a whole step of the grid.

A rotation is part of Q where its signs are always the same; a lane with random ones, or with a quantizer that has no
split, has no number. Operands that products round once more (`gemm`) are not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4dse.dse import Quantizer
from fp4dse.dse.inject import PARTS
from fp4dse.dse.quantizer import tile
from fp4dse.dse.stages import Hadamard
from fp4dse.kernels import LaneNumerics, QuantLinear, decompose, lane_sum, why_not_decomposed
from fp4dse.kernels.inspection.decompose import CROSS
from fp4dse.kernels.ops.rotation import rotate, signs_of

LARGE = 1e30
"""Weights from which on a lane has no numbers: their quantized form may be beyond FP32."""
TERMS = ("", *PARTS, *(f"{a}·{b}" for a, b in CROSS))
Parts = dict[str, Tensor]
"""`scale`, `dead` and `grid`, float64 [L, n] each."""


class WeightErrors:
    """Measures the weights of a model of lanes against those that it has now. numerics: the trainer's."""

    def __init__(self, model: nn.Module, numerics: LaneNumerics) -> None:
        self.lanes = numerics.lanes
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
        sampling = [recipe.sampling() for recipe in numerics.recipes]
        self.used: dict[str, dict[tuple[Quantizer, Hadamard | None], list[int]]] = {}
        known = torch.ones(self.lanes, dtype=torch.bool)
        some = torch.zeros(self.lanes, dtype=torch.bool)
        for name, layer in self.layers.items():
            for lane, recipe in enumerate(sampling):
                here = recipe.at(numerics.places[layer.layer]).fprop
                if here.w.is_plain:
                    continue
                some[lane] = True
                if why_not_decomposed(here.w) or (here.rotation and here.rotation.signs == "random"):
                    known[lane] = False
                    continue
                self.used.setdefault(name, {}).setdefault((here.w, here.rotation), []).append(lane)
        self.known = known & some
        self.first = {name: self.layers[name].weight.detach().clone() for name in self.used}

    @torch.no_grad()
    def statistics(self) -> dict[str, Tensor]:
        """Name -> float64 [L], NaN where a lane has no such number."""
        nothing = torch.zeros(self.lanes, dtype=torch.float64)
        sums = {key: {term: nothing.clone() for term in TERMS} for key in ("weight_error", "change_error")}
        sizes = {key: nothing.clone() for key in sums}
        known = self.known.clone()
        for name, groups in self.used.items():
            for (quantizer, rotation), lanes in groups.items():
                now, then = (of[lanes] for of in (self.layers[name].weight.detach(), self.first[name]))
                fits = (now.flatten(1).abs().amax(1) < LARGE).cpu()  # false for NaN
                known[lanes] &= fits
                now = torch.where(fits.to(now.device)[:, None, None], now, 0.0)
                parts, before = (parts_of(w, quantizer, rotation) for w in (now, then))
                change = {part: parts[part] - before[part] for part in PARTS}
                moved = now.double() - then.double()
                for key, found, w in (("weight_error", parts, now.double()), ("change_error", change, moved)):
                    for term, value in _terms(found).items():
                        sums[key][term][lanes] += value.cpu()
                    sizes[key][lanes] += lane_sum(w.flatten(1).square(), 1).cpu()
        return {
            f"{key}/{term}" if term else key: torch.where(known, value / sizes[key], torch.nan)
            for key, terms in sums.items()
            for term, value in terms.items()
        }

    def state(self) -> dict[str, Tensor]:
        """The weights of the start."""
        return self.first

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over copies of them."""
        for name, value in self.first.items():
            value.copy_(state[name])


def parts_of(w: Tensor, quantizer: Quantizer, rotation: Hadamard | None) -> Parts:
    """The parts of the error of weights [L, N, K], one a lane, padded with zeros to whole blocks as in products."""
    lanes, rows = len(w), w.to(torch.float32)
    if rotation:
        size = rotation.size
        signs = signs_of(rotation, w.device, lambda: torch.empty(0))  # none are drawn
        rows = rotate(F.pad(rows, (0, -rows.shape[2] % size)), size, 2, signs, rotation.order)
    edge = tile(quantizer.block) or 1
    rows = F.pad(rows, (0, -rows.shape[2] % quantizer.unit, 0, -rows.shape[1] % edge))
    apart = quantizer.tensor_scale is not None or quantizer.scaling != "amax" or quantizer.block == "tensor"
    found = [decompose(of, quantizer) for of in (rows if apart else rows.flatten(0, 1)[None])]
    return {part: torch.stack([getattr(of, part) for of in found]).view(lanes, -1) for part in PARTS}


def _terms(parts: Parts) -> dict[str, Tensor]:
    """The sum of squares of all parts together, of each, and twice the inner product of each two, float64 [L]."""
    whole = parts["scale"] + parts["dead"] + parts["grid"]
    out = {"": lane_sum(whole.square(), 1)}
    out |= {name: lane_sum(part.square(), 1) for name, part in parts.items()}
    return out | {f"{a}·{b}": 2 * lane_sum(parts[a] * parts[b], 1) for a, b in CROSS}
