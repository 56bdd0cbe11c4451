"""The margin of equivalence: how close two losses must be to count as the same, and what it is from.

By default it is what MORE tokens, or samples, would be worth to BF16 in the setting (tokens_worth.py); where nothing
tells that it is MARGIN, and of shares POINTS_MARGIN, and says that it is assumed.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import pandas as pd

from fp4dse.dse import ConfigError
from fp4dse.results.stats.levels import POINTS, are_shares
from fp4dse.results.stats.paired import MARGINS
from fp4dse.results.text.ratios import noun, size

POINTS_MARGIN = 0.007
"""Of losses that are shares: 0.7 points of accuracy, which 2605.20402 has between BF16 and its best FP4."""
LARGEST_SHARE = 0.1
"""A margin for shares beyond this is one in points, by mistake: 10 points are no equivalence."""
MARGIN = 0.005
"""Where nothing is known of BF16's training, as a log ratio: losses within half a percent."""
MORE = 0.02
"""Share of tokens that a margin is worth to BF16."""
FROM = 0.25
"""Share of the steps from which on a training curve counts: before that it is steeper than at its end."""

BY_LAW = "by the law of its loss over sizes"
BY_CURVE = "by the slope of its training curve, from a quarter of the steps on"
ASSUMED = "assumed"


class Margin(NamedTuple):
    """A margin and what it is from."""

    value: float
    """A log ratio above 0, or a share."""
    of: str
    """BY_LAW, with the revisions of the fit if they are others, BY_CURVE, `given`, or `assumed: …` with the reason."""

    def sentence(self) -> str:
        """For people; without a full stop."""
        says = f"{noun(many=True)} within {margin_text(self.value)} count as the same"
        if self.of.startswith(ASSUMED) or self.of == "given":
            return f"{says}, which is {self.of}"
        return f"{says}: what {100 * MORE:g} % more tokens, or samples, are worth to BF16, {self.of}"


OF_POINTS = Margin(POINTS_MARGIN, f"{ASSUMED}, as between BF16 and FP4 in arXiv 2605.20402")


def margin_text(margin: float) -> str:
    """`±0.5 %`, `±0.7 points`. margin: a log ratio, or a share."""
    return f"±{size(margin)}"


def read_margin(text: str) -> tuple[float, str]:
    """A margin as gaps are, and its unit, `points`, `%` or none; of `0.7 points`, `0.5 %`, `0.005`.

    ConfigError, of `--margin`, unless it is a finite number above 0."""
    found = re.fullmatch(r"\s*(\S+?)\s*(points|%)?\s*", text)
    try:
        value = float(found[1]) if found else math.nan
    except ValueError:
        value = math.nan
    if found is None or not 0 < value < math.inf:
        shown = text if math.isnan(value) else value
        accepted = "a log ratio above 0, such as 0.005 for half a percent; with a unit: '0.5 %', '0.7 points'"
        raise ConfigError("--margin", shown, accepted)
    return (value / 100, found[2]) if found[2] else (value, "")


def check_unit(unit: str, rows: pd.DataFrame) -> None:
    """ConfigError, of `--margin`, if these rows are not compared in the unit of `read_margin`."""
    shares = are_shares(rows)
    if unit == POINTS and not shares.all():
        raise ConfigError("--margin", unit, f"% with {_tasks(rows[~shares])}, whose losses are compared as ratios")
    if unit == "%" and shares.any():
        raise ConfigError("--margin", unit, f"points with {_tasks(rows[shares])}, whose gaps are in points of accuracy")


def _tasks(rows: pd.DataFrame) -> str:
    return ", ".join(sorted(set(rows["task"].astype(str) + ":" + rows["preset"].astype(str))))


def margin_of(rows: pd.DataFrame, given: float | None = None) -> Margin:
    """The margin of one setting. rows: of it, from a store with MARGINS; given: instead of theirs.

    ConfigError if 10 points of accuracy or more are given as a share."""
    if given is not None:
        if given > LARGEST_SHARE and are_shares(rows).any():
            raise ConfigError("margin", given, f"a share of problems up to {LARGEST_SHARE}: 0.007 is 0.7 points")
        return Margin(given, "given")
    if MARGINS[0] not in rows or rows.empty:
        if are_shares(rows).any():
            return OF_POINTS
        return Margin(MARGIN, f"{ASSUMED}: these rows hold nothing of BF16's curve")
    return Margin(float(rows[MARGINS[0]].iloc[0]), str(rows[MARGINS[1]].iloc[0]))
