"""A procedural language: text without end, the same on every machine, whose entropy is known token by token.

A text begins with a topic; then come sentences. A sentence has a subject, perhaps with adjectives, prepositional
phrases and nested relative clauses (`noun that noun verb … verb`), verbs that agree with their subject over whatever
stands in between, objects and adverbs. A pronoun takes up the subject of the sentence before. The words of a kind
follow Zipf's law with the exponent 2, in an order that depends on what stands before: nouns on the topic, verbs on
their subject, objects half on their verb and half on subject and verb together. These orders are what there is to learn
by heart: with a vocabulary of 512 some two million facts, the rarest of which is met once in millions of tokens, so
that a larger model, or more text, always knows more.

Every choice shows in the token that follows it. So a reader who knows the language knows the state at every place, and
the next token's probability is that of a choice times that of a word. `texts` draws many texts at once, and with each
token its surprise in nats to that reader. The mean surprise is the least loss that any model can have on these texts.

    kind          tokens of a vocabulary of V
    noun          0 … V/2       gender: token mod 4
    verb          … 3/4 V       gender of the subjects that it agrees with: token mod 4
    adjective     … 7/8 V
    adverb        … 15/16 V
    topic         … 31/32 V
    preposition   … 63/64 V
    stop, that, and, pronouns of gender 0 … 3: the first seven of the rest

As options, `grammar?copying=25&arithmetic=25`, a share of the texts, in percent, copies or calculates in its second
half (turns.py). They are off by themselves: what is learned all at once adds noise between runs (docs/log.md, copying).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.dse.program.cache import cache_folder, keep
from fp4dse.kernels.ops.philox import STREAMS, words
from fp4dse.tasks.data.turns import Turns

GENDERS = 4
REV = 2
"""Raised when the texts change."""
EXPONENT = 2
"""Of Zipf's law: with 1 too much of the loss is chance, and recipes are not told apart (docs/log.md, 2026-11-23)."""
TRAIN, HELD_OUT = 0, 1
"""Splits. Two texts of 64 tokens are practically never the same."""
DEPTH = 3
"""Deepest nesting of relative clauses."""
ROWS = 1 << 15
"""Texts that are drawn at once."""

NOUN, VERB, ADJECTIVE, ADVERB, TOPIC, PREPOSITION, STOP, THAT, AND, PRONOUN, END = range(11)
"""Kinds of the next token. END: a stop; within a relative clause the verb that ends it and belongs to the outer
subject."""

BEGIN, FIRST, SENTENCE, DESCRIBED, SUBJECT, PHRASE, VERBED, QUALIFIED, OBJECT, OBJECT_PHRASE, LINKED, RELATIVE = range(
    12
)
"""States, named after what has been read: nothing; the topic; a sentence; an adjective of a subject; a subject; its
preposition; a verb; an adverb; an object; its preposition; `and`; `that`."""

CHOICES = 16
GRAMMAR: dict[int, dict[int, tuple[int, int]]] = {
    BEGIN: {TOPIC: (16, FIRST)},
    FIRST: {NOUN: (11, SUBJECT), ADJECTIVE: (5, DESCRIBED)},
    SENTENCE: {NOUN: (8, SUBJECT), ADJECTIVE: (4, DESCRIBED), PRONOUN: (4, SUBJECT)},
    DESCRIBED: {NOUN: (13, SUBJECT), ADJECTIVE: (3, DESCRIBED)},
    SUBJECT: {VERB: (9, VERBED), THAT: (4, RELATIVE), PREPOSITION: (3, PHRASE)},
    PHRASE: {NOUN: (16, SUBJECT)},
    VERBED: {NOUN: (9, OBJECT), ADVERB: (4, QUALIFIED), END: (3, SENTENCE)},
    QUALIFIED: {NOUN: (8, OBJECT), END: (8, SENTENCE)},
    OBJECT: {END: (9, SENTENCE), PREPOSITION: (3, OBJECT_PHRASE), AND: (4, LINKED)},
    OBJECT_PHRASE: {NOUN: (16, OBJECT)},
    LINKED: {VERB: (16, VERBED)},
    RELATIVE: {VERB: (8, VERBED), NOUN: (8, SUBJECT)},
}
"""State -> what may come next -> its chances of 16, and the state after it."""

NAME = "grammar"
"""Of `--data`, with options behind a question mark."""
OPTIONS = ("copying", "arithmetic")
"""Fields of Language that are percents of the texts; both together at most 100."""

NESTED = len(GRAMMAR)
"""SUBJECT as deep as clauses nest: what would be `that` is the verb."""
_ROWS = {**GRAMMAR, NESTED: {VERB: (13, VERBED), PREPOSITION: (3, PHRASE)}}


@dataclass(frozen=True)
class Language:
    """The language of a vocabulary, a power of two from 512 on, with arithmetic from 2048 on. copying, arithmetic: of
    texts, in percent."""

    vocabulary: int = 2048
    copying: int = 0
    arithmetic: int = 0

    @property
    def name(self) -> str:
        """Name in a task's summary."""
        return "procedural language"

    @property
    def contents(self) -> None:
        """Nothing but what digest and options say."""
        return None

    @property
    def digest(self) -> str:
        """16 hex digits that stand for the language."""
        options = "".join(f" {name} {value}" for name in OPTIONS if (value := getattr(self, name)))
        return hashlib.sha256(f"grammar {REV} {self.vocabulary}{options}".encode()).hexdigest()[:16]

    def windows(self, length: int, train: int, held_out: int) -> tuple[Tensor, Tensor]:
        """Texts of length + 1 tokens, int16 [n, length + 1]: so many to train on, and so many held out."""
        splits = ((TRAIN, train), (HELD_OUT, held_out))
        drawn = [torch.from_numpy(self._tokens(split, count, length + 1)) for split, count in splits]
        return drawn[0], drawn[1]

    def entropy(self, length: int, held_out: int) -> float:
        """Mean surprise, in nats, of the tokens after the first in the held-out texts that `windows` gives."""
        return float(self.texts(HELD_OUT, 0, held_out, length + 1)[1][:, 1:].mean(dtype=np.float64))

    @cached_property
    def first(self) -> dict[int, int]:
        """Kind -> its first token."""
        v = self.vocabulary
        ends = (v // 2, 3 * v // 4, 7 * v // 8, 15 * v // 16, 31 * v // 32, 63 * v // 64)
        return dict(enumerate((0, *ends, ends[-1] + 1, ends[-1] + 2, ends[-1] + 3)))

    def count(self, kind: int) -> int:
        """Number of words of the kind; of verbs, of those of one gender."""
        size = self.first[kind + 1] - self.first[kind]
        return size // GENDERS if kind == VERB else size

    def zipf(self, kind: int) -> NDArray[np.int64]:
        """Cumulative frequency of each rank, of 2^32: the r-th word comes 1/r^EXPONENT times as often as the first."""
        shares = np.cumsum(1 / np.arange(1, self.count(kind) + 1) ** EXPONENT)
        ends: NDArray[np.int64] = np.rint(shares / shares[-1] * 2**32).astype(np.int64)
        return ends

    @cached_property
    def _ends(self) -> dict[int, NDArray[np.int64]]:
        return {kind: self.zipf(kind) for kind in range(STOP)}

    @cached_property
    def chances(self) -> dict[int, NDArray[np.float64]]:
        """Kind -> the probability of each rank."""
        return {kind: np.diff(ends, prepend=0) / 2**32 for kind, ends in self._ends.items()}

    def ranked(self, kind: int, bits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ranks from 32 random bits each."""
        return np.searchsorted(self._ends[kind], bits, side="right")

    def texts(self, split: int, first: int, count: int, length: int) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
        """Texts number `first` to `first + count` of a split, cut after `length` tokens: tokens and their surprise in
        nats, [count, length] each. A text does not depend on how many are drawn with it."""
        tokens, nats = np.empty((count, length), np.int16), np.empty((count, length), np.float32)
        for start in range(0, count, ROWS):
            rows = slice(start, min(start + ROWS, count))
            drawing = _Drawing(self, rows.stop - rows.start)
            turns = Turns(self.copying, self.arithmetic, self.first[PRONOUN] + GENDERS, tokens[rows], nats[rows])
            for position, bits in enumerate(_bits(split, first + start, rows.stop - rows.start, length)):
                tokens[rows, position], probability = drawing.step(bits)
                nats[rows, position] = -np.log(probability)
                turns.step(position, bits[3])
        return tokens, nats

    def _tokens(self, split: int, count: int, length: int) -> NDArray[np.int16]:
        """The first `count` texts of a split, [count, length]."""
        tokens = np.empty((count, length), np.int16)
        for start in range(0, count, ROWS):
            rows = slice(start, min(start + ROWS, count))
            if rows.stop - start == ROWS:
                tokens[rows] = self.block(split, start, length)
            else:
                tokens[rows] = self.texts(split, start, count - start, length)[0]
        return tokens

    def block(self, split: int, first: int, length: int) -> NDArray[np.int16]:
        """Texts number `first` to `first + ROWS`, [ROWS, length], from a file of the cache if there is one: drawing a
        block takes a second, and each job of a sweep reads the same ones."""
        file = cache_folder() / "texts" / f"{self.digest}-{split}-{length}-{first}.npy"
        with contextlib.suppress(OSError, ValueError, EOFError):
            kept: NDArray[np.int16] = np.load(file)
            if kept.shape == (ROWS, length):
                return kept
        tokens = self.texts(split, first, ROWS, length)[0]

        def write(path: Path) -> None:
            with open(path, "wb") as out:  # np.save would add a suffix to the name
                np.save(out, tokens)

        keep(file, write)
        return tokens


def _bits(split: int, first: int, count: int, length: int) -> Iterator[NDArray[np.int64]]:
    """For each position 32 random bits for choice, mixture and word of each text, [4, count], from counters of its
    own."""
    seed = torch.zeros(1, dtype=torch.int64)
    for position in range(length):
        drawn = words(seed, STREAMS["data"], torch.tensor(position), torch.tensor(split), count, first)[0]
        yield (drawn.numpy().astype(np.int64) & 0xFFFFFFFF).T


def ordered(rank: NDArray[np.int64], key: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The words at these ranks in the order that a key stands for: a bijection of 0 … size - 1, a power of two."""
    a, b, c = _scrambled(key)
    half = (size.bit_length()) // 2
    word = ((rank ^ (b % size)) * (a | 1)) % size
    word ^= word >> half
    out: NDArray[np.int64] = (word * (c | 1) + (b >> 16)) % size
    return out


def rank_of(word: NDArray[np.int64], key: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The inverse of `ordered`."""
    a, b, c = _scrambled(key)
    half = (size.bit_length()) // 2
    rank = ((word - (b >> 16)) * _inverse(c | 1, size)) % size
    rank ^= rank >> half
    return ((rank * _inverse(a | 1, size)) % size) ^ (b % size)


def _scrambled(key: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Three numbers of 20 to 24 bits from a key (the finalizer of SplitMix64)."""
    z = (key.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    parts = (z >> np.uint64(44), (z >> np.uint64(20)) & np.uint64(0xFFFFFF), z & np.uint64(0xFFFFF))
    return tuple(part.astype(np.int64) for part in parts)


def _inverse(odd: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Inverses of odd numbers modulo a power of two up to 2^16, by Newton's iteration: 3 bits are right, then 6, 12,
    24."""
    inverse = odd
    for _ in range(3):
        inverse = inverse * (2 - odd * inverse) % (1 << 24)
    return inverse % size


def key_of(*parts: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """One number for some, each below 2^15."""
    key = np.zeros(1, np.int64)
    for part in parts:
        key = (key << 15) + part
    return key


def parse_language(data: str) -> Language:
    """`grammar?copying=25&arithmetic=25`. ConfigError names an option or a value that there is not."""
    given: dict[str, int] = {}
    for part in filter(None, data.partition("?")[2].split("&")):
        option, _, value = part.partition("=")
        if option not in OPTIONS:
            raise ConfigError(f"option of data {NAME}", option, ", ".join(OPTIONS))
        if not value.isdecimal() or int(value) > 100:
            raise ConfigError(f"{option} of data {NAME}", value, "0 to 100, percent of the texts")
        given[option] = int(value)
    if sum(given.values()) > 100:
        raise ConfigError(
            f"{' and '.join(OPTIONS)} of data {NAME}", sum(given.values()), "100 percent together at most"
        )
    return Language(**given)


def _table(column: int) -> NDArray[np.int64]:
    """[states, 16]: kind (column 0), chances of it (1), state after it (2), for each draw of 4 bits."""
    rows = []
    for options in _ROWS.values():
        row = [(kind, share, after)[column] for kind, (share, after) in options.items() for _ in range(share)]
        assert len(row) == CHOICES
        rows.append(row)
    return np.array(rows, np.int64)


_KIND, _SHARE, _AFTER = (_table(column) for column in range(3))


class _Drawing:
    """Many texts on their way, in lock-step."""

    def __init__(self, language: Language, count: int) -> None:
        self.language, self.all = language, np.arange(count)
        self.state, self.depth, self.topic, self.verb, self.preposition = (np.zeros(count, np.int64) for _ in range(5))
        self.subjects = np.zeros((count, DEPTH + 1), np.int64)

    def step(self, bits: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The next token of each text, and its probability. bits: [3 or more, count]."""
        row = np.where((self.state == SUBJECT) & (self.depth == DEPTH), NESTED, self.state)
        draw = bits[0] >> 28
        kind, after, probability = _KIND[row, draw], _AFTER[row, draw], _SHARE[row, draw] / CHOICES
        closing = (kind == END) & (self.depth > 0)
        self.depth -= closing
        kind = np.where(closing, VERB, np.where(kind == END, STOP, kind))
        after = np.where(closing, VERBED, after)
        token = np.empty_like(kind)
        for each in np.unique(kind):
            at = np.flatnonzero(kind == each)
            token[at], chance = self._word(int(each), at, bits[1, at], bits[2, at])
            probability[at] *= chance
        self._read(kind, token)
        self.state = after
        return token, probability

    def _word(
        self, kind: int, at: NDArray[np.int64], coin: NDArray[np.int64], bits: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Words of a kind for the texts `at`, and the probability of each among its kind."""
        language, subject = self.language, self.subjects[at, self.depth[at]]
        if kind in (STOP, THAT, AND):
            return np.full(len(at), language.first[kind]), np.ones(len(at))
        if kind == PRONOUN:
            return language.first[PRONOUN] + subject % GENDERS, np.ones(len(at))
        keys = self._keys(kind, at, subject)
        size, chances = language.count(kind), language.chances[kind]
        key = np.where((coin >> 31).astype(bool), keys[-1], keys[0])
        word = ordered(language.ranked(kind, bits), key, size)
        chance = np.mean([chances[rank_of(word, each, size)] for each in keys], axis=0)
        if kind == VERB:
            word = word * GENDERS + subject % GENDERS
        return language.first[kind] + word, chance

    def _keys(self, kind: int, at: NDArray[np.int64], subject: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The orders, equally likely, in which the word of a kind is looked up."""
        state, topic, verb = self.state[at], self.topic[at], self.verb[at]
        if kind == VERB:
            return [key_of(kind, subject)]
        if kind == ADVERB:
            return [key_of(kind, verb)]
        if kind == ADJECTIVE:
            return [key_of(kind, topic)]
        if kind != NOUN:
            return [key_of(kind + 0 * topic)]
        phrase = (state == PHRASE) | (state == OBJECT_PHRASE)
        plain = np.where(phrase, key_of(kind, PREPOSITION, self.preposition[at]), key_of(kind, TOPIC, topic))
        object_ = (state == VERBED) | (state == QUALIFIED)
        by_verb, by_both = key_of(kind, VERB, verb), key_of(kind, subject, verb)
        return [np.where(object_, by_verb, plain), np.where(object_, by_both, plain)]

    def _read(self, kind: NDArray[np.int64], token: NDArray[np.int64]) -> None:
        """Update the state on which later words depend."""
        self.depth += kind == THAT
        at = self.all[kind == THAT]
        self.subjects[at, self.depth[at]] = self.subjects[at, self.depth[at] - 1]
        named = (kind == NOUN) & np.isin(self.state, (FIRST, SENTENCE, DESCRIBED, RELATIVE))
        at = self.all[named]
        self.subjects[at, self.depth[at]] = token[at]
        self.topic = np.where(kind == TOPIC, token, self.topic)
        self.verb = np.where(kind == VERB, token, self.verb)
        self.preposition = np.where(kind == PREPOSITION, token, self.preposition)
