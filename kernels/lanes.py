"""The numerics of a population: the GEMM that uses its six operand slots.

One function serves the three GEMMs: both operands are padded with zeros to whole blocks, rotated, quantized along the
contraction, and multiplied by the stage's backend of gemm.py; the tensor decode factors are applied to the result.

There are two sets of them: the recipe's, and the BF16 baseline's. The latter is for layers that the recipe keeps
precise, by their place in the model, and for the stages and steps of its finish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dse.dse import SHARED, SLOTS, STAGES, Hadamard, Recipe
from fp4dse.dse.estimator import Through
from fp4dse.dse.place import Place
from fp4dse.dse.stages import grouped
from fp4dse.kernels.arithmetic import blocks
from fp4dse.kernels.arithmetic.philox import signs
from fp4dse.kernels.arithmetic.rotation import rotate, rotate_back, signs_of
from fp4dse.kernels.backend import PLAIN, Backend, backend
from fp4dse.kernels.counters import COUNTERS
from fp4dse.kernels.gemm import GEMMS, Gemm, pick, scaled
from fp4dse.kernels.kept import kept_state, load_kept
from fp4dse.kernels.operand import PART, Kept, Keys, Operand, Slot, Turn


class Forward(NamedTuple):
    """A forward product y [L, M, N]; what the backward products are to take for x and for w; and what the gradients of
    x and of w need to pass through their quantizers, None where they pass straight."""

    y: Tensor
    x: Tensor
    w: Tensor
    kept_x: Kept | None
    kept_w: Kept | None


class Products(NamedTuple):
    """How a layer multiplies: slots by name, rotations and backends by stage."""

    slots: dict[str, Slot]
    rotations: dict[str, Hadamard | None]
    gemms: dict[str, str]


class LaneNumerics:
    """Recipes of equal structural signature with their seeds, ready to run: `gemm(stage, …)`.

    recipes, seeds: one a lane, one lane or more. steps: of the training, if it has an end: the recipe's finish is a
    share of them. dtype: of what passes between layers, float32 or bfloat16.

    `step` is a device scalar that the training loop advances, and `part` tells the parts of a batch within a step
    apart. While `training` is False, nothing that is kept from step to step changes. While `counting` is True, slots
    count what they lose (see `lost`). While `measuring` is False, held maxima are taken as they are.
    """

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
        first = recipes[0].canonical()
        self.recipe = first
        """The first lane's: what is structure is that of all."""
        self.steps = steps
        self.dtype = dtype
        self.lanes = len(recipes)
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.training = True
        self.counting = False
        self.measuring = True
        self.backend: Backend = PLAIN if first.is_plain else backend(str(device))
        self.gemm_why_not: tuple[str, ...] = ()
        self.through_why_not: tuple[str, ...] = ()
        self.operand_why_not: tuple[str, ...] = ()
        self.quantized = self._products(recipes, first.gemm)
        self.slots, self.rotations, self.gemms = self.quantized
        self.baseline = self.quantized if first.is_plain else self._products([BASELINE] * len(recipes), "exact")
        self.requantized = {stage for stage in SHARED if first.source(stage) == "forward"}
        self.part = 0
        self.precise_layers: set[int] = set()
        self.precise_stages: frozenset[str] = frozenset()

    def _products(self, recipes: Sequence[Recipe], gemm: str) -> Products:
        """The slots of the recipes, and the stages' backends; adds to `gemm_why_not`, `through_why_not` and
        `operand_why_not`."""
        device = self.step.device
        gemms = {}
        for stage, operands in STAGES.items():
            a, b = ([recipe.slot(f"{stage}.{operand}").canonical() for recipe in recipes] for operand in operands)
            gemms[stage], reasons = pick(str(device), a, b, gemm)
            self.gemm_why_not += tuple(f"{stage}: {reason}" for reason in reasons)
        slots = {slot: Slot(recipes, slot, device, self.backend) for slot in SLOTS}
        self.through_why_not += tuple(
            f"{name}: gradient through the reference ({slot.why_not_through})"
            for name, slot in slots.items()
            if slot.why_not_through
        )
        reasons_of = {name: slot.why_not_fused for name, slot in slots.items()}
        texts = {name: f"quantized by the reference ({why})" if why else "" for name, why in reasons_of.items()}
        self.operand_why_not += tuple(grouped(texts))
        return Products(slots, {stage: recipes[0].canonical().rotation(stage) for stage in STAGES}, gemms)

    def add_layer(self, layer: int, place: Place) -> str | None:
        """Take note of where a layer stands. Returns why it is precise, None if it is quantized."""
        why = None if self.recipe.is_plain else self.recipe.precise.why(place)
        (self.precise_layers.discard if why is None else self.precise_layers.add)(layer)
        return why

    def changes_at(self, step: int) -> bool:
        """Whether the recipe's finish begins with this step: what was captured before does not hold from there on."""
        finish = self.recipe.finish
        return finish is not None and self.steps is not None and 0 < step == finish.first_step(self.steps)

    def phase(self, step: int) -> frozenset[str]:
        """Compute as at this step of the training, from now on: within the recipe's finish or before it.

        Returns the stages that are precise now. A step that was captured holds for the steps with the same ones.
        """
        finish = self.recipe.finish
        begun = finish is not None and self.steps is not None and step >= finish.first_step(self.steps)
        self.precise_stages = frozenset(finish.stages if finish and begun else ())
        return self.precise_stages

    def _of(self, stage: str, layer: int) -> Products:
        """What a stage of a layer takes."""
        if layer not in self.precise_layers and stage not in self.precise_stages:
            return self.quantized
        a, b = (self.slots[f"{stage}.{operand}"] for operand in STAGES[stage])
        stays = a.block is None and b.block is None and layer not in self.precise_layers
        return self.quantized if stays else self.baseline

    def gemm(self, stage: str, layer: int, a: Tensor, a_dim: int, b: Tensor, b_dim: int) -> Tensor:
        """The product of one stage, contracted over dimension `a_dim` of a and `b_dim` of b (1 or 2): [L, R, S].

        a, b: float32 or bfloat16 [L, ·, ·], in the order of STAGES[stage]. `layer` keys the random numbers.
        """
        return _product(self._gemm(stage, layer), *self._operands(stage, layer, a, a_dim, b, b_dim))

    def forward(
        self, layer: int, x: Tensor, w: Tensor, keep: tuple[bool, bool] = (False, False), copies_x: bool = True
    ) -> Forward:
        """Y = X Wᵀ of x [L, M, K] and w [L, N, K], float32. keep: whether `through` will be called for x, for w.
        copies_x: whether to make what the backward pass takes for x; else it gets that from `again`."""
        qx, qw = self._operands("fprop", layer, x, 2, w, 2, keep)
        copy_x = self._copy(layer, qx, x) if copies_x and "wgrad" in self.requantized else x
        copy_w = self._copy(layer, qw, w) if "dgrad" in self.requantized else w
        return Forward(_product(self._gemm("fprop", layer), qx, qw), copy_x, copy_w, qx.kept, qw.kept)

    def enough(self, stage: str, layer: int, dtype: torch.dtype) -> torch.dtype:
        """What x of this dtype may be rounded to before a stage takes it, without a change of what comes out."""
        of = self._of(stage, layer)
        slot, other = _pair(of, stage, "x")
        rounds_first = slot.block is None and slot.bf16 == "all" and not of.rotations[stage]
        return torch.bfloat16 if rounds_first and other.compensated is None else dtype

    def looks_back(self, layer: int) -> bool:
        """Whether the backward pass needs what the forward pass made of x: its copy, or what its gradient passes."""
        slot = self._of("fprop", layer).slots["fprop.x"]
        return "wgrad" in self.requantized or (slot.block is not None and slot.through != Through())

    def repeats(self, layer: int) -> bool:
        """Whether `again` finds in the backward pass what the forward pass had: nothing that moves on."""
        slot = self._of("fprop", layer).slots["fprop.x"]
        return slot.block is None or not slot.maxima.has_state

    def again(self, layer: int, x: Tensor) -> tuple[Tensor, Kept | None]:
        """What `forward` gave for x [L, M, K], made again: what the backward product takes for it, if that is a copy,
        and what its gradient needs."""
        keys = self.keys(layer)._replace(counting=False)  # it has been counted
        operand = self._operand("fprop", layer, "x", x, 2, keys, self._turn("fprop", layer), keep=True)
        return self._copy(layer, operand, x) if "wgrad" in self.requantized else x, operand.kept

    def through(self, operand: str, layer: int, g: Tensor, kept: Kept | None) -> Tensor:
        """The gradient of `x` or `w` [L, ·, K] from g, that of what the forward product saw of it, rotated back."""
        if kept is None:
            return g
        of = self._of("fprop", layer)
        slot, other = _pair(of, "fprop", operand)
        keys = self.keys(layer)._replace(counting=False)  # what is kept tells whether something was counted
        turn = self._turn("fprop", layer)
        padded = blocks.pad(g, 2, _unit(of, "fprop"))
        if turn is None or (kept.q is None and _turns(slot, other, turn, keys, True)):
            return slot.backward(padded, kept, keys, turn)[:, :, : g.shape[2]]
        padded = rotate(padded, turn.size, 2, turn.signs, turn.order)
        out = slot.backward(padded, kept, keys)
        return rotate_back(out, turn.size, 2, turn.signs, turn.order)[:, :, : g.shape[2]]

    def _gemm(self, stage: str, layer: int) -> Gemm:
        return GEMMS[self._of(stage, layer).gemms[stage]]

    def _operands(
        self,
        stage: str,
        layer: int,
        a: Tensor,
        a_dim: int,
        b: Tensor,
        b_dim: int,
        keep: tuple[bool, bool] = (False, False),
    ) -> tuple[Operand, Operand]:
        turn, keys = self._turn(stage, layer), self.keys(layer)
        first, second = STAGES[stage]
        return (
            self._operand(stage, layer, first, a, a_dim, keys, turn, keep[0]),
            self._operand(stage, layer, second, b, b_dim, keys, turn, keep[1]),
        )

    def _operand(
        self, stage: str, layer: int, name: str, x: Tensor, dim: int, keys: Keys, turn: Turn | None, keep: bool = False
    ) -> Operand:
        """One operand of a stage, contracted over `dim` of x."""
        of = self._of(stage, layer)
        slot, other = _pair(of, stage, name)
        length = x.shape[dim]
        x = blocks.pad(x.detach(), dim, _unit(of, stage))
        if turn:
            length += -length % turn.size  # a rotation fills its last group
        keys = keys._replace(length=length)
        gemm = GEMMS[of.gemms[stage]]
        fused = turn is not None and _turns(slot, other, turn, keys, keep)
        if turn and not fused:
            x = rotate(x.to(torch.float32), turn.size, dim, turn.signs, turn.order)
        dtype = torch.float32 if gemm.whole else gemm.operand
        operand = slot.quantize(x, dim, keys, dtype, keep, turn if fused else None)
        return operand.whole() if gemm.whole else operand

    def keys(self, layer: int, length: int = 0) -> Keys:
        """What random numbers and state of a layer are keyed by, now."""
        training = self.training and self.part == 0  # what is kept moves on once a step
        return Keys(self.seeds, self.step, layer, training, length, self.counting, self.measuring, self.part)

    def measures(self, step: int) -> bool:
        """Whether some slot looks at tensor maxima in this step to keep them: what `measuring` is to be in it."""
        return any(slot.block is not None and slot.maxima.due(step) for slot in self.slots.values())

    def lost(self) -> dict[str, dict[str, Tensor]]:
        """Slot -> share of elements or blocks, float64 [L], that was lost while counting, over all layers.

        counters.COUNTERS says what is counted, and of what it is a share. Slots without a block scale are left out, and
        so are blocks that hold nothing but zeros.
        """
        counts = {name: slot.counts for name, slot in self.slots.items() if slot.counts}
        return {
            name: {key: of[key].double() / of[whole].double() for key, whole in COUNTERS.items()}
            for name, of in counts.items()
        }

    def forget_lost(self) -> None:
        """Count from zero again."""
        for slot in self.slots.values():
            slot.counts.clear()

    def kept(self) -> dict[str, Tensor]:
        """What slots keep from step to step: name -> the tensor itself, the lane axis first."""
        return kept_state(self.slots)

    def load_kept(self, kept: Mapping[str, Tensor]) -> None:
        """Take over what `kept` returned, on the same device."""
        load_kept(self.slots, kept)

    def _turn(self, stage: str, layer: int) -> Turn | None:
        """The rotation of both operands of a stage."""
        rotation = self._of(stage, layer).rotations[stage]
        return Turn(rotation.size, self._signs(stage, layer, rotation), rotation.order) if rotation else None

    def _signs(self, stage: str, layer: int, rotation: Hadamard) -> Tensor | None:
        """[L, size] of ±1, or [1, size] for all lanes; the same for both operands."""
        number = 8 * layer + list(STAGES).index(stage) + PART * self.part

        def draw() -> Tensor:
            site = torch.full((), number, device=self.seeds.device)
            return signs(self.seeds, self.step, site, rotation.size, self.backend.words)

        return signs_of(rotation, self.seeds.device, draw)

    def _copy(self, layer: int, operand: Operand, x: Tensor) -> Tensor:
        """The forward's quantized copy of x [L, ·, K], decoded and rotated back."""
        decoded, rotation = operand.decoded(), self._of("fprop", layer).rotations["fprop"]
        if rotation:
            decoded = rotate_back(decoded, rotation.size, 2, self._signs("fprop", layer, rotation), rotation.order)
        return decoded[:, :, : x.shape[2]]


BASELINE = Recipe.named("bf16")
"""What precise layers and stages compute as."""


def _pair(of: Products, stage: str, name: str) -> tuple[Slot, Slot]:
    """The slot of an operand, and that of the other one of its product."""
    (other,) = (operand for operand in STAGES[stage] if operand != name)
    return of.slots[f"{stage}.{name}"], of.slots[f"{stage}.{other}"]


def _turns(slot: Slot, other: Slot, turn: Turn, keys: Keys, keep: bool) -> bool:
    """Whether the slot's kernel rotates: what clamping cuts off an operand is multiplied with the other as it is."""
    return slot.rotates(turn, keys, keep) and other.compensated is None


def _unit(of: Products, stage: str) -> int:
    """What the contraction axis of a stage is padded to a multiple of."""
    rotation = of.rotations[stage]
    return max([rotation.size if rotation else 1, *(of.slots[f"{stage}.{o}"].unit for o in STAGES[stage])])


def _product(gemm: Gemm, a: Operand, b: Operand) -> Tensor:
    """a [L, R, C] and b [L, S, C] multiplied: [L, R, S]. What clamping cut off meets the other operand unquantized."""
    out = None
    for s in a.terms:
        for t in b.terms:
            part = scaled(gemm.run(s.values, t.values), s.factor, t.factor)
            out = part if out is None else out + part
    assert out is not None
    unquantized = GEMMS["fp32"].run
    if a.rest is not None:
        out = out + unquantized(a.rest, b.raw.to(torch.float32))
    if b.rest is not None:
        raw = a.raw.to(torch.float32)
        out = out + unquantized(raw if a.rest is None else raw - a.rest, b.rest)
    return out
