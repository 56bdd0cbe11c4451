"""The modelled time of a training step: products at matrix-unit rates, element-wise work at vector rates and bytes.

For every layer with a weight [N, K] and M rows:

    products    products.py
    operands    the passes of operands.py over X (M·K), W (N·K, once an optimizer step) and dY (M·N)
    estimator   a pass over dX and, once an optimizer step, over dW
    core        attention cores, core.py
    exchange    of tokens with experts on other GPUs, the share that nothing hides, exchange.py
    the rest    element-wise layers, optimizer: the same for every recipe, BF16 among them
    unmodelled  other communication, idle time and all else, a share of BF16's step: the same seconds for every recipe

Every layer computes as `Recipe.at` says of its place. Those that are precise are BF16's, and so are the stages of the
finish for their share of the steps: the step is the mean over the training. Products and passes follow one another;
nothing else overlaps. Each format reaches its own share of the peak (Chip.achieved). How good the software is, a
scenario says (scenario.py): `mid` gives the overhead, `low` and `high` its band.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec

from fp4dse.dse.cost import operands, work
from fp4dse.dse.cost.at_place import BF16, recipe_at
from fp4dse.dse.cost.channels import channels_apart
from fp4dse.dse.cost.chip import Chip, load_chip
from fp4dse.dse.cost.core import core
from fp4dse.dse.cost.exchange import exchange_seconds
from fp4dse.dse.cost.model import Linear, Model, load_model, together, told_apart
from fp4dse.dse.cost.operands import TECHNIQUES, tensor_uses
from fp4dse.dse.cost.products import Seconds, Stage, product
from fp4dse.dse.cost.scenario import ENDS, MID, under
from fp4dse.dse.cost.units import gemm_of
from fp4dse.dse.cost.work import Work
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.estimator import Through
from fp4dse.dse.outliers import LearnedClip, TrainedScales
from fp4dse.dse.recipe import GemmChoice, Recipe
from fp4dse.dse.record import Part
from fp4dse.dse.stages import SHARED, Fprop

COST_REV = 8
"""Raised when counts, rates or shapes change, so that overheads of several revisions are not compared unnoticed."""
DEFAULT_MODEL, DEFAULT_CHIP = "llama-8b", "gb200"

KEPT = "layers in BF16"
CORE, EXCHANGE, TEACHER, REST, UNMODELLED = "attention core", "exchange", "teacher", "rest", "unmodelled"
PARTS = ("products", *TECHNIQUES, KEPT, CORE, EXCHANGE, TEACHER, REST, UNMODELLED)
"""Parts of a step's time; KEPT: all that is done for layers that the recipe keeps precise."""


class Share(NamedTuple):
    """Layers that compute as one recipe, for a share of the steps; `kept`: precise, beside others that are not."""

    share: float
    recipe: Recipe
    layers: Model
    kept: bool = False


class Cost(msgspec.Struct, frozen=True):
    """Modelled seconds of a micro-batch, an optimizer step's work shared out to its micro-batches, by part of PARTS."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def overhead(recipe: Recipe, model: str = DEFAULT_MODEL, chip: str = DEFAULT_CHIP, scenario: str = MID) -> float:
    """Modelled step time relative to BF16's: below 1 is faster. ConfigError for an unknown model or chip."""
    return relative_time(recipe, load_model(model), load_chip(chip), scenario)


def relative_time(recipe: Recipe, model: Model, chip: Chip, scenario: str = MID) -> float:
    """The same, of a model and a chip that are loaded."""
    chip = under(chip, scenario)
    return _total(recipe, model, chip) / _bf16(model, chip)


class CostTarget(Part, frozen=True):
    """The model shape and the chip that an overhead is of, each by name or as the path of a `.toml` file."""

    model: str = DEFAULT_MODEL
    chip: str = DEFAULT_CHIP

    @property
    def of(self) -> str:
        """The column `overhead_of`: model, chip and revision of the cost model."""
        return f"{self.model} on {self.chip}, revision {COST_REV}"

    @property
    def explanation(self) -> str:
        """For people: what an overhead is, and how to have another one."""
        return f"overhead: modelled time of a training step of {self.model} on {self.chip}, BF16 = 1 (--model, --chip)"

    def overhead(self, recipe: Recipe, scenario: str = MID) -> float:
        """Modelled step time relative to BF16's."""
        return overhead(recipe, self.model, self.chip, scenario)

    def band(self, recipe: Recipe) -> tuple[float, ...]:
        """The overhead with the best software and with the worst (ENDS)."""
        return tuple(self.overhead(recipe, end) for end in ENDS)

    def check(self, where: str) -> None:
        """ConfigError at `where` + `model` or `chip` if there is no such, or its file is wrong."""
        for name, load in (("model", load_model), ("chip", load_chip)):
            try:
                load(getattr(self, name))
            except ConfigError as error:
                if error.where == name:
                    raise ConfigError(f"{where}{name}", error.found, error.accepted) from None
                raise


DEFAULT_COST = CostTarget()
"""The model and chip of the overheads that rows are stored with."""
OVERHEAD_OF = DEFAULT_COST.of


def step_cost(recipe: Recipe, model: Model, chip: Chip, scenario: str = MID) -> Cost:
    """The step's time by part."""
    chip = under(chip, scenario)
    out = dict.fromkeys(PARTS, 0.0)
    for share, r, part, kept in _shares(recipe, model):
        for piece in _pieces(r, part, chip):
            for name, seconds in piece:
                out[KEPT if kept else name] += share * seconds
    out[CORE], out[EXCHANGE] = core(recipe, model, chip), exchange_seconds(recipe, model, chip)
    out[TEACHER] = _teacher(recipe, model, chip)
    out[REST], out[UNMODELLED] = _rest(model, chip), _unmodelled(model, chip)
    return Cost(out)


def _total(recipe: Recipe, model: Model, chip: Chip) -> float:
    own = _layers(recipe, model, chip) + core(recipe, model, chip) + exchange_seconds(recipe, model, chip)
    return own + _teacher(recipe, model, chip) + _same(model, chip)


def _teacher(recipe: Recipe, model: Model, chip: Chip) -> float:
    """The forward pass of a teacher in BF16: one of the three products of each layer, and as much of all else."""
    return _bf16(model, chip) / 3 if recipe.training.distill is not None else 0.0


def _layers(recipe: Recipe, model: Model, chip: Chip) -> float:
    return sum(share * _seconds(r, part, chip) for share, r, part, _ in _shares(recipe, model))


@lru_cache(maxsize=4096)
def _seconds(recipe: Recipe, model: Model, chip: Chip) -> float:
    """Cached for BF16, whose layers stand in nearly every step."""
    return sum(seconds for piece in _pieces(recipe, model, chip) for _, seconds in piece)


@lru_cache
def _bf16(model: Model, chip: Chip) -> float:
    return _total(BF16, model, chip)


def _same(model: Model, chip: Chip) -> float:
    """Seconds that every recipe takes."""
    return _rest(model, chip) + _unmodelled(model, chip)


@lru_cache
def _unmodelled(model: Model, chip: Chip) -> float:
    own = _layers(BF16, model, chip) + core(BF16, model, chip) + exchange_seconds(BF16, model, chip)
    return chip.rest * (own + _rest(model, chip))


def _shares(recipe: Recipe, model: Model) -> list[Share]:
    """The layers by the recipe that they compute as, with its share of the steps."""
    out: list[Share] = []
    for layers_recipe, part in layers_by_recipe(recipe, model):
        if layers_recipe is not recipe and is_bf16(layers_recipe):
            out.append(Share(1.0, layers_recipe, part, kept=True))
        elif layers_recipe.finish:
            end = layers_recipe.finish.share
            out += [Share(1 - end, layers_recipe, part), Share(end, finished(layers_recipe), part)]
        else:
            out.append(Share(1.0, layers_recipe, part))
    return out


def is_bf16(recipe: Recipe) -> bool:
    """True if layers compute as in the BF16 baseline."""
    return (recipe.fprop, recipe.dgrad, recipe.wgrad) == (BF16.fprop, BF16.dgrad, BF16.wgrad)


def layers_by_recipe(recipe: Recipe, model: Model) -> list[tuple[Recipe, Model]]:
    """The recipes that layers compute as, each with its part of the model. A plain recipe keeps nothing precise: all
    layers are its own."""
    if _all_plain(recipe):
        return [(recipe, model)]
    return [(recipe_at(recipe, place), part) for place, part in told_apart(model, recipe.precise, recipe.layers)]


def quantized_and_kept(recipe: Recipe, model: Model) -> tuple[Model, Model]:
    """The model with the layers that the recipe quantizes, and with those that it keeps in BF16. A plain recipe keeps
    nothing: all of its layers are of one kind."""
    if _all_plain(recipe):
        return model, msgspec.structs.replace(model, linears=[])
    quantized, kept = (
        [linear for r, part in layers_by_recipe(recipe, model) if is_bf16(r) == kept for linear in part.linears]
        for kept in (False, True)
    )
    return together(model, quantized), together(model, kept)


def _all_plain(recipe: Recipe) -> bool:
    return not recipe.layers and all(map(_is_plain, (recipe.fprop, recipe.dgrad, recipe.wgrad)))


@lru_cache(maxsize=65536)
def _is_plain(stage: Stage) -> bool:
    """Cached, as this is asked of every recipe of a space."""
    return all(getattr(stage, name).is_plain for name in "xwg" if hasattr(stage, name))


def but_weight(stage: Stage) -> Stage:
    """A product with its weight, whose other operand is BF16."""
    [other] = (name for name in "xg" if hasattr(stage, name))
    return msgspec.structs.replace(stage, **{other: BF16.fprop.x})


@lru_cache(maxsize=4096)
def finished(recipe: Recipe) -> Recipe:
    """The recipe in the steps of its finish. Backward operands made from the forward's copy still are."""
    stages: dict[str, Stage] = {}
    for name in recipe.finish.stages if recipe.finish else ():
        plain, own = getattr(BF16, name), getattr(recipe, name)
        if not _is_plain(own):
            stages[name] = msgspec.structs.replace(plain, source=own.source) if name in SHARED else plain
    for name in recipe.finish.stages_but_weights if recipe.finish else ():
        stages[name] = but_weight(getattr(recipe, name))
    return msgspec.structs.replace(recipe, **stages)


def _pieces(recipe: Recipe, model: Model, chip: Chip) -> list[Seconds]:
    """Every product, tensor and estimator; each is remembered by its own part of the recipe."""
    fprop, dgrad, wgrad, through = recipe.fprop, recipe.dgrad, recipe.wgrad, recipe.estimator
    gemm = gemm_of(recipe)
    return [
        product("fprop", fprop, model, chip, gemm),
        product("dgrad", dgrad, model, chip, gemm),
        product("wgrad", wgrad, model, chip, gemm),
        channels_apart(fprop, wgrad, model, chip, gemm),
        _tensor("x", fprop, wgrad, model, chip, gemm),
        _tensor("w", fprop, dgrad, model, chip, gemm),
        _tensor("g", dgrad, wgrad, model, chip, gemm),
        _estimator("x", fprop, through.x, model, chip),
        _estimator("w", fprop, through.w, model, chip),
    ]


@lru_cache(maxsize=65536)
def _tensor(tensor: str, first: Stage, second: Stage, model: Model, chip: Chip, gemm: GemmChoice) -> Seconds:
    """The passes over X, W or dY in all layers, for the two stages that use it."""
    elements, launches = _extent(tensor, model)
    out: dict[str, float] = {}
    for kernel in operands.passes(tensor_uses(tensor, first, second, chip, gemm), chip):
        times = {name: seconds * elements * chip.passes for name, seconds in operands.seconds(kernel, chip).items()}
        times[next(iter(times))] += launches * kernel.per_step * chip.launch.value
        for technique, seconds in times.items():
            out[technique] = out.get(technique, 0.0) + seconds
    return tuple(out.items())


def pass_seconds(recipe: Recipe, model: Model, chip: Chip) -> float:
    """Seconds of the passes over X in all layers, in a scenario's chip."""
    return sum(seconds for _, seconds in _tensor("x", recipe.fprop, recipe.wgrad, model, chip, gemm_of(recipe)))


def _extent(tensor: str, model: Model) -> tuple[float, float]:
    """Elements of X, W or dY in all layers, and kernels for one pass. What is done to W is done once an
    optimizer step, and shared out to its micro-batches."""
    m, share = model.tokens, 1 / model.micro_batches if tensor == "w" else 1.0
    elements = sum(linear.count * _numbers(tensor, linear, m * linear.tokens) for linear in model.linears)
    return share * elements, share * sum(linear.launches for linear in model.linears)


def _numbers(tensor: str, linear: Linear, rows: float) -> float:
    return {"x": rows * linear.inputs, "w": linear.inputs * linear.outputs, "g": rows * linear.outputs}[tensor]


@lru_cache(maxsize=65536)
def _estimator(operand: str, fprop: Fprop, through: Through, model: Model, chip: Chip) -> Seconds:
    """The pass over the gradient of x or, once an optimizer step, of w."""
    done = estimator_work(operand, fprop, through)
    if done == Work():
        return ()
    elements, launches = _extent(operand, model)
    return (("estimator", done.seconds(chip) * elements * chip.passes + launches * chip.launch.value),)


def estimator_work(operand: str, fprop: Fprop, through: Through) -> Work:
    """Per element of the gradient, which is BF16 for x and FP32 for w. It passes through the quantizer of a rotated
    operand rotated, and is rotated back."""
    q = getattr(fprop, operand)
    through = through.canonical(q.scale)
    gradient = 2 if operand == "x" else 4
    if isinstance(q.outliers, LearnedClip):
        return work.LEARNED_CLIP + Work(read=gradient, write=gradient)
    if isinstance(q.outliers, TrainedScales):  # read the gradient and the codes: a product and a sum
        return Work(read=gradient + q.bits_per_element / 8, vector=4)
    if q.is_plain or through == Through():
        return Work()
    relaxation = work.ESTIMATOR[str(through.element.__struct_config__.tag)]
    scale = work.SCALE_GRADIENT[through.scale] + work.scale_rounding(through.scale_rounding, q)
    twice = (
        2 if relaxation.read >= 2 and work.SCALE_GRADIENT[through.scale].read >= 2 else 0
    )  # the operand is read once for both
    turns = work.rotation(fprop.rotation) * 2 if fprop.rotation else Work()
    return relaxation + scale + turns + Work(read=gradient - twice, write=gradient, vector=2)


@lru_cache
def _rest(model: Model, chip: Chip) -> float:
    """Seconds of everything that no recipe changes."""
    bandwidth = chip.bandwidth.value * chip.achieved.bandwidth.value
    total = model.parameters * model.bytes_per_parameter / bandwidth / model.micro_batches
    for item in model.traffic:
        total += item.count * (2 * item.passes * item.width * model.tokens / bandwidth + 2 * chip.launch.value)
    return total
