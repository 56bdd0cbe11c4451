"""Whose training step an overhead is of: a model's on a chip. An overhead says little without them."""

from __future__ import annotations

from fp4dse.dse.cost.chip import load_chip
from fp4dse.dse.cost.model import load_model
from fp4dse.dse.cost.step import COST_REV, DEFAULT_CHIP, DEFAULT_MODEL, overhead
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.record import Part


class CostTarget(Part, frozen=True):
    """A model shape and a chip, each by name or as the path of a `.toml` file."""

    model: str = DEFAULT_MODEL
    chip: str = DEFAULT_CHIP

    @property
    def of(self) -> str:
        """The column `overhead_of`: model, chip and revision of the cost model."""
        return f"{self.model} on {self.chip}, revision {COST_REV}"

    @property
    def says(self) -> str:
        """For people: what an overhead is, and how to have another one."""
        return f"overhead: modelled time of a training step of {self.model} on {self.chip}, BF16 = 1 (--model, --chip)"

    def overhead(self, recipe: Recipe) -> float:
        """Modelled step time relative to BF16's."""
        return overhead(recipe, self.model, self.chip)

    def check(self, where: str) -> None:
        """ConfigError at `where` + `model` or `chip` if there is no such, or its file is wrong."""
        for name, load in (("model", load_model), ("chip", load_chip)):
            try:
                load(getattr(self, name))
            except ConfigError as error:
                if error.where == name:
                    raise ConfigError(f"{where}{name}", error.found, error.accepted) from None
                raise


DEFAULT_COST = CostTarget()
"""What the overheads are of that rows are stored with."""
