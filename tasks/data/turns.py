"""Copies and sums, which texts of the procedural language say after HALF tokens as options of `--data grammar`.

A copying text says `copy` and its first HALF tokens again, over and over. An arithmetic one says `sum`, and then
digits: a + b = c, c the last digit of the sum. A reader who knows this is surprised by the turn, or by its absence, and
after it by the two digits of each sum alone.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

HALF = 32
DIGITS = 10


class Turns:
    """The turns of many texts, written over their sentences. copying, arithmetic: of texts, in percent; free: the first
    token that sentences have not, of 14 with arithmetic and of one without; tokens, nats: [count, length]."""

    def __init__(
        self, copying: int, arithmetic: int, free: int, tokens: NDArray[np.int16], nats: NDArray[np.float32]
    ) -> None:
        self.shares, self.tokens, self.nats = (copying / 100, arithmetic / 100), tokens, nats
        self.copy, self.sum, self.plus, self.equals, self.zero = range(free, free + 5)
        self.copying = self.calculating = np.zeros(0, np.int64)
        self.a = self.b = self.copying

    def step(self, position: int, bits: NDArray[np.int64]) -> None:
        """Write one position, once its sentences are. bits: 32 random ones of each text."""
        if position < HALF or not any(self.shares):
            return
        if position == HALF:
            self._choose(bits / 2**32)
            return
        place = (position - HALF) % (HALF + 1)
        self._write(self.copying, position, self.tokens[self.copying, place - 1] if place else self.copy)
        place = (position - HALF - 1) % 5
        digit = bits[self.calculating] * DIGITS >> 32
        self.a, self.b = digit if place == 0 else self.a, digit if place == 2 else self.b
        said = (self.zero + self.a, self.plus, self.zero + self.b, self.equals, self.zero + (self.a + self.b) % DIGITS)
        self._write(self.calculating, position, said[place], math.log(DIGITS) if place in (0, 2) else 0.0)

    def _choose(self, drawn: NDArray[np.float64]) -> None:
        """Choose the texts that copy and those that calculate, by a number from 0 to 1 each, and write how these
        begin."""
        copying, arithmetic = self.shares
        self.copying = np.flatnonzero(drawn < copying)
        self.calculating = np.flatnonzero((drawn >= copying) & (drawn < copying + arithmetic))
        self.a = self.b = np.zeros(len(self.calculating), np.int64)
        if (rest := 1 - copying - arithmetic) > 0:
            self.nats[:, HALF] -= math.log(rest)
        if copying:
            self._write(self.copying, HALF, self.copy, -math.log(copying))
        if arithmetic:
            self._write(self.calculating, HALF, self.sum, -math.log(arithmetic))

    def _write(self, texts: NDArray[np.int64], position: int, token: ArrayLike, nats: float = 0.0) -> None:
        self.tokens[texts, position], self.nats[texts, position] = token, nats
