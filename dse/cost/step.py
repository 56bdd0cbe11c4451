"""The modelled time of a training step: products at matrix-unit rates, element-wise work at vector rates and bytes.

For every layer with a weight [N, K] and M rows:

    product     max( 2MNK / rate of its unit, bytes / bandwidth, instructions in its loop / vector rate ) + launch
    operands    the passes of operands.py over X (M·K), W (N·K, once an optimizer step) and dY (M·N)
    estimator   a pass over dX and, once an optimizer step, over dW
    the rest    head, attention core, element-wise layers, optimizer: the same for every recipe, BF16 among them

Products and passes follow one another; nothing else overlaps. A share of the peaks is reached (Chip.achieved), the same
for every format and shape, and GPUs do not talk to each other.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from fp4dse.dse.cost import operands, work
from fp4dse.dse.cost.chip import UNITS, Chip, load_chip
from fp4dse.dse.cost.model import Model, load_model
from fp4dse.dse.cost.operands import TECHNIQUES, Use
from fp4dse.dse.cost.work import Work
from fp4dse.dse.estimator import Through
from fp4dse.dse.exactness import operand_format
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.quantizer import Quantizer, Residual
from fp4dse.dse.recipe import SLOTS, Hadamard, Recipe
from fp4dse.dse.scale import scale_format

DEFAULT_MODEL, DEFAULT_CHIP = "llama-1b", "b200"
"""Of the store's column `overhead`."""

PARTS = ("products", *TECHNIQUES, "rest")
"""What a step's time is split into."""

Seconds = tuple[tuple[str, float], ...]


class Cost(msgspec.Struct, frozen=True):
    """Modelled seconds of a micro-batch, an optimizer step's work shared out to its micro-batches, by part of PARTS."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def overhead(recipe: Recipe, model: str = DEFAULT_MODEL, chip: str = DEFAULT_CHIP) -> float:
    """Modelled step time relative to BF16's: below 1 is faster. ConfigError for an unknown model or chip."""
    shape, device = load_model(model), load_chip(chip)
    return _layers(recipe, shape, device) / _bf16(shape, device) + _rest(shape, device) / _bf16(shape, device)


def step_cost(recipe: Recipe, model: Model, chip: Chip, plain_blocks: float = 0) -> Cost:
    """The step's time by part, with `plain_blocks` of the model's blocks left in BF16."""
    out = dict.fromkeys(PARTS, 0.0)
    plain = plain_blocks / model.blocks
    for share, r in ((1 - plain, recipe), (plain, Recipe.named("bf16"))):
        for part, seconds in (item for piece in _pieces(r, model, chip) for item in piece):
            out[part] += share * seconds
    out["rest"] = _rest(model, chip)
    return Cost(out)


def _layers(recipe: Recipe, model: Model, chip: Chip) -> float:
    return sum(seconds for piece in _pieces(recipe, model, chip) for _, seconds in piece)


@lru_cache
def _bf16(model: Model, chip: Chip) -> float:
    return _layers(Recipe.named("bf16"), model, chip) + _rest(model, chip)


def _pieces(recipe: Recipe, model: Model, chip: Chip) -> list[Seconds]:
    """Every product, tensor and estimator: what is computed once and remembered by its own part of the recipe."""
    f, d, w, through = recipe.fprop, recipe.dgrad, recipe.wgrad, recipe.estimator
    return [
        _product("fprop", f.x, f.w, model, chip),
        _product("dgrad", d.g, d.w, model, chip),
        _product("wgrad", w.g, w.x, model, chip),
        _tensor("x", f.x, f.w, f.rotation, w.x, w.g, w.rotation, w.source, model, chip),
        _tensor("w", f.w, f.x, f.rotation, d.w, d.g, d.rotation, d.source, model, chip),
        _tensor("g", d.g, d.w, d.rotation, w.g, w.x, w.rotation, "master", model, chip),
        _estimator("x", f.x, through.x, model, chip),
        _estimator("w", f.w, through.w, model, chip),
    ]


@lru_cache(maxsize=65536)
def operand_unit(q: Quantizer, chip: Chip) -> str:
    """The fastest unit that takes the operand. A chip without FP4 units takes the decoded operand, exactly."""
    if q.element == "bf16":
        return "bf16"
    if q.element == "none":
        return "tf32"
    if ELEMENTS[q.element].bits == 8 and "fp8" in chip.matrix and q.block in ("row", "tensor"):
        return "fp8"
    if not chip.has_fp4:
        return operand_format(q)
    return "fp8" if ELEMENTS[q.element].bits == 8 else "fp4"


def product_unit(a: Quantizer, b: Quantizer, chip: Chip) -> str:
    """The slower of the two operands' units."""
    return max(operand_unit(a.canonical(), chip), operand_unit(b.canonical(), chip), key=UNITS.index)


@lru_cache(maxsize=65536)
def _product(stage: str, a: Quantizer, b: Quantizer, model: Model, chip: Chip) -> Seconds:
    """The stage's product in all quantized layers, and what outliers and factors along the contraction add to it."""
    a, b = a.canonical(), b.canonical()
    unit = product_unit(a, b, chip)
    products = (1 + isinstance(a.outliers, Residual)) * (1 + isinstance(b.outliers, Residual))
    in_loop = unit not in work.PLAIN_BYTES and any(q.scaling == "macro" or q.factors_over == "segment" for q in (a, b))
    base = scales = outliers = 0.0
    for linear in model.quantized:
        rows, columns, depth, output = _sizes(stage, linear.inputs, linear.outputs, model)
        size = rows * columns * depth
        nbytes = _operand_bytes(a, unit) * rows * depth + _operand_bytes(b, unit) * columns * depth
        memory = (nbytes + output * rows * columns) / (chip.bandwidth.value * chip.achieved.bandwidth.value)
        once = max(2 * size / chip.flops(unit), memory)
        loop = size * work.IN_LOOP / (chip.vector.value * chip.achieved.vector.value) if in_loop else 0.0
        base += linear.count * (once + chip.launch.value)
        scales += linear.count * max(0.0, loop - once)
        outliers += linear.count * (products - 1) * (once + chip.launch.value)
        for share in filter(None, map(work.cut_share, (a, b))):  # sparse on the vector units, or dense in BF16
            sparse = share * size / (chip.vector.value * chip.achieved.vector.value)
            outliers += linear.count * (min(sparse, 2 * size / chip.flops("bf16")) + chip.launch.value)
    return ("products", base), ("scales", scales), ("outliers", outliers)


def _sizes(stage: str, inputs: int, outputs: int, model: Model) -> tuple[int, int, int, int]:
    """Rows and columns of the output, the contraction, and bytes moved for each output."""
    if stage == "fprop":
        return model.tokens, outputs, inputs, 2
    if stage == "dgrad":
        return model.tokens, inputs, outputs, 2
    return outputs, inputs, model.tokens, 4 if model.micro_batches == 1 else 8  # FP32 gradients, accumulated


def _operand_bytes(q: Quantizer, unit: str) -> float:
    return work.PLAIN_BYTES.get(unit) or work.stored_bytes(q)


@lru_cache(maxsize=65536)
def _tensor(
    tensor: str,
    first: Quantizer,
    first_partner: Quantizer,
    first_rotation: Hadamard | None,
    second: Quantizer,
    second_partner: Quantizer,
    second_rotation: Hadamard | None,
    source: str,
    model: Model,
    chip: Chip,
) -> Seconds:
    """The passes over X, W or dY in all quantized layers. The first use of X and W is the forward's."""
    slots = tuple(slot for slot in SLOTS if slot.endswith(tensor))
    uses = slot_uses(
        slots, (first, first_partner, first_rotation), (second, second_partner, second_rotation), source, chip
    )
    elements, launches = _extent(tensor, model)
    out: dict[str, float] = {}
    for kernel in operands.passes(uses, chip):
        split = {name: seconds * elements for name, seconds in operands.seconds(kernel, chip).items()}
        split[next(iter(split))] += launches * chip.launch.value
        for technique, seconds in split.items():
            out[technique] = out.get(technique, 0.0) + seconds
    return tuple(out.items())


def _extent(tensor: str, model: Model) -> tuple[float, float]:
    """Elements of X, W or dY in all quantized layers, and kernels for one pass. What is done to W is done once an
    optimizer step, and shared out to its micro-batches."""
    m, share = model.tokens, 1 / model.micro_batches if tensor == "w" else 1.0
    elements = sum(
        linear.count * {"x": m * linear.inputs, "w": linear.inputs * linear.outputs, "g": m * linear.outputs}[tensor]
        for linear in model.quantized
    )
    return share * elements, share * sum(linear.count for linear in model.quantized)


def slot_uses(slots: tuple[str, ...], first: tuple, second: tuple, source: str, chip: Chip) -> list[Use]:
    """The two uses of a tensor, canonical. first, second: (quantizer, that of the other operand, rotation)."""
    uses: list[Use] = []
    for slot, (quantizer, partner, rotation) in zip(slots, (first, second), strict=True):
        q, other = quantizer.canonical(), partner.canonical()
        turned = None if q.is_plain and other.is_plain else rotation
        copied = bool(uses) and source == "forward" and not uses[0].quantizer.is_plain
        copy = (uses[0].quantizer, uses[0].unit) if copied else (None, "")
        uses.append(Use(slot, q, turned, product_unit(q, other, chip), *copy))
    return uses


@lru_cache(maxsize=65536)
def _estimator(operand: str, quantizer: Quantizer, through: Through, model: Model, chip: Chip) -> Seconds:
    """The pass over the gradient of x or, once an optimizer step, of w."""
    done = estimator_work(operand, quantizer, through)
    if done == Work():
        return ()
    elements, launches = _extent(operand, model)
    return (("estimator", done.seconds(chip) * elements + launches * chip.launch.value),)


def estimator_work(operand: str, quantizer: Quantizer, through: Through) -> Work:
    """Per element of the gradient, which is BF16 for x and FP32 for w."""
    through = through.canonical()
    if quantizer.is_plain or through == Through():
        return Work()
    relaxation = work.ESTIMATOR[str(through.element.__struct_config__.tag)]
    scale = work.SCALE_GRADIENT[through.scale]
    again = min(relaxation.read, scale.read) if min(relaxation.read, scale.read) >= 2 else 0.0  # x is read once
    gradient = 2 if operand == "x" else 4
    return relaxation + scale + Work(read=gradient - again, write=gradient, vector=2)


@lru_cache
def _rest(model: Model, chip: Chip) -> float:
    """What no recipe touches."""
    bandwidth = chip.bandwidth.value * chip.achieved.bandwidth.value
    bf16 = chip.flops("bf16")
    total = model.parameters * model.bytes_per_parameter / bandwidth / model.micro_batches
    for linear in model.linears:
        if not linear.quantized:
            total += linear.count * 3 * (2 * model.tokens * linear.inputs * linear.outputs / bf16 + chip.launch.value)
    for core in model.attention:
        scores = model.tokens * core.context / (2 if core.causal else 1)
        products = 3.5 * 4 * scores * core.width / bf16  # two forward, five backward
        exponentials = 2 * scores * core.width / core.head / (chip.special.value * chip.achieved.vector.value)
        total += core.count * (max(products, exponentials) + 2 * chip.launch.value)
    for item in model.traffic:
        total += item.count * (2 * item.passes * item.width * model.tokens / bandwidth + 2 * chip.launch.value)
    return total


def notes(recipe: Recipe, chip: Chip) -> list[str]:
    """How operands are priced that the chip's units do not take as they are."""
    out: list[str] = []
    for slot in SLOTS:
        q = recipe.canonical().slot(slot)
        if q.is_plain or ELEMENTS[q.element].bits == 8:
            continue
        if not chip.has_fp4:
            out.append(f"{slot}: no FP4 unit; emulated, decoded exactly to {operand_format(q).upper()}")
        elif reason := why_not_native(q, chip):
            out.append(f"{slot}: {reason}; priced as if the FP4 unit took it")
    shared: dict[str, list[str]] = {}
    for line in out:
        slot, _, text = line.partition(": ")
        shared.setdefault(text, []).append(slot)
    return [
        f"{'all slots' if len(slots) == len(SLOTS) else ', '.join(slots)}: {text}" for text, slots in shared.items()
    ]


def why_not_native(q: Quantizer, chip: Chip) -> str | None:
    """Why the chip's FP4 unit does not take a 4-bit operand, or None if it does."""
    if "any" in chip.native:
        return None
    name, block = scale_format(q.scale), 16 if isinstance(q.block, str) else q.block
    if isinstance(q.block, str) and q.block in ("row", "tensor"):
        name = "e8m0"  # the factor is taken after the product, blocks have scale 1
    takes = [entry.split() for entry in chip.native]
    fits = any(element == q.element and scale == name and block % int(size) == 0 for element, scale, size in takes)
    if not fits:
        return f"{q.element} with {name} scales in blocks of {q.block} is not native"
    if q.codec in ("split", "razer", "dialects", "if4", "hif4"):
        return f"{q.codec} is not native"
    if getattr(q.scale, "convention", "decode") == "encode":
        return "a stored multiplier is not native"
    return None
