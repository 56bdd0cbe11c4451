"""Questions about techniques, to be written before the training: which pairs of recipes answer each, by which rule.

screen = "language:0.4M"                         the task that decides
later = ["language:10M", "language:3M"]          tasks of which one must agree
negligible = 0.1                                 percent of loss that nobody pays for
where = { "training.loss_scale" = 1 }            what both recipes of every pair have

[[question]]
id = "Q4"
asks = "Does stochastic rounding of forward operands harm training?"
claim = "harms"                                  or helps, or differs

[[question.effect]]
name = "forward, stochastic"
from = { "forward.rounding" = "nearest" }        paths and values as in a space
to = { "forward.rounding" = "stochastic" }
where = { "*.block" = 16 }                       what both recipes have
each = { "*.scale" = ["e4m3", "ue5m3"] }         the effect once for each value
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.errors import at_key
from fp4dse.dse.reading.files import read_toml
from fp4dse.dse.reading.library import read_places
from fp4dse.dse.reading.paths import RecipePath, holds, parse_path, value_text, write

Values = tuple[tuple[RecipePath, Any], ...]
"""Paths with the value that each has, as `library.read_value` gives it."""
EXAMPLE = "see docs/results.md, questions of your own"


class Effect(msgspec.Struct, frozen=True):
    """The change between the two recipes of a pair; `where`: what both have."""

    name: str
    before: Values
    after: Values
    where: Values = ()

    def pairs(self, recipes: Mapping[str, Recipe]) -> list[tuple[str, str]]:
        """(before, after) of all recipes that differ in nothing else. recipes: canonical, by config_id."""
        found = []
        for one, recipe in recipes.items():
            if all(holds(recipe, path, value) for path, value in (*self.before, *self.where)):
                other = recipe
                for path, value in self.after:
                    other = write(other, path, value)
                changed = other.canonical().config_id
                if changed in recipes and changed != one:
                    found.append((one, changed))
        return found


class Question(msgspec.Struct, frozen=True):
    """A question, what is claimed of each of its effects, and the effects."""

    id: str
    asks: str
    claim: Literal["helps", "harms", "differs"]
    effects: tuple[Effect, ...]


class Questions(msgspec.Struct, frozen=True):
    """The questions of a file and the rule by which they are answered (answers.py). negligible: a log ratio."""

    screen: str
    later: tuple[str, ...]
    negligible: float
    questions: tuple[Question, ...]


class _EffectTable(msgspec.Struct, forbid_unknown_fields=True, rename={"before": "from", "after": "to"}):
    name: str
    before: dict[str, Any]
    after: dict[str, Any]
    where: dict[str, Any] = {}
    each: dict[str, list[Any]] = {}


class _QuestionTable(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    asks: str
    claim: Literal["helps", "harms", "differs"]
    effect: Annotated[list[_EffectTable], msgspec.Meta(min_length=1)]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    screen: str
    question: Annotated[list[_QuestionTable], msgspec.Meta(min_length=1)]
    later: list[str] = []
    negligible: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    where: dict[str, Any] = {}


def load_questions(path: Path) -> Questions:
    """The questions of a TOML file. ConfigError names the file, the key and what is accepted."""
    data = read_toml(path, EXAMPLE)
    try:
        file = msgspec.convert(data, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(str(path), str(error), EXAMPLE) from None
    everywhere = _values(file.where, path, "where")
    found = tuple(
        Question(table.id, table.asks, table.claim, tuple(_effects(table, path, number, everywhere)))
        for number, table in enumerate(file.question)
    )
    names = [(question.id, effect.name) for question in found for effect in question.effects]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{path}: {twice[0]}", twice[1], "a name that no other effect of the question has")
    return Questions(file.screen, tuple(file.later), file.negligible / 100, found)


def _effects(table: _QuestionTable, path: Path, number: int, everywhere: Values) -> Iterator[Effect]:
    """The effects of a question, one for each combination of values of `each`. everywhere: the `where` of all."""
    for index, effect in enumerate(table.effect):
        keys = f"question[{number}]", f"effect[{index}]"
        before, after, where = (
            _values(of, path, *keys, name)
            for name, of in (("from", effect.before), ("to", effect.after), ("where", effect.where))
        )
        if {key.tree for key, _ in before} != {key.tree for key, _ in after}:
            accepted = f"the paths of `from`: {', '.join(effect.before)}"
            raise ConfigError(at_key(str(path), *keys, "to"), ", ".join(effect.after), accepted)
        for chosen in itertools.product(*effect.each.values()):
            held = _values(dict(zip(effect.each, chosen, strict=True)), path, *keys, "each")
            of = f" ({', '.join(value_text(value) for _, value in held)})" if held else ""
            yield Effect(effect.name + of, before, after, (*everywhere, *where, *held))


def _values(of: Mapping[str, Any], path: Path, *keys: str) -> Values:
    found = read_places(of, path.parent, str(path), *keys)
    return tuple((parse_path(text, str(path)), value) for text, value in found.items())
