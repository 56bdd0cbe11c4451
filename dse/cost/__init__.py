"""The cost of a recipe: the paper's points, stored bits, and the modelled time of a training step on a named chip."""

from fp4dse.dse.cost.chip import Chip, chip_names, load_chip
from fp4dse.dse.cost.decoding import rollout_overhead
from fp4dse.dse.cost.iteration import load_workload, rollout_share, workload_names
from fp4dse.dse.cost.model import Model, load_model, model_names
from fp4dse.dse.cost.points import points
from fp4dse.dse.cost.scenario import BAND, ENDS, MID, scenarios
from fp4dse.dse.cost.step import (
    DEFAULT_CHIP,
    DEFAULT_COST,
    DEFAULT_MODEL,
    OVERHEAD_OF,
    Cost,
    CostTarget,
    overhead,
    step_cost,
)
from fp4dse.dse.cost.storage import activation_bits, bits_per_element

__all__ = [
    "BAND",
    "DEFAULT_CHIP",
    "DEFAULT_COST",
    "DEFAULT_MODEL",
    "ENDS",
    "MID",
    "OVERHEAD_OF",
    "Chip",
    "Cost",
    "CostTarget",
    "Model",
    "activation_bits",
    "bits_per_element",
    "chip_names",
    "load_chip",
    "load_model",
    "load_workload",
    "model_names",
    "overhead",
    "points",
    "rollout_overhead",
    "rollout_share",
    "scenarios",
    "step_cost",
    "workload_names",
]
