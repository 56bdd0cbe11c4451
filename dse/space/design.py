"""Designs: the combinations of a space that are taken. All of them, a balanced fraction, random ones, or one change at
a time.

A combination is a tuple of level numbers, one per axis with `sizes[i]` levels.

Resolution R means strength t = R - 1: on any t axes, every combination of levels occurs equally often. With 3, main
effects are clear of each other; with 4, of pairwise interactions; with 5, these are clear of each other. The array is
built per prime p: the p-part of an axis with p^k·m levels is k linear forms over GF(p)^r, and any t axes together must
have independent forms; r is the smallest for which a greedy choice in lexicographic order succeeds (Bose's construction
of orthogonal arrays; Hedayat, Sloane, Stufken 1999). The arrays of different primes are crossed, which keeps strength.

A fraction of a given number of runs is chosen run by run: every axis takes one of its levels that occurred least
often, and of these the one that met the levels chosen before it least often. So the levels of an axis differ by one
run at most, after any number of runs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.record import Part

Levels = tuple[int, ...]
Pair = tuple[int, int, int, int]
"""(axis, its level, a later axis, its level)."""

RESOLUTIONS = (3, 4, 5)
MOST_RUNS = 2**14
"""A regular fraction with more runs is no saving, and takes long to find."""


class Factorial(Part, frozen=True, tag_field="kind", tag="factorial"):
    """All combinations."""


class Fractional(Part, frozen=True, tag_field="kind", tag="fractional"):
    """A balanced part of them: so many `runs`, or as few as the `resolution` 3, 4 or 5 needs."""

    runs: int | None = None
    resolution: int | None = None
    seed: int = 0


class Random(Part, frozen=True, tag_field="kind", tag="random"):
    """Combinations in random order, until `runs` recipes are left by the rules."""

    runs: int
    seed: int = 0


class OneAtATime(Part, frozen=True, tag_field="kind", tag="one-at-a-time"):
    """The base, then every value of every axis alone in it."""


Design = Factorial | Fractional | Random | OneAtATime
DESIGN_NAMES: dict[str, Factorial | Fractional | Random | OneAtATime] = {
    "factorial": Factorial(),
    "one-at-a-time": OneAtATime(),
}


def check_design(design: Factorial | Fractional | Random | OneAtATime, where: str) -> None:
    """ConfigError if numbers are missing or make no sense."""
    runs = getattr(design, "runs", 1)
    if isinstance(design, Fractional):
        if (design.runs is None) == (design.resolution is None):
            given = "both" if design.runs else "neither"
            raise ConfigError(where, given, "one of runs, resolution")
        if design.resolution not in (None, *RESOLUTIONS):
            raise ConfigError(f"{where}.resolution", design.resolution, ", ".join(map(str, RESOLUTIONS)))
    if runs is not None and runs < 1:
        raise ConfigError(f"{where}.runs", runs, "a whole number above 0")


def balanced(sizes: Sequence[int], runs: int, seed: int = 0) -> Iterator[Levels]:
    """`runs` combinations, with each level of an axis equally often, give or take one. A repeated one is avoided."""
    rng = random.Random(seed)
    if runs >= math.prod(sizes):
        yield from itertools.product(*map(range, sizes))
        return
    counts = [[0] * size for size in sizes]
    met: dict[Pair, int] = {}
    seen: set[Levels] = set()
    for _ in range(runs):
        for _attempt in range(100):
            run = _next_run(sizes, counts, met, rng)
            if run not in seen:
                break
        seen.add(run)
        for axis, level in enumerate(run):
            counts[axis][level] += 1
            for other in range(axis):
                pair = (other, run[other], axis, level)
                met[pair] = met.get(pair, 0) + 1
        yield run


def _next_run(sizes: Sequence[int], counts: list[list[int]], met: dict[Pair, int], rng: random.Random) -> Levels:
    chosen: dict[int, int] = {}
    for axis in rng.sample(range(len(sizes)), len(sizes)):
        fewest = min(counts[axis])
        levels = [level for level in range(sizes[axis]) if counts[axis][level] == fewest]

        def times_met(level: int, axis: int = axis) -> float:
            pairs = [
                (other, at, axis, level) if other < axis else (axis, level, other, at) for other, at in chosen.items()
            ]
            return sum(met.get(pair, 0) * sizes[pair[0]] * sizes[pair[2]] for pair in pairs) + rng.random()

        chosen[axis] = min(levels, key=times_met)
    return tuple(chosen[axis] for axis in range(len(sizes)))


def regular(sizes: Sequence[int], resolution: int) -> Iterator[Levels]:
    """The smallest regular fraction that is found with this resolution. ConfigError if it is a large one."""
    factors = [_prime_factors(size) for size in sizes]
    primes = sorted({p for of_axis in factors for p in of_axis})
    parts = [_linear_array(p, [of_axis.count(p) for of_axis in factors], resolution - 1) for p in primes]
    for rows in itertools.product(*parts):
        # mixed radix: the digit of each prime part is worth the product of the parts before it
        levels = []
        for axis, of_axis in enumerate(factors):
            level, worth = 0, 1
            for p, row in zip(primes, rows, strict=True):
                level += worth * row[axis]
                worth *= p ** of_axis.count(p)
            levels.append(level)
        yield tuple(levels)


def _linear_array(p: int, forms: Sequence[int], strength: int) -> list[Levels]:
    """An orthogonal array over GF(p) with p^forms[i] levels on axis i, each as one number."""
    fewest = sum(sorted(forms)[-strength:])  # the largest axes must be independent of each other
    for r in range(fewest, int(math.log(MOST_RUNS, p)) + 1):
        if (found := _independent_forms(p, forms, strength, r)) is not None:
            return [
                tuple(_value(p, of_axis, point) for of_axis in found) for point in itertools.product(range(p), repeat=r)
            ]
    raise ConfigError("design.resolution", strength + 1, f"a number of runs (a fraction needs over {MOST_RUNS:,})")


def _independent_forms(p: int, forms: Sequence[int], strength: int, r: int) -> list[list[int]] | None:
    """Per axis its linear forms, as numbers with r digits in base p, or None if the greedy choice gets stuck."""
    chosen: list[list[int]] = []
    for count in forms:
        own: list[int] = []
        taken = set()  # what any `strength - 1` other axes span: with it, a form would not be independent
        number = min(strength - 1, len(chosen))
        for others in itertools.combinations(chosen, number):
            taken |= _span(p, [form for axis in others for form in axis])
        for _ in range(count):
            blocked = {_add(p, a, b) for a in taken | {0} for b in _span(p, own)}
            free = next((form for form in range(1, p**r) if form not in blocked), None)
            if free is None:
                return None
            own.append(free)
        chosen.append(own)
    return chosen


def _span(p: int, forms: Sequence[int]) -> set[int]:
    span = {0}
    for form in forms:
        span = {_add(p, a, b) for a in span for b in _multiples(p, form)}
    return span


def _multiples(p: int, form: int) -> list[int]:
    out = [0]
    for _ in range(p - 1):
        out.append(_add(p, out[-1], form))
    return out


def _add(p: int, a: int, b: int) -> int:
    """Digit by digit, modulo p."""
    if p == 2:
        return a ^ b
    total, worth = 0, 1
    while a or b:
        total += (a % p + b % p) % p * worth
        a, b, worth = a // p, b // p, worth * p
    return total


def _value(p: int, forms: Sequence[int], point: Levels) -> int:
    """The level of an axis at a point: the values of its forms as digits."""
    level = 0
    for form in forms:
        digits = [form // p**i % p for i in range(len(point))]
        level = level * p + sum(d * x for d, x in zip(digits, point, strict=True)) % p
    return level


def _prime_factors(n: int) -> list[int]:
    out, p = [], 2
    while n > 1:
        while n % p == 0:
            out.append(p)
            n //= p
        p += 1
    return out


def shuffled(sizes: Sequence[int], seed: int = 0) -> Iterator[Levels]:
    """All combinations in random order, lazily: they may be too many to list."""
    total = math.prod(sizes)
    rng = random.Random(seed)
    seen: set[int] = set()
    while len(seen) < total:
        if 2 * len(seen) > total:  # drawing would take long to meet the rest
            rest = [number for number in range(total) if number not in seen]
            rng.shuffle(rest)
            yield from (_levels(sizes, number) for number in rest)
            return
        number = rng.randrange(total)
        if number not in seen:
            seen.add(number)
            yield _levels(sizes, number)


def _levels(sizes: Sequence[int], number: int) -> Levels:
    out = []
    for size in reversed(sizes):
        number, level = divmod(number, size)
        out.append(level)
    return tuple(reversed(out))
