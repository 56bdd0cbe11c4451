"""Published gaps of FP4 schemes, as data: a file a table, with its source; each scheme has a recipe or a reason.

`recipe` is the config_id of the recipe that a scheme is here. It does not change, and two schemes may have one. A space
that trains them is named by `space`; without one they are shipped recipes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from fp4dse.dse import ConfigError

_Percent = Annotated[float, msgspec.Meta(ge=0)]


class Scheme(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a table. gaps: 100 · ln(loss / BF16's) in each column, NaN where the table has none. differs: what the
    recipe does otherwise than the source; not_expressible: why there is no recipe."""

    group: str
    gaps: list[float]
    recipe: str | None = None
    differs: str = ""
    not_expressible: str = ""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published table. primary: the column that others are compared with; error: standard deviation of one figure, in
    %, from what `error_is` says; groups of schemes are ranked apart."""

    summary: str
    source: str
    licence: str
    columns: list[str]
    columns_are: str
    primary: str
    error: _Percent
    error_is: str
    schemes: dict[str, Scheme]
    space: str = ""

    def groups(self) -> list[str]:
        """In the order of the file."""
        return list(dict.fromkeys(scheme.group for scheme in self.schemes.values()))

    def gaps(self, column: str = "") -> dict[str, float]:
        """Scheme -> gap in % in a column; default: the primary one."""
        place = self.columns.index(column or self.primary)
        return {name: scheme.gaps[place] for name, scheme in self.schemes.items()}


@cache
def tables() -> dict[str, Table]:
    """File name without its end -> table. ConfigError on a file that is wrong."""
    return {file.stem: _read(file) for file in sorted(Path(__file__).parent.glob("*.toml"))}


def _read(file: Path) -> Table:
    try:
        table = msgspec.toml.decode(file.read_bytes(), type=Table)
    except msgspec.MsgspecError as error:
        raise ConfigError(file.name, str(error), "a table as results/published/__init__.py describes it") from None
    for name, scheme in table.schemes.items():
        if (scheme.recipe is None) != bool(scheme.not_expressible) or len(scheme.gaps) != len(table.columns):
            accepted = f"either a recipe or not_expressible, and {len(table.columns)} gaps"
            raise ConfigError(f"{file.name}: {name}", scheme.recipe or scheme.not_expressible, accepted)
    return table
