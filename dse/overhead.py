"""What a recipe costs. Until the cost model exists: the technique count of arXiv 2509.17791."""

from __future__ import annotations

from fp4dse.dse.estimator import STE
from fp4dse.dse.quantizer import Stochastic
from fp4dse.dse.recipe import SLOTS, STAGES, Recipe


def points(recipe: Recipe) -> int:
    """The paper's count: one for each technique that is switched on anywhere, on a floor of one; plain recipes 0.

    Techniques counted: Hadamard rotation, stochastic rounding, tensor scaling, a relaxation of the element rounding, a
    gradient through the block scale. The floor is the paper's own: its
    counter for the tensor-scale gradient reads one whenever that gradient is not taken. Scale format and block size
    cost nothing in this count.
    """
    r = recipe.canonical()
    if r.is_plain:
        return 0
    slots = [r.slot(s) for s in SLOTS]
    throughs = (r.estimator.x, r.estimator.w)
    techniques = (
        any(r.rotation(stage) for stage in STAGES),
        any(isinstance(q.rounding, Stochastic) for q in slots),
        any(q.tensor_scale for q in slots),
        any(through.element != STE() for through in throughs),
        any(through.scale != "none" for through in throughs),
    )
    return 1 + sum(techniques)


def bits_per_element(recipe: Recipe) -> float:
    """Mean stored bits per operand element over the six slots."""
    return sum(recipe.canonical().slot(s).bits_per_element for s in SLOTS) / len(SLOTS)
