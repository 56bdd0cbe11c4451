"""Lane optimizers: every lane its own numbers, all parameters in one tensor."""

from fp4dse.tasks.optimizers.lanes import KINDS, LaneOptimizer, decays, make_optimizer
from fp4dse.tasks.optimizers.numbers import Numbers, numbers_of

__all__ = ["KINDS", "LaneOptimizer", "Numbers", "decays", "make_optimizer", "numbers_of"]
