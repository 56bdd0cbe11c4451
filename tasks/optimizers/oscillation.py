"""Oscillating weights: those whose quantized value jumps to and fro while they hardly move (2502.20853, 2510.27527).

    R_w = Σ_t |Q(W_t) - Q(W_{t-1})| / (Σ_t |W_t - W_{t-1}| + 1e-8)        over the steps t of a window, for each weight

Q(W) is what the forward product takes for the weight, decoded and rotated back, rounded to nearest where training
rounds by chance, and under the same random signs at all steps where training draws new ones: so it moves with the
weight alone. A weight with R_w >= 16 oscillates (TetraJet's alpha, TetraJet-v2's default). Of a layer, or of all
that are quantized:

    oscillation   ΣΣ |ΔQ(W)| / ΣΣ |ΔW|, over steps and weights
    oscillating   share of the weights with R_w >= 16

Weights are looked at between steps, in the WINDOW steps before one that is recorded; what comes before that is not
known, and has no number. None of it changes a bit of the training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp4dse.kernels import LaneNumerics, QuantLinear, lane_sum

WINDOW = 30
"""Steps of a window of what is recorded (2502.20853)."""
MANY = 16.0
"""R_w from which on a weight oscillates."""
LEAST = 1e-8


class Moved(NamedTuple):
    """The movement of all weights over a window, [L, P] each: Σ|ΔW|, Σ|ΔQ(W)|, NaN where a weight is not block-scaled;
    and Q(W) at its end."""

    weights: Tensor
    decoded: Tensor
    last: Tensor

    def ratios(self) -> Tensor:
        """R_w."""
        return self.decoded / (self.weights + LEAST)


class Oscillation:
    """Watches the weights of a model's quantized layers. ends: the steps before which windows of `window` steps end,
    those that begin before the first step excepted."""

    def __init__(self, model: nn.Module, numerics: LaneNumerics, ends: Collection[int], window: int = WINDOW) -> None:
        self.numerics, self.window = numerics, window
        self.layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, QuantLinear) and module.layer not in numerics.precise_layers
        }
        plain = numerics.recipe.is_plain and not numerics.splits
        self.ends = set() if plain or not self.layers else {end for end in ends if end >= window}
        self.last: dict[str, Tensor] = {}  # of the step before: weights, and what is made of them
        self.sums: dict[int, dict[str, Tensor]] = {}  # end of a window -> movement so far of both

    def watches(self, step: int) -> bool:
        """True if a window is open before step `step`."""
        return any(end - self.window <= step <= end for end in self.ends)

    @torch.no_grad()
    def observe(self, step: int) -> Moved | None:
        """Look at the weights before step `step`, if a window is open then; to be called before every step. Returns
        the movement at the end of a window, else None."""
        if not self.watches(step):
            return None
        now = {"weights": self._weights(), "decoded": self._decoded()}
        for of in self.sums.values():
            for name, total in of.items():
                total.add_((now[name] - self.last[name]).abs_())
        if step + self.window in self.ends:
            self.sums[step + self.window] = {name: torch.zeros_like(value) for name, value in now.items()}
        found = Moved(**self.sums.pop(step), last=now["decoded"]) if step in self.sums else None
        self.last = now if self.sums else {}
        return found

    def _weights(self) -> Tensor:
        """The weights of all layers, [L, P]."""
        return torch.cat([layer.weight.detach().flatten(1) for layer in self.layers.values()], dim=1)

    def _decoded(self) -> Tensor:
        """The operands that the forward products take for them."""
        parts = [self.numerics.decoded_weight(of.layer, of.weight.detach()) for of in self.layers.values()]
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def statistics(self, of: Moved) -> dict[str, Tensor]:
        """Name -> float64 [L], NaN where nothing is block-scaled."""
        sizes = [layer.weight[0].numel() for layer in self.layers.values()]
        many = (of.ratios() >= MANY).where(of.decoded.isfinite(), torch.nan)
        moved = {
            name: [lane_sum(part.double(), 1) for part in every.split(sizes, 1)]
            for name, every in {"weights": of.weights, "decoded": of.decoded, "many": many}.items()
        }
        counts = [torch.full_like(part, size) for part, size in zip(moved["many"], sizes, strict=True)]
        out = {}
        for i, name in enumerate(self.layers):
            out[f"oscillation/{name}"] = moved["decoded"][i] / moved["weights"][i]
            out[f"oscillating/{name}"] = moved["many"][i] / counts[i]
        known = torch.stack([part.isfinite() for part in moved["decoded"]])

        def total(parts: list[Tensor]) -> Tensor:
            return lane_sum(torch.stack(parts).where(known, 0.0), 0)

        out["oscillation"] = total(moved["decoded"]) / total(moved["weights"])
        out["oscillating"] = total(moved["many"]) / total(counts)
        return out

    def state(self) -> dict[str, Tensor]:
        """Open windows as tensors [L, …]."""
        sums = {f"{end}/{name}": value for end, of in self.sums.items() for name, value in of.items()}
        return sums | {f"last/{name}": value for name, value in self.last.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from copies of what `state` returned, on the same device."""
        self.last, self.sums = {}, {}
        for key, value in state.items():
            at, _, name = key.partition("/")
            if at != "last" and int(at) not in self.ends:  # a window of lanes that are gone
                continue
            of = self.last if at == "last" else self.sums.setdefault(int(at), {})
            of[name] = value.clone()
