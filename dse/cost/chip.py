"""A chip as data: peak rates with the source of each, and how much of a peak good kernels reach.

`chips/` has one TOML file for each; a file of your own is as good. Rates are of one GPU, dense. An *instruction* is
what one lane executes at a time: a fused multiply-add is one, and the peak of FP32 in FLOP/s is twice the vector rate.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.reading.files import read_toml

Data = TypeVar("Data")

UNITS = ("fp4", "fp8", "bf16", "tf32", "fp32")
"""Units that form a product, the fastest first. A product of two operands takes the slower of theirs."""


class Number(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure and where it comes from: a data sheet, a measurement, or an assumption with its reason."""

    value: float
    source: str


class Achieved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of the peaks that kernels reach.

    matrix     of the matrix peak, for units that `formats` does not have
    formats    unit -> its own share: products of narrow formats stay farther from their peak
    unscaled   unit -> the share of products whose operands have no scales of blocks, but a factor a row or a tensor,
               where it is another one
    attention  of the matrix peak, by the core of attention, measured in BF16, where it stands to other products as
               in all formats; None: as other products
    """

    matrix: Number
    vector: Number
    bandwidth: Number
    formats: dict[str, Number] = {}
    unscaled: dict[str, Number] = {}
    attention: Number | None = None


class Chip(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """One GPU.

    matrix     unit -> FLOP/s, of those of UNITS that it has; FP32 products without one run at twice the vector rate
    vector     instructions a second of all FP32 and integer lanes
    special    reciprocals, exponentials and the like a second
    convert    conversions between number formats a second; one makes two elements
    bandwidth  of the memory, bytes/s
    capacity   of the memory, bytes; said in tables, and no part of a price
    network    to GPUs of other hosts, bytes/s each way; None: unknown, and nothing is sent
    launch     what a kernel costs beyond its work, s
    achieved   shares of these peaks that kernels reach
    native     `element scale block` that the FP4 unit takes, such as `e2m1 e4m3 16`; larger blocks repeat the scale
    converts   element and scale formats with a conversion instruction; `e2m1 stochastic` where it takes random bits.
               What has none is rounded by vector instructions
    writes_apart   units so fast that a product's output is written after it is formed; the others write meanwhile
    either_axis    units that contract an operand along either axis of one copy, if it has one factor for the tensor;
               the others want a copy for each
    philox_rounds  of the generator that random bits for stochastic rounding are from; None: as the scenario says
    passes     time of the kernels that quantize relative to the modelled one
    rest       unmodelled part of a step (communication, idle time), a share of BF16's modelled step; the same seconds
               are added to every recipe

    A scenario (scenario.py) changes the last two, and rounds that are not stated.
    """

    name: str
    summary: str
    matrix: dict[str, Number]
    vector: Number
    special: Number
    convert: Number
    bandwidth: Number
    launch: Number
    achieved: Achieved
    capacity: Number | None = None
    network: Number | None = None
    native: list[str] = []
    converts: list[str] = []
    writes_apart: list[str] = []
    either_axis: list[str] = []
    philox_rounds: float | None = None
    passes: float = 1.0
    rest: float = 0.0

    def __post_init__(self) -> None:
        rates = {f"matrix.{unit}": number for unit, number in self.matrix.items()}
        rates |= {name: getattr(self, name) for name in ("vector", "special", "convert", "bandwidth")}
        rates |= {"capacity": self.capacity} if self.capacity else {}
        rates |= {"network": self.network} if self.network else {}
        achieved = self.achieved
        shares = {f"achieved.{name}": getattr(achieved, name) for name in ("matrix", "vector", "bandwidth")}
        for name, of in (("formats", achieved.formats), ("unscaled", achieved.unscaled)):
            shares |= {f"achieved.{name}.{unit}": number for unit, number in of.items()}
        shares |= {"achieved.attention": achieved.attention} if achieved.attention else {}
        for name, number in (rates | shares | {"launch": self.launch}).items():
            least = "0 or more" if name == "launch" else "above 0"
            if not (0 < number.value < math.inf or (name == "launch" and number.value == 0)):
                raise ValueError(f"{name} is {number.value:g}, but must be a finite number {least}")
            if name in shares and number.value > 1:
                raise ValueError(f"{name} is {number.value:g}, but is a share, 1 at most")
        for name, lowest in (("philox_rounds", 1.0), ("passes", 0.0), ("rest", 0.0)):
            value = getattr(self, name)
            if value is not None and not lowest <= value < math.inf:
                raise ValueError(f"{name} is {value:g}, but must be a finite number, {lowest:g} or more")
        for name, units in (
            ("achieved.formats", achieved.formats),
            ("achieved.unscaled", achieved.unscaled),
            ("writes_apart", self.writes_apart),
            ("either_axis", self.either_axis),
        ):
            for unit in units:
                if unit not in self.matrix:
                    raise ValueError(f"{name} has {unit}, but the matrix units are {', '.join(self.matrix)}")

    @property
    def has_fp4(self) -> bool:
        """True if it multiplies FP4 operands itself; else they are decoded, and multiplied in a wider unit."""
        return "fp4" in self.matrix

    def flops(self, unit: str, *, unscaled: bool = False) -> float:
        """FLOP/s that products in this unit reach; unscaled: no operand has scales of blocks."""
        if unit in self.matrix:
            share = self.achieved.formats.get(unit, self.achieved.matrix)
            return self.matrix[unit].value * (self.achieved.unscaled.get(unit, share) if unscaled else share).value
        return 2 * self.vector.value * self.achieved.vector.value

    def attention_flops(self, unit: str) -> float:
        """FLOP/s that the core of attention reaches in this unit: as much of what layers reach there as in BF16."""
        reached = self.achieved.attention
        share = reached.value * self.matrix["bf16"].value / self.flops("bf16") if reached else 1.0
        return share * self.flops(unit)


def chip_names() -> list[str]:
    """The chips that come with fp4dse."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


@cache
def load_chip(source: str) -> Chip:
    """A chip by name or from a `.toml` file; ConfigError if there is none or it is wrong."""
    return load_data(source, "chip", _FOLDER, Chip)


_FOLDER = Path(__file__).parent / "chips"


def load_data(source: str, what: str, folder: Path, type_: type[Data]) -> Data:
    """A record of `type_` from the file `source`, or from `source`.toml in the folder. Its name is the file's."""
    path = Path(source) if source.endswith(".toml") else folder / f"{source}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.toml")))
        raise ConfigError(what, source, f"{known}, or a .toml file")
    data = read_toml(path, f"a {what} as in {folder.name}/ of fp4dse/dse/cost")
    try:
        return msgspec.convert({"name": path.stem, **data}, type_)
    except msgspec.ValidationError as error:
        raise ConfigError(str(path), str(error), f"a {what} as in {folder.name}/ of fp4dse/dse/cost") from None
