"""Quantized training of the user's own torch model: `convert(model, recipe)`.

The model is converted in place. A converted layer is the same module with another forward pass (converted.py): its
parameters are the same objects with the same names and shapes, so state_dict, optimizers, hooks and
DistributedDataParallel notice nothing. The model's structure tells which layers are stem, head and blocks
(structure.py).

The model is a single lane. Every forward pass of the whole model in train mode is a step: it keys the random bits and
updates the state that quantizers carry (tensor maxima, moving averages). In eval mode no state changes, and the model
computes as it is deployed: what training rounds by chance is rounded to nearest, and after fine-tuning in high
precision activations are quantized. A backward pass belongs to the step of its forward pass, even if the model was
called again in between.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fp4dse.dse import SLOTS
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.rule import check_places
from fp4dse.dse.reading.library import load_recipe
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.training import Training
from fp4dse.kernels.block_scales import refuse_scales
from fp4dse.kernels.converted import LAYERS, Converted, Source, converted_class
from fp4dse.kernels.factors import refuse_factors
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.learned import learned_clips, refuse
from fp4dse.kernels.structure import LOOK_UPS, Structure, is_product, structure_of


class Line(NamedTuple):
    """One module in the report of a conversion. why_not: why it is not quantized, None if it is."""

    name: str
    kind: str
    place: Place
    why_not: str | None

    def words(self) -> str:
        """The text of the report about it."""
        block = "" if self.place.block is None else f" of block {self.place.block}"
        return self.why_not or f"quantized, as {self.place.kind}{block}"


class Report(NamedTuple):
    """The result of `convert`: a line for every module with a parameter of two or more dimensions, and notes."""

    recipe: Recipe
    lines: list[Line]
    notes: list[str]
    steps: Steps

    @property
    def converted(self) -> list[str]:
        """The names of the quantized layers."""
        return [line.name for line in self.lines if line.why_not is None]

    @property
    def fallbacks(self) -> list[str]:
        """Faster paths that were not taken on the devices used so far, one sentence each, with the reason."""
        return self.steps.fallbacks

    def __str__(self) -> str:
        rows = [[line.name or "(model)", line.kind, line.words()] for line in self.lines]
        wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
        text = [f"{name:<{wide[0]}}  {kind:<{wide[1]}}  {what}" for name, kind, what in rows]
        return "\n".join([self.recipe.label(), *text, *self.notes])


class Steps:
    """State that all layers of a converted model share: the recipe, the step, and the numerics of each device.

    Copies and pickles begin without the state that quantizers carry between steps.
    """

    def __init__(self, recipe: Recipe, seed: int, steps: int | None) -> None:
        self.recipe, self.seed, self.steps = recipe, seed, steps
        self.off = is_off(recipe)
        self.step, self.training = 0, True
        self._started = False
        self.places: dict[int, Place] = {}
        self._numerics: dict[torch.device, LaneNumerics] = {}
        self._now: dict[torch.device, LaneNumerics] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_numerics": {}, "_now": {}}

    def advance(self, model: nn.Module, _: Any) -> None:
        """Begin a forward pass of the model."""
        if model.training and self._started:
            self.step += 1
        self._started = self._started or model.training
        self.training = model.training
        self._now = {}

    def numerics(self, device: torch.device) -> LaneNumerics:
        """The numerics of the present step. Later steps leave them alone, since a backward pass may come late."""
        if device not in self._now:
            if device not in self._numerics:
                self._numerics[device] = LaneNumerics([self.recipe], [self.seed], device, self.steps)
                for layer, place in self.places.items():
                    self._numerics[device].add_layer(layer, place)
            now = copy.copy(self._numerics[device])
            now.step = torch.full((), self.step, dtype=torch.int64, device=device)
            now.training = self.training
            now.evaluation = "" if self.training else "quantized"
            now.phase(self.step)
            self._now[device] = now
        return self._now[device]

    @property
    def fallbacks(self) -> list[str]:
        return [*dict.fromkeys(reason for of in self._numerics.values() for reason in of.fallbacks)]


def convert(
    model: nn.Module,
    recipe: Recipe | str | Path,
    seed: int = 0,
    steps: int | None = None,
    places: Mapping[str, Place] | None = None,
) -> Report:
    """Quantize the layers of `model` as the recipe says, in place. Returns what was converted, and why not the rest.

    recipe   itself, or the name of a shipped one, or a `.toml` file
    seed     of the random bits; give the processes of a data-parallel training different ones
    steps    of the whole training, for a recipe whose last steps are precise
    places   name of a layer -> its place in the model, for recipes that keep some layers precise; places of other
             layers follow from the model's structure

    The report is also `model.fp4dse_report`. Warns if the recipe keeps stem, head or blocks precise and none can be
    found in the model. ConfigError for an invalid recipe, an unknown name in `places`, a model that was converted
    before, and a model without a layer to convert.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(str(recipe))
    for rule, reason in recipe.validate():
        raise ConfigError("recipe", rule, f"recipes that keep this rule: {reason}")
    if recipe.finish and steps is None:
        raise ConfigError("steps", None, f"the steps of the whole training (recipe.finish: {recipe.finish.label()})")
    shared = Steps(recipe.canonical(), seed, steps)
    modules = dict(model.named_modules())
    structure = structure_of(modules)
    lines = lines_of(modules, structure, places or {})
    if not shared.recipe.is_plain:
        lines = [line._replace(why_not=line.why_not or _why_precise(shared.recipe, line.place)) for line in lines]
    if not any(line.why_not is None for line in lines):
        reasons = "; ".join(f"{line.name}: {line.why_not}" for line in lines[:4]) or "it has no weights"
        raise ConfigError("model", type(model).__name__, f"a model with a layer to quantize ({reasons})")
    if (fault := check_places(shared.recipe.layers, [line.place for line in lines])) is not None:
        raise fault
    for line in lines:
        refuse(
            {} if line.why_not else learned_clips([shared.recipe.at(line.place)]), "your model has no such parameter"
        )
    refuse_factors([shared.recipe], "your model has no such parameters")
    refuse_scales([shared.recipe], "your model has no such parameters")
    numbers = attach(modules, lines, shared)
    places_of = {line.name: line.place for line in lines}
    shared.places = {number: places_of[name] for name, of in numbers.items() for number in of}
    model.register_forward_pre_hook(shared.advance)
    notes = [structure.words(), *structure.faults(("stem", "head", "blocks"))]
    if lost := structure.faults(kept_precise(shared.recipe)):
        said = f"{'; '.join(lost)}. {shared.recipe.label()!r} keeps them precise: places={{…}} says where layers stand"
        warnings.warn(f"convert: {said}", stacklevel=2)
    if not recipe.attention.is_plain:
        notes.append(f"attention core left to your model: {recipe.attention.label()}")
    if recipe.training != Training():
        notes.append(f"left to your training loop: {recipe.training.label()}")
    report = Report(shared.recipe, lines, notes, shared)
    model.fp4dse_report = report  # type: ignore[assignment]
    return report


def lines_of(
    modules: Mapping[str, nn.Module], structure: Structure, places: Mapping[str, Place] | None = None
) -> list[Line]:
    """A line for each of a model's `named_modules` that has a weight; says if it can be quantized by any recipe at all.
    ConfigError for a model that was converted before, and for an unknown name in `places`."""
    if any(isinstance(module, Converted) for module in modules.values()):
        raise ConfigError("model", "converted already", "a model that was not")
    for name in places or {}:
        if name not in modules:
            raise ConfigError("places", name, ", ".join(filter(None, modules)))
    lines = []
    for name, module in modules.items():
        if any(p.dim() >= 2 for p in module.parameters(recurse=False)):
            of = name.removesuffix(".out_proj") if _is_out_projection(name, modules) else name
            place = (places or {}).get(of) or structure.place(of, modules[of])
            lines.append(Line(name, type(module).__name__, place, _why_not(name, modules)))
    return lines


def attach(modules: Mapping[str, nn.Module], lines: list[Line], source: Source) -> dict[str, range]:
    """Convert the layers whose lines have no reason against it. Returns name -> the numbers that key its products."""
    numbers, first = {}, 0
    for line in lines:
        if line.why_not is not None or _is_out_projection(line.name, modules):
            continue
        module = modules[line.name]
        kind = converted_class(type(module))
        assert kind is not None
        module.__class__ = kind
        module.fp4dse, module.fp4dse_layer = source, first  # type: ignore[assignment]
        numbers[line.name] = range(first, first + kind.products)
        first += kind.products
    for module in modules.values():
        if isinstance(module, nn.TransformerEncoderLayer):  # in eval mode it would multiply without its layers
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):  # nor do its nested tensors reach them
            module.use_nested_tensor = False
    return numbers


def kept_precise(recipe: Recipe) -> list[str]:
    """Those of `stem`, `head` and `blocks` that a recipe keeps precise."""
    precise = recipe.precise
    wanted = {"stem": precise.embedding, "head": precise.head, "blocks": bool(precise.first or precise.last)}
    return [] if recipe.is_plain else [what for what, is_wanted in wanted.items() if is_wanted]


def is_off(recipe: Recipe) -> bool:
    """True if a recipe leaves every operand as it is."""
    return all(recipe.slot(slot).element == "none" for slot in SLOTS)


def _why_precise(recipe: Recipe, place: Place) -> str | None:
    if not recipe.at(place).is_plain:
        return None
    why = recipe.precise.why(place)
    if why in ("first", "last"):
        return f"precise in the recipe ({why} blocks, block {place.block} of {place.blocks})"
    return f"precise in the recipe ({why or 'by a rule for layers'})"


def _is_out_projection(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """True for the layer whose weight an nn.MultiheadAttention uses without calling the layer."""
    return name.endswith("out_proj") and isinstance(modules.get(name.rpartition(".")[0]), nn.MultiheadAttention)


def _why_not(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """The reason why a module cannot be quantized, None if it can."""
    module = modules[name.rpartition(".")[0] if _is_out_projection(name, modules) else name]
    if isinstance(module, LOOK_UPS):
        return "a look-up, not a product"
    kind = converted_class(type(module))
    if kind is not None:
        return kind.why_not(module)
    known = next((known.__name__ for known in LAYERS if isinstance(module, known)), None)
    if known:
        return f"a subclass of {known}, which may compute something else"
    if not is_product(module):
        return "parameters of its own code, which is left as it is"
    return f"not one of {', '.join(kind.__name__ for kind in LAYERS)}"
