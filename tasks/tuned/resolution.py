"""The resolution of a preset, whether it tells recipes apart, from the fresh seeds of its tuning; how sure its rates
are."""

from __future__ import annotations

import math
from statistics import NormalDist, fmean, stdev

import msgspec
from scipy.optimize import brentq
from scipy.stats import nct, t

from fp4dse.dse.resolution import SEEDS
from fp4dse.tasks.tuned import Point, Tuned

SIZES = (0.001, 0.005, 0.02)
"""Differences in loss, as shares, for which the needed seeds are stated."""
FAR = 3.0
"""Of a rate and another one, as a factor: rates further apart than neighbours of a grid."""
LEVEL, POWER = 0.05, 0.8
"""Of the paired t test that finds a difference, and of studies that find it."""


class Resolution(msgspec.Struct, frozen=True):
    """Differences are of log losses, paired by seed; NaN where a recipe diverged or there is one seed.

    spread: standard deviation of BF16 between seeds; gap, gap_sd: of NVFP4 against BF16; ratio: |gap| / gap_sd;
    rival, rival_sd: of MXFP4 against NVFP4; seeds: that a difference of each of SIZES needs to be found, for pairs as
    noisy as NVFP4 and BF16 are.
    """

    spread: float
    gap: float
    gap_sd: float
    rival: float
    rival_sd: float
    seeds: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return abs(self.gap) / self.gap_sd if self.gap_sd else math.nan

    def tells_apart(self, seeds: int = SEEDS) -> bool:
        """True if NVFP4 and MXFP4 lie so far apart that these seeds find it in 80 of 100 studies."""
        return found_by(seeds, self.rival, self.rival_sd) >= POWER


def resolution(found: Tuned) -> Resolution:
    """Of a preset, from its check."""
    logs = {point.of: _logs(point) for point in found.check}
    gap = _differences(logs["nvfp4"], logs["bf16"])
    rival = _differences(logs["mxfp4"], logs["nvfp4"])
    return Resolution(
        spread=_sd(logs["bf16"]),
        gap=fmean(gap),
        gap_sd=_sd(gap),
        rival=fmean(rival),
        rival_sd=_sd(rival),
        seeds=tuple(_needed(_sd(gap), math.log1p(size)) for size in SIZES),
    )


def is_open(found: Tuned, of: str) -> bool:
    """True if a rate FAR from the best one of a class is not told from it by a paired t test of the tuning's seeds, so
    that the best may be one of luck. One seed tells none."""
    if (best := found.best(of)) is None:
        return False
    others = [point for point in found.curve if point.of == of and point.is_own and None not in point.losses]
    return any(not differ(point, best) for point in others if not best.lr / FAR < point.lr < best.lr * FAR)


def differ(point: Point, best: Point) -> bool:
    """True if a paired t test of the tuning's seeds tells two points of a curve apart."""
    apart = _differences(_logs(point), _logs(best))
    if len(apart) < 2:
        return False
    reach = t.isf(LEVEL / 2, len(apart) - 1) * stdev(apart) / math.sqrt(len(apart))
    return abs(fmean(apart)) > float(reach)


def found_by(seeds: int, difference: float, sd: float) -> float:
    """Share of studies of two seeds or more in which a paired t test at LEVEL finds a difference; NaN if the sd is."""
    if sd == 0:
        return float(difference != 0)
    freedom = seeds - 1
    return float(nct.sf(t.isf(LEVEL / 2, freedom), freedom, abs(difference) / sd * math.sqrt(seeds)))


def least_found(seeds: int, sd: float) -> float:
    """The difference that a paired t test at LEVEL finds in a share POWER of studies of two seeds or more; NaN if the
    sd is."""
    if math.isnan(sd) or sd == 0:
        return sd
    return float(brentq(lambda of: found_by(seeds, of * sd, sd) - POWER, 0, 100)) * sd


def _needed(sd: float, difference: float) -> float:
    """Seeds; two at least, for there is no spread of one. Few seeds know their own spread badly, so that they are more
    than a normal distribution asks for, from whose number this counts up."""
    if math.isnan(sd):
        return math.nan
    normal = NormalDist().inv_cdf(1 - LEVEL / 2) + NormalDist().inv_cdf(POWER)
    seeds = max(2, math.ceil((normal * sd / difference) ** 2))
    while found_by(seeds, difference, sd) < POWER:
        seeds += 1
    return seeds


def _logs(point: Point) -> list[float]:
    return [math.nan if loss is None else math.log(loss) for loss in point.losses]


def _differences(a: list[float], b: list[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _sd(values: list[float]) -> float:
    return math.nan if len(values) < 2 or any(math.isnan(v) for v in values) else stdev(values)
