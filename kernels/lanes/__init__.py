"""The numerics of a population: every product of every layer, quantized as the recipes of its lanes say.

A class a module, each made of the one before it:

    moment.py    Moment        what a training loop sets: the step, whether it is training, counting, evaluation …
    stages.py    LaneStages    which stages a layer takes now, what they need, why they are not faster
    products.py  LaneProducts  forward, backward and attention of lanes that compute alike in a layer
    parts.py     LaneParts     groups of lanes, experts side by side; what all of them carry from step to step and count
    here         LaneNumerics  the layers, and the groups that their rules make of lanes

split.py puts lanes of one layer together in such groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.dse import STAGES, Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.rule import check_places, idle_rules
from fp4dse.kernels.lanes.moment import MOMENT, Evaluation
from fp4dse.kernels.lanes.parts import PRESENT, LaneParts
from fp4dse.kernels.lanes.products import Forward
from fp4dse.kernels.lanes.split import Group, Split, make_split
from fp4dse.kernels.lanes.stages import BASELINE, expert_seed
from fp4dse.kernels.learned import Clips, learned_clips
from fp4dse.kernels.quant.backend import PLAIN, backend

__all__ = ["MOMENT", "PRESENT", "Evaluation", "Forward", "LaneNumerics", "expert_seed"]


class LaneNumerics(LaneParts):
    """The products of lanes whose recipes have one structural signature.

    recipes, seeds: one a lane, one lane or more. steps: of the whole training, if it has an end: the recipe's finish is
    a share of them. dtype: of what passes between layers, float32 or bfloat16. ValueError for no lanes, for another
    number of seeds, for recipes of several signatures.

    A training loop sets the attributes of `Moment`. Where recipes have rules for layers, a layer has numerics of its
    own for each group of lanes that computes alike there.
    """

    groups_experts = True
    """Experts of a layer are multiplied together (experts.py); False: each by itself, with the same bits."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
        steps: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not recipes or len(recipes) != len(seeds):
            raise ValueError(f"a population needs a lane or more and a seed each: {len(recipes)}, {len(seeds)}")
        if len({r.signature() for r in recipes}) != 1:
            raise ValueError("lanes of one population must share their structural signature")
        recipes, device = [recipe.canonical() for recipe in recipes], torch.device(device)
        chosen = PLAIN if recipes[0].is_plain else backend(str(device))
        super().__init__(recipes, seeds, device, steps, dtype, chosen)
        self.places: dict[int, Place] = {}
        self.idle_rules: tuple[str, ...] = ()
        """Rules of lanes that no layer meets, one sentence each (`check_layers`)."""
        self.ungrouped: set[str] = set()
        """The reasons why experts were multiplied each by itself."""
        self.unpacked: set[str] = set()
        """The reasons why layers kept something else where codes are wanted (layers.py)."""

    def add_layer(self, layer: int, place: Place) -> None:
        """Take note of where in the model a layer stands."""
        self.places[layer] = place
        self.precise_layers.discard(layer)
        self.splits.pop(layer, None)
        if not any(recipe.layers for recipe in self.recipes):
            if not self.recipe.is_plain and self.recipe.precise.why(place):
                self.precise_layers.add(layer)
            return
        here = [recipe.at(place) for recipe in self.recipes]
        if all((r.fprop, r.dgrad, r.wgrad) == (BASELINE.fprop, BASELINE.dgrad, BASELINE.wgrad) for r in here):
            self.precise_layers.add(layer)
        elif here != [recipe.base for recipe in self.recipes]:
            self.splits[layer] = self._split(here)

    def check_layers(self) -> None:
        """ConfigError for a lane's rule that check_places refuses, once all layers are added. One that is idle in this
        model may be meant for others: `fallbacks` names it."""
        places = list(self.places.values())
        for recipe in dict.fromkeys(self.recipes):
            if (error := check_places(recipe.layers, places, used_elsewhere=recipe.layers)) is not None:
                raise error
        idle = [rule for recipe in self.recipes for rule in idle_rules(recipe.layers, places)]
        self.idle_rules = tuple(f"rule without a layer in this model: {rule.label()}" for rule in dict.fromkeys(idle))

    def clips(self, layer: int) -> dict[str, Clips]:
        """Operand -> the clips that lanes learn for it in a layer; without operands for which no lane does."""
        return learned_clips([recipe.at(self.places[layer]) for recipe in self.recipes])

    def split(self, layer: int) -> Split | None:
        """The groups of a layer, with numerics of the present moment; None where all lanes compute alike."""
        found = self.splits.get(layer)
        if found is None or self.evaluation == "bf16":
            return None
        groups = tuple(Group(g.lanes, self.at_present(g.numerics)) for g in found.groups)
        if self.filled is not None:
            for group, part in zip(groups, found.cut(self.filled), strict=True):
                group.numerics.filled = part
        for operand in STAGES["fprop"]:
            if (alpha := self.learned.get((operand, layer))) is not None:
                for group, part in zip(groups, found.cut(alpha), strict=True):
                    group.numerics.learned = group.numerics.learned | {(operand, layer): part}
        return found._replace(groups=groups)

    def _split(self, here: Sequence[Recipe]) -> Split:
        """The groups of lanes that have these recipes in a layer. Groups are made once."""
        members: dict[object, list[int]] = {}
        for lane, recipe in enumerate(here):
            members.setdefault(recipe.signature(), []).append(lane)
        groups, seeds, device = [], self.seeds.tolist(), self.seeds.device
        for lanes in members.values():
            key = tuple(lanes), tuple(here[lane] for lane in lanes)
            if key not in self.groups:
                numerics = LaneNumerics(key[1], [seeds[lane] for lane in lanes], device, self.steps, self.dtype)
                numerics.keys = self.keys
                self.groups[key] = Group(key[0], numerics)
            groups.append(self.groups[key])
        return make_split(groups, device)

    def decoded_weight(self, layer: int, w: Tensor) -> Tensor:
        """`decoded` of w [L, N, K]."""
        if (split := self.split(layer)) is not None:
            parts = zip(split.groups, split.cut(w), strict=True)
            return split.join([group.numerics.decoded_weight(layer, part) for group, part in parts])
        return self.decoded("w", layer, w)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Rules for layers that this model has not, and the reasons why faster paths were passed over, of quantizers,
        products and gradients."""
        own = (*self.backend.why_not, *self.gemm_why_not, *self.through_why_not, *self.operand_why_not)
        if self.packed and (reason := self.why_not_packed()):
            own = *own, f"activations not kept as codes ({reason})"
        own = *own, *(f"activations not kept as codes ({reason})" for reason in sorted(self.unpacked))
        own = *own, *(f"experts multiplied one by one ({reason})" for reason in sorted(self.ungrouped))
        own = *self.idle_rules, *own
        return tuple(dict.fromkeys([*own, *(reason for group in self._groups() for reason in group.fallbacks)]))
