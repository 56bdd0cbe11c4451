"""Numerics and those that are parts of them: of groups of lanes that compute apart in some layers (split.py), and of
experts side by side (experts.py).

Seeds, and what slots carry from step to step and count, are asked of the whole: its tensors have all lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4dse.dse import Recipe
from fp4dse.kernels.lanes.products import LaneProducts
from fp4dse.kernels.lanes.split import Group, Split
from fp4dse.kernels.lanes.stages import expert_seed
from fp4dse.kernels.quant.backend import Backend
from fp4dse.kernels.quant.counters import COUNTERS

if TYPE_CHECKING:
    from fp4dse.kernels.lanes import LaneNumerics

PRESENT = "has/"
"""Before the name of a state that slots carry: the lanes that have it, bool [L]."""


class LaneParts(LaneProducts):
    """Numerics with parts, which have some of the lanes, or each lane once for each of several experts."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        seeds: Sequence[int],
        device: torch.device,
        steps: int | None,
        dtype: torch.dtype,
        backend: Backend,
    ) -> None:
        super().__init__(recipes, seeds, device, steps, dtype, backend)
        self.groups: dict[tuple[tuple[int, ...], tuple[Recipe, ...]], Group] = {}
        """Of lanes, with the recipes that they have in some layers."""
        self.splits: dict[int, Split] = {}
        """Layer -> its groups, where not all lanes compute there as their recipes say of layers in general."""
        self.folds: dict[tuple[int, ...], LaneNumerics] = {}
        """Numbers of experts -> numerics of all of them, a lane each. They share what is carried (experts.py)."""

    def parts(self) -> Iterator[LaneParts]:
        """All numerics that stages are in: these, those of experts side by side, and those of the groups of lanes that
        some layers have."""
        yield self
        for other in (*self.folds.values(), *self._groups()):
            yield from other.parts()

    def _groups(self) -> Iterator[LaneNumerics]:
        """The numerics of all groups."""
        return (group.numerics for group in self.groups.values())

    def reseed(self, seeds: Sequence[int]) -> None:
        """Draw random bits by these seeds from now on, one a lane."""
        self.seeds.copy_(torch.tensor(list(seeds)))
        for group in self.groups.values():
            group.numerics.reseed([seeds[lane] for lane in group.lanes])
        for experts, fold in self.folds.items():
            fold.reseed([expert_seed(seed, expert) for seed in seeds for expert in experts])

    def measures(self, step: int) -> bool:
        """True if some slot will keep a tensor maximum of this step. `measuring` is to be set to it."""
        own = any(slot.maxima is not None and slot.maxima.due(step) for slot in self.slots.values())
        return own or any(group.measures(step) for group in self._groups())

    def lost(self) -> dict[str, dict[str, Tensor]]:
        """Slot -> share of elements or blocks, float64 [L], that was lost while counting, over all layers.

        counters.COUNTERS says what is counted, and of what it is a share. Slots without a block scale are left out, and
        so are blocks that hold nothing but zeros.
        """
        counts = self._counts()
        return {
            name: {key: of[key].double() / of[whole].double() for key, whole in COUNTERS.items()}
            for name, of in counts.items()
        }

    def _counts(self) -> dict[str, dict[str, Tensor]]:
        """Slot -> counts of all lanes [L], those of groups included."""
        counts = {name: dict(slot.counts) for name, slot in self.slots.items() if slot.counts}
        folds = self.folds.items()
        others = [Group(tuple(lane for lane in range(self.lanes) for _ in experts), fold) for experts, fold in folds]
        for group in (*self.groups.values(), *others):
            lanes = torch.tensor(group.lanes, device=self.seeds.device)
            for name, of in group.numerics._counts().items():
                of_all = counts.setdefault(name, {})
                for key, value in of.items():
                    of_all[key] = of_all.get(key, value.new_zeros(self.lanes)).index_add(0, lanes, value)
        return counts

    def forget_lost(self) -> None:
        """Count from zero again."""
        for numerics in self.parts():
            for slot in numerics.slots.values():
                slot.counts.clear()

    def state(self) -> dict[str, Tensor]:
        """The tensors that slots carry from step to step and have counted: name -> the tensor itself, the lane axis
        first. What groups of lanes carry for a layer has zeros in the other lanes, and beside it stands which lanes
        have it; they do not carry what they counted."""
        out = {f"{at}/{key}": value for at, of in self._carried().items() for key, value in of.items()}
        for group in self.groups.values():
            for name, value in group.numerics.state().items():
                if name.startswith("state/"):
                    lanes = torch.tensor(group.lanes, device=value.device)
                    whole = out.setdefault(name, value.new_zeros(self.lanes, *value.shape[1:]))
                    whole.index_copy_(0, lanes, value)
                    has = out.setdefault(PRESENT + name, torch.zeros(self.lanes, dtype=torch.bool, device=value.device))
                    has.index_fill_(0, lanes, True)
        return out

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over copies of what `state` returned, on the same device."""
        for numerics in self.parts():
            for of in numerics._carried().values():
                of.clear()
        for name, value in state.items():
            at, _, key = name.rpartition("/")
            if name.startswith(PRESENT):
                continue
            if PRESENT + name not in state:
                self._carried()[at][key] = value.clone()
                continue
            for group in self.splits[int(key.split()[1])].groups:  # keys are a kind, a layer, perhaps a term
                if state[PRESENT + name][list(group.lanes)].all():
                    group.numerics._carried()[at][key] = value[list(group.lanes)].clone()

    def _carried(self) -> dict[str, dict[str, Tensor]]:
        of_kind = {f"state/{name}": slot.state for name, slot in self.slots.items()}
        return of_kind | {f"counts/{name}": slot.counts for name, slot in self.slots.items()}
