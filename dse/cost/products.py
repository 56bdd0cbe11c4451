"""The three products of every layer, and what techniques do to them.

product   max( 2MNK / rate of its unit, bytes of operands and output / bandwidth ) + launch
apart     in units that the chip says so of (FP4 on Blackwell) the output is written after the product, not meanwhile:
          max( 2MNK / rate, bytes of operands / bandwidth ) + bytes of output / bandwidth + launch
factors   that change along the contraction (macro blocks, segments of 128, 1x128 FP8 on Hopper) are applied to
          partial sums on the vector units, beside the matrix units: what that takes longer than the product is added
residual  every residual doubles the products
samples   every sample of a stochastic rounding is a product of its own
clamped   what is cut off is a sparse product on the vector units, or a dense one in BF16, whichever is faster
mean      the other operand is read again for its product with a vector, decoded and multiplied on the vector units; an
          FMA for every output
low rank  products in BF16 with as many columns as there are components: in each iteration two of the operand, which is
          read for each; then its product, which is taken off; and two for the result. Their vectors, few beside the
          operand, and what makes these orthonormal are not priced
"""

from __future__ import annotations

from functools import lru_cache

from fp4dse.dse.cost import work
from fp4dse.dse.cost.chip import Chip
from fp4dse.dse.cost.model import Linear, Model
from fp4dse.dse.cost.units import decoded_bytes, has_block_scales, product_unit, scales_partial_sums
from fp4dse.dse.outliers import LowRank, Mean, TrainedFactors
from fp4dse.dse.quantizer import MACRO_BLOCK, Quantizer
from fp4dse.dse.recipe import GemmChoice
from fp4dse.dse.rounding import samples_of
from fp4dse.dse.stages import STAGES, Dgrad, Fprop, Wgrad

Stage = Fprop | Dgrad | Wgrad
Seconds = tuple[tuple[str, float], ...]
"""Part -> seconds of a micro-batch."""

IN_LOOP = 2 / MACRO_BLOCK
"""Vector instructions for a multiply-add whose factors change every 128: for every output and 128 products a
multiplication of two factors and an FMA."""


@lru_cache(maxsize=65536)
def product(name: str, stage: Stage, model: Model, chip: Chip, gemm: GemmChoice = "exact") -> Seconds:
    """A stage's product in all layers: the product itself, and what scales, outliers and samples add."""
    a, b = (getattr(stage, operand).canonical() for operand in STAGES[name])
    unit = product_unit(a, b, chip, gemm)
    sampled = samples_of(a.rounding) * samples_of(b.rounding)
    residuals = a.encodings * b.encodings - sampled
    factors = any(scales_partial_sums(q, unit, chip) for q in (a, b))
    rate = chip.flops(unit, unscaled=not any(has_block_scales(q) for q in (a, b)))
    lanes = chip.vector.value * chip.achieved.vector.value
    bandwidth = chip.bandwidth.value * chip.achieved.bandwidth.value
    base = scales = outliers = samples = 0.0
    for linear in model.linears:
        rows, columns, depth, output = _sizes(name, linear, model)
        size = rows * columns * depth
        reads = depth * (rows * _bytes(a, unit, chip) + columns * _bytes(b, unit, chip)) / bandwidth
        writes = rows * columns * output / bandwidth
        after = writes if unit in chip.writes_apart else 0.0
        formed = max(2 * size / rate, reads + writes - after)
        once = formed + after
        launch = chip.launch.value / linear.together
        base += linear.count * (once + launch)
        scales += linear.count * max(0.0, factors * size * IN_LOOP / lanes - formed)
        samples += linear.count * (sampled - 1) * (once + launch)
        outliers += linear.count * residuals * (once + launch)
        for share in filter(None, map(work.cut_share, (a, b))):
            apart = min(share * size / lanes, 2 * size / chip.flops("bf16"))
            outliers += linear.count * (apart + launch)
        for q, other, lines in ((a, b, columns), (b, a, rows)):
            if isinstance(q.outliers, Mean):
                vector = max(lines * depth * _bytes(other, unit, chip) / bandwidth, 2 * lines * depth / lanes)
                outliers += linear.count * (vector + rows * columns / lanes + launch)
        for q, own, other in ((a, rows, columns), (b, columns, rows)):
            if isinstance(q.outliers, LowRank):
                sizes = round(own), round(other), round(depth)
                outliers += linear.count * _low_rank(q.outliers, sizes, chip)
        if isinstance(b.outliers, TrainedFactors):
            sizes = round(rows), round(columns), round(depth)
            outliers += linear.count * _factors(b.outliers, sizes, chip)
    return ("products", base), ("scales", scales), ("outliers", outliers), ("stochastic rounding", samples)


def _low_rank(of: LowRank, sizes: tuple[int, int, int], chip: Chip) -> float:
    """Seconds to find the components of an operand of so many rows, and to multiply them with the rows of the other.
    sizes: these, and the contraction."""
    rows, others, depth = sizes
    rank, rate = of.count(rows, depth), chip.flops("bf16")
    bandwidth = chip.bandwidth.value * chip.achieved.bandwidth.value
    once = max(2 * rank * rows * depth / rate, 2 * rows * depth / bandwidth)
    found = 2 * of.iterations * (once + chip.launch.value) + 2 * rank * rows * depth / rate
    small = max(2 * rank * others * depth / rate, 2 * others * depth / bandwidth) + chip.launch.value
    return found + small + 2 * rank * rows * others / rate


def _factors(of: TrainedFactors, sizes: tuple[int, int, int], chip: Chip) -> float:
    """Seconds of the products with both outer factors of a weight, forward and those of both gradients, each as long as
    forward. x is read again, and y is added to. sizes: rows, outputs and inputs."""
    rows, outputs, inputs = sizes
    rank, bandwidth = of.count(outputs, inputs), chip.bandwidth.value * chip.achieved.bandwidth.value
    once = sum(
        max(2 * rank * rows * width / chip.flops("bf16"), 2 * times * rows * width / bandwidth) + chip.launch.value
        for width, times in ((inputs, 1), (outputs, 2))
    )
    return 3 * once


def _sizes(name: str, linear: Linear, model: Model) -> tuple[float, float, float, int]:
    """Rows and columns of the output, the contraction, and bytes moved for an output."""
    inputs, outputs, tokens = linear.inputs, linear.outputs, model.tokens * linear.tokens
    if name == "fprop":
        return tokens, outputs, inputs, 2
    if name == "dgrad":
        return tokens, inputs, outputs, 2
    return outputs, inputs, tokens, 4 if model.micro_batches == 1 else 8  # FP32, read again to accumulate


def _bytes(q: Quantizer, unit: str, chip: Chip) -> float:
    return decoded_bytes(q, unit, chip) or work.stored_bytes(q)
