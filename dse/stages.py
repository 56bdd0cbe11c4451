"""The three GEMMs of a linear layer, each with two quantizers and one rotation.

    fprop   Y  = X Wᵀ     operands x [M, K], w [N, K]      contraction K
    dgrad   dX = dY W     operands g [M, N], w [K, N]      contraction N
    wgrad   dW = dYᵀ X    operands g [N, M], x [K, M]      contraction M

Every operand is quantized along the contraction axis of the GEMM that consumes it, so there are six slots. A rotation
belongs to the GEMM: both operands get the same one and it cancels in the product.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from fp4dse.dse.channels import Channels
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.record import Part


class Hadamard(Part, frozen=True):
    """Block Hadamard of `size` along the contraction axis, normalised by 1/sqrt(size).

    signs  the input is flipped by a ±1 vector: `random`, of length `size`, drawn once per GEMM and step; `fixed`, the
           vector of 16 that NVIDIA's Transformer Engine uses, repeated; or `none`
    order  of the matrix's columns: `sylvester`, or `sequency`, by the number of sign changes (GSR, 2505.03810)
    """

    size: Literal[16, 32, 64, 128]
    signs: Literal["random", "fixed", "none"] = "random"
    order: Literal["sylvester", "sequency"] = "sylvester"


_ROTATION_WORDS = {"random": "rht", "fixed": "fixed", "none": "hadamard"}
_ORDER_WORDS = {"sylvester": "", "sequency": "gsr"}
ROTATION_NAMES: dict[str, Hadamard | None] = {
    "none": None,
    **{f"{word}{n}": Hadamard(size=n, signs=s) for s, word in _ROTATION_WORDS.items() for n in (16, 32, 64, 128)},  # type: ignore[arg-type]
    **{f"gsr{n}": Hadamard(size=n, signs="none", order="sequency") for n in (16, 32, 64, 128)},
}

Source = Literal["master", "forward"]
"""The source of an operand of a backward product that the forward pass quantizes too: high precision, or
re-quantized from the forward's quantized copy."""
XSource = Literal["master", "forward", "converted"]
"""Of x also `converted`: the forward's MXFP4 codes in FP8, by exponents alone (2603.02731). Elements are E2M1 · 2^j
under a power of two for 128 tokens and 32 channels, rounded only where a block's scale is 2^15 or more below the
largest."""


class Fprop(Part, frozen=True):
    """Y = X Wᵀ, contraction over the input width. `channels` of it may be treated apart."""

    x: Quantizer
    w: Quantizer
    rotation: Hadamard | None = None
    channels: Channels = None


class Dgrad(Part, frozen=True):
    """dX = dY W, contraction over the output width. `source` is that of w."""

    g: Quantizer
    w: Quantizer
    rotation: Hadamard | None = None
    source: Source = "master"


class Wgrad(Part, frozen=True):
    """dW = dYᵀ X, contraction over the batch. `source` is that of x."""

    g: Quantizer
    x: Quantizer
    rotation: Hadamard | None = None
    source: XSource = "master"


STAGES: dict[str, tuple[str, str]] = {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}
"""Stage name -> its two operands, in the order of the product."""
SLOTS = tuple(f"{stage}.{operand}" for stage, operands in STAGES.items() for operand in operands)
"""The six operand slots."""
SHARED = {"dgrad": "dgrad.w", "wgrad": "wgrad.x"}
"""Backward stage -> its operand that the forward pass quantizes too."""


def rotation_name(rotation: Hadamard | None) -> str:
    """`none`, `rht16` (random signs), `fixed16`, `hadamard16` (no signs), `gsr16`, `gsr-rht16`."""
    if rotation is None:
        return "none"
    order, signs = _ORDER_WORDS[rotation.order], _ROTATION_WORDS[rotation.signs]
    words = [order, "" if order and rotation.signs == "none" else signs]
    return f"{'-'.join(filter(None, words))}{rotation.size}"


_GROUPS: dict[str, set[str]] = {
    "all": set(SLOTS),
    "x+w": set(SLOTS) - {"dgrad.g", "wgrad.g"},
    "backward": set(SLOTS[2:]),
    "forward": set(SLOTS[:2]),
    "gradients": {"dgrad.g", "wgrad.g"},
    "weights": {"fprop.w", "dgrad.w"},
    "activations": {"fprop.x", "wgrad.x"},
    "backward x+w": {"dgrad.w", "wgrad.x"},
    **{stage: {f"{stage}.{operand}" for operand in operands} for stage, operands in STAGES.items()},
    **{slot: {slot} for slot in SLOTS},
}
_STAGE_GROUPS = {"all": set(STAGES), "backward": set(SHARED), **{stage: {stage} for stage in STAGES}}
"""Words for sets of slots and of stages, larger sets first."""


def grouped(texts: dict[str, str]) -> list[str]:
    """Slot or stage -> text as phrases: each distinct text once, after those that have it; empty texts are left out."""
    groups = _STAGE_GROUPS if texts.keys() <= STAGES.keys() else _GROUPS
    phrases = []
    for text in dict.fromkeys(filter(None, texts.values())):
        left = {name for name in texts if texts[name] == text}
        words = []
        for word, names in groups.items():
            if names <= left:
                words.append(word)
                left -= names
        phrases.append(text if words == ["all"] else f"{' and '.join(words)} {text}")
    return phrases


def with_exceptions(texts: dict[str, str]) -> list[str]:
    """Slot -> text, none of them empty, as phrases: what most slots have alone, then the others: `nvfp4, weights
    nvfp4-2d`; as `grouped` where there is no such text."""
    [(most, count)] = Counter(texts.values()).most_common(1)
    if 2 * count <= len(texts):
        return grouped(texts)
    return [most, *grouped({slot: "" if text == most else text for slot, text in texts.items()})]
