"""The numerics of a population: every product of every layer, quantized as the recipes of its lanes say.

A product is computed by its stage (stage.py). There are two sets of stages: the recipes', and the BF16 baseline's for
layers that the recipe keeps precise by their place in the model, and for the stages and steps of its finish. Where
recipes have rules for layers, a layer has numerics of its own for each group of lanes that computes alike there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from fp4dse.dse import SHARED, SLOTS, STAGES, Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.rule import check_places, idle_rules
from fp4dse.dse.stages import grouped
from fp4dse.kernels.dispatch import by_device
from fp4dse.kernels.learned import Clips, Inside, clipped, learned_clips
from fp4dse.kernels.ops.attention import attention
from fp4dse.kernels.ops.attention_core import AttentionCore, attention_core
from fp4dse.kernels.ops.products import Finish
from fp4dse.kernels.quant.backend import PLAIN, Backend, backend
from fp4dse.kernels.quant.counters import COUNTERS
from fp4dse.kernels.quant.operand.kinds import Converted
from fp4dse.kernels.quant.operand.records import Journal, Operand, Rotation, Saved, Stored, Use
from fp4dse.kernels.quant.operand.stored import restored, stored
from fp4dse.kernels.split import Group, Split, make_split
from fp4dse.kernels.stage import Stage, but_weights, make_stages

BASELINE = Recipe.named("bf16")
"""The recipe of precise layers and stages."""


class Forward(NamedTuple):
    """A forward product and what its backward products need.

    y                 the product with its bias, [L, M, N] of the numerics' dtype
    x, w              what the backward products are computed from, [L, M, K] and [L, N, K]; x may be stored as codes
    saved_x, saved_w  for `LaneNumerics.backward`; None where the gradient passes straight through
    """

    y: Tensor
    x: Tensor | Stored
    w: Tensor
    saved_x: Saved | None
    saved_w: Saved | None


MOMENT = ("step", "part", "training", "counting", "measuring", "evaluation", "precise_stages", "packed", "journal")
"""Attributes of numerics that a training loop sets, and that numerics of a layer follow."""
PRESENT = "has/"
"""Before the name of a state that slots carry: the lanes that have it, bool [L]."""

EXPERT = 24
"""Bits that the number of an expert is shifted by in its seed: lanes have smaller seeds, mostly."""

Seeds = TypeVar("Seeds", int, Tensor)


def expert_seed(seed: Seeds, expert: int) -> Seeds:
    """The seed by which an expert draws where it shares its layer's number, of the lane's."""
    return seed + (expert << EXPERT)


Evaluation = Literal["", "quantized", "bf16"]
"""The ways in which held-out data go through a model; empty: as in training."""


class LaneNumerics:
    """The products of lanes whose recipes have one structural signature.

    recipes, seeds: one a lane, one lane or more. steps: of the whole training, if it has an end: the recipe's finish is
    a share of them. dtype: of what passes between layers, float32 or bfloat16.

    A training loop sets these:
    step       int64 scalar on the device, the number of the step
    part       number of the part of the batch, where gradients are accumulated over several
    training   False: no state that is carried from step to step changes
    counting   True: slots count what they lose (`lost`)
    measuring  False: no held maximum is due in this step (`measures`)
    evaluation empty in training. `quantized`: forward operands are rounded to nearest where training rounds by chance
               (`Recipe.evaluated`). `bf16`: every product is the BF16 baseline's
    groups_experts  experts of a layer are multiplied together (experts.py); False: each by itself, with the same bits
    packed     True: what the backward pass takes of the forward's quantized x is kept as codes (operand/stored.py)
    recompute  True: a model with blocks has their inside made again in the backward pass
    journal    of a forward pass that is made again in the backward pass, None in others (recompute.py)
    """

    groups_experts = True

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
        device = torch.device(device)
        self.recipes = [recipe.canonical() for recipe in recipes]
        self.recipe = self.recipes[0]
        """The first lane's: what is structure is that of all."""
        self.steps, self.dtype, self.lanes = steps, dtype, len(recipes)
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.part = 0
        self.training, self.counting, self.measuring = True, False, True
        self.evaluation: Evaluation = ""
        self.journal: Journal | None = None
        self.recompute = self.packed = False
        self.precise_layers: set[int] = set()
        self.places: dict[int, Place] = {}
        self.idle_rules: tuple[str, ...] = ()
        """Rules of lanes that no layer meets, one sentence each (`check_layers`)."""
        self.groups: dict[tuple[tuple[int, ...], tuple[Recipe, ...]], Group] = {}
        """Of lanes, with the recipes that they have in some layers."""
        self.learned: dict[tuple[str, int], Tensor] = {}
        """(operand, layer) -> the clip that is trained there, [L, 1]: a parameter of the layer."""
        self.splits: dict[int, Split] = {}
        """Layer -> its groups, where not all lanes compute there as their recipes say of layers in general."""
        self.precise_stages: frozenset[str] = frozenset()
        self.requantized = {stage for stage in SHARED if self.recipe.copies(stage)}
        self.backend: Backend = PLAIN if self.recipe.is_plain else backend(str(device))
        self.quantized = self.baseline = make_stages(self.recipes, self.recipe.gemm, device, self.backend)
        if any(recipe.slot(slot).element != "bf16" for recipe in self.recipes for slot in SLOTS):
            self.baseline = make_stages([BASELINE] * self.lanes, "exact", device, self.backend)
        self.but_weights: dict[str, Stage] = {}
        """Stages whose weight alone is quantized, for a finish that has such."""
        if self.recipe.finish and self.recipe.finish.stages_but_weights:
            self.but_weights = but_weights(self.recipes, self.quantized, self.baseline, self.recipe.gemm, device)
        self.slots = {
            f"{name}.{of}": slot for name, stage in self.quantized.items() for of, slot in stage.slots.items()
        }
        self.core: AttentionCore | None = None
        """The attention core, where it is quantized."""
        if not self.recipe.attention.is_plain:
            parts = [recipe.attention for recipe in self.recipes]
            self.core = AttentionCore(parts, device, self.backend, self.recipe.gemm)
            self.slots |= self.core.slots

        self.keys: dict[int, tuple[int, int]] = {}
        """Layer of an expert -> that of the first expert and the number of the expert, by which it draws."""
        self.folds: dict[tuple[int, ...], LaneNumerics] = {}
        """Numbers of experts -> numerics of all of them, a lane each. They share what is carried."""
        self.members: tuple[int, ...] = ()
        self.filled: Tensor | None = None
        self.ungrouped: set[str] = set()
        """The reasons why experts were multiplied each by itself."""

    @property
    def gemms(self) -> dict[str, str]:
        """Stage -> the backend of its product, in quantized layers."""
        return {name: stage.gemm for name, stage in self.quantized.items()}

    @property
    def gemm_why_not(self) -> tuple[str, ...]:
        """The reasons why faster products were passed over, one sentence each."""
        stages = [
            *self.quantized.values(),
            *self.but_weights.values(),
            *([] if self.quantized is self.baseline else self.baseline.values()),
        ]
        return tuple(f"{stage.name}: {reason}" for stage in stages for reason in stage.gemm_why_not)

    @property
    def through_why_not(self) -> tuple[str, ...]:
        """The reasons why gradients pass through quantizers by the reference."""
        reasons = {name: slot.why_not_through for name, slot in self.slots.items()}
        return tuple(f"{name}: gradient through the reference ({why})" for name, why in reasons.items() if why)

    @property
    def operand_why_not(self) -> tuple[str, ...]:
        """The reasons why the reference quantizes."""
        reasons = {name: slot.why_not_fused for name, slot in self.slots.items()}
        return tuple(grouped({n: f"quantized by the reference ({why})" if why else "" for n, why in reasons.items()}))

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Rules for layers that this model has not, and the reasons why faster paths were passed over, of quantizers,
        products and gradients."""
        own = (*self.backend.why_not, *self.gemm_why_not, *self.through_why_not, *self.operand_why_not)
        if self.packed and (reason := self.why_not_packed()):
            own = *own, f"activations not kept as codes ({reason})"
        own = *own, *(f"experts multiplied one by one ({reason})" for reason in sorted(self.ungrouped))
        own = *self.idle_rules, *own
        return tuple(dict.fromkeys([*own, *(reason for group in self._groups() for reason in group.fallbacks)]))

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

    def clips(self, layer: int) -> dict[str, Clips]:
        """Operand -> the clips that lanes learn for it in a layer; without operands for which no lane does."""
        return learned_clips([recipe.at(self.places[layer]) for recipe in self.recipes])

    def clip(self, operand: str, layer: int) -> Tensor | None:
        """The clip of an operand, [L, 1], None where the layer does not clamp it now."""
        if not self.learned or not self._stage("fprop", layer).slots[operand].learns_clip:
            return None
        return self.learned.get((operand, layer))

    def clipped(self, operand: str, layer: int, x: Tensor) -> Tensor:
        """An operand [L, …] as it enters its quantizer: clamped where a clip is learned."""
        alpha = self.clip(operand, layer)
        if alpha is None or (unit := self._stage("fprop", layer).slots[operand].lsq) is None:
            return clipped(x, alpha)

        def decoded(x: Tensor) -> Tensor:
            return self.decoded(operand, layer, x.reshape(len(x), -1, x.shape[-1])).view(x.shape)

        return clipped(x, alpha, Inside(decoded, unit))

    def check_layers(self) -> None:
        """ConfigError for a lane's rule that check_places refuses, once all layers are added. One that is idle in this
        model may be meant for others: `fallbacks` names it."""
        places = list(self.places.values())
        for recipe in dict.fromkeys(self.recipes):
            if (error := check_places(recipe.layers, places, used_elsewhere=recipe.layers)) is not None:
                raise error
        idle = [rule for recipe in self.recipes for rule in idle_rules(recipe.layers, places)]
        self.idle_rules = tuple(f"rule without a layer in this model: {rule.label()}" for rule in dict.fromkeys(idle))

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

    def at_present(self, other: LaneNumerics) -> LaneNumerics:
        """Other numerics, of some of the lanes, at the moment of these: they share what is carried from step to
        step."""
        now = copy.copy(other)
        for name in MOMENT:
            setattr(now, name, getattr(self, name))
        return now

    @contextmanager
    def temporarily(self, **values: Any) -> Iterator[None]:
        """In the block, attributes that a training loop sets (MOMENT) have these values; after it, those they had."""
        before = {name: getattr(self, name) for name in values}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

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

    def reseed(self, seeds: Sequence[int]) -> None:
        """Draw random bits by these seeds from now on, one a lane."""
        self.seeds.copy_(torch.tensor(list(seeds)))
        for group in self.groups.values():
            group.numerics.reseed([seeds[lane] for lane in group.lanes])
        for experts, fold in self.folds.items():
            fold.reseed([expert_seed(seed, expert) for seed in seeds for expert in experts])

    def parts(self) -> Iterator[LaneNumerics]:
        """All numerics that stages are in: these, those of experts side by side, and those of the groups of lanes that
        some layers have."""
        yield self
        for other in (*self.folds.values(), *self._groups()):
            yield from other.parts()

    def _groups(self) -> Iterator[LaneNumerics]:
        """The numerics of all groups."""
        return (group.numerics for group in self.groups.values())

    def phase(self, step: int) -> frozenset[str]:
        """Compute as at this step of the training from now on: within the recipe's finish or before it.

        Returns the stages that are precise now, and as `fprop.w` those that are but for their weight. A step that was
        captured holds for the steps with the same ones.
        """
        finish = self.recipe.finish
        has_begun = finish is not None and self.steps is not None and step >= finish.first_step(self.steps)
        self.precise_stages = frozenset()
        if finish and has_begun:
            self.precise_stages = frozenset([*finish.stages, *(f"{stage}.w" for stage in finish.stages_but_weights)])
        return self.precise_stages

    def gemm(
        self,
        stage: str,
        layer: int,
        a: Tensor,
        a_dim: int,
        b: Tensor | Stored,
        b_dim: int,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """The product of one stage, contracted over dimension `a_dim` of a and `b_dim` of b (1 or 2): [L, R, S] of a
        dtype. out: where it is written, of its shape and dtype and each lane in one piece; None: a new tensor.

        a, b: float32 or bfloat16 [L, ·, ·], in the order of STAGES[stage]; b also codes that are converted, with what
        pads their rows. `layer` keys the random numbers.
        """
        of, use = self._stage(stage, layer), self.use(layer)
        rotation, (first, second) = of.draw_rotation(use), STAGES[stage]
        if isinstance(b, Tensor):
            of.choose(a, b, use, (a_dim, b_dim))
        qa = of.operand(first, a, replace(use, dim=a_dim), rotation)
        qb = of.operand(second, b, replace(use, dim=b_dim), rotation)
        return of.multiply(qa, qb, self.filled, Finish(dtype=dtype, out=out))

    def forward(
        self,
        layer: int,
        x: Tensor,
        w: Tensor,
        save: tuple[bool, bool] = (False, False),
        copy_x: bool = True,
        b: Tensor | None = None,
    ) -> Forward:
        """Y = X Wᵀ + b of x [L, M, K], w [L, N, K] and b [L, N] or None. save: whether `backward` will be called for x,
        for w. copy_x: False leaves x as it is in what is returned, for callers that call `requantize_x` later."""
        stage, use = self._stage("fprop", layer), self.use(layer)
        rotation = stage.draw_rotation(use)
        stage.choose(x, w, use, (2, 2))
        is_made_again = self.journal is not None and self.journal.mode == "first"  # of this pass nothing is kept
        copies = copy_x and "wgrad" in self.requantized and not is_made_again
        packs = copies and (self.converts(layer) or (self.packed and self.why_not_packed(layer) is None))
        use_x = replace(use, save=save[0], keeping=packs, clip=self._bounds("x", layer))
        qx = stage.operand("x", x, use_x, rotation)
        qw = stage.operand("w", w, replace(use, save=save[1], clip=self._bounds("w", layer)), rotation)
        back_x: Tensor | Stored = x
        if copies:
            back_x = self._copy(stage, qx, rotation, x.shape[2], packs)
        back_w = qw.restored(rotation, w.shape[2]) if "dgrad" in self.requantized else w
        y = stage.multiply(qx, qw, self.filled, Finish(bias=b, dtype=self.dtype))
        return Forward(y, back_x, back_w, qx.saved, qw.saved)

    @staticmethod
    def _copy(stage: Stage, x: Operand, rotation: Rotation | None, length: int, packs: bool) -> Tensor | Stored:
        """The forward's copy of x, [L, M, length], or its codes."""
        if packs:
            return x.stored or stored(x.terms[0], stage.slots["x"].each)
        return x.restored(rotation, length)

    def converts(self, layer: int) -> bool:
        """True if the weight's gradient takes codes of x as they are: they are kept for it in any case."""
        is_wanted = isinstance(self._stage("wgrad", layer).slots["x"], Converted)
        return is_wanted and self._stage("fprop", layer).slots["x"].maxima is not None

    def why_not_packed(self, layer: int | None = None) -> str | None:
        """The reason why a layer, or one that is quantized, does not keep codes of x for the backward pass, None if it
        does."""
        if "wgrad" not in self.requantized:
            return "wgrad.source: found input; accepted: forward"
        stage = self.quantized["fprop"] if layer is None else self._stage("fprop", layer)
        if stage.choice is not None:
            return "fprop.channels: accepted: none"
        slot = stage.slots["x"]
        return slot.why_not_stored() or by_device(self.seeds.device, cpu=None, cuda=slot.why_not_codes)

    def restored_x(self, layer: int, x: Stored, length: int) -> Tensor | Stored:
        """The x that backward products are computed from, float32 [L, M, length], of the one that `forward` stored; its
        codes where these are converted."""
        if self.converts(layer):
            return x
        stage = self._stage("fprop", layer)
        rotation = stage.draw_rotation(self.use(layer))
        term = restored(x, stage.slots["x"].each)
        return Operand([term], term.values).restored(rotation, length)

    def backward(self, operand: str, layer: int, g: Tensor, saved: Saved | None) -> Tensor:
        """The gradient of `x` or `w` [L, ·, K] from g, that of what the forward product took for it; saved: as
        `forward` returned it."""
        if saved is None:
            return g
        use = replace(self.use(layer), counting=False)  # in the forward pass alone
        return self._stage("fprop", layer).backward(operand, g, saved, use)

    def decoded_weight(self, layer: int, w: Tensor) -> Tensor:
        """`decoded` of w [L, N, K]."""
        if (split := self.split(layer)) is not None:
            parts = zip(split.groups, split.cut(w), strict=True)
            return split.join([group.numerics.decoded_weight(layer, part) for group, part in parts])
        return self.decoded("w", layer, w)

    def decoded(self, operand: str, layer: int, x: Tensor) -> Tensor:
        """The operand that the forward product takes for x [L, ·, K] where all lanes compute alike, decoded and rotated
        back, float32, as under evaluation, with the same random signs in every step; NaN in lanes where it is not
        block-scaled. No state changes."""
        stage, use = self._stage("fprop", layer), replace(self.use(layer), training=False, evaluating=True, fixed=True)
        if stage.slots[operand].maxima is None:
            return torch.full_like(x, torch.nan)
        rotation, use = stage.draw_rotation(use), replace(use, clip=self._bounds(operand, layer))
        x = clipped(x, self.clip(operand, layer))
        return stage.operand(operand, x, use, rotation).restored(rotation, x.shape[2])

    def input_dtype(self, stage: str, layer: int, dtype: torch.dtype) -> torch.dtype:
        """The dtype that x of this dtype may be rounded to before it enters a stage, without a change of the result."""
        return self._stage(stage, layer).input_dtype("x", dtype)

    def common_dtype(self, operand: str, layer: int, dtype: torch.dtype) -> torch.dtype:
        """The dtype that x, w or g of this dtype may be rounded to once for all products that take it, without a change
        of a result."""
        stages = [self._stage(name, layer) for name, operands in STAGES.items() if operand in operands]
        [common, *others] = {stage.input_dtype(operand, dtype) for stage in stages}
        return dtype if others else common

    def needs_forward_x(self, layer: int) -> bool:
        """True if the backward pass needs what the forward quantizer made of x, or saved for its gradient."""
        return "wgrad" in self.requantized or self._stage("fprop", layer).slots["x"].has_estimator

    def can_requantize_x(self, layer: int) -> bool:
        """True if `requantize_x` returns in the backward pass what `forward` had: no state has changed in between."""
        maxima = self._stage("fprop", layer).slots["x"].maxima
        return maxima is None or not maxima.has_state

    def requantize_x(self, layer: int, x: Tensor) -> tuple[Tensor | Stored, Saved | None]:
        """`Forward.x` and `Forward.saved_x` of x [L, M, K], made again."""
        stage, converts = self._stage("fprop", layer), self.converts(layer)
        use = replace(self.use(layer), counting=False, save=True, keeping=converts)
        rotation, use = stage.draw_rotation(use), replace(use, clip=self._bounds("x", layer))
        operand = stage.operand("x", x, use, rotation)
        if "wgrad" not in self.requantized:
            return x, operand.saved
        return self._copy(stage, operand, rotation, x.shape[2], converts), operand.saved

    def _bounds(self, operand: str, layer: int) -> Tensor | None:
        """`clip` as the tensor maxima of an operand that is clamped already, [L]."""
        alpha = self.clip(operand, layer)
        return None if alpha is None else alpha.detach()[:, 0]

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        """softmax(q kᵀ / sqrt d) v of [N, T, d] each, N = lanes × batch × heads, in v's dtype. layer: of the
        projections of q, k and v; it keys the random numbers. causal: to no later key."""
        if self.core is None or self.evaluation == "bf16":
            return attention(q, k, v, causal)
        return attention_core(q, k, v, causal, self.core, self, layer)

    def use(self, layer: int) -> Use:
        """The record of a slot's use in this layer, now."""
        training = self.training and self.part == 0  # state changes once a step
        evaluating = self.evaluation == "quantized"
        is_again = self.journal is not None and self.journal.mode == "again"
        flags = training, self.counting and not is_again, self.measuring
        key, expert = self.keys.get(layer, (layer, 0))
        seeds = expert_seed(self.seeds, expert) if expert else self.seeds
        more: dict[str, Any] = {"evaluating": evaluating, "journal": self.journal, "key": key, "members": self.members}
        return Use(seeds, self.step, layer, *flags, self.part, **more)

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

    def _stage(self, stage: str, layer: int) -> Stage:
        """The stage as it is computed in a layer now."""
        if layer in self.precise_layers or self.evaluation == "bf16":
            return self.baseline[stage]
        is_plain = all(slot.maxima is None for slot in self.quantized[stage].slots.values())
        if is_plain or not self.is_precise(stage):
            return self.quantized[stage]
        return (
            self.baseline[stage] if stage in self.precise_stages else self.but_weights.get(stage, self.baseline[stage])
        )

    def is_precise(self, stage: str) -> bool:
        """True if a stage is precise now, its weight apart in fine-tuning; what is then deployed is quantized."""
        return stage in self.precise_stages or (f"{stage}.w" in self.precise_stages and not self.evaluation)
