"""The element-wise passes over one tensor: X, W or dY, each the operand of two products.

One kernel reads a tensor once and writes the encodings of both products; what the forward pass can make for the
backward pass (the copies of X and W along their other axis) it makes then. A second read is needed where something
about the whole tensor must be known first: its maximum, its quantiles, or its mean over tokens. A backward operand made
from the forward's quantized copy has a kernel of its own, which reads that copy.

    split of a pass by technique: the time of the plain pass, then what each technique adds to it, in TECHNIQUES' order

Kernels are limited by one resource at a time (Work.seconds), so that arithmetic under a pass that waits for memory is
free, and the order matters where it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from fp4dse.dse.cost import work
from fp4dse.dse.cost.chip import Chip
from fp4dse.dse.cost.products import Stage
from fp4dse.dse.cost.units import decoded_bytes, product_unit
from fp4dse.dse.cost.work import Work
from fp4dse.dse.outliers import Clamp, LearnedClip, Mean
from fp4dse.dse.quantizer import Quantizer, tile
from fp4dse.dse.recipe import GemmChoice
from fp4dse.dse.record import unlabelled
from fp4dse.dse.rounding import Ema, Stochastic
from fp4dse.dse.scale import One
from fp4dse.dse.stages import SHARED, STAGES, Hadamard

TECHNIQUES = (
    "quantize",
    "second copy",
    "copies of the forward",
    "tensor maximum",
    "scales",
    "encodings",
    "stochastic rounding",
    "moving average",
    "outliers",
    "rotation",
    "estimator",
)
"""Parts of a step's element-wise time."""


class Use(msgspec.Struct, frozen=True):
    """A slot: its canonical quantizer, unlabelled, and rotation, the unit of its product, and the forward's quantizer
    and unit if it is made from the forward's copy."""

    slot: str
    quantizer: Quantizer
    rotation: Hadamard | None
    unit: str
    copy_of: Quantizer | None = None
    copy_unit: str = ""


class Item(msgspec.Struct, frozen=True):
    """The work of one technique for a slot, per element of the tensor."""

    slot: str
    technique: str
    work: Work


class Kernel(msgspec.Struct, frozen=True):
    """The work of one kernel, and its runs per step: 1, or a share of the steps where a maximum is held."""

    items: tuple[Item, ...]
    per_step: float = 1.0


USED_BY = {"x": ("fprop", "wgrad"), "w": ("fprop", "dgrad"), "g": ("dgrad", "wgrad")}
"""Tensor -> the stages that it is an operand of; X and W are first the forward's."""


def tensor_uses(tensor: str, first: Stage, second: Stage, chip: Chip, gemm: GemmChoice = "exact") -> list[Use]:
    """The two uses of X, W or dY."""
    uses: list[Use] = []
    for name, stage in zip(USED_BY[tensor], (first, second), strict=True):
        a, b = (unlabelled(getattr(stage, operand).canonical()) for operand in STAGES[name])
        q = a if STAGES[name][0] == tensor else b
        copied = bool(uses) and getattr(stage, "source", "master") != "master" and SHARED[name].endswith(tensor)
        copied = copied and not uses[0].quantizer.is_plain
        uses.append(
            Use(
                slot=f"{name}.{tensor}",
                quantizer=q,
                rotation=None if a.is_plain and b.is_plain else stage.rotation,
                unit=product_unit(a, b, chip, gemm),
                copy_of=uses[0].quantizer if copied else None,
                copy_unit=uses[0].unit if copied else "",
            )
        )
    return uses


def passes(uses: Sequence[Use], chip: Chip) -> list[Kernel]:
    """The kernels that make these operands of one tensor."""
    fresh = [use for use in uses if use.copy_of is None and (use.rotation or not use.quantizer.is_plain)]
    kernels = [_before(Clamp, work.QUANTILE_PASS, fresh), _before(Mean, work.MEAN_PASS, fresh)]
    kernels += [_statistics(fresh, Work(read=2)), _encode(fresh, Work(read=2), chip)]
    for use in uses:
        if use.copy_of is not None:
            read = _decode_copy(use.copy_of, use.copy_unit, chip)
            kernels += [_statistics([use], read), _encode([use], read, chip)]
    return [kernel for kernel in kernels if kernel.items]


def seconds(kernel: Kernel, chip: Chip) -> dict[str, float]:
    """Technique -> seconds per element and step, such that they add up to the kernel's time."""
    out: dict[str, float] = {}
    done, before = Work(), 0.0
    for item in sorted(kernel.items, key=lambda item: TECHNIQUES.index(item.technique)):
        done += item.work
        now = done.seconds(chip)
        out[item.technique] = out.get(item.technique, 0.0) + (now - before) * kernel.per_step
        before = now
    return out


def _statistics(uses: Sequence[Use], read: Work) -> Kernel:
    """The pass that finds the maxima of the whole tensor, for uses that need them first. Without rotations there is one
    maximum; rotated along different axes, the tensor has two."""
    shares = {use.slot: current(use.quantizer) for use in uses}
    per_step = max(shares.values(), default=0.0)
    items: list[Item] = []
    plain_found = False
    for use in uses:
        if not shares[use.slot] or (plain_found and not use.rotation):
            continue
        plain_found = plain_found or not use.rotation
        found = Work(vector=3 if use.quantizer.scaling == "sawb" else 1) + (Work() if items else read + Work(vector=1))
        share = shares[use.slot] / per_step if items else 1.0
        items.append(Item(use.slot, "tensor maximum", found * share))
        if use.rotation:
            items.append(Item(use.slot, "rotation", work.rotation(use.rotation) * share))
    return Kernel(tuple(items), per_step)


_IN_PASSING = ("previous", "history", "feedback")
"""Maxima that are taken while the operand is quantized, for later steps."""


def current(q: Quantizer) -> float:
    """Maxima of the whole tensor taken per step before it is quantized: 1, 1/steps for a held one, or 0."""
    if q.is_plain:
        return 0.0
    if q.block == "tensor" and not isinstance(q.scale, One):
        return 1.0
    if isinstance(q.outliers, LearnedClip):  # which a tensor scale follows
        return 0.0
    if q.tensor_scale is None or q.tensor_scale.over != "tensor" or q.tensor_scale.amax in _IN_PASSING:
        return 0.0
    return 1.0 if q.tensor_scale.amax == "current" else 1 / max(1.0, q.tensor_scale.steps)


def _before(outliers: type[Clamp | Mean], found: Work, uses: Sequence[Use]) -> Kernel:
    """The pass that finds the quantiles to clamp to, or the mean over tokens; one does for all uses."""
    slots = [use.slot for use in uses if isinstance(use.quantizer.outliers, outliers)]
    return Kernel(tuple(Item(slot, "outliers", found) for slot in slots[:1]))


def _encode(uses: Sequence[Use], read: Work, chip: Chip) -> Kernel:
    """The pass that writes the encodings."""
    items: list[Item] = []
    first: Use | None = None
    for use in uses:
        base = Work() if items else read
        if use.quantizer.is_plain:  # for a product in high precision: decoded, rotated, or both
            made = base + Work(write=2, vector=0 if items else 1)
            items.append(Item(use.slot, "rotation" if use.copy_of is None else "copies of the forward", made))
            items += [Item(use.slot, "rotation", work.rotation(use.rotation))] if use.rotation else []
        elif first is not None and one_encoding(first, use):
            if _serves_both(first, use, chip):
                continue
            write = decoded_bytes(use.quantizer, use.unit, chip) or work.stored_bytes(use.quantizer)
            items.append(Item(use.slot, "second copy", Work(write=use.quantizer.encodings * write)))
        else:
            technique = "quantize" if use.copy_of is None else "copies of the forward"
            items += [Item(use.slot, technique, base + Work(vector=0 if items else 1))]
            items += _techniques(use, chip)
        first = first or use
    return Kernel(tuple(items))


@lru_cache(maxsize=65536)
def _techniques(use: Use, chip: Chip) -> tuple[Item, ...]:
    """The work of each technique for a slot in the pass that encodes it, without the reading."""
    return tuple(Item(use.slot, name, added) for name, added in _added(use, chip) if added != Work())


def _added(use: Use, chip: Chip) -> Iterator[tuple[str, Work]]:
    q = use.quantizer
    yield "quantize", work.quantize(q, chip, use.unit)
    if q.tensor_scale is not None:
        previous = q.tensor_scale.amax in _IN_PASSING or q.tensor_scale.over != "tensor"
        yield "tensor maximum", Work(vector=(1 + previous) * work.per_block(q))
    yield "scales", work.scaling(q, chip)
    yield "encodings", work.adapt(q, chip)
    if isinstance(q.rounding, Stochastic):
        yield "stochastic rounding", work.stochastic(q, chip) + work.more_samples(q, chip, use.unit)
    if isinstance(q.rounding, Ema):
        yield "moving average", work.AVERAGE
    yield "outliers", work.outliers(q, chip, use.unit)
    if use.rotation:
        yield "rotation", work.rotation(use.rotation)


def in_registers(use: Use, chip: Chip) -> Work:
    """The work of an operand that is made and multiplied in one kernel: nothing is read or written for it."""
    done = sum((item.work for item in _techniques(use, chip)), Work())
    return msgspec.structs.replace(done, read=0.0, write=0.0)


def one_encoding(a: Use, b: Use) -> bool:
    """True if the tensor and its transpose have the same codes: equal tiles, or one scale, and no random bits."""
    symmetric = bool(tile(a.quantizer.block)) or a.quantizer.block == "tensor"
    drawn = isinstance(a.quantizer.rounding, Stochastic) or a.quantizer.stochastic_scales
    return symmetric and not drawn and a.quantizer == b.quantizer and not (a.rotation or b.rotation)


def _serves_both(a: Use, b: Use, chip: Chip) -> bool:
    """True if one copy of the tensor is all that both products need."""
    return a.unit == b.unit and b.unit in chip.either_axis and b.quantizer.block == "tensor"


def _decode_copy(q: Quantizer, unit: str, chip: Chip) -> Work:
    """Reading the forward's copy: codes and scales, or what a wider unit got."""
    if decoded := decoded_bytes(q, unit, chip):
        return Work(read=decoded)
    decode = Work(convert=0.5) if q.element in chip.converts else Work(vector=3)
    return Work(read=q.bits_per_element / 8, vector=1) + decode
