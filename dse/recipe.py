"""A recipe: the three GEMMs of a linear layer, each with two quantizers and one rotation. Immutable, hashable.

    fprop   Y  = X Wᵀ     operands x [M, K], w [N, K]      contraction K
    dgrad   dX = dY W     operands g [M, N], w [K, N]      contraction N
    wgrad   dW = dYᵀ X    operands g [N, M], x [K, M]      contraction M

Every operand is quantized along the contraction axis of the GEMM that consumes it, so there are six slots. A rotation
belongs to the GEMM: both operands get the same one and it cancels in the product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.exactness import product_format
from fp4dse.dse.formats import SCALES
from fp4dse.dse.quantizer import E8M0, Quantizer, block_name, rounding_name, scale_key, scale_name
from fp4dse.dse.record import Part, plain

ID_VERSION = 1
"""Raised only if the canonical form itself changes meaning; it is part of the hash."""


class Hadamard(Part, frozen=True):
    """Block Hadamard of `size` along the contraction axis, normalised by 1/sqrt(size).

    `signs`: `random` flips the input by a ±1 vector of length `size`, drawn once per GEMM and step; `none` does not.
    """

    size: Literal[16, 32, 64, 128]
    signs: Literal["random", "none"] = "random"


ROTATION_NAMES: dict[str, Hadamard | None] = {
    "none": None,
    **{f"rht{n}": Hadamard(size=n) for n in (16, 32, 64, 128)},
    **{f"hadamard{n}": Hadamard(size=n, signs="none") for n in (16, 32, 64, 128)},
}


class Fprop(Part, frozen=True):
    """Y = X Wᵀ, contraction over the input width."""

    x: Quantizer
    w: Quantizer
    rotation: Hadamard | None = None


class Dgrad(Part, frozen=True):
    """dX = dY W, contraction over the output width."""

    g: Quantizer
    w: Quantizer
    rotation: Hadamard | None = None


class Wgrad(Part, frozen=True):
    """dW = dYᵀ X, contraction over the batch."""

    g: Quantizer
    x: Quantizer
    rotation: Hadamard | None = None


STAGES: dict[str, tuple[str, str]] = {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}
"""Stage name -> its two operands, in the order of the product."""
SLOTS = tuple(f"{stage}.{operand}" for stage, operands in STAGES.items() for operand in operands)
"""The six operand slots."""


class Recipe(Part, frozen=True):
    """Three stages. `config_id` is the identity of what is computed; learning rate and seed are not part of it."""

    fprop: Fprop
    dgrad: Dgrad
    wgrad: Wgrad

    @staticmethod
    def named(name: str) -> Recipe:
        """A recipe shipped as a data file in `dse/recipes/`; ConfigError names the known ones."""
        from fp4dse.dse.library import recipe_files  # the library needs Recipe

        if name not in recipe_files():
            raise ConfigError("recipe", name, ", ".join(recipe_files()))
        return recipe_files()[name].recipe

    @staticmethod
    def uniform(quantizer: Quantizer) -> Recipe:
        """The same quantizer in all six slots, no rotation."""
        q = quantizer
        return Recipe(fprop=Fprop(x=q, w=q), dgrad=Dgrad(g=q, w=q), wgrad=Wgrad(g=q, x=q))

    def slot(self, name: str) -> Quantizer:
        """The quantizer in slot `fprop.x` … `wgrad.x`."""
        stage, operand = name.split(".")
        return getattr(getattr(self, stage), operand)

    def rotation(self, stage: str) -> Hadamard | None:
        return getattr(self, stage).rotation

    def canonical(self) -> Recipe:
        """The one spelling of all recipes that compute the same."""
        stages = {}
        for stage, (a, b) in STAGES.items():
            old = getattr(self, stage)
            qa, qb = getattr(old, a).canonical(), getattr(old, b).canonical()
            rotation = None if qa.is_plain and qb.is_plain else old.rotation  # nothing is quantized: no effect
            stages[stage] = type(old)(**{a: qa, b: qb, "rotation": rotation})
        return Recipe(**stages)

    @property
    def config_id(self) -> str:
        """16 hex digits: SHA-256 of the canonical recipe as sorted JSON without defaults."""
        text = msgspec.json.encode([ID_VERSION, plain(self.canonical())], order="sorted")
        return hashlib.sha256(text).hexdigest()[:16]

    @property
    def is_plain(self) -> bool:
        """True where no slot has a block scale."""
        return all(self.slot(s).is_plain for s in SLOTS)

    def validate(self) -> list[tuple[str, str]]:
        """The rules that this recipe breaks, as (name, one line that says how); empty if it makes sense.

        What makes no sense within one part is unwritable or has no effect; rules concern several fields.
        """
        return [(rule, str(error)) for rule, check in RULES.items() if (error := check(self))]

    def signature(self) -> Signature:
        """What fixes tensor shapes and control flow: lanes of equal signature share one compiled step."""
        r = self.canonical()
        return Signature(
            blocks=tuple("" if r.slot(s).is_plain else block_name(r.slot(s).block) for s in SLOTS),
            rotations=tuple(rotation_name(r.rotation(stage)) for stage in STAGES),
            products=tuple(product_format(*(r.slot(f"{s}.{o}") for o in STAGES[s])) for s in STAGES),
        )

    def label(self) -> str:
        """The recipe in words: formats, where ranges and stochastic rounding apply, rotations.

        `nvfp4, gradients 16/17 SR, wgrad rht16`; a word for the slots stands before all that is not everywhere.
        """
        r = self.canonical()
        words = _grouped({slot: r.slot(slot).format_label() for slot in SLOTS})
        words += _grouped({slot: r.slot(slot).modifier_label() for slot in SLOTS})
        words += [f"{stage} {rotation_name(r.rotation(stage))}" for stage in STAGES if r.rotation(stage)]
        return ", ".join(words)

    def columns(self) -> dict[str, str | int | float | None]:
        """Every axis as its own flat column, for the store: `fprop_x_scale`, `wgrad_rotation`, …"""
        r = self.canonical()
        out: dict[str, str | int | float | None] = {}
        for slot in SLOTS:
            q, prefix = r.slot(slot), slot.replace(".", "_")
            block_scaled = not q.is_plain
            out[f"{prefix}_element"] = q.element
            out[f"{prefix}_block"] = block_name(q.block) if block_scaled else None
            out[f"{prefix}_scale"] = scale_name(q.scale) if block_scaled else None
            out[f"{prefix}_tensor_scale"] = q.tensor_scale.target if q.tensor_scale else None
            out[f"{prefix}_rounding"] = rounding_name(q.rounding) if block_scaled else None
            out[f"{prefix}_range"] = q.range if block_scaled else None
            out[f"{prefix}_adapt"] = q.adapt if block_scaled else None
        for stage in STAGES:
            out[f"{stage}_rotation"] = rotation_name(r.rotation(stage))
        return out


class Signature(msgspec.Struct, frozen=True, order=True):
    """Structural signature: block shape per slot (empty = plain), rotation and format of the operands per stage.

    Lanes whose operands need different formats take different GEMMs on a GPU. A lane's bits would depend on its
    company if they shared one.
    """

    blocks: tuple[str, ...]  # in the order of SLOTS
    rotations: tuple[str, ...]  # in the order of STAGES
    products: tuple[str, ...]  # in the order of STAGES: `bf16`, `tf32` or `fp32`, see exactness.py


def _target_above_scale(r: Recipe) -> ConfigError | None:
    """A tensor-scale target above the largest block scale would always clip the largest blocks."""
    for slot in SLOTS:
        q = r.slot(slot).canonical()
        if q.tensor_scale and not isinstance(q.scale, E8M0):
            name = scale_key(q.scale)
            target, largest = q.tensor_scale.target, SCALES[name].max
            if target and target > largest:
                accepted = f"at most {largest:g}, the largest {name} block scale"
                return ConfigError(f"{slot}.tensor_scale.target", target, accepted)
    return None


RULES: dict[str, Callable[[Recipe], ConfigError | None]] = {
    "target-above-scale-format": _target_above_scale,
}
"""Rule name -> what breaks it in a recipe, or None."""


def rotation_name(rotation: Hadamard | None) -> str:
    """`none`, `rht16` (random signs), `hadamard16` (no signs): the key in ROTATION_NAMES."""
    if rotation is None:
        return "none"
    return f"{'rht' if rotation.signs == 'random' else 'hadamard'}{rotation.size}"


_GROUPS: dict[str, set[str]] = {
    "all": set(SLOTS),
    "x+w": set(SLOTS) - {"dgrad.g", "wgrad.g"},
    "backward": set(SLOTS[2:]),
    "forward": set(SLOTS[:2]),
    "gradients": {"dgrad.g", "wgrad.g"},
    "weights": {"fprop.w", "dgrad.w"},
    "activations": {"fprop.x", "wgrad.x"},
    "backward x+w": {"dgrad.w", "wgrad.x"},
    **{slot: {slot} for slot in SLOTS},
}
"""Words for sets of slots, larger sets first."""


def _grouped(texts: dict[str, str]) -> list[str]:
    """Slot -> text as phrases: each distinct text once, after the slots that have it; empty texts are left out."""
    phrases = []
    for text in dict.fromkeys(filter(None, texts.values())):
        left = {slot for slot in SLOTS if texts[slot] == text}
        words = []
        for word, slots in _GROUPS.items():
            if slots <= left:
                words.append(word)
                left -= slots
        phrases.append(text if words == ["all"] else f"{' and '.join(words)} {text}")
    return phrases
