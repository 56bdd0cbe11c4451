"""Lane optimizers: every lane its own numbers, all parameters in one tensor."""

from fp4dse.tasks.optimizers.hyperparameters import Numbers, numbers_of
from fp4dse.tasks.optimizers.lane_optimizer import KINDS, LaneOptimizer, decays, make_optimizer

__all__ = ["KINDS", "LaneOptimizer", "Numbers", "decays", "make_optimizer", "numbers_of"]
