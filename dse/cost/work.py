"""The work of each technique on an operand: bytes and instructions per element of the operand.

The counts are of one fused kernel a pass, 16-bit input, packed output. They follow the operations of docs/numerics.md
(kernels/quant/spec/reference.py), each FP32 or integer operation one instruction; n is the number of elements, l that
of a block.

    pass                  bytes                         instructions
    quantize              2 read, stored bits written   unpack, maximum, multiply; rounding; a scale / l
    tensor maximum        2 read                        unpack, maximum; the rotation, if that comes first
    stochastic rounding                                 Philox 4×32: 8 a round for 128 bits; two to cut out and add
                                                        where no conversion instruction takes random bits
    rotation of b                                       log2 b, an exchange a stage above 16, a flip
    other scales          SCALING
    several encodings     ADAPT
    estimator             ESTIMATOR, SCALE_GRADIENT and scale_rounding, and a gradient that is read and written

An unknown name is a KeyError: a technique that nobody has priced must not be free without a word.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import msgspec

from fp4dse.dse.cost.chip import Chip
from fp4dse.dse.cost.units import decoded_bytes
from fp4dse.dse.estimator import STE, ScaleRelaxation
from fp4dse.dse.outliers import Clamp, LearnedClip, LowRank, Mean, Residual, TrainedScales
from fp4dse.dse.own_formats import Element, TableElement, element_format
from fp4dse.dse.quantizer import Quantizer, block_elements
from fp4dse.dse.rounding import Ema, Stochastic, samples_of
from fp4dse.dse.scale import E6M2, E8M0, One, scale_format
from fp4dse.dse.stages import Hadamard


class Work(msgspec.Struct, frozen=True):
    """Per element: bytes read and written; vector, special and conversion instructions."""

    read: float = 0.0
    write: float = 0.0
    vector: float = 0.0
    special: float = 0.0
    convert: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.read + other.read,
            self.write + other.write,
            self.vector + other.vector,
            self.special + other.special,
            self.convert + other.convert,
        )

    def __mul__(self, factor: float) -> Work:
        return Work(*(a * factor for a in msgspec.structs.astuple(self)))

    def seconds(self, chip: Chip) -> float:
        """Per element, if everything overlaps: the slowest of memory, instruction issue and the units behind it."""
        lanes = chip.achieved.vector.value
        return max(
            (self.read + self.write) / (chip.bandwidth.value * chip.achieved.bandwidth.value),
            (self.vector + self.special + self.convert) / (chip.vector.value * lanes),
            self.special / (chip.special.value * lanes),
            self.convert / (chip.convert.value * lanes),
        )


ROUND = Work(vector=14)
"""Rounding an element by its bits, without a conversion instruction: this project's kernels take 20 instructions an
element (docs/log.md, both orientations, H200), of which 6 are counted elsewhere."""
ROUND_UNIFORM = Work(vector=3, convert=1)
"""To an equally spaced grid: conversion to an integer, clamp, pack."""
ROUND_POWERS = Work(vector=6)
"""To powers: add a part of the exponent's unit, cut the mantissa off, clamp, pack."""
COMPARE = Work(vector=2)
"""To a table: with each number where a value begins, which adds one to the code or not."""
BETWEEN_VALUES = Work(vector=5)
"""By chance between two values of a table: both are looked up, and the place between them is a share."""
PHILOX = 8.0
"""Instructions of a round for 128 random bits: two wide multiplies (two each), two XORs and two additions."""
PHILOX_ROUNDS = 10
"""Rounds where neither chip nor scenario says: this project's kernels'."""
RS_BITS = 8
"""Random bits of an element that a conversion instruction takes: 32 for four (PTX ISA, cvt.rs, e2m1x4 and e4m3x4)."""


def random_bits(bits: float, chip: Chip) -> float:
    """Instructions for that many random bits."""
    return PHILOX * (chip.philox_rounds or PHILOX_ROUNDS) * bits / 128


def per_block(q: Quantizer) -> float:
    """Blocks per element; 0 where a row or the tensor is the block."""
    return 1 / (block_elements(q.block) or math.inf)


def rounding(q: Quantizer, chip: Chip) -> Work:
    """One element to its format: by an instruction where the chip has one, two elements at a time."""
    stochastic = " stochastic" if isinstance(q.rounding, Stochastic) else ""
    if isinstance(q.rounding, Ema) or q.adapt == "dialects":
        return ROUND
    if isinstance(q.element, str) and q.element + stochastic in chip.converts:
        return Work(convert=0.5)
    more = BETWEEN_VALUES if stochastic and isinstance(q.element, TableElement) else Work()
    return by_software(q.element) + more


@cache
def by_software(element: Element) -> Work:
    """The work of rounding without an instruction for it, by the kind of grid."""
    numbers = element_format(element)
    if isinstance(numbers, TableElement):
        return ROUND_UNIFORM if numbers.is_even else COMPARE * (len(numbers.values) - 1)
    if len({b - a for a, b in pairwise(numbers.magnitudes())}) == 1:
        return ROUND_UNIFORM
    return ROUND_POWERS if numbers.mantissa == 0 else ROUND


def scale(q: Quantizer, chip: Chip) -> Work:
    """A block's scale, rounded to its format and back, and the multiplier that follows from it; per block."""
    if isinstance(q.scale, E8M0):
        return Work(vector=6)  # exponent by an integer rule; its reciprocal is an exponent, too
    if isinstance(q.scale, One):
        return Work(vector=1, special=1)  # a factor and its inverse
    name = "e4m3" if isinstance(q.scale, E6M2) else scale_format(q.scale)
    if name in ("bf16", "fp32"):
        return Work(vector=5, special=1)
    return Work(vector=5, special=1) + (Work(convert=2) if name in chip.converts else ROUND)


def quantize(q: Quantizer, chip: Chip, unit: str) -> Work:
    """Block maximum, scale, multiplication, rounding to nearest, and the writing of what the GEMM's unit reads."""
    nearest = msgspec.structs.replace(q, rounding=Quantizer().rounding)
    work = Work(vector=2) + rounding(nearest, chip) + scale(q, chip) * per_block(q)
    if not (decoded := decoded_bytes(q, unit, chip)):
        return work + Work(write=stored_bytes(q))
    if unit == "fp8":
        return work + Work(write=decoded, vector=2, convert=0.5)  # a row's maximum, its power of two, E4M3
    return work + Work(write=decoded, vector=1)  # one more multiplication


def stored_bytes(q: Quantizer) -> float:
    """Of one encoding."""
    return q.bits_per_element / 8 / q.encodings


def rotation(r: Hadamard) -> Work:
    """A butterfly on the vector units, as in this project's kernels: a stage is an addition an element, and above 16 an
    exchange between threads. (As a product of 2b FLOP on the matrix units it would be nearly free, in BF16.)"""
    stages = math.log2(r.size)
    return Work(vector=stages + max(0.0, stages - 4) + (r.signs != "none"))


def stochastic(q: Quantizer, chip: Chip) -> Work:
    """The random bits, and how rounding differs. An instruction takes RS_BITS however many the recipe asks for."""
    assert isinstance(q.rounding, Stochastic)
    nearest = msgspec.structs.replace(q, rounding=Quantizer().rounding)
    if takes_random_bits(q, chip):
        return Work(vector=random_bits(min(q.rounding.bits, RS_BITS), chip))
    more = rounding(q, chip).vector - rounding(nearest, chip).vector
    fewer = rounding(q, chip).convert - rounding(nearest, chip).convert
    return Work(vector=random_bits(q.rounding.bits, chip) + 2 + more, convert=fewer)


def more_samples(q: Quantizer, chip: Chip, unit: str) -> Work:
    """The encodings of all samples but the first; the products that follow are products.py's."""
    return (quantize(q, chip, unit) + stochastic(q, chip)) * (samples_of(q.rounding) - 1)


def takes_random_bits(q: Quantizer, chip: Chip) -> bool:
    """True if a conversion instruction of the chip rounds this element stochastically."""
    return isinstance(q.element, str) and q.adapt != "dialects" and f"{q.element} stochastic" in chip.converts


SCALING: dict[str, Work] = {
    "amax": Work(),
    "split": Work(vector=2),  # a second maximum, and which scale an element takes
    "macro": Work(vector=1 / 32),  # maxima of 128, factors: the multiplication joins that by the scale
    "eden": Work(vector=4, convert=0.5),  # decode, Σz², Σz·ẑ
    "quest": Work(vector=2),  # Σx and Σx² in place of the maximum, the mean taken off
    "sawb": Work(),  # sums take the place of the tensor maximum
    "softmax": Work(vector=3, special=1),
}
"""Beyond the maximum, per element."""


def scaling(q: Quantizer, chip: Chip) -> Work:
    """The work of finding scales from the block, beyond one maximum and one rounding."""
    blocks = per_block(q)
    more = SCALING[q.scaling]
    if isinstance(q.scale, E6M2):
        more = Work(vector=1 + 24 * 3 / 64)  # two more levels of maxima: 16 and 8 comparisons, exponents, multipliers
    if q.scaling == "split":
        more += scale(q, chip) * blocks
    if q.scaling in ("eden", "quest"):
        more += (scale(q, chip) + Work(special=1)) * blocks  # a second scale; a division or a root
    if q.stochastic_scales:
        more += Work(vector=random_bits(16, chip) + 2) * blocks
    return more


ADAPT: dict[str, Work] = {
    "none": Work(),
    "if4": Work(vector=10, convert=1),  # INT4 beside E2M1: multiply, round, clamp (4); two errors of three
    "mixfp4": Work(vector=11, convert=1),  # the same, and the ratio of scales; a second scale of the block is apart
    "razer": Work(vector=12),  # two special values: compare and select; two errors
    "dialects": Work(vector=80),  # 16 codebooks of two thresholds and an error each
}


def adapt(q: Quantizer, chip: Chip) -> Work:
    """Encoding every block in several ways and keeping the best."""
    if q.adapt.startswith("4over6"):  # a second scale, multiplication and rounding; two errors of three operations
        second = rounding(q, chip)
        decode = Work(convert=1) if second.convert else Work()
        return Work(vector=1 + 6 + 1 / 8) + second + decode + scale(q, chip) * per_block(q)
    blocks = (scale(q, chip) + Work(special=1)) * per_block(q) if q.adapt == "mixfp4" else Work()
    return ADAPT[q.adapt] + blocks


def outliers(q: Quantizer, chip: Chip, unit: str) -> Work:
    """A second encoding of the error, clamping, or a part of low rank taken off; what follows for products, and how
    components are found, is in products.py."""
    if isinstance(q.outliers, Residual):
        return Work(vector=2) + quantize(q, chip, unit)
    if isinstance(q.outliers, Clamp):
        cut = 4 * cut_share(q) if q.outliers.compensate else 0.0  # BF16 value and 16-bit place
        return Work(vector=2 + (3 if cut else 0), write=cut)
    if isinstance(q.outliers, Mean | LowRank):
        return Work(vector=1)
    if isinstance(q.outliers, LearnedClip):
        return Work(vector=2)
    if isinstance(q.outliers, TrainedScales):  # codes first, then each block's scale is stored anew
        return Work(vector=1) + quantize(q, chip, unit)
    return Work()


def cut_share(q: Quantizer) -> float:
    """The share of elements that a clamp to quantiles cuts, and that are multiplied apart."""
    return 2 * (1 - q.outliers.quantile) if isinstance(q.outliers, Clamp) and q.outliers.compensate else 0.0


QUANTILE_PASS = Work(read=2, vector=6)
"""Both quantiles of a tensor: unpack, and a histogram of the magnitudes' leading bits; assumed, not measured."""

MEAN_PASS = Work(read=2, vector=2)
"""The mean over tokens: unpack, add."""

AVERAGE = Work(read=8, write=4, vector=9)
"""Q-EMA: read the FP32 average to round towards, and move it after the optimizer's step."""

ESTIMATOR: dict[str, Work] = {
    "ste": Work(),
    "clipped": Work(read=1 / 8, write=1 / 8, vector=3),  # one bit, saved by the forward pass
    "trust": Work(read=1 / 8, write=1 / 8, vector=5),
    "dge": Work(read=2, vector=11, special=2),  # unpack, scale, four comparisons, place in the interval, power, cap
    "power-law": Work(read=2, vector=10, special=2),
    "sigmoid": Work(read=2, vector=11, special=2),
    "spline": Work(read=2, vector=8),
}
"""The factor on a gradient, by the relaxation's tag: what is read again and computed."""

LEARNED_CLIP = Work(read=2, vector=5)
"""The gradient through a learned clip: what was clamped again, unpack, two comparisons, a sign, a sum."""

SCALE_GRADIENT: dict[str, Work] = {
    "none": Work(),
    "diagonal": Work(vector=1),
    "exact": Work(read=2, vector=3 + ROUND.vector),  # the residual again, a dot product, the share of the maximum
    "softmax-diagonal": Work(read=2, vector=4, special=1),
    "softmax": Work(read=2, vector=6 + ROUND.vector, special=1),
}
"""The gradient through the block scale."""


def scale_rounding(relaxation: ScaleRelaxation, q: Quantizer) -> Work:
    """The derivative of a scale's rounding: found where the scale is, saved as BF16, one more factor; per element."""
    if relaxation == STE():
        return Work()
    found = ESTIMATOR[str(relaxation.__struct_config__.tag)]
    return Work(read=2, write=2, vector=found.vector + 1, special=found.special) * per_block(q)
