"""A recipe: how a linear layer computes in training, and what is done around it. Immutable, hashable."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TypeVar

import msgspec

from fp4dse.dse.attention import Attention
from fp4dse.dse.channels import Held, channels_name
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.estimator import STE, Estimator, Through
from fp4dse.dse.exactness import fp8_format, has_factor, product_format
from fp4dse.dse.formats import PLAIN
from fp4dse.dse.inject import inject_name
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.precision import Finish, Precise
from fp4dse.dse.layers.rule import LayerRule, canonical_rules
from fp4dse.dse.noise import noise_name
from fp4dse.dse.outliers import LearnedClip, TrainedFactors, TrainedScales, outlier_words
from fp4dse.dse.own_formats import Element, element_name
from fp4dse.dse.quantizer import Quantizer, block_name
from fp4dse.dse.record import Part, plain_parts, unlabelled
from fp4dse.dse.rollout import Rollout, rollout_name
from fp4dse.dse.rounding import Ema, rounding_name
from fp4dse.dse.scale import scale_key, scale_name
from fp4dse.dse.stages import (
    SHARED,
    SLOTS,
    STAGES,
    Dgrad,
    Fprop,
    Hadamard,
    Wgrad,
    XSource,
    grouped,
    rotation_name,
    with_exceptions,
)
from fp4dse.dse.training import (
    DEFAULT,
    Training,
    coreset_name,
    distill_name,
    optimizer_name,
    ramping_name,
    reset_name,
    schedule_name,
)

Function = TypeVar("Function", bound=Callable[..., Any])
AnyPart = TypeVar("AnyPart", bound=Part)

ID_VERSION = 1
"""Raised only if the canonical form itself changes meaning; it is part of the hash."""


_ABOVE: dict[str, Callable[..., Any]] = {}


def serves_recipes(function: Function) -> Function:
    """A function of a module above this one that methods of Recipe call: they find it by its name."""
    _ABOVE[function.__name__] = function
    return function


_FROM = {"forward": "from forward", "converted": "converted from forward"}
"""Source of an operand -> words for it."""
_SLOT: dict[str, Callable[[Recipe], Quantizer]] = {slot: operator.attrgetter(slot) for slot in SLOTS}

GemmChoice = Literal["exact", "bf16-rounded", "fp8-exact"]
"""Products that operands meet in: `exact`, the fastest that rounds no operand; `bf16-rounded`, operands decoded with
all their factors and rounded to BF16, as most simulations have them; `fp8-exact`, in FP8 on FP8 units."""


class Recipe(Part, frozen=True):
    """Three stages, the gradient estimator, the layers and steps that are not quantized, the layers that compute
    otherwise, the attention core, the products, and the training side. `config_id` is the identity of what is computed;
    learning rate and seed are not part of it."""

    fprop: Fprop
    dgrad: Dgrad
    wgrad: Wgrad
    estimator: Estimator = Estimator()
    precise: Precise = Precise()
    layers: tuple[LayerRule, ...] = ()
    attention: Attention = Attention()
    finish: Finish | None = None
    gemm: GemmChoice = "exact"
    training: Training = Training()

    @staticmethod
    def named(name: str) -> Recipe:
        """A recipe shipped as a data file in `dse/recipes/`; ConfigError names the known ones."""
        files = _ABOVE["recipe_files"]()
        if name not in files:
            raise ConfigError("recipe", name, ", ".join(files))
        found: Recipe = files[name].recipe
        return found

    @staticmethod
    def uniform(quantizer: Quantizer) -> Recipe:
        """The same quantizer in all six slots, no rotation."""
        q = quantizer
        return Recipe(fprop=Fprop(x=q, w=q), dgrad=Dgrad(g=q, w=q), wgrad=Wgrad(g=q, x=q))

    def slot(self, name: str) -> Quantizer:
        """The quantizer in slot `fprop.x` … `wgrad.x`."""
        return _SLOT[name](self)

    def rotation(self, stage: str) -> Hadamard | None:
        rotation: Hadamard | None = getattr(self, stage).rotation
        return rotation

    def source(self, stage: str) -> XSource:
        """Of the operand that stage `dgrad` or `wgrad` shares with the forward pass."""
        source: XSource = getattr(self, stage).source
        return source

    def copies(self, stage: str) -> bool:
        """True if that operand is made from the forward's quantized copy."""
        return self.source(stage) != "master"

    def changed(self, rule: LayerRule) -> Recipe:
        """The recipe of a layer with what a rule changes, without rules of its own."""
        changes: dict[str, dict[str, object]] = {}
        for field in rule.changes:
            part, _, of = field.partition("_")
            changes.setdefault(part, {})[of] = None if getattr(rule, field) == "none" else getattr(rule, field)
        new = {part: msgspec.structs.replace(getattr(self, part), **of) for part, of in changes.items()}
        return msgspec.structs.replace(self, layers=(), **new)

    def canonical(self) -> Recipe:
        """The one spelling of all recipes that compute the same."""
        if self.training.trains != "all" and (found := _as_trained(self)) is not self:
            return found.canonical()
        plain_x, plain_w = self.fprop.x.is_plain, self.fprop.w.is_plain
        precise, layers = canonical_rules(self.precise, self.layers) if self.layers else (self.precise, ())
        attention = self.attention if self.attention == _PLAIN_ATTENTION else self.attention.canonical()
        quantizes = bool(layers) or attention != _PLAIN_ATTENTION
        fprop = _canonical_channels(_canonical_stage(self.fprop, False), self.wgrad)
        dgrad = _canonical_stage(self.dgrad, self.fprop.w.element == "none")
        wgrad = _canonical_stage(self.wgrad, self.fprop.x.element == "none")
        estimator = _canonical_estimator(self.estimator, fprop)
        finish = self.finish
        if finish and finish.what == "all-but-weights" and plain_w and self.dgrad.w.is_plain and not quantizes:
            finish = msgspec.structs.replace(finish, what="all")
        around = _canonical_around(
            precise,
            finish,
            self.gemm,
            _without_oscillation(self.training) if plain_w and not layers else self.training,
            plain_x and plain_w and not quantizes,
            _elements(dgrad) | _elements(wgrad) <= PLAIN.keys() and not quantizes,
            _elements(fprop) | _elements(dgrad) | _elements(wgrad) == {"bf16"} and not quantizes,
        )
        changes = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad, "estimator": estimator}
        found = _replaced(self, **changes, layers=layers, attention=attention, **around)
        return found if found.training.rollout is None else _without_own_rollout(found)

    def _passage(self, operand: str) -> str:
        """The estimator with the grids that it is a function of; empty for straight through."""
        through, q = getattr(self.estimator, operand), self.slot(f"fprop.{operand}")
        element = element_name(q.element)
        if through.scale_rounding == STE():
            return through.label() and f"{through.label()} on {element}"
        return f"{through.label()} on {element} {getattr(q.scale, 'convention', '')} {scale_key(q.scale)}"

    @property
    def config_id(self) -> str:
        """16 hex digits: SHA-256 of the canonical recipe as sorted JSON without defaults."""
        text = msgspec.json.encode([ID_VERSION, plain_parts(self.canonical())], order="sorted")
        return hashlib.sha256(text).hexdigest()[:16]

    @property
    def is_plain(self) -> bool:
        """True where no slot has a block scale, in any layer, and none of the attention core."""
        return not self.layers and all(self.slot(s).is_plain for s in SLOTS) and self.attention.is_plain

    @property
    def _forward_changes(self) -> bool:
        """True where the forward pass depends on more than its operands and the step's random bits: on what slots keep,
        on what a layer's rule has, or on a finish."""
        q = self.fprop.x, self.fprop.w
        held = any(of.tensor_scale is not None and of.tensor_scale.amax != "current" for of in q)
        return held or isinstance(self.fprop.w.rounding, Ema) or bool(self.layers) or self.finish is not None

    @property
    def _finish_structure(self) -> str:
        """The finish, with the formats that its weights meet BF16 in; empty without one."""
        if self.finish is None:
            return ""
        met = (product_format(_BF16, self.slot(f"{stage}.w")) for stage in self.finish.stages_but_weights)
        return " ".join([self.finish.label(), *met])

    @property
    def base(self) -> Recipe:
        """The recipe of layers that no rule concerns and that are not precise, canonical."""
        return _base(self)

    def at(self, place: Place) -> Recipe:
        """The recipe of the layer at this place, canonical: with what its rules change there, BF16 where it is precise
        and no rule says otherwise. It has no layers of its own."""
        return _at(self, place)

    def evaluated(self) -> Recipe:
        """The recipe that held-out data go through: rounding by chance in the forward pass is rounding to nearest
        (`Quantizer.evaluated`). Rotations and all else stay."""
        x, w = self.fprop.x.evaluated(), self.fprop.w.evaluated()
        fprop, layers = msgspec.structs.replace(self.fprop, x=x, w=w), tuple(rule.evaluated() for rule in self.layers)
        attention = self.attention.evaluated()
        return msgspec.structs.replace(self, fprop=fprop, layers=layers, attention=attention).canonical()

    def sampling(self) -> Recipe:
        """The recipe whose forward pass samples come from, where a task learns from its own: `training.rollout`, or as
        `evaluated`. Its backward pass is of no use."""
        rollout, bf16 = self.training.rollout, Recipe.named("bf16")
        if rollout is None:
            return self.evaluated()
        found = msgspec.structs.replace(bf16, fprop=rollout.fprop, precise=rollout.precise, gemm=self.gemm)
        return found.evaluated()

    def baseline(self) -> Recipe:
        """The recipe that this one's losses are compared with, canonical: BF16, with the training side of a recipe that
        quantizes as far as that changes what BF16 computes. So the gap of a recipe with another optimizer is what FP4
        costs under that optimizer. One that does not quantize is compared with plain BF16."""
        return baseline_of(DEFAULT if self.is_plain else self.training)

    @property
    def is_baseline(self) -> bool:
        """True of what `baseline` returns: BF16 under some training side."""
        return self.is_plain and self.canonical() == baseline_of(self.training)

    def validate(self) -> list[tuple[str, str]]:
        """The rules that this recipe breaks, as (name, one line that says how); empty if it makes sense.

        What makes no sense within one part is unwritable or has no effect; rules concern several fields.
        """
        return [(rule, str(error)) for rule, error in _ABOVE["faults"](self)]

    def signature(self) -> Signature:
        """The part that fixes tensor shapes and control flow: lanes of equal signature share one compiled step."""
        r = unlabelled(self.canonical())
        return Signature(
            layouts=tuple(r.slot(s).layout for s in SLOTS),
            rotations=tuple(rotation_name(r.rotation(stage)) for stage in STAGES),
            products=tuple(map(r._formats, STAGES)),
            sources=tuple(r.source(stage) for stage in SHARED),
            estimators=tuple(r._passage(x) for x in STAGES["fprop"]),
            around=(
                "" if r.precise == Precise() else r.precise.label(),
                r._finish_structure,
                "" if r.gemm == "exact" else r.gemm,
                "" if r.training.optimizer is None else r.training.kind,
                "" if r.training.accumulate == 1 else str(r.training.accumulate),
                *(["rollout"] if r.training.rollout is not None and r._forward_changes else []),
            ),
            attention=r.attention.layout,
            channels="" if r.fprop.channels is None else repr(r.fprop.channels),
        )

    def _formats(self, stage: str) -> str:
        """The formats in which a stage's product may take its operands: that of both, in FP8 that of each, and which
        have no factor: these take other ways."""
        quantizers = [self.slot(f"{stage}.{operand}") for operand in STAGES[stage]]
        of_each = [fp8_format(q) or "none" for q in quantizers] if self.gemm == "fp8-exact" else []
        of_each += [f"no factor {n}" for n, q in enumerate(quantizers) if not has_factor(q)]
        return " ".join([product_format(*quantizers), *of_each])

    def label(self) -> str:
        """The recipe in words: formats, where ranges and roundings apply, rotations, sources, estimators, and what is
        not the default of the rest.

        `nvfp4, gradients 16/17 SR, wgrad rht16`; words for slots or stages stand before all that is not everywhere.
        """
        r = self.canonical()
        words = with_exceptions({slot: r.slot(slot).format_label() for slot in SLOTS})
        words += grouped({slot: r.slot(slot).modifier_label() for slot in SLOTS})
        words += grouped({stage: rotation_name(of) if (of := r.rotation(stage)) else "" for stage in STAGES})
        words += [f"channels {channels_name(r.fprop.channels)}"] if r.fprop.channels else []
        words += grouped({slot: _FROM[r.source(stage)] for stage, slot in SHARED.items() if r.copies(stage)})
        passages = {x: text for x in STAGES["fprop"] if (text := getattr(r.estimator, x).phrase())}
        both = r.estimator.x == r.estimator.w
        words += [f"{x} {text}" for x, text in ({"forward": passages["x"]} if both and passages else passages).items()]
        words += [f"precise {r.precise.label()}"] if r.precise != Precise() else []
        words += [f"({rule.label()})" for rule in r.layers]
        words += [] if r.attention.is_plain else [f"attention core {r.attention.label()}"]
        words += [f"{r.finish.label()} precise"] if r.finish else []
        words += [r.gemm] if r.gemm != "exact" else []
        words += [text] if (text := r.training.label()) else []
        return ", ".join(words)

    def columns(self) -> dict[str, str | int | float | None]:
        """Every axis as its own flat column, for the store: `fprop_x_scale`, `wgrad_rotation`, …"""
        r = self.canonical()
        out: dict[str, str | int | float | None] = {}
        for slot in SLOTS:
            q, prefix = r.slot(slot), slot.replace(".", "_")
            block_scaled = not q.is_plain
            out[f"{prefix}_element"] = element_name(q.element)
            out[f"{prefix}_block"] = block_name(q.block) if block_scaled else None
            out[f"{prefix}_scale"] = scale_name(q.scale) if block_scaled else None
            out[f"{prefix}_tensor_scale"] = q.tensor_scale.target if q.tensor_scale else None
            out[f"{prefix}_tensor_amax"] = q.tensor_scale.policy if q.tensor_scale else None
            out[f"{prefix}_rounding"] = rounding_name(q.rounding) if block_scaled else None
            for field in ("range", "adapt", "scaling", "arithmetic"):
                out[f"{prefix}_{field}"] = getattr(q, field) if block_scaled else None
            out[f"{prefix}_outliers"] = (outlier_words(q.outliers) or "none") if block_scaled else None
        for stage in STAGES:
            out[f"{stage}_rotation"] = rotation_name(r.rotation(stage))
        out["fprop_channels"] = channels_name(r.fprop.channels)
        for stage in SHARED:
            out[f"{stage}_source"] = r.source(stage)
        for operand in STAGES["fprop"]:
            out[f"estimator_{operand}"] = getattr(r.estimator, operand).label() or "ste"
        out["layers"] = "; ".join(rule.label() for rule in r.layers) or "none"
        out["attention"] = r.attention.label()
        out |= {"precise": r.precise.label(), "finish": r.finish.label() if r.finish else "none", "gemm": r.gemm}
        out |= {name: getattr(r.training, name) for name in Training.__struct_fields__}
        names = {"optimizer": optimizer_name(r.training.optimizer), "schedule": schedule_name(r.training.schedule)}
        names |= {"reset": reset_name(r.training.reset), "ramping": ramping_name(r.training.ramping)}
        names |= {"rollout": rollout_name(r.training.rollout), "noise": noise_name(r.training.noise)}
        names |= {"coreset": coreset_name(r.training.coreset), "inject": inject_name(r.training.inject)}
        return out | names | {"distill": distill_name(r.training.distill)}


@lru_cache(maxsize=4096)
def baseline_of(training: Training) -> Recipe:
    """BF16 under this training side, canonical: the baseline of recipes that quantize and have it."""
    return msgspec.structs.replace(Recipe.named("bf16"), training=training.of_baseline()).canonical()


@lru_cache(maxsize=4096)
def _base(recipe: Recipe) -> Recipe:
    return msgspec.structs.replace(recipe, layers=(), precise=Precise(), attention=Attention()).canonical()


@lru_cache(maxsize=4096)
def _at(recipe: Recipe, place: Place) -> Recipe:
    rules = [rule for rule in recipe.layers if rule.matches(place)]
    is_precise = not recipe.is_plain and recipe.precise.why(place) is not None
    here = _in_bf16(recipe.base) if is_precise else recipe.base
    for rule in rules:
        here = _in_bf16(here) if rule.is_bf16 else here.changed(rule)
    is_bf16 = rules and all(here.slot(slot).element == "bf16" for slot in SLOTS)
    return (_in_bf16(here) if is_bf16 else here).canonical()


def _as_trained(recipe: Recipe) -> Recipe:
    """A recipe that does not train all parameters: none where nothing is learned beside the weights, and then without
    what training alone has."""
    training, operands = recipe.training, (recipe.fprop.x.canonical(), recipe.fprop.w.canonical())
    kinds = LearnedClip | TrainedFactors | TrainedScales
    learns = bool(recipe.layers) or any(isinstance(q.outliers, kinds) for q in operands)
    if training.trains == "learned" and learns:
        return recipe
    bf16 = Recipe.named("bf16")
    sides = {"dgrad": bf16.dgrad, "wgrad": bf16.wgrad, "estimator": bf16.estimator}
    untrained = Training(rollout=training.rollout, trains="none")
    return _replaced(recipe, training=untrained, **({} if recipe.layers else sides))


def _without_own_rollout(recipe: Recipe) -> Recipe:
    """A canonical recipe, without a rollout that computes as its forward pass does."""
    own = Rollout(recipe.fprop.x, recipe.fprop.w, recipe.fprop.rotation, recipe.precise).canonical()
    if own != recipe.training.rollout or recipe.layers or recipe.attention != _PLAIN_ATTENTION:
        return recipe
    return _replaced(recipe, training=msgspec.structs.replace(recipe.training, rollout=None))


@lru_cache(maxsize=4096)
def _without_oscillation(training: Training) -> Training:
    """The training side of a recipe whose weights are not quantized, and so do not oscillate."""
    return msgspec.structs.replace(training, reset=None, ramping=None)


def _in_bf16(recipe: Recipe) -> Recipe:
    """The recipe with BF16's products."""
    bf16 = Recipe.named("bf16")
    stages = {stage: getattr(bf16, stage) for stage in STAGES}
    return msgspec.structs.replace(recipe, estimator=bf16.estimator, gemm="exact", **stages)


@lru_cache(maxsize=65536)
def _canonical_stage(stage: Part, forward_is_untouched: bool) -> Part:
    """Cached, as spaces make many recipes of few stages."""
    operands = {
        name: q.canonical() for name in stage.__struct_fields__ if isinstance(q := getattr(stage, name), Quantizer)
    }
    changes: dict[str, object] = dict(operands)
    if all(q.is_plain for q in operands.values()):
        changes["rotation"] = None  # nothing is quantized: no effect
        if "channels" in stage.__struct_fields__:
            changes["channels"] = None
    if forward_is_untouched:
        changes["source"] = "master"  # the forward's copy is the operand itself
    return _replaced(stage, **changes)


def _canonical_channels(fprop: Any, wgrad: Wgrad) -> Any:
    """The forward product with the one spelling of its channels: where the weight's gradient is plain, nothing of it is
    in another format."""
    if not isinstance(fprop.channels, Held):
        return fprop
    of_wgrad = fprop.channels.wgrad and not (wgrad.g.is_plain and wgrad.x.is_plain)
    channels = msgspec.structs.replace(fprop.channels, format=fprop.channels.format.canonical(), wgrad=of_wgrad)
    return _replaced(fprop, channels=channels)


@lru_cache(maxsize=65536)
def _canonical_estimator(estimator: Estimator, fprop: Any) -> Estimator:
    """Nothing passes through the quantizer of a plain operand."""
    x, w = (
        Through() if (q := getattr(fprop, operand)).is_plain else getattr(estimator, operand).canonical(q.scale)
        for operand in STAGES["fprop"]
    )
    return _replaced(estimator, x=x, w=w)


def _replaced(part: AnyPart, **changes: object) -> AnyPart:
    """The part itself where nothing changes, which is found quickly in what was computed before."""
    for name, new in changes.items():
        if getattr(part, name) is not new and getattr(part, name) != new:
            return msgspec.structs.replace(part, **changes)
    return part


_PLAIN_ATTENTION = Attention()
_BF16 = Quantizer(element="bf16")


class Signature(msgspec.Struct, frozen=True, order=True):
    """Structural signature: layout per slot (empty = plain), rotation and format of the operands per stage, and how the
    backward pass is made.

    Lanes whose operands need different formats take different GEMMs on a GPU. In one GEMM a lane's bits would depend on
    the other lanes.
    """

    layouts: tuple[str, ...]  # in the order of SLOTS
    rotations: tuple[str, ...]  # in the order of STAGES
    products: tuple[str, ...]  # in the order of STAGES: `bf16`, `tf32` or `fp32`, see exactness.py
    sources: tuple[str, ...] = ("master", "master")  # dgrad, wgrad
    estimators: tuple[str, ...] = ("", "")  # x, w, with the element; empty = straight through
    around: tuple[str, ...] = ("", "", "", "", "")  # precise, finish, gemm, optimizer, accumulate; empty = the default.
    # A sixth, `rollout`, where samples have a forward pass of their own, and the trainer's is not the same at all steps
    attention: str = ""  # layouts of the core's operands; empty = none is quantized
    channels: str = ""  # those that are treated apart; empty = none


@lru_cache(maxsize=65536)
def _canonical_around(
    precise: Precise,
    finish: Finish | None,
    gemm: GemmChoice,
    training: Training,
    forward: bool,
    backward: bool,
    rounded: bool,
) -> dict[str, Any]:
    """The canonical fields beside the stages. forward, backward: their operands are plain; rounded: all to BF16."""
    if finish and (forward or backward):  # what is plain cannot become more precise
        left = {"forward": not forward, "backward": not backward}
        what = next((name for name, there in left.items() if there and finish.what in (name, "all")), None)
        what = "all-but-weights" if finish.what == "all-but-weights" and any(left.values()) else what
        finish = msgspec.structs.replace(finish, what=what) if what else None
    return {
        "precise": Precise() if forward and backward else precise,
        "finish": finish,
        "gemm": "exact" if rounded and gemm == "bf16-rounded" else gemm,
        "training": training.canonical(),
    }


@lru_cache(maxsize=65536)
def _elements(stage: Part) -> frozenset[Element]:
    """Of a stage's operands."""
    return frozenset(q.element for name in stage.__struct_fields__ if isinstance(q := getattr(stage, name), Quantizer))
