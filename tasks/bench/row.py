"""A row of `fp4dse bench train`: what was measured beside its bound, or the reason why there is no measurement."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from fp4dse.dse import ConfigError
from fp4dse.tasks.bench.in_time import NotInTime


class Row(msgspec.Struct, frozen=True):
    """One row: what was measured, its value and unit, the bound that it shall keep (`≤ 8.5`), and a remark."""

    what: str
    value: float | None
    unit: str
    reach: str
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """True if the value keeps its bound; None without a value or a bound."""
        if self.value is None or not self.reach:
            return None
        sign, bound = self.reach.split()
        return self.value <= float(bound) if sign == "≤" else self.value >= float(bound)


class Measure(msgspec.Struct, frozen=True):
    """A row that is still to be measured. `value` returns its value, or its value and a remark."""

    what: str
    unit: str
    reach: str
    value: Callable[[], float | tuple[float, str]]


def measured(measure: Measure) -> Row:
    """The measurement, or the reason why there is none."""
    try:
        found = measure.value()
        value, note = found if isinstance(found, tuple) else (found, "")
        return Row(measure.what, value, measure.unit, measure.reach, note)
    except ConfigError as error:
        why = str(error)
    except NotInTime as error:
        why = f"torch.compile: {error}"
    except (torch.OutOfMemoryError, AttributeError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return Row(measure.what, None, measure.unit, measure.reach, f"skipped: {why}")
