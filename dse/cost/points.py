"""The paper's count of techniques (arXiv 2509.17791), extended by one rule to techniques that it did not have.

The count is the released analysis's axis, kept so that results can be compared; what a technique costs says step.py.
"""

from __future__ import annotations

from fp4dse.dse.attention import ATTENTION_SLOTS
from fp4dse.dse.estimator import STE
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.rounding import Ema, Stochastic, samples_of
from fp4dse.dse.scale import E6M2
from fp4dse.dse.stages import SLOTS, STAGES


def points(recipe: Recipe) -> int:
    """One for each kind of technique that is switched on anywhere, on a floor of one; plain recipes 0.

    The paper's own kinds: Hadamard rotation, stochastic rounding, tensor scaling, a relaxation of the element rounding,
    a gradient through the block scale, a relaxation of the scale's rounding. The floor is the paper's, too: its counter
    for the tensor-scale gradient reads one whenever that gradient is not taken. Scale format, block size and shape,
    range, and what a backward operand is made from cost nothing. The rule for all others: what is done beyond a maximum
    and a rounding per block is one point for each kind. Encoding a block in several ways (`adapt`), scales that do not
    follow from the maximum alone (`scaling`, HiFloat4's exponents), rounding towards an average, averaging samples,
    treating outliers, in elements, in channels or in the mean of keys, and noise on what samples. Operands of the
    attention core count, too, and those of a rollout with a forward pass of its own, also beside a plain trainer.
    """
    r = recipe.canonical()
    rollout = r.training.rollout
    of_rollout = [] if rollout is None else [rollout.x, rollout.w, rollout.kv_cache]
    if r.is_plain and all(q.is_plain for q in of_rollout):
        return 0
    everywhere = [r, *(r.changed(rule).canonical() for rule in r.layers)]
    slots = [of.slot(s) for of in everywhere for s in SLOTS]
    slots += [*(r.attention.operand(s) for s in ATTENTION_SLOTS), *of_rollout]
    throughs = [through for of in everywhere for through in (of.estimator.x, of.estimator.w)]
    techniques = (
        any(of.rotation(stage) for of in everywhere for stage in STAGES) or (rollout and rollout.rotation),
        any(isinstance(q.rounding, Stochastic) for q in slots),
        any(q.tensor_scale for q in slots),
        any(through.element != STE() for through in throughs),
        any(through.scale != "none" for through in throughs),
        any(through.scale_rounding != STE() for through in throughs),
        any(q.adapt != "none" for q in slots),
        any(q.scaling != "amax" or isinstance(q.scale, E6M2) for q in slots),
        any(isinstance(q.rounding, Ema) for q in slots),
        any(samples_of(q.rounding) > 1 for q in slots),
        any(q.outliers for q in slots) or any(of.fprop.channels for of in everywhere) or r.attention.smooth_k,
        r.training.noise,
    )
    return 1 + sum(map(bool, techniques))
