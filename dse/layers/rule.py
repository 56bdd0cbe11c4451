"""Exceptions to a recipe, layer by layer, as data: an ordered list of rules, each of which says where and what.

A rule applies to the layers that meet all of its conditions, and changes what it names there. Where two rules change
the same, the later one holds; what neither names is the recipe's own. Layers that the recipe keeps precise
(precision.py) are BF16 before the rules apply, so a rule may quantize them after all. They have no rotation then but
the rule's; nor have layers that an earlier rule made BF16 in all six operands, which is another spelling of the same.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from fp4dse.dse.channels import Corrected, Held, channels_name
from fp4dse.dse.errors import ALIKE, ConfigError
from fp4dse.dse.estimator import Through
from fp4dse.dse.layers.place import WORDS, Place
from fp4dse.dse.layers.precision import KINDS, Precise, at_either_end
from fp4dse.dse.quantizer import BF16, Quantizer
from fp4dse.dse.record import Part, defaults
from fp4dse.dse.stages import SHARED, SLOTS, STAGES, Hadamard, Source, XSource, grouped, rotation_name, with_exceptions

WHERE = ("kind", "name", "first", "last", "blocks")
"""Fields of a rule that say where it applies; the others say what it changes."""
_BLOCKS = re.compile(r"-?\d+|(-?\d+)?:(-?\d+)?")

Rotation = Hadamard | Literal["none"] | None
ChannelsOrNone = Held | Corrected | Literal["none"] | None


class LayerRule(Part, frozen=True, omit_defaults=True):
    """An exception: where it applies, and what is different there. Fields that are not given say nothing.

    kind     words of which a layer has one (place.WORDS): `attention`, `qkv`, `expert` …
    name     of layers, with * and ? for any text and any letter: `block?.up`
    first, last, blocks    blocks: a number or share at either end, as in `precise`, and those of a slice as Python has
             it: `2:6`, `-8:`, `0`. A layer in any of the three is meant; layers outside of blocks are not
    fprop_x … wgrad_x      the quantizer of an operand
    …_rotation, …_source   of a product; `none` for no rotation
    fprop_channels   that are treated apart; `none` for none
    estimator_x, estimator_w   of gradients through the forward operands
    """

    kind: tuple[str, ...] = ()
    name: str = ""
    first: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    last: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    blocks: str = ""
    fprop_x: Quantizer | None = None
    fprop_w: Quantizer | None = None
    dgrad_g: Quantizer | None = None
    dgrad_w: Quantizer | None = None
    wgrad_g: Quantizer | None = None
    wgrad_x: Quantizer | None = None
    fprop_rotation: Rotation = None
    dgrad_rotation: Rotation = None
    wgrad_rotation: Rotation = None
    dgrad_source: Source | None = None
    wgrad_source: XSource | None = None
    fprop_channels: ChannelsOrNone = None
    estimator_x: Through | None = None
    estimator_w: Through | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for word in self.kind:
            if word not in WORDS:
                raise ConfigError("kind", word, ", ".join(WORDS))
        if re.search(r'["\\\x00-\x1f]', self.name):
            raise ConfigError("name", self.name, "a name of layers, without quotes")
        if self.blocks and not _BLOCKS.fullmatch(self.blocks):
            raise ConfigError("blocks", self.blocks, "a slice of the blocks: 2:6, -8:, 0")
        for end in ("first", "last"):
            if (number := getattr(self, end)) >= 1 and number != int(number):
                raise ConfigError(end, number, "a whole number of blocks, or below 1 a share of them")
        if not any(getattr(self, field) for field in WHERE):
            raise ConfigError("where", None, f"one of {', '.join(WHERE)} (what holds everywhere is the recipe's own)")
        if not self.changes:
            raise ConfigError("what", None, 'something that is different there: "*" = "bf16", say')

    @property
    def changes(self) -> tuple[str, ...]:
        """The fields that say what is different."""
        return tuple(field for field in CHANGES if getattr(self, field) is not None)

    def matches(self, place: Place) -> bool:
        """True for a layer at this place."""
        if self.kind and not place.words & set(self.kind):
            return False
        if self.name and not fnmatchcase(place.name, self.name):
            return False
        return not (self.first or self.last or self.blocks) or self._within(place)

    def _within(self, place: Place) -> bool:
        if place.block is None:
            return False
        if at_either_end(place, self.first, self.last):
            return True
        if not self.blocks:
            return False
        ends = [int(end) if end else None for end in self.blocks.split(":")]
        if len(ends) == 1:
            return place.block == (ends[0] if ends[0] is None or ends[0] >= 0 else place.blocks + ends[0])
        return place.block in range(place.blocks)[ends[0] : ends[1]]

    @property
    def is_bf16(self) -> bool:
        """True if all six operands are BF16, so that nothing else that it changes matters."""
        return all(getattr(self, field) == BF16 for field in QUANTIZERS)

    def canonical(self) -> LayerRule:
        """The one spelling of rules that mean the same."""
        changes: dict[str, object] = {field: of.canonical() for field in QUANTIZERS if (of := getattr(self, field))}
        changes["kind"] = tuple(sorted(set(self.kind), key=WORDS.index))
        if self.is_bf16:
            changes |= {field: None for field in CHANGES if field not in QUANTIZERS}
        return msgspec.structs.replace(self, **changes)

    def evaluated(self) -> LayerRule:
        """The rule for held-out data (`Quantizer.evaluated`)."""
        x, w = (of.evaluated() if of else None for of in (self.fprop_x, self.fprop_w))
        return msgspec.structs.replace(self, fprop_x=x, fprop_w=w)

    def where(self) -> str:
        """The layers that are meant, in words: `attention, last 4`."""
        words = ["+".join(self.kind), self.name]
        words += [f"{end} {number!r}".removesuffix(".0") for end in ("first", "last") if (number := getattr(self, end))]
        words += [f"blocks {self.blocks}" if self.blocks else ""]
        return ", ".join(filter(None, words))

    def label(self) -> str:
        """The rule in words: `last 4: wgrad bf16`."""
        formats = {slot: q.label() for slot in SLOTS if (q := getattr(self, field_of(slot)))}
        words = with_exceptions(formats) if len(formats) == len(SLOTS) else grouped(formats)
        rotations = {stage: getattr(self, f"{stage}_rotation") for stage in STAGES}
        named = {at: of if of == "none" else rotation_name(of) for at, of in rotations.items() if of}
        words += grouped({at: "not rotated" if of == "none" else of for at, of in named.items()})
        words += grouped({SHARED[at]: f"from {of}" for at in SHARED if (of := getattr(self, f"{at}_source"))})
        if of := self.fprop_channels:
            words.append(f"channels {channels_name(None if of == 'none' else of)}")
        passages = {x: of for x in STAGES["fprop"] if (of := getattr(self, f"estimator_{x}")) is not None}
        words += [f"{x} {of.phrase() or 'straight through'}" for x, of in passages.items()]
        return f"{self.where()}: {', '.join(words)}"


CHANGES = tuple(field for field in defaults(LayerRule) if field not in WHERE)
"""Fields of a rule that say what is different."""


def field_of(slot: str) -> str:
    """The field of a rule for a slot, or for a part of a stage: `fprop.x` -> `fprop_x`."""
    return slot.replace(".", "_")


QUANTIZERS = tuple(field_of(slot) for slot in SLOTS)


@lru_cache(maxsize=4096)
def canonical_rules(precise: Precise, layers: tuple[LayerRule, ...]) -> tuple[Precise, tuple[LayerRule, ...]]:
    """Rules that come first and make whole kinds, or the ends, BF16, are what `precise` is short for."""
    rules = [rule.canonical() for rule in layers]
    while rules and (folded := _folded(precise, rules[0])):
        precise = folded
        del rules[0]
    return precise, tuple(rules)


def _folded(precise: Precise, rule: LayerRule) -> Precise | None:
    """`precise` with what the rule says, None where it cannot say it."""
    if not rule.is_bf16 or rule.name or rule.blocks:
        return None
    ends = {end: number for end in ("first", "last") if (number := getattr(rule, end))}
    if rule.kind and not ends and set(rule.kind) <= set(KINDS):
        return msgspec.structs.replace(precise, **dict.fromkeys(rule.kind, True))
    if ends and not rule.kind and all(getattr(precise, end) in (0, number) for end, number in ends.items()):
        return msgspec.structs.replace(precise, **ends)
    return None


def check_rules(rules: Iterable[LayerRule]) -> ConfigError | None:
    """The error of two rules that say different things of the same layers, if there are such."""
    for (earlier_number, earlier), (number, rule) in itertools.combinations(enumerate(rules), 2):
        both = [field for field in rule.changes if field in earlier.changes]
        if _place(rule) == _place(earlier) and any(getattr(rule, field) != getattr(earlier, field) for field in both):
            accepted = f"other layers than layers[{earlier_number}] has, which says otherwise ({earlier.label()})"
            return ConfigError(f"layers[{number}]", rule.label(), accepted)
    return None


def _place(rule: LayerRule) -> tuple[object, ...]:
    """The fields that say where a rule applies; the order of kinds says nothing."""
    return frozenset(rule.kind), *(getattr(rule, field) for field in WHERE if field != "kind")


def check_places(
    rules: tuple[LayerRule, ...], places: Iterable[Place], used_elsewhere: Collection[LayerRule] = ()
) -> ConfigError | None:
    """The error of a rule that means no layer of a model, or whose changes later rules take back in every layer; None
    if there is no such rule.

    used_elsewhere: rules that may be idle here, where they say no more than kinds and the ends, which are words for any
    model: one for attention may be meant for another task of the same sweep.
    """
    layers = list(places)
    for number, rule in enumerate(rules):
        meant = [place for place in layers if rule.matches(place)]
        if not meant and rule in used_elsewhere and not rule.name and not rule.blocks:
            continue
        if not meant:
            names = ", ".join(dict.fromkeys(place.name for place in layers if place.name))
            words = sorted({word for place in layers for word in place.words})
            blocks = max((place.blocks for place in layers), default=0)
            accepted = f"layers that the model has: {', '.join(words)}; {blocks} blocks; {names}"
            return ConfigError(f"layers[{number}]", rule.where(), accepted, _meant(rule, layers))
        for other in rules[number + 1 :]:
            if set(rule.changes) <= set(other.changes) and all(map(other.matches, meant)):
                accepted = f"an effect in some layer: all that it means, a later rule changes ({other.label()})"
                return ConfigError(f"layers[{number}]", rule.label(), accepted)
    return None


def idle_rules(rules: Iterable[LayerRule], places: Collection[Place]) -> tuple[LayerRule, ...]:
    """The rules that mean no layer of a model."""
    return tuple(rule for rule in rules if not any(map(rule.matches, places)))


def near_glob(glob: str, names: Collection[str]) -> str | None:
    """The pattern that this one, which meets none of the names, is a slip of: word by word the nearest, where numbers
    may be * or ?. None if no such pattern meets a name."""
    split = [name.split(".") for name in names]
    words = []
    for i, word in enumerate(glob.split(".")):
        there = {parts[i] for parts in split if i < len(parts)}
        known = [*there, *(re.sub(r"\d+", mark, of) for mark in "*?" for of in there if re.search(r"\d", of))]
        if not any(fnmatchcase(of, word) for of in there):
            word = next(iter(difflib.get_close_matches(word, sorted(set(known)), 1, ALIKE)), word)
        words.append(word)
    found = ".".join(words)
    return found if found != glob and any(fnmatchcase(name, found) for name in names) else None


def _meant(rule: LayerRule, layers: Iterable[Place]) -> list[str]:
    """The rule's words with the name that it may have meant."""
    found = near_glob(rule.name, {place.name for place in layers if place.name}) if rule.name else None
    return [msgspec.structs.replace(rule, name=found).where()] if found else []
