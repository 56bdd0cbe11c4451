"""A recipe with exceptions as other libraries have it: an ordered list of layers, the first that fits holds.

Here rules change one thing at a time and the later one holds. So each rule is looked at in all the layers that it
means: where its changes give one recipe, that recipe is the rule's; where they give several (because of other rules
below it, or of layers that are BF16), the rule becomes as many entries as there are, if kinds and blocks tell them
apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import msgspec

from fp4dse.dse.export.listed import of_layer
from fp4dse.dse.export.names import GLOBS, numbers, places, words_of
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.precision import KINDS, Precise
from fp4dse.dse.layers.rule import LayerRule
from fp4dse.dse.quantizer import BF16
from fp4dse.dse.recipe import Recipe

ALWAYS = tuple(kind for kind in KINDS if getattr(Precise(), kind))
"""Kinds of layers that are BF16 by default, here and in the other libraries."""
PRECISE, USUAL = -1, -2
"""Numbers of entries that stand for `precise`: what a recipe says, and its default."""


class Entry(msgspec.Struct, frozen=True):
    """Layers that have all of kind (a word of several), name and blocks (None: any), and the recipe that they compute.

    origin: where the recipe says so, in words; number: of the rule, PRECISE or USUAL.
    """

    recipe: Recipe
    origin: str
    number: int
    kind: tuple[str, ...] = ()
    name: str = ""
    blocks: tuple[int, ...] | None = None

    @property
    def globs(self) -> tuple[str, ...]:
        """Those of the kinds; none for layers of any kind."""
        return tuple(glob for word in self.kind for glob in GLOBS[word])


class Assignment(msgspec.Struct, frozen=True):
    """entries: the exceptions, the first that fits holds; default: the recipe of all other layers; cannot: what no list
    of this form says."""

    default: Recipe
    entries: tuple[Entry, ...]
    cannot: tuple[str, ...]


def assign(recipe: Recipe, blocks: int | None) -> Assignment:
    """The recipe, canonical, in a model of so many blocks; None where they are not known."""
    recipe = recipe.canonical()
    cannot: list[str] = []
    rules: dict[int, LayerRule] = {}
    for number, rule in enumerate(recipe.layers):
        if why := _why_not(rule, blocks):
            cannot.append(f"layers[{number}] {rule.label()}: {why}")
        else:
            rules[number] = rule
    precise, ends = _precise(recipe, blocks, cannot)
    entries: list[Entry] = []
    said, among = msgspec.structs.replace(recipe, precise=precise), blocks or _enough(rules.values(), ends)
    for number in sorted(rules, reverse=True):
        found = _entries(said, rules, number, blocks, among)
        if isinstance(found, str):
            cannot.append(f"layers[{number}] {rules[number].label()}: {found}")
        else:
            entries += found
    if ends is not None:
        entries.append(Entry(of_layer(Recipe.uniform(BF16)), f"precise {precise.label()}", PRECISE, blocks=ends))
    if precise.attention:
        entries.append(Entry(of_layer(Recipe.uniform(BF16)), "precise attention", PRECISE, ("attention",)))
    usual = tuple(kind for kind in ALWAYS if getattr(precise, kind))
    if usual and not recipe.is_plain:
        entries.append(Entry(of_layer(Recipe.uniform(BF16)), f"precise {'+'.join(usual)}", USUAL, usual))
    return Assignment(of_layer(recipe.base), tuple(entries), tuple(cannot))


def _why_not(rule: LayerRule, blocks: int | None) -> str:
    """The reason why a rule does not say which layers of another library it means, if there is one."""
    try:
        numbers(rule, blocks)
    except ValueError as error:
        return f"{error}? --blocks says so"
    unknown = [word for word in rule.kind if word not in GLOBS]
    return f"layers of kind {', '.join(unknown)} have no names by which they are known" if unknown else ""


def _precise(recipe: Recipe, blocks: int | None, cannot: list[str]) -> tuple[Precise, tuple[int, ...] | None]:
    """`precise` as far as it can be said, and the blocks at the ends."""
    precise = recipe.precise
    if not recipe.is_plain:
        cannot += [f"precise {kind} false (it has true)" for kind in ALWAYS if not getattr(precise, kind)]
    if not (precise.first or precise.last):
        return precise, None
    try:
        rule = LayerRule(first=precise.first, last=precise.last, fprop_rotation="none")
        return precise, numbers(rule, blocks) or None
    except ValueError as error:
        words = [f"{end} {number:g}" for end in ("first", "last") if (number := getattr(precise, end))]
        cannot.append(f"precise {', '.join(words)}: {error}? --blocks says so")
        return msgspec.structs.replace(precise, first=0.0, last=0.0), None


def _entries(
    recipe: Recipe, rules: dict[int, LayerRule], number: int, blocks: int | None, among: int
) -> list[Entry] | str:
    """The entries of a rule, or why it has none. among: the blocks of the model in which it is looked at."""
    rule = rules[number]
    words = "".join(letter if letter.isprintable() else "?" for letter in rule.label())  # it becomes a comment
    origin = f"layers[{number}] {words}"
    below = [other for i, other in rules.items() if i < number]
    hidden = [other for other in below if other.name and not set(other.changes) <= set(rule.changes)]
    if hidden:
        return f"it leaves what another rule changes by name ({hidden[0].label()})"
    beneath = msgspec.structs.replace(recipe, layers=tuple(other for other in below if not other.name))
    above = [other for i, other in rules.items() if i > number and not other.name]
    groups: dict[Recipe, list[tuple[str, int | None]]] = {}
    free = set()  # where an earlier entry holds
    for key, place in places(among).items():
        if any(other.matches(place) for other in above):
            free.add(key)
        elif _may_match(rule, place):
            groups.setdefault(of_layer(_with(beneath, rule, place)), []).append(key)
    if not groups:
        return "no layer that the other library has, or later rules hold in all of them"
    if len(groups) == 1:
        return [Entry(next(iter(groups)), origin, number, rule.kind, rule.name, numbers(rule, blocks))]
    found = []
    # with the last block last, for it stands for all that are not named
    for of, keys in sorted(groups.items(), key=lambda group: any(block == among - 1 for _, block in group[1])):
        leaves, inside = {leaf for leaf, _ in keys}, {block for _, block in keys}
        kinds = words_of(leaves)
        others = set(product(leaves, inside)) - set(keys)
        if kinds is None or None in inside or not others <= free:
            return "what it leaves differs among its layers, and kinds and blocks do not tell them apart"
        rest = len(inside) == among or (blocks is None and among - 1 in inside)
        which = None if rest else tuple(sorted(i for i in inside if i is not None))
        found.append(Entry(of, origin, number, kinds, rule.name, which))
    return found


def _may_match(rule: LayerRule, place: Place) -> bool:
    """True for a layer here; one by name may have any."""
    conditions = bool(rule.kind or rule.first or rule.last or rule.blocks)
    return (
        (not conditions or msgspec.structs.replace(rule, name="").matches(place)) if rule.name else rule.matches(place)
    )


def _with(recipe: Recipe, rule: LayerRule, place: Place) -> Recipe:
    """The recipe of a layer here with this rule on top."""
    on_top = msgspec.structs.replace(rule, kind=(), name="*", first=0.0, last=0.0, blocks="")
    return msgspec.structs.replace(recipe, layers=(*recipe.layers, on_top)).at(place)


def _enough(rules: Iterable[LayerRule], ends: tuple[int, ...] | None) -> int:
    """A number of blocks in which every rule that does not depend on it means what it does in larger models."""
    return 2 + max((max(of, default=0) for of in (ends, *(numbers(rule, None) for rule in rules)) if of), default=0)
